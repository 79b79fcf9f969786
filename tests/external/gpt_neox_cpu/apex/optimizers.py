"""The optimizer that GPT-NeoX takes from apex."""

from torch.optim import AdamW as FusedAdam

__all__ = ["FusedAdam"]
