"""Smaller dense models to a target: blocks, neurons, heads, hidden size and experts, by measured losses and costs."""
