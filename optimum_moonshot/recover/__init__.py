"""Tuning the surviving weights: block-wise, gradual, or of the whole model by distillation."""
