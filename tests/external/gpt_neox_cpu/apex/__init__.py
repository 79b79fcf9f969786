"""Stand-in for apex, from which GPT-NeoX imports the optimizer."""
