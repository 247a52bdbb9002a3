"""Select the experts that remain in each mixture."""

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from ..calibration.mixture_sums import MixtureStatistics
from ..devices import peak_bytes
from ..model.mixtures import Mixture
from ..objective.patterns import Experts
from ..objective.removal import Removal
from ..pipeline.inputs import Prepared
from ..pipeline.store import ResultStore
from ..reports.prune_report import ExpertChoice, LayerReport, loss_fields
from ..solvers import Solver, make_solver, solver_names
from .problems import MixtureProblems


class ExpertSelection(MixtureProblems):
    """The remaining experts of each mixture; `store` may have those of an interrupted run.

    The result of a mixture is a row with a 1 for each remaining expert.
    """

    def __init__(self, prepared: Prepared, mixtures: Sequence[Mixture], pattern: Experts, store: ResultStore):
        super().__init__(prepared, mixtures)
        self.pattern, self.store, self.solving = pattern, store, 0.0
        self.notes: list[str] = [*prepared.notes, *store.notes]

    def lacks_mixture(self, name: str) -> bool:
        return name not in self.store.reports

    def run(self) -> None:
        super().run()
        self.notes += self.pipeline.notes

    def take(self, mixture: Mixture, statistics: MixtureStatistics) -> None:
        started, pattern = time.perf_counter(), self.pattern
        problem = self.problem(statistics)
        keep, losses = _solve_by_all(self.selection.solver, self.selection.config.solver, problem, pattern)
        (loss,) = problem.losses(keep)
        removed = (~keep).nonzero().flatten().tolist()
        seconds = time.perf_counter() - started
        report = LayerReport(
            name=mixture.name,
            shape=(mixture.count, mixture.size),
            sparsity=len(removed) / mixture.count,
            seconds=seconds,
            peak_memory=peak_bytes(mixture.parameters[0].device),
            notes=problem.scales.notes,
            target_sparsity=pattern.sparsity,
            experts=ExpertChoice(tuple(removed), losses),
            **loss_fields(problem.scales.lam, loss, loss),
        )
        self.solving += seconds
        self.store.put(report, keep.float()[None])

    def removed(self, mixture: Mixture) -> tuple[int, ...]:
        """The indices of the removed experts."""
        choice = self.store.reports[mixture.name].experts
        assert choice is not None
        return choice.removed

    def remaining(self) -> dict[str, Tensor]:
        """The indices of the remaining experts by mixture, int64."""
        return {
            mixture.name: torch.tensor([each for each in range(mixture.count) if each not in self.removed(mixture)])
            for mixture in self.mixtures
        }


def _solve_by_all(solver: Solver, name: str, problem: Removal, pattern: Experts) -> tuple[Tensor, dict[str, float]]:
    """The experts kept by a solver, bool [E], and the loss L_λ of its selection and of those of all other solvers."""
    keeps = {name: solver.solve(problem, pattern).keep[0]}
    others = [other for other in solver_names(Experts) if other != name]
    keeps |= {other: make_solver(other, {}).solve(problem, pattern).keep[0] for other in others}
    losses = problem.losses(*keeps.values())
    return keeps[name], {other: loss.total for other, loss in zip(keeps, losses, strict=True)}
