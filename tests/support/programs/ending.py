"""Makes five calls and ends: ending.py HOW."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time

import torch
import torch.distributed as dist

from commtrace.network.process_exit import wait_for_threads

how = sys.argv[1]
dist.init_process_group("gloo")
for _ in range(5):
    dist.all_reduce(torch.ones(4))
if how == "exit":
    sys.exit(3)
elif how == "raise":
    raise KeyError("of the program")
elif how == "os._exit":
    os._exit(4)
elif how == "SIGTERM":
    signal.raise_signal(signal.SIGTERM)
elif how == "SIGINT":
    signal.raise_signal(signal.SIGINT)
elif how == "abort":
    os.abort()
elif how == "handled SIGTERM":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
    signal.raise_signal(signal.SIGTERM)
elif how == "forgotten":
    work = dist.all_reduce(torch.ones(4), async_op=True)
    assert work is not None
    work.get_future().then(lambda _: None).wait()  # after all other callbacks
    del work
elif how == "exec":
    os.execv("/bin/sh", ["sh", "-c", "exit 6"])
elif how == "thread":
    # Ends after the main thread, before exit handlers: its call is recorded.
    threading.Timer(0.2, lambda: dist.all_reduce(torch.ones(4))).start()
elif how == "busy daemon":
    atexit.unregister(wait_for_threads)  # torch aborts this process, which waiting would only delay

    def busy() -> None:
        while True:
            dist.all_reduce(torch.ones(4))

    threading.Thread(target=busy, daemon=True).start()
    time.sleep(0.2)
