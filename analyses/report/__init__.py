"""The report of one run: `document` makes JSON of its tables, `terminal` makes text; `command` prints either."""
