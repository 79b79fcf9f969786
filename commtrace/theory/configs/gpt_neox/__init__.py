"""GPT-NeoX's YAML files: read, checked, and typed."""
