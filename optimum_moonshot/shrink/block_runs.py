"""Which runs of blocks to merge: the measured loss of short runs, and the sets of runs of least total loss.

Several short runs lose less than one long run, and a set of runs about as much as the sum of them. So the loss of runs
of up to `LONGEST` blocks is measured, of twice as many runs as there are blocks at most: of every single block, and of
the better half of the runs of each length with one block more. Of every number of blocks, the set of runs with the
least sum of losses follows by dynamic programming; at least one block remains between two runs.
"""

from collections.abc import Callable, Collection

from .merging import Run

LONGEST = 4


def measure_runs(possible: Collection[Run], most: int, measure: Callable[[Run], float]) -> dict[Run, float]:
    """The losses of runs, by successive halving.

    Args:
        possible: the runs that can be merged.
        most: the largest number of blocks to remove.
        measure: returns the increase of the model's loss without a run.

    Returns:
        The losses of those that were measured, at least 0.
    """
    losses = dict[Run, float]()
    runs = sorted(run for run in possible if run[1] - run[0] == 1)
    for length in range(1, min(LONGEST, most) + 1):
        measured = {run: max(0.0, measure(run)) for run in runs}
        losses |= measured
        better = sorted(measured, key=lambda run: measured[run])[: (len(measured) + 1) // 2]
        runs = sorted((before, last + 1) for before, last in better if (before, last + 1) in possible)
    return losses


def best_sets(losses: dict[Run, float], most: int) -> dict[int, tuple[int, ...]]:
    """The set of blocks with the least sum of losses of its runs, by the number of its blocks.

    Args:
        losses: of runs.
        most: the largest number of blocks.

    Returns:
        Ascending indices of 1 to `most` blocks, as far as so many can be removed.
    """
    end = 1 + max((last for _, last in losses), default=-1)
    # By the number of removed blocks: the loss, and the blocks, among those with an index of at least `first`.
    tables: list[dict[int, tuple[float, tuple[int, ...]]]] = [{0: (0.0, ())} for _ in range(end + 2)]
    for first in range(end, -1, -1):
        table = dict(tables[first + 1])
        for (before, last), loss in losses.items():
            if before != first:
                continue
            blocks = tuple(range(before + 1, last + 1))
            # The next run begins behind the block that follows this one, which may take up its change.
            for count, (other, others) in tables[last + 1].items():
                total = len(blocks) + count
                if total <= most and (total not in table or loss + other < table[total][0]):
                    table[total] = loss + other, (*blocks, *others)
        tables[first] = table
    return {count: blocks for count, (_, blocks) in tables[0].items() if count}
