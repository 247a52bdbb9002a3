"""A command that a launcher such as torchrun has started in several processes."""

import os
import sys

from ..errors import MoonshotError, reason
from .common import UsageError, expect


def several() -> bool:
    """Whether a launcher has started more processes than this."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


def join(device: str | None, shared: bool) -> None:
    """Come together with the other processes that the launcher started, if it did: one for each GPU, or on the CPU.

    Args:
        device: what `--device` says.
        shared: whether the command can be divided between processes.

    Raises:
        UsageError: a command for one process, or more processes than GPUs.
        MoonshotError: the others cannot be reached.
    """
    if not several():
        return
    count = os.environ["WORLD_SIZE"]
    if not shared and not is_first():
        sys.exit(2)  # one says it
    expect(shared, f"{count} processes: this command runs in one; start it without torchrun or accelerate")
    one = device is not None and ":" in device
    expect(not one, f"--device {device}: {count} processes have a GPU each; leave it out, or give cpu")
    import torch
    import torch.distributed as dist

    gpus = 0 if device is not None and not device.startswith("cuda") else torch.cuda.device_count()
    if gpus:
        local = int(os.environ.get("LOCAL_RANK", "0"))
        mend = "start one for each, or give --device cpu"
        if local >= gpus:
            raise UsageError(f"{count} processes: this machine has {gpus} GPUs; {mend}")
        torch.cuda.set_device(local)
    if not is_first():
        _show_no_bars()
    if dist.is_initialized():
        return
    try:
        dist.init_process_group("cpu:gloo,cuda:nccl" if gpus else "gloo")
    except (RuntimeError, ValueError, OSError) as error:
        raise MoonshotError(f"{count} processes: they cannot reach each other ({reason(error)})") from error


def _show_no_bars() -> None:
    from huggingface_hub.utils import disable_progress_bars
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bars()
    disable_progress_bar()


def is_first() -> bool:
    """Whether this process is the one that writes and prints."""
    return not several() or os.environ["RANK"] == "0"


def part() -> None:
    """The command has ended well: leave the group of the processes."""
    if not several():
        return
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def last_words(error: BaseException, message: str) -> tuple[str, str] | None:
    """Of a command that failed: what to print, where no other process prints it; the others are told.

    Args:
        error: that ended it.
        message: what it says, in one line.

    Returns:
        Who failed, for the beginning of the line, and the message; None where another process prints them.
    """
    if not several():
        return "", message
    from ..distributed.ranks import leave

    return leave(error if isinstance(error, MoonshotError) else MoonshotError(message))
