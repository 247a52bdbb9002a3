"""What the package says of fields, said of the command line's options; and the end of a command that failed."""

import argparse
import os
import re
import sys
from collections.abc import Callable, Mapping

from ..errors import MoonshotError
from .common import UsageError, one_line
from .launched import join, last_words, part
from .method_options import CONFIG_OPTIONS, flag

# What the package calls the folders in which a command writes.
FOLDERS = ("output", "directory", "resume_dir", "work_dir")
SWITCHES = tuple(name for name, options in CONFIG_OPTIONS.items() if options.get("action") == "store_true")
# Fields that a sweep has several values of, and that the commands share with other functions.
_LISTS = ("lambdas", "sparsities", "patterns", "metric", "calibration", "format", "prompts", "temperature")
_NAMES = "|".join(sorted((*CONFIG_OPTIONS, *FOLDERS, *_LISTS), key=len, reverse=True))
_QUOTES = "'\""
_VALUE = r"""'[^']*'|"[^"]*"|\[[^]]*\]|\{[^}]*\}|[^\s:;,()]+"""
_FIELD = re.compile(rf"(?<![\w./-])(?P<name>{_NAMES})(?!\w)(?:=(?P<value>{_VALUE}))?")


def as_options(message: str, plurals: Mapping[str, str], output: str | None) -> str:
    """What the package says of a field, said of the option that the field is on the command line.

    Args:
        message: such as ``lam=1.5: λ lies between 0 and 1``.
        plurals: fields whose option of this command has another name.
        output: what was given as `--output`, if the command has one; its folders have several names in the package.
    """

    def option(match: re.Match[str]) -> str:
        name, value = match["name"], match["value"]
        heads = match.start() == 0 and message[match.end() :][:1] in (":", "[")
        if value is None and "_" not in name and not heads:
            return match[0]  # a word of English
        if name in FOLDERS:
            return flag("output") if output is None or value is None else f"{flag('output')} {output}"
        shown = flag(plurals.get(name, name))
        if value is None or value == "None" or (name in SWITCHES and value == "True"):
            return shown
        items = re.sub(r"[\[\],'\"]+", "", value) if value.startswith("[") else value.strip(_QUOTES)
        return f"{shown} {items}"

    return _FIELD.sub(option, message)


def guard(
    work: Callable[[argparse.Namespace], None],
    args: argparse.Namespace,
    plurals: Mapping[str, str] | None = None,
    shared: bool = False,
) -> None:
    """Do the work; what a user can mend is one line on stderr, without a traceback unless MOONSHOT_DEBUG=1.

    Args:
        work: what a command does.
        args: for it.
        plurals: as for `as_options`.
        shared: whether several processes do the work together, where a launcher has started them.

    Raises:
        SystemExit: the work failed: with status 2 for a `UsageError`, 130 for an interruption, else 1.
    """
    try:
        join(getattr(args, "device", None), shared)
        work(args)
        part()
        return
    except (MoonshotError, OSError, KeyboardInterrupt) as error:
        if os.environ.get("MOONSHOT_DEBUG") == "1":
            raise
        if isinstance(error, KeyboardInterrupt):
            status, message = 130, "interrupted"
        else:
            status, message = 2 if isinstance(error, UsageError) else 1, one_line(error)
        told = last_words(error, message)
    if told is not None:
        who, message = told
        shown = as_options(message, plurals or {}, getattr(args, "output", None)) if status != 130 else message
        print(f"error: {who}{shown}", file=sys.stderr)
    sys.exit(status)
