"""Parallelism over independent tasks on a CPU, for products too small to share between threads."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Piece = TypeVar("Piece")
Result = TypeVar("Result")


def parallel_map(work: Callable[[Piece], Result], pieces: Sequence[Piece], device: torch.device) -> list[Result]:
    """Call `work` on every piece; on a CPU, concurrently, with one thread of torch each.

    torch parallelises within an operation, which costs more than it gains on small batched products, and its batched
    factorisations use a single thread anyway.

    Args:
        work: called without recording gradients. Calls must write to disjoint memory; the result then does not depend
            on the number of threads.
        pieces: the arguments.
        device: of the computation.

    Returns:
        The results, in the order of `pieces`.

    Raises:
        Exception: the first raised by a call, after all have ended.
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
        torch.set_num_threads(total)  # threads started later would inherit the workers' setting
