"""Errors on the command line: fields formatted as options, in one line on stderr, with an exit status."""

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import UNSET, MoonshotError, Option, shown
from .common import UsageError, one_line
from .launched import failure_message, join, leave_group
from .method_options import CONFIG_OPTIONS, flag

# Arguments of the package for the folders that `--output` determines.
FOLDERS = ("output", "directory", "resume_dir", "work_dir")
POSITIONAL = ("model",)
LONGEST_VALUE = 200  # characters


def option_formatter(args: argparse.Namespace | None, plurals: Mapping[str, str]) -> Callable[[Option], str]:
    """Return the function that formats a field as the option of a command, for `MoonshotError.render`.

    A field that the command has no option for is formatted as in Python.

    Args:
        args: of the command.
        plurals: fields whose option of this command takes several values, and has another name.
    """
    options = {} if args is None else vars(args)

    def format_option(option: Option) -> str:
        name, bracket, key = option.name.partition("[")  # an entry of a field, such as allocation['mlp']
        value = option.value
        if name in FOLDERS and options.get("output") is not None:
            name, value = "output", value if value is UNSET else options["output"]
        elif name in POSITIONAL or name not in (*CONFIG_OPTIONS, *options):
            return str(option)
        text = flag(plurals.get(name, name)) + bracket + key
        without_value = any(value is each for each in (UNSET, None, True))
        return text if without_value else f"{text} {_argument(value)}"

    return format_option


def _argument(value: Any) -> str:
    """Format a value as it is typed in a shell."""
    if isinstance(value, list | tuple):
        return " ".join(map(_argument, value))
    if isinstance(value, str | os.PathLike):
        text = str(value)[:LONGEST_VALUE]
        return text if text.split() == [text] else shlex.quote(text)
    return shown(value)


def guard(
    work: Callable[[argparse.Namespace], None],
    args: argparse.Namespace,
    plurals: Mapping[str, str] | None = None,
    shared: bool = False,
) -> None:
    """Run a command; print an error that users can fix as one line, without a traceback unless MOONSHOT_DEBUG=1.

    Args:
        work: the command.
        args: its arguments.
        plurals: as for `option_formatter`.
        shared: whether the processes that a launcher has started share the work.

    Raises:
        SystemExit: the work failed: with status 2 for a `UsageError`, 130 for an interruption, else 1.
    """
    try:
        join(getattr(args, "device", None), shared)
        work(args)
        leave_group()
        return
    except (MoonshotError, OSError, KeyboardInterrupt) as error:
        if os.environ.get("MOONSHOT_DEBUG") == "1":
            raise
        status, text = 2 if isinstance(error, UsageError) else 1, str(error)
        if isinstance(error, MoonshotError):
            text = error.render(option_formatter(args, plurals or {}))
        elif isinstance(error, KeyboardInterrupt):
            status, text = 130, "interrupted"
        message = failure_message(one_line(text) or type(error).__name__)
    if message is not None:
        print(f"error: {message}", file=sys.stderr)
    sys.exit(status)
