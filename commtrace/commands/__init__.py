"""The commands, one module each; `commtrace.cli` lists them.

option_types    options that several commands have, and how values of options are parsed
exit_status     the exit statuses of all commands
"""
