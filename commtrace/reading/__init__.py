"""Readers of log directories: runs and their event tables. Damaged logs are read as far as possible.

In the order of the work:

log, process_reader             which runs and processes a directory has, and the files of each process
process_ends                    how each process ended
live_processes                  why a live process takes no turns: it is stopped, say
table_reader, segment_reader    lines of tables (newer formats are refused), and files of records,
                                checked value by value
summary_reader, device_work     what a process wrote beside its records
log_notes                       the type of a note on a file, and how notes are merged; the modules above make them
labels, roles_by_name           what the numbers in records mean, on every rank alike
recorded_run                    a run: its processes, its event table, and how it is split into parts
run_parts, executors            parts that are read one after the other, or in several processes; dask_executor
allocator                       what becomes of freed memory
record_columns                  records of several processes as columns
pack, packed_log, stored_tables    a log as one Parquet data set, with tables that were computed before
export                          the event table as a file
"""
