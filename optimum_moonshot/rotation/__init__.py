"""Orthogonal changes of basis that leave a model's function as it is: found by probing, learned, merged."""
