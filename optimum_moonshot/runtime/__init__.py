"""Layers that multiply by packed or 2:4 weights, and which is used when."""
