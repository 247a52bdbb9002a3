"""The run over a model's stages: partition, collect statistics, solve, store, advance."""
