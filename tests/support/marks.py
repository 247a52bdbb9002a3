"""Parameters of tests, marked as slow or not, and the devices of this machine."""

import pytest
import torch

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def slow(*values):
    """One set of parameters."""
    return pytest.param(*values, marks=pytest.mark.slow)


def slow_but(fast, values):
    """All values of one parameter; those not in `fast` are marked slow."""
    return [value if value in fast else slow(value) for value in values]
