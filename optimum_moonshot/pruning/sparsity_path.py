"""A model at several sparsities from one calibration and one elimination per layer (OBC, CAP).

A solver that ranks removals (`solvers/ranked.py`) removes everything once: each sparsity is a first part of the same
ranking, and needs nothing but its surviving weights computed.
"""

import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from ..errors import require
from ..reports.prune_report import PruneReport
from .sweep import Sweep, applied, write


class SparsityPath:
    """What `MoonshotPruner.prune_path` returns. The model is dense until `apply`.

    ```python
    path = pruner.prune_path("c4", [0.5, 0.7, 0.9])
    for sparsity in path.sparsities:
        with path.applied(sparsity):
            print(sparsity, perplexity(pruner.model, pruner.tokenizer, "wikitext2").value)
    report = path.apply(0.7)
    pruner.save_pretrained("pruned-0.7")
    ```
    """

    def __init__(self, sweep: Sweep, seconds: float, report: Callable[[PruneReport], None]):
        self._sweep, self._report = sweep, report
        self._runs = {run.config.sparsity: run for run in sweep.runs}
        # The passes over the data, shared by all, and the time of the solver, which the runs have divided.
        self._calibrating = seconds - sum(run.solving for run in sweep.runs)

    @property
    def sparsities(self) -> list[float]:
        return list(self._runs)

    def applied(self, sparsity: float) -> AbstractContextManager[None]:
        """A context in which the model has the weights of one sparsity; as before on exit."""
        run = self._run(sparsity)
        return applied(run.results, run.layers)

    def apply(self, sparsity: float) -> PruneReport:
        """Write the weights of one sparsity into the model, to be saved; the others may follow.

        Returns:
            The report, also kept as the pruner's.
        """
        run = self._run(sparsity)
        write(run.results, run.layers)
        report = run._finish(self._calibrating + run.solving)
        self._report(report)
        return report

    def discard(self) -> None:
        """Remove the folder of the results, if they are in one."""
        for run in self._runs.values():
            run.results.discard()

    def _run(self, sparsity: float):
        require(sparsity in self._runs, f"sparsity={sparsity}: the path has {', '.join(map(str, self._runs))}")
        return self._runs[sparsity]


def prune_path(
    sweep: Sweep, calibration: Any, work_dir: str | os.PathLike | None, report: Callable[[PruneReport], None]
) -> SparsityPath:
    """Calibrate and solve."""
    started = time.perf_counter()
    sweep.prepare(calibration, work_dir)
    sweep.solve()
    return SparsityPath(sweep, time.perf_counter() - started, report)
