"""Hooks of Megatron-LM and GPT-NeoX: the parallel dimensions of their process groups."""
