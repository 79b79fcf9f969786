"""Number of random programs that an exhaustive test of real ranks draws: the variable DRAWS, or 20."""

from __future__ import annotations

import os
from typing import Final

DRAWS: Final = int(os.environ.get("DRAWS") or 20)
