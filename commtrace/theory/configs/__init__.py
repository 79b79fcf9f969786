"""Configuration files as job descriptions: GPT-NeoX, DeepSpeed, Hugging Face."""
