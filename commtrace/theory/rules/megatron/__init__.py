"""Rules that mirror Megatron-LM and GPT-NeoX's model parallelism."""
