"""Tuning the surviving weights of a block towards the dense block's outputs."""
