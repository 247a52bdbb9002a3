"""Layers that multiply by packed or 2:4 weights, and the selection between them."""
