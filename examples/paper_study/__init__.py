"""The experiments of a paper on communication in transformer training, repeated and compared with theory.

`python -m examples.paper_study OUT`; docs/study.md has the results. A part (`parts.StudyPart`) lists its experiments
and makes sections of the page from their results. Every experiment is run once and kept (`experiments`), so that an
interrupted study continues where it stopped. The verdicts about the paper's statements are a table (`claims`).
"""
