"""Stands in for apex, of which GPT-NeoX takes the optimizer."""
