"""A test suite, every rank alike: writes each test's outcome to a file per rank. Arguments: its folder, where to write.

Left out: what starts further processes or listens on ports, whose outcomes depend on the machine.
"""

import json
import sys
import unittest
from pathlib import Path

import outcomes
from mpi4py import MPI

LEFT_OUT = ("test_spawn", "test_dynproc", "test_util_pool", "test_doc")

folder, out = Path(sys.argv[1]), Path(sys.argv[2])
sys.path.insert(0, str(folder))
names = sorted(path.stem for path in folder.glob("test_*.py") if path.stem not in LEFT_OUT)
ended = outcomes.run(unittest.defaultTestLoader.loadTestsFromNames(names))
(out / f"{MPI.COMM_WORLD.rank}.json").write_text(json.dumps(ended))
