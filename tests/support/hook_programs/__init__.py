"""Small programs that the tests of the hooks run, and what starts and reads them."""
