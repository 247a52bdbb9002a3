"""Too little memory on the device: an error that says what to lower."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..errors import MoonshotError

MEND = "lower max_memory, batch_size or num_samples"


@contextmanager
def enough_memory(mend: str = MEND) -> Iterator[None]:
    """Inside the block, a device that is out of memory is a `MoonshotError`.

    Args:
        mend: what the user can do.

    Raises:
        MoonshotError: the device is out of memory.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise MoonshotError(f"out of device memory: {mend} ({error})") from None
