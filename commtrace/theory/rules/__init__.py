"""Rules: which calls a library makes for a job, one sub-package per library.

`gradients` has what the libraries share: the order of gradients, and how buckets are filled.

`registry` lists all rules and the library versions that they were written against; `schemes` selects those for a job.
A rule's docstring says what it returns. To add a library, write its rules in a sub-package with a function
`predict(job)`, and add the function to `schemes.SCHEMES`.
"""
