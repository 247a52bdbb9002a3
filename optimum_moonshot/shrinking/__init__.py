"""Smaller dense models: the loss and the cost of removing parts of a model, and the decision."""
