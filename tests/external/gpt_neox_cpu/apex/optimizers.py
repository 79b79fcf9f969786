"""The optimizer that GPT-NeoX imports from apex."""

from torch.optim import AdamW as FusedAdam

__all__ = ["FusedAdam"]
