"""Sparsity budgets of layers: uniform, OWL, AlphaPruning, Fisher; budgets of bytes."""
