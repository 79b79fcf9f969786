"""Import of runs that other tools recorded.

- `formats`: the table of formats, by which a file's format is told
- `events`: what importers yield: processes, calls, other work of the device, what is not known
- `imported_log`: writes the events as an ordinary log, marked with its source; `imported_summary` writes calls that the
  source only counts
- `events_of_files`: reads the events of many files in worker processes
- `import_run`: imports files and directories
- `json_stream`: reads large JSON files in pieces; `json_lines`: reads files of lines
- `enclosing`: spans of time that nest, and unions of spans
- `file_names`: what the names of files say
- `operation_names`: operations, element types and kernels by their names in other tools

Formats:

- `kineto`: traces of torch.profiler; `kineto_trace` reads the events of a file, `kineto_calls` joins host events and
  kernels, `kineto_context` finds step, phase, call site and purpose, `kineto_sizes` the sizes, groups and peers
- `execution_trace`: execution traces of torch.profiler, read as Kineto traces without times; they complete the Kineto
  traces of their processes
- `flight_recorder`: dumps of PyTorch's NCCL flight recorder, by `plain_pickle`
- `nccl_inspector`: JSON lines of the NCCL and RCCL Inspector
- `mpip`: reports of mpiP
- `deepspeed_comms`: the summary and the dictionaries of DeepSpeed's CommsLogger
"""
