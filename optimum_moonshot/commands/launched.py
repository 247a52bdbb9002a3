"""Commands that a launcher such as torchrun has started in several processes."""

import os
import sys

from ..errors import MoonshotError, Option, Text, reason
from .common import UsageError, expect


def several() -> bool:
    """Whether a launcher has started more than one process."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


def join(device: str | None, shared: bool) -> None:
    """Join the process group if a launcher has started several processes, with one GPU each or on the CPU.

    Args:
        device: the value of `--device`.
        shared: whether the processes can share the work of the command.

    Raises:
        UsageError: the command runs in one process, or there are more processes than GPUs.
        MoonshotError: the other processes cannot be reached.
    """
    if not several():
        return
    count = os.environ["WORLD_SIZE"]
    if not shared and not is_first():
        sys.exit(2)  # the first process prints the error
    expect(shared, f"{count} processes: this command runs in one; start it without torchrun or accelerate")
    indexed = device is not None and ":" in device
    expect(not indexed, f"{count} processes have a GPU each; leave it out, or give cpu", field="device", value=device)
    import torch
    import torch.distributed as dist

    gpus = 0 if device is not None and not device.startswith("cuda") else torch.cuda.device_count()
    if gpus:
        local = int(os.environ.get("LOCAL_RANK", "0"))
        if local >= gpus:
            hint = Text("start one for each, or give {}", Option("device", "cpu"))
            raise UsageError(f"{count} processes: this machine has {gpus} GPUs", hint=hint)
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


def leave_group() -> None:
    """Leave the process group at the end of a command."""
    if not several():
        return
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def failure_message(message: str) -> str | None:
    """Report the failure of this process to the others, and return what this process prints.

    Args:
        message: of the error, in one line.

    Returns:
        The message, with the rank that failed in front if there are several; None if another process prints it.
    """
    if not several():
        return message
    from ..distributed.ranks import leave

    parts = leave(MoonshotError(message))
    return None if parts is None else "".join(parts)
