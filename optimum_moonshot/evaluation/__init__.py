"""Perplexity, accuracy, zero-shot tasks, and all results of a model in one report."""
