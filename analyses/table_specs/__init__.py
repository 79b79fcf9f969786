"""Descriptions of tables: title, rows, and for each column its head, unit, format and meaning.

`spec` has the types, `shared_columns` the columns that several tables share, and `equivalent_ranks` merges the rows of
many ranks. A table is described in the module or package that computes it; `analysis_catalog.TABLES` has all of them,
and the terminal report, the HTML pages, the "columns" of the JSON documents, `Run.describe_table` and the reference
page of the documentation are made from it. A test compares it with the tables of real logs.

Definitions that hold for all tables are in the docstring of `commtrace.analyses`.
"""
