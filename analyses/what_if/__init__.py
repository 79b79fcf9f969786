"""What a step would take if something were changed, from a replay of recorded steps.

event_graph     events that wait for each other, and when they occur
recorded_graph  the recorded steps as such events
changes         changes of their delays: another network, no straggler, faster computation
buckets         changes of the graph: gradient buckets of another size
predictions     the tables: steps with these changes, and the bandwidth that hides communication
bandwidth_bounds  the same bandwidth from bytes and a stated computation, for dry runs
"""

from __future__ import annotations
