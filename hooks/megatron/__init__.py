"""Hooks of Megatron-LM (`core`) and GPT-NeoX (`gpt_neox`): the parallel dimensions of their process groups."""
