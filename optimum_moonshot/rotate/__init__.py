"""Orthogonal changes of basis that preserve a model's function: probed, learned, merged into the weights."""
