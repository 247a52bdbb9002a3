"""Perplexity, accuracy, zero-shot tasks, and all of a model in one report."""

from .images import Accuracy, accuracy
from .text import Perplexity, perplexity

__all__ = ["Accuracy", "Perplexity", "accuracy", "perplexity"]
