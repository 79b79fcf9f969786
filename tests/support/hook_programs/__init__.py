"""Small programs that the tests of the hooks run, and the functions that start them and read their logs."""
