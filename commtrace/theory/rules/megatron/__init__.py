"""Rules that mirror the Megatron code in GPT-NeoX, of the version `registry.GPT_NEOX`, as in `examples.gpt_neox`."""
