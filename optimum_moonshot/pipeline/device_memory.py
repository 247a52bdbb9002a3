"""Too little memory on the device, where nothing can be halved any more: an error that says what to lower."""

from collections.abc import Iterator
from contextlib import contextmanager

from ..devices import is_out_of_memory
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
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise MoonshotError(f"out of device memory: {mend} ({error})") from None
