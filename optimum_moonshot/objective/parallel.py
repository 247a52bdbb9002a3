"""Independent pieces of work on a CPU: one piece per thread, where every product in it is too small for two."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Piece = TypeVar("Piece")
Result = TypeVar("Result")


def parallel_map(work: Callable[[Piece], Result], pieces: Sequence[Piece], device: torch.device) -> list[Result]:
    """The work on every piece; on a CPU as many pieces at a time as torch has threads, each on one of them.

    torch splits a single operation between its threads, which costs more than it gains on small batched products, and
    its batched factorisations use one thread anyway.

    Args:
        work: records no gradients. Pieces must write to different places; the result then does not depend on the
            number of threads.
        pieces: what it is called with, one at a time.
        device: where it computes.

    Returns:
        What `work` returned, in the order of the pieces.

    Raises:
        Exception: the first that a piece raised, once all have ended.
    """
    threads = min(torch.get_num_threads(), len(pieces)) if device.type == "cpu" else 1
    if threads <= 1:
        with torch.no_grad():
            return [work(piece) for piece in pieces]
    total = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            return list(pool.map(torch.no_grad()(work), pieces))
    finally:
        torch.set_num_threads(total)  # the workers' setting would be inherited by threads that start later
