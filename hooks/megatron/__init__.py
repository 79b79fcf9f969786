"""Hooks of Megatron-LM, Megatron-Core and GPT-NeoX: roles of their groups, their steps, and Megatron-Core's job."""
