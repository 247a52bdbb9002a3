"""Checkpoints of pruned models: packed files, weight names, saving, loading, integrity checks, model card, Hub."""
