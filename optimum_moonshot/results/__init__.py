"""Pruned weights between the solver and the model, in memory or in a resumable folder."""
