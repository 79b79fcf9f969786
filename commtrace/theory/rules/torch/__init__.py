"""Rules that mirror PyTorch."""
