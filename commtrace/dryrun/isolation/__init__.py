"""Isolation of a simulated rank: what the program writes never reaches the user's files.

A rank is started by `start`, a small process that isolates itself and then becomes the program. It either gets a
private copy-on-write layer over every file system (`private_layer`, by `system_calls`), or is denied to change any
file (`write_denial`,
with errors that name the line in `file_guard`). The parent process chooses (`policy`) and reads what the program wrote
into its layer (`file_changes`). `network_writers` covers what the program sends to services.
"""
