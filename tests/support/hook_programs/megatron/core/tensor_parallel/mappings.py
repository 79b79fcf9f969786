"""An autograd function that communicates in both passes, in the place of Megatron-Core's."""

from __future__ import annotations

from hook_programs.tensor_parallel import Reduce

__all__ = ["Reduce"]
