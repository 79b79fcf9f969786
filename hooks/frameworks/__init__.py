"""Hooks of frameworks that train with torch or DeepSpeed: purposes, and roles of groups. The calls are torch's.

accelerate, transformers, lightning, picotron
"""
