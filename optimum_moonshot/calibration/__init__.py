"""Passes of the data over a model, hooks that observe them, and what is gathered of a layer within a budget."""
