"""Rules that mirror DeepSpeed."""
