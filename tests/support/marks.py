"""Which values of a test's parameters are among the slow ones."""

import pytest


def slow(*values):
    """One set of parameters."""
    return pytest.param(*values, marks=pytest.mark.slow)


def slow_but(fast, values):
    """All values of one parameter, those that are not in `fast` as slow ones."""
    return [value if value in fast else slow(value) for value in values]
