"""A command that a launcher such as torchrun has started in several processes."""

import os
import sys

from ..errors import MoonshotError, reason
from .common import UsageError, expect


def several() -> bool:
    """Whether a launcher has started more processes than this."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


def join(device: str | None, shared: bool) -> None:
    """Join the process group of the launcher, if there is one: a process for each GPU, or processes on the CPU.

    Args:
        device: the value of `--device`.
        shared: whether several processes can share the command.

    Raises:
        UsageError: the command needs a single process, or there are more processes than GPUs.
        MoonshotError: the processes cannot connect.
    """
    if not several():
        return
    count = os.environ["WORLD_SIZE"]
    if not shared and not is_first():
        sys.exit(2)  # the first process prints the error
    expect(shared, f"{count} processes: this command runs in one; start it without torchrun or accelerate")
    one = device is not None and ":" in device
    expect(not one, f"--device {device}: {count} processes have a GPU each; leave it out, or give cpu")
    import torch
    import torch.distributed as dist

    gpus = 0 if device is not None and not device.startswith("cuda") else torch.cuda.device_count()
    if gpus:
        local = int(os.environ.get("LOCAL_RANK", "0"))
        hint = "start one for each, or give --device cpu"
        if local >= gpus:
            raise UsageError(f"{count} processes: this machine has {gpus} GPUs; {hint}")
        torch.cuda.set_device(local)
    if not is_first():
        _disable_progress_bars()
    if dist.is_initialized():
        return
    try:
        dist.init_process_group("cpu:gloo,cuda:nccl" if gpus else "gloo")
    except (RuntimeError, ValueError, OSError) as error:
        raise MoonshotError(f"{count} processes: they cannot connect ({reason(error)})") from error


def _disable_progress_bars() -> None:
    from huggingface_hub.utils import disable_progress_bars
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bars()
    disable_progress_bar()


def is_first() -> bool:
    """Whether this process writes and prints."""
    return not several() or os.environ["RANK"] == "0"


def part() -> None:
    """Destroy the process group, when the command has succeeded."""
    if not several():
        return
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def last_words(error: BaseException, message: str) -> tuple[str, str] | None:
    """Select the process that prints the error of a command, before it exits.

    Args:
        error: that ended it.
        message: of the error, in one line.

    Returns:
        The prefix of the line, which names the process that failed, and the message; None where another process prints
        them.
    """
    if not several():
        return "", message
    from ..distributed.ranks import leave

    return leave(error if isinstance(error, MoonshotError) else MoonshotError(message))
