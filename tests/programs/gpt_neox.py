"""The GPT-NeoX-style training, as `python -m commtrace.workloads.gpt_neox.train` runs it."""

from __future__ import annotations

import sys

from commtrace.workloads.gpt_neox.train import main

sys.exit(main())
