"""Errors a user can act on: each message names the field, the value and the mend."""


class MoonshotError(ValueError):
    """Input that cannot be pruned as asked. The model is left as it was."""


class FactorizationError(MoonshotError):
    """A layer's quadratic stayed singular at the largest damping tried."""


def require(condition: bool, message: str) -> None:
    """Raise `MoonshotError(message)` unless `condition` holds."""
    if not condition:
        raise MoonshotError(message)
