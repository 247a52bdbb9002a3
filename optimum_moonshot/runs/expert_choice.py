"""Select the experts that remain in each mixture, from the data at the stage of its block, or try several numbers."""

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import Tensor
from tqdm.auto import tqdm

from ..calibration.merging import merge_mixtures
from ..calibration.mixture_sums import MixtureObserver, MixtureStatistics
from ..devices import peak_bytes
from ..errors import MoonshotError
from ..model.expert_removal import ExpertRemoval
from ..model.layers import PrunableLayer
from ..model.mixtures import Mixture
from ..objective.patterns import Experts
from ..objective.removal import Removal
from ..pipeline.inputs import Prepared
from ..pipeline.loop import run_pipeline
from ..pipeline.model_pipeline import ModelPipeline
from ..pipeline.stages import Stage
from ..progress import progress_bar
from ..reports.prune_report import ExpertChoice, LayerReport, loss_fields
from ..results.store import ResultStore
from ..solvers import Solver, make_solver, solver_names


class MixtureProblems:
    """The problem of each mixture, in the order of the blocks, from a pass over the data at the stage of its block."""

    def __init__(self, prepared: Prepared, mixtures: Sequence[Mixture]):
        self.prepared, self.mixtures, self.selection = prepared, mixtures, prepared.selection
        self.pipeline = ModelPipeline(prepared, self)
        self.where = "the passes over the data"  # then the last mixture
        self.by_module = {mixture.module: mixture for mixture in mixtures}

    def lacks_mixture(self, name: str) -> bool:
        """Whether the problem of a mixture is needed."""
        raise NotImplementedError

    def take(self, mixture: Mixture, statistics: MixtureStatistics) -> None:
        """Use the statistics of a mixture."""
        raise NotImplementedError

    def problem(self, statistics: MixtureStatistics) -> Removal:
        """The objective of a mixture."""
        sums = statistics.gram, statistics.gradients, statistics.norms, statistics.tokens
        return Removal.build(*sums, self.selection.lam)

    def lacks(self, layer: PrunableLayer) -> bool:
        mixture = self.by_module.get(layer.modules[0])
        return mixture is not None and self.lacks_mixture(mixture.name)

    def skip(self, layer: PrunableLayer) -> None:
        """Raise `MoonshotError`: all mixtures lose the same number of experts, so none can be skipped."""
        raise MoonshotError(self.pipeline.reason(layer)).within(layer.name)

    def run(self) -> None:
        """Pass the data over the model, and take the statistics of each mixture.

        Raises:
            MoonshotError: bad statistics, or a mixture that no data reach.
        """
        prepared, shown = self.prepared, self.prepared.subject.progress
        with progress_bar(total=len(self.mixtures), desc="pruning", unit="mixture", shown=shown) as bar:
            bar.update(sum(not self.lacks_mixture(mixture.name) for mixture in self.mixtures))
            visit = partial(self._visit, bar=bar)
            run_pipeline(self.pipeline, visit, prepared.backoff, lambda: prepared.batches, lambda: self.where)

    def _visit(self, stage: Stage, bar: tqdm) -> None:
        modules = dict.fromkeys(layer.modules[0] for layer in stage.layers if self.lacks(layer))
        mixtures = [self.by_module[module] for module in modules]
        if not mixtures:
            return
        self.where = mixtures[0].name
        prepared, gradients = self.prepared, self.selection.needs_gradients
        samples, backoff = prepared.calibration.num_samples, prepared.backoff
        here = prepared.samples_here
        watched = MixtureObserver(mixtures, gradients, samples, prepared.storage, here)
        with backoff.passing(watched, merge_mixtures) as observer:
            stage.observe(observer, advance=True)
        for mixture in mixtures:
            bar.set_postfix_str(mixture.name)
            self.take(mixture, observer.sums[mixture.name].result())
            bar.update(1)


class ExpertTrials(MixtureProblems):
    """The model without several numbers of experts, one for each of `removals`, for measurements; its λ is < 1."""

    def __init__(self, prepared: Prepared, removals: Sequence[ExpertRemoval]):
        super().__init__(prepared, tuple(removals[0].mixtures))
        self.removals, self.problems = removals, dict[str, Removal]()

    def lacks_mixture(self, name: str) -> bool:
        return name not in self.problems

    def take(self, mixture: Mixture, statistics: MixtureStatistics) -> None:
        self.problems[mixture.name] = self.problem(statistics)

    def without(self, trial: int) -> AbstractContextManager[None]:
        """A context in which the model lacks the experts of a trial."""
        if not self.problems:
            self.run()
        removal, solver = self.removals[trial], self.selection.solver
        keep = {
            name: solver.solve(problem, removal.pattern).keep[0].nonzero().flatten()
            for name, problem in self.problems.items()
        }
        return removal.removed(keep)


class ExpertSelection(MixtureProblems):
    """The remaining experts of each mixture; `store` may have those of an interrupted run.

    The result of a mixture is a row with a 1 for each remaining expert.
    """

    def __init__(self, prepared: Prepared, mixtures: Sequence[Mixture], pattern: Experts, store: ResultStore):
        super().__init__(prepared, mixtures)
        self.pattern, self.store, self.solving = pattern, store, 0.0
        self.notes: list[str] = [*(prepared.data.notes if prepared.data else ()), *store.notes]

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
