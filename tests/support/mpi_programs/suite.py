"""Run modules of a test suite on every rank, and write each test's outcome to a file per rank.

Arguments: the suite's directory, the output directory, the modules.
"""

import json
import sys
import unittest
from pathlib import Path

import outcomes
from mpi4py import MPI

folder, out, *names = sys.argv[1:]
sys.path.insert(0, folder)
ended = outcomes.run(unittest.defaultTestLoader.loadTestsFromNames(names))
(Path(out) / f"{MPI.COMM_WORLD.rank}.json").write_text(json.dumps(ended))
