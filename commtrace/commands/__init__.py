"""The commands, one module each; `commtrace.cli` lists them.

option_types    options that several commands have, and how values of options are parsed
log_reading     a reading of a run that is followed, in a thread of its own
exit_status     the exit statuses of all commands
http_server, live_pages    what `top --web` serves, and how
"""
