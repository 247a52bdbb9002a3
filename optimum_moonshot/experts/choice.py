"""Select the experts of each mixture: collect statistics in a pass at the stage of its block, and solve the problem."""

import time
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from tqdm.auto import tqdm

from ..calibration.mixture_sums import MixtureObserver, MixtureStatistics, merge_mixtures
from ..devices import peak_bytes
from ..errors import MoonshotError
from ..model.layers import PrunableLayer
from ..model.mixtures import Mixture
from ..objective.patterns import Experts
from ..objective.removal import Removal
from ..pipeline.inputs import Prepared
from ..pipeline.loop import run_pipeline
from ..pipeline.model_pipeline import ModelPipeline
from ..pipeline.store import ResultStore
from ..pipeline.walk import Stage
from ..progress import progress_bar
from ..reports.prune_report import ExpertChoice, LayerReport, loss_fields
from ..solvers import make_solver, solver_names


class MixtureProblems:
    """The problems of the mixtures, in the order of their blocks."""

    def __init__(self, prepared: Prepared, mixtures: Sequence[Mixture]):
        self.prepared, self.mixtures, self.selection = prepared, mixtures, prepared.selection
        self.pipeline = ModelPipeline(prepared, self)
        self.where = "the passes over the data"  # in messages; later the current mixture
        self.by_module = {mixture.module: mixture for mixture in mixtures}

    def lacks_mixture(self, name: str) -> bool:
        """Whether the statistics of a mixture are still needed."""
        raise NotImplementedError

    def use(self, mixture: Mixture, statistics: MixtureStatistics) -> None:
        """Process the statistics of a mixture."""
        raise NotImplementedError

    def problem(self, statistics: MixtureStatistics) -> Removal:
        """Return the removal problem of a mixture from its statistics."""
        sums = statistics.gram, statistics.gradients, statistics.norms, statistics.tokens
        return Removal.build(*sums, self.selection.lam)

    def lacks(self, layer: PrunableLayer) -> bool:
        mixture = self.by_module.get(layer.modules[0])
        return mixture is not None and self.lacks_mixture(mixture.name)

    def skip(self, layer: PrunableLayer) -> None:
        """Raise `MoonshotError`: the same number of experts is removed from all mixtures, so none can be skipped."""
        raise MoonshotError(self.pipeline.reason(layer)).within(layer.name)

    def run(self) -> None:
        """Pass the data through the model, and call `use` with the statistics of each mixture."""
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
        samples, local_samples = prepared.calibration.num_samples, prepared.local_samples
        watched = MixtureObserver(mixtures, gradients, samples, prepared.storage, local_samples)
        with prepared.backoff.passing(watched, merge_mixtures) as observer:
            stage.observe(observer, advance=True)
        for mixture in mixtures:
            bar.set_postfix_str(mixture.name)
            self.use(mixture, observer.sums[mixture.name].result())
            bar.update(1)


class ExpertSelection(MixtureProblems):
    """Selects the remaining experts of each mixture; `store` may have results of an interrupted run.

    The stored result of a mixture is a row [1, E], 1 for a remaining expert and 0 for a removed expert.
    """

    def __init__(self, prepared: Prepared, mixtures: Sequence[Mixture], pattern: Experts, store: ResultStore):
        super().__init__(prepared, mixtures)
        self.pattern, self.store, self.solving = pattern, store, 0.0
        self.notes: list[str] = [*prepared.notes, *store.notes]

    def lacks_mixture(self, name: str) -> bool:
        return name not in self.store.reports

    def use(self, mixture: Mixture, statistics: MixtureStatistics) -> None:
        started, pattern, solver = time.perf_counter(), self.pattern, self.selection.config.solver
        problem = self.problem(statistics)
        keep = self.selection.solver.solve(problem, pattern).keep[0]
        (loss,) = problem.losses(keep)
        keeps = {solver: keep}  # by solver; the report compares their losses
        for other in solver_names(Experts):
            if other != solver:
                keeps[other] = make_solver(other, {}).solve(problem, pattern).keep[0]
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
