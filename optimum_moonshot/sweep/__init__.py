"""Several values of λ or of the sparsity from one calibration."""
