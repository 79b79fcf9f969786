"""Reports of one run, of runs side by side, and of runs by number of ranks.

`terminal`, `side_by_side` and `scaling_text` make text, `document` makes JSON, `html` makes pages. Text and
pages share the sentences of `findings` and `log_facts`; `commtrace.analyses.table_specs` describes the tables.
"""
