"""Parameters of tests, marked as slow or not."""

import pytest


def slow(*values):
    """One set of parameters."""
    return pytest.param(*values, marks=pytest.mark.slow)


def slow_but(fast, values):
    """All values of one parameter; those not in `fast` are marked slow."""
    return [value if value in fast else slow(value) for value in values]
