"""`python -m examples.paper_study`: the paper's experiments as one command, with theory beside every figure.

A part (`parts.Part`) says which experiments it needs and what its results show. Experiments are run once each and kept
(`experiments`), so that an interrupted study goes on where it stopped; the page, the tables and the pictures are made
from what is kept. What there is to see, and how to repeat it: docs/study.md.
"""
