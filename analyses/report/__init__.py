"""Reports of one run, of runs side by side, and of runs by number of ranks.

`terminal` and `several_runs_text` render text, `document` JSON, `html` pages. All of them render the sections and
tables of `commtrace.analyses.analysis_catalog`; `spec_table` formats a table. Which rows are shown is decided by
sections (`sections.Report`); how many, also by `html/page_contents` (MAX_ROWS).
"""
