"""Rules that mirror Megatron's code in GPT-NeoX (version `registry.GPT_NEOX`) and in `examples.gpt_neox`."""
