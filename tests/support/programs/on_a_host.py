"""python on_a_host.py HOSTS COMMAND...: run a command as a rank on a simulated host.

HOSTS is JSON: for each rank but 0, the seconds by which its monotonic clock is ahead, and variables for the preloaded
clock library. Rank 0 stays on this host. A host is a UTS and a time namespace.
"""

from __future__ import annotations

import json
import os
import sys

RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")


def main() -> None:
    """Replace this process with the command on its host."""
    hosts, command = json.loads(sys.argv[1]), sys.argv[2:]
    rank = int(next(os.environ[name] for name in RANK_VARIABLES if name in os.environ))
    if rank:
        ahead_seconds, variables = hosts[rank - 1]
        os.environ.update(variables)
        namespaces = ["unshare", "--uts", "--time", "--monotonic", str(ahead_seconds)]
        command = [*namespaces, "--fork", "sh", "-c", f'hostname host{rank} && exec "$@"', "sh", *command]
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
