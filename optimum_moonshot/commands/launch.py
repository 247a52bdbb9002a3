"""Run a command, also in several processes of a launcher such as torchrun; errors become one line on stderr."""

import argparse
import ast
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ..errors import UNSET, MoonshotError, field_text, reason, truncated_repr
from .common import CONFIG_OPTIONS, UsageError, expect, flag

# Arguments of the package for the folders that `--output` determines.
FOLDERS = ("output", "directory", "resume_dir", "work_dir")
LONGEST_VALUE = 200  # characters
# A field in a message: `ignore`, batch_size, lam=1, allocation['mlp'], pattern='2:4'.
MENTIONED = re.compile(
    r"""`(\w+)`|(?<![\w.'"/-])([a-z]\w*(?:\[[^\]]*\])?)"""
    r"""(?:=('[^']*'|"[^"]*"|\[[^\]]*\]|True|False|None|-?\d+(?:\.\d+)?\b))?"""
)
# Seconds that processes without work wait for the first one to print; then torchrun ends them.
PATIENCE = 10.0


def guard(
    work: Callable[[argparse.Namespace], None],
    args: argparse.Namespace,
    shared: bool = False,
    plurals: Mapping[str, str] = {},
) -> None:
    """Run a command; print an error that users can fix as one line, without a traceback unless MOONSHOT_DEBUG=1.

    The exit status is then 2 for a `UsageError`, 130 for an interruption, else 1. `plurals`: see
    `shell_message`; the processes of a launcher can share the work of a `shared` command.
    """
    try:
        _join(getattr(args, "device", None), shared)
        work(args)
        if _several():
            import torch.distributed as dist

            if dist.is_initialized():
                dist.destroy_process_group()
        return
    except (MoonshotError, OSError, KeyboardInterrupt) as error:
        if os.environ.get("MOONSHOT_DEBUG") == "1":
            raise
        status, message = 2 if isinstance(error, UsageError) else 1, shell_message(error, args, plurals)
        if isinstance(error, KeyboardInterrupt):
            status, message = 130, "interrupted"
    if _several():  # all processes end, and one of them prints the errors of all
        from ..distributed.sharing import exit_message

        messages = exit_message(MoonshotError(message))
        message = "" if messages is None else "".join(messages)
    if message:
        print(f"error: {message}", file=sys.stderr)
    sys.exit(status)


def shell_message(error: BaseException, args: argparse.Namespace | None = None, plurals: Mapping[str, str] = {}) -> str:
    """The message of an error in one line, in which fields are named by the options of a command.

    `plurals` maps fields to the options with several of their values. A field without an option is formatted as in
    Python, and so is a single word without a value or backquotes, which may not mean the field.
    """
    options = {} if args is None else vars(args)

    def field(full: str, value: Any) -> str:
        name, bracket, key = full.partition("[")  # an entry of a field, such as allocation['mlp']
        if name in FOLDERS and options.get("output") is not None:
            name, value = "output", value if value is UNSET else options["output"]
        elif name == "model" or name not in (*CONFIG_OPTIONS, *options):
            return field_text(full, value)
        option = flag(plurals.get(name, name)) + bracket + key
        return option if value is UNSET or value is None or value is True else f"{option} {_argument(value)}"

    def mentioned(match: re.Match[str]) -> str:
        quoted, name, value = match.groups()
        name = quoted or name
        if (
            not quoted
            and value is None
            and "_" not in name
            or name.partition("[")[0] not in (*CONFIG_OPTIONS, *options)
        ):
            return match[0]
        try:
            return field(name, UNSET if value is None else ast.literal_eval(value))
        except (ValueError, SyntaxError):  # a list of objects
            return match[0]

    text = error.render(field, partial(MENTIONED.sub, mentioned)) if isinstance(error, MoonshotError) else str(error)
    return " ".join(text.split()) or type(error).__name__


def _argument(value: Any) -> str:
    """Format a value as it is typed in a shell."""
    if isinstance(value, list | tuple):
        return " ".join(map(_argument, value))
    if isinstance(value, str | os.PathLike):
        text = str(value)[:LONGEST_VALUE]
        return text if text.split() == [text] else shlex.quote(text)
    return truncated_repr(value)


def _several() -> bool:
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


def is_first() -> bool:
    """Whether this process writes and prints."""
    return not _several() or os.environ["RANK"] == "0"


def by_first(work: Callable[[], Any]) -> Any:
    """Do work in the first process, and return its value, of JSON types, in all of them."""
    from ..distributed.sharing import on_main_process

    return on_main_process(work)


def _join(device: str | None, shared: bool) -> None:
    """Join the process group if a launcher has started several processes, with one GPU each or on the CPU."""
    if not _several():
        return
    count = os.environ["WORLD_SIZE"]
    if not shared and not is_first():
        time.sleep(PATIENCE)  # a launcher may end all processes once one has ended, and the first prints the error
        sys.exit(2)
    expect(shared, f"{count} processes: this command runs in one; start it without torchrun or accelerate")
    indexed = device is not None and ":" in device
    expect(not indexed, f"{count} processes have a GPU each; leave it out, or give cpu", field="device", value=device)
    import torch
    import torch.distributed as dist

    gpus = 0 if device is not None and not device.startswith("cuda") else torch.cuda.device_count()
    if gpus:
        local = int(os.environ.get("LOCAL_RANK", "0"))
        hint = "start one for each, or give device='cpu'"
        expect(local < gpus, f"{count} processes: this machine has {gpus} GPUs", hint=hint)
        torch.cuda.set_device(local)
    if not is_first():
        from huggingface_hub.utils import disable_progress_bars
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bars()
        disable_progress_bar()
    if dist.is_initialized():
        return
    try:
        dist.init_process_group("cpu:gloo,cuda:nccl" if gpus else "gloo")
    except (RuntimeError, ValueError, OSError) as error:
        raise MoonshotError(f"{count} processes: they cannot connect ({reason(error)})") from error
