"""Reading and validation of GPT-NeoX's YAML files."""
