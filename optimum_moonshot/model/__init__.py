"""Layers, blocks and losses of a model, its calls and properties; structured groups, experts and compaction."""
