"""Hooks of Megatron-LM and GPT-NeoX: parallel dimensions of their process groups, GPT-NeoX's steps and evaluations."""
