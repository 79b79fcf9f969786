"""Hooks of Megatron-LM, Megatron-Core and GPT-NeoX: dimensions of their groups, their steps, Megatron-Core's job."""
