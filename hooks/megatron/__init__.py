"""Hooks of Megatron-LM, Megatron-Core and GPT-NeoX.

core_groups, gpt_neox_groups        roles of their groups
core_schedules, core_optimizer      steps, phases and micro-batches of Megatron-Core, and its job
core_purposes                       purposes of its other calls
gpt_neox_training                   steps and evaluations of GPT-NeoX
gpt_neox_purposes                   purposes of its own calls
"""
