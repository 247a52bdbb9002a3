"""Calls that the first process serves while the others wait, such as a save, and the message of a failed command."""

import json
from collections.abc import Callable
from typing import TypeVar

from ..errors import one_line
from .ranks import RunGroup, calls, several

Value = TypeVar("Value")
_MAIN = "a call that the first process serves, such as a save"


def on_main_process(work: Callable[[], Value]) -> Value:
    """Do work in the first process, and return its value, which JSON can hold, in all processes.

    The others wait for the first process, but it does not wait for them.

    Raises:
        MoonshotError: the first process failed or died.
    """
    if not several():
        return work()
    group = RunGroup(f"call {next(calls)}", _MAIN)
    if group.rank:
        return json.loads(group.read())
    group.begin()
    try:
        value = work()
    except BaseException as error:
        group.fail(error)
        raise
    group.publish(json.dumps(value))
    return value


def exit_message(error: BaseException) -> tuple[str, str] | None:
    """The prefix and the message, ("rank 1 failed: ", "…"), that this process prints when an error ends its command.

    None if another process prints them.
    """
    if not several():
        return "", one_line(error)
    group = RunGroup()
    failure = group.failure(error)
    return (f"rank {failure.rank} failed: ", failure.reason) if group.record(failure) else None
