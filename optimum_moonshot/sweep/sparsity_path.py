"""A model at several sparsities from one calibration and one elimination per layer (OBC, CAP).

A solver that ranks removals (`solvers/ranked.py`) removes all weights once: each sparsity is a prefix of this ranking,
and requires only the values of its surviving weights.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from ..config import MoonshotConfig
from ..errors import require
from ..functional import check_ranked
from ..pipeline.run_context import check_idle
from ..pipeline.selection import Subject
from ..pipeline.variant import Variant
from ..reports.prune_report import PruneReport
from .variants import Solved, combinations, select_layers, solve_variants


class SparsityPath:
    """The results of `MoonshotPruner.prune_path`. The model is dense until `apply`.

    ```python
    path = pruner.prune_path("c4", [0.5, 0.7, 0.9])
    for sparsity in path.sparsities:
        with path.applied(sparsity):
            print(sparsity, perplexity(pruner.model, pruner.tokenizer, "wikitext2").value)
    report = path.apply(0.7)
    pruner.save_pretrained("pruned-0.7")
    ```
    """

    def __init__(self, solved: Solved, report: Callable[[PruneReport], PruneReport]):
        self._solved, self._report = solved, report
        sparsities = [(variant.selection.config.sparsity, variant) for variant in solved.variants]
        self._variants = {sparsity: variant for sparsity, variant in sparsities if sparsity is not None}

    @property
    def sparsities(self) -> list[float]:
        return list(self._variants)

    def applied(self, sparsity: float) -> AbstractContextManager[None]:
        """A context in which the model has the weights of one sparsity, and afterwards its previous ones."""
        return self._variant(sparsity).applied()

    def apply(self, sparsity: float) -> PruneReport:
        """Write the weights of one sparsity into the model; others can be applied later.

        Returns:
            The report, which is also that of the pruner.

        Raises:
            MoonshotError: the path lacks this sparsity, or the call is inside of `applied`.
        """
        variant = self._variant(sparsity)
        check_idle(variant.model, "apply")
        variant.commit(keep=True)
        # The calibration passes are shared; the variants have divided the time of the solver.
        calibrating = self._solved.seconds - sum(variant.solving for variant in self._solved.variants)
        seconds = {"calibration": calibrating, "solver": variant.solving, "total": calibrating + variant.solving}
        return self._report(variant.report(self._solved.prepared, seconds))

    def discard(self) -> None:
        """Delete the folder of the results, if there is one."""
        self._solved.discard()

    def _variant(self, sparsity: float) -> Variant:
        message = f"the path has {', '.join(map(str, self._variants))}"
        require(sparsity in self._variants, message, field="sparsity", value=sparsity)
        return self._variants[sparsity]


def prune_path(
    subject: Subject,
    config: MoonshotConfig,
    calibration: Any,
    sparsities: Sequence[float],
    work_dir: str | os.PathLike[str] | None,
    report: Callable[[PruneReport], PruneReport],
) -> SparsityPath:
    """Solve for `MoonshotPruner.prune_path`; `report` receives the report of every sparsity that is applied."""
    check_ranked(config, sparsities)
    selections = select_layers(subject.model, combinations(config, [config.lam], sparsities, None))
    return SparsityPath(solve_variants(subject, selections, calibration, work_dir), report)
