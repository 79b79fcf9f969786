"""Hooks of frameworks that train with torch or DeepSpeed. They only mark purposes: the calls are torch's.

accelerate, transformers, lightning
"""
