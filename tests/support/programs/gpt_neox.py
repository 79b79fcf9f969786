"""The GPT-NeoX-style training, as `python -m examples.gpt_neox.train` runs it."""

from __future__ import annotations

import sys

from examples.gpt_neox.train import main

sys.exit(main())
