"""PyTorch's own tests of torch.distributed over gloo: writes each test's outcome to a file. Arguments: the file, tests.

Without names of tests, all tests run. WORLD_SIZE is the number of ranks of each test, which are forked processes.
"""

import json
import multiprocessing
import os
import sys
import unittest
from pathlib import Path

os.environ.setdefault("BACKEND", "gloo")

from torch.testing._internal.distributed.distributed_test import DistributedTest, TestDistBackend


class ForkedTests(TestDistBackend, DistributedTest._DistTestBase):
    """The class of `test/distributed/test_distributed_spawn.py` in PyTorch's repository, but with forked processes.

    Importing torch in each of them would take most of the time.
    """

    def setUp(self) -> None:
        super().setUp()  # type: ignore[no-untyped-call]
        self._start_processes(multiprocessing.get_context("fork").Process)


if __name__ == "__main__":
    import outcomes

    names = sys.argv[2:] or unittest.defaultTestLoader.getTestCaseNames(ForkedTests)
    ended = outcomes.run(unittest.TestSuite(map(ForkedTests, names)))
    Path(sys.argv[1]).write_text(json.dumps(ended))
