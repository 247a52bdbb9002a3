"""A pruning run: its phases, and the results of its layers."""
