"""Selects the experts of each mixture that remain."""

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from ..calibration.mixture_sums import MixtureStatistics
from ..devices import peak_bytes
from ..model.mixtures import Mixture
from ..objective.patterns import Experts
from ..pipeline.inputs import Prepared
from ..pipeline.store import ResultStore
from ..reports.prune_report import ExpertChoice, LayerReport, loss_fields
from ..solvers import make_solver, solver_names
from .problems import MixtureProblems


class ExpertSelection(MixtureProblems):
    """The remaining experts of each mixture; `store` may have results of an interrupted run.

    The result of a mixture is a row with 1 for each remaining expert.
    """

    def __init__(self, prepared: Prepared, mixtures: Sequence[Mixture], pattern: Experts, store: ResultStore):
        super().__init__(prepared, mixtures)
        self.pattern, self.store, self.solving = pattern, store, 0.0
        self.notes: list[str] = [*prepared.notes, *store.notes]

    def lacks_mixture(self, name: str) -> bool:
        return name not in self.store.reports

    def take(self, mixture: Mixture, statistics: MixtureStatistics) -> None:
        started, pattern, solver = time.perf_counter(), self.pattern, self.selection.config.solver
        problem = self.problem(statistics)
        keep = self.selection.solver.solve(problem, pattern).keep[0]
        (loss,) = problem.losses(keep)
        # The report compares the losses of all solvers.
        keeps = {solver: keep}
        others = [other for other in solver_names(Experts) if other != solver]
        keeps |= {other: make_solver(other, {}).solve(problem, pattern).keep[0] for other in others}
        losses = {name: one.total for name, one in zip(keeps, problem.losses(*keeps.values()), strict=True)}
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
            mixture.name: torch.tensor([index for index in range(mixture.count) if index not in self.removed(mixture)])
            for mixture in self.mixtures
        }
