"""Rules: which calls a library makes for a job, one sub-package per library. `registry` lists them."""
