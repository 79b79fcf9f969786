"""Recording: from a hooked call to records in the log directory. Imported by every traced process.

session                        whether this process is traced, and by which recorder
recorder                       what the hooks call for each call (in C++: hooks/native/recording.h); stem of file names
ring, slots                    memory that outlives the process; its slots, and what happens if they are too few
drain                          thread that moves finished records from the ring to the log
log_writer                     the files of one process; tolerates failures of the file system
segment_writer                 files of records: names, sizes, and when a new one begins
table_lines                    rows that records refer to by number
summary, summary_writer, summary_files    COMMTRACE_MODE=summary: counts in place of calls
stacks                         what the threads do while the process makes no call
kept_records                   the last calls of a process, whatever its steps, for hung jobs
counters                       faults of the hooks, and the cost of recording (table `stats`)
interrupts                     exceptions of the program's signal handlers
leaving, exception_facts       how this process leaves its program; what is kept of an exception
exit_byte                      exit status of this process, at the end of its tables; none after `os._exit` or a signal
thread_exceptions              exceptions that end threads of the program
peer_watch                     what the other processes of the run on this host end by, `os._exit` and signals included
recovery                       after `kill -9`: from the ring to the log; copies of rings of running processes
"""
