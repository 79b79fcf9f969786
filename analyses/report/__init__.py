"""The report of one run, or of several side by side: `document` makes JSON of the tables, `terminal` and `side_by_side`
make text, `html` a page; `command` prints or writes one of them.
"""
