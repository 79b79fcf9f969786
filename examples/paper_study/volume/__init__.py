"""The volume part of the study: dry runs of the paper's models at the paper's scales and beyond.

dry_runs           which trainings are run as which ranks
recorded_dry_run   the log of a dry run and its comparison with theory
volume_tables      tables of many dry runs
volume_claims      the paper's statements and their verdicts
volume_figures     figures
volume_part        experiments and sections
"""
