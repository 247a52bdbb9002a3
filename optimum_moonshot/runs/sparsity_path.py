"""A model at several sparsities from one calibration and one elimination per layer (OBC, CAP).

A solver that ranks removals (`solvers/ranked.py`) removes everything once: each sparsity is a first part of the same
ranking, and needs nothing but its surviving weights computed.
"""

import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from ..config import MoonshotConfig
from ..errors import require
from ..pipeline.selection import Subject
from ..pipeline.variant import Variant
from ..reports.prune_report import PruneReport
from .rotate import rotated
from .sweep import Solved, choose_layers, open_variants, released_on_failure, solve_variants


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

    def __init__(self, solved: Solved, report: Callable[[PruneReport], None]):
        self._solved, self._report = solved, report
        sparsities = [(variant.selection.config.sparsity, variant) for variant in solved.variants]
        self._variants = {sparsity: variant for sparsity, variant in sparsities if sparsity is not None}
        # The passes over the data, shared by all, and the time of the solver, which the variants have divided.
        self._calibrating = solved.seconds - sum(variant.solving for variant in solved.variants)

    @property
    def sparsities(self) -> list[float]:
        return list(self._variants)

    def applied(self, sparsity: float) -> AbstractContextManager[None]:
        """A context in which the model has the weights of one sparsity; as before on exit."""
        return self._variant(sparsity).applied()

    def apply(self, sparsity: float) -> PruneReport:
        """Write the weights of one sparsity into the model, to be saved; the others may follow.

        Returns:
            The report, also kept as the pruner's.
        """
        variant = self._variant(sparsity)
        variant.commit(keep=True)
        seconds = {"calibration": self._calibrating, "solver": variant.solving}
        report = variant.report(self._solved.prepared, {**seconds, "total": self._calibrating + variant.solving})
        self._report(report)
        return report

    def discard(self) -> None:
        """Remove the folder of the results, if they are in one."""
        self._solved.discard()

    def _variant(self, sparsity: float) -> Variant:
        message = f"the path has {', '.join(map(str, self._variants))}"
        require(sparsity in self._variants, message, field="sparsity", value=sparsity)
        return self._variants[sparsity]


def prune_path(
    subject: Subject,
    configs: list[MoonshotConfig],
    calibration: Any,
    work_dir: str | os.PathLike[str] | None,
    report: Callable[[PruneReport], None],
) -> SparsityPath:
    """Calibrate and solve.

    Args:
        subject: the model, which stays dense, and what belongs to it.
        configs: they differ in sparsity alone.
        calibration: as for `MoonshotPruner.prune_path`.
        work_dir: as for `MoonshotPruner.prune_path`.
        report: gets the report of every sparsity that is applied.
    """
    selections = choose_layers(subject.model, configs)
    started = time.perf_counter()
    prepared, variants = open_variants(subject, selections, calibration, work_dir)
    with released_on_failure(variants), rotated(prepared, variants, stays=False):
        source = solve_variants(prepared, variants)
    return SparsityPath(Solved(prepared, variants, source, time.perf_counter() - started), report)
