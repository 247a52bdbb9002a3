"""Folders of pruned models: packed files, their keys, saving, verified loading, model card, Hub."""
