"""What a step would take if something were changed, from a replay of recorded steps.

event_graph     events that wait for each other, and when they occur
recorded_graph  the recorded steps as such events, and the error of their replay, which `predictions` states
changed_run     a run after changes: another graph, other delays
changes         options such as `--scale-network 2x`: their values, the delays that they change, and the catalogue of
                changes that are tried without options
bucket_size     the change of the size of gradient buckets, with what it assumes
message_dtype   the change of the type in which gradients and parameters are sent
overlap_rules   which operations may overlap with computation, and until when
overlapped_step the change in which they do
world_size      the change of the number of data-parallel ranks
rewiring        a graph that is being changed
buckets         the graph with other buckets of DistributedDataParallel, and times of their messages
blocking_buckets   the same of calls that block their rank, of ZeRO and FSDP2
message_plans   the messages that these have with buckets of another size
timelines       a step before and after changes, rank by rank
critical_parts  what the critical path of a step consists of
predictions     the tables: steps with these changes, and the bandwidth that hides communication
simulated_step  a step of a dry run: its calls, and what each rank computes between them
layout_graph    two such graphs of it, in which nothing is hidden, and all that can be
layouts         the tables of dry runs that are compared: steps between these bounds
bandwidth_bounds   the bandwidth and latency that hide communication, in the same bounds
layout_comparison  these tables from opened runs, for Python and the command
"""

from __future__ import annotations
