"""The runs a user starts: prune, sweep, sparsity path, rotation, expert pruning."""
