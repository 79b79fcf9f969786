"""Run the GPT-NeoX-style training like `python -m examples.gpt_neox.train`."""

from __future__ import annotations

import sys

from examples.gpt_neox.train import main

sys.exit(main())
