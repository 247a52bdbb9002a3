"""One run that removes whole experts: find → try → gather → choose, mixture by mixture → take out.

There is nothing in between a model with all experts and one with fewer: a router would send tokens to an expert of
zeros, and zeros are no way to tell it not to. So the model becomes smaller at the end of the run itself.
"""

import dataclasses
import os
import time
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from ..calibration.merging import merge_mixtures
from ..calibration.mixture_sums import MixtureObserver, MixtureStatistics
from ..config import MoonshotConfig
from ..devices import peak_bytes
from ..errors import MoonshotError, require
from ..model.calls import frozen
from ..model.compaction import Compaction
from ..model.expert_removal import ExpertRemoval
from ..model.layers import PrunableLayer, Structure, find_structure
from ..model.mixtures import Mixture, find_mixtures
from ..objective.patterns import Experts
from ..objective.removal import Removal
from ..pipeline.backoff import enough_memory
from ..pipeline.inputs import Prepared, prepare, sample_folder
from ..pipeline.loop import run_pipeline
from ..pipeline.model_pipeline import ModelPipeline
from ..pipeline.selection import Selection, Subject, resolved_lam
from ..pipeline.stages import Stage
from ..pipeline.variant import open_store, process_notes
from ..progress import progress_bar
from ..reports.measurement import versions
from ..reports.prune_report import ExpertChoice, LayerReport, PruneReport, loss_fields
from ..reports.record import PruningRecord
from ..results.store import ResultStore
from ..solvers import Solver, make_solver, solver_names


@enough_memory()
def run_removal(
    subject: Subject, config: MoonshotConfig, calibration: Any, resume_dir: str | os.PathLike[str] | None
) -> tuple[PruneReport, ResultStore]:
    """Remove the same number of experts from every mixture of a model.

    Args:
        subject: the model and what belongs to it.
        config: which share, by which solver.
        calibration: what `MoonshotPruner.prune` takes.
        resume_dir: a folder that keeps each mixture's result, or None.

    Returns:
        The report, and what holds the results.

    Raises:
        MoonshotError: a model without mixtures, or one that cannot lose so many experts; bad data, or too little
            memory. The model is as it was.
    """
    started = time.perf_counter()
    selection = _select(subject.model, config)
    prepared = prepare(subject, selection, calibration, sample_folder(subject, resume_dir))
    before = sum(parameter.numel() for parameter in subject.model.parameters())
    with frozen(subject.model):
        removal = _plan(prepared)
    choices = _Choices.open(prepared, removal, resume_dir)
    try:
        with frozen(subject.model):
            choices.gather()
        prepared.backoff.share()
        removal.apply({mixture.name: choices.kept(mixture) for mixture in removal.mixtures})
    finally:
        choices.store.release()
    total = time.perf_counter() - started
    seconds = {"calibration": total - choices.solving, "solver": choices.solving, "total": total}
    return choices.report(before, seconds), choices.store


def _select(model: nn.Module, config: MoonshotConfig) -> Selection:
    """The parameters of all experts, as layers: what has to be finite, and where the data are watched."""
    found = find_structure(model)

    def experts(layers: tuple[PrunableLayer, ...]) -> tuple[PrunableLayer, ...]:
        return tuple(layer for layer in layers if layer.separate and layer.groups > 1)

    blocks = tuple(dataclasses.replace(block, layers=experts(block.layers)) for block in found.blocks)
    structure = Structure(blocks, experts(found.outside))
    name = type(model).__name__
    require(
        any(structure.layers()),
        f"{name} has no experts in fused parameters; give a mixture of experts",
        field="pattern",
        value=Experts.kind,
    )
    pattern = config.parsed_pattern
    assert isinstance(pattern, Experts)
    patterns = dict.fromkeys((layer.name for layer in structure.layers()), pattern)
    return Selection(config, config.make_solver(), structure, patterns, resolved_lam(config, model))


def _plan(prepared: Prepared) -> ExpertRemoval:
    message = "what an expert contributes is measured on data; give some"
    require(prepared.data is not None, message, field="calibration", value=None)
    pattern = prepared.selection.config.parsed_pattern
    assert isinstance(pattern, Experts)
    mixtures = find_mixtures(prepared.model, prepared.probe)
    return ExpertRemoval.plan(prepared.model, mixtures, pattern, prepared.probe)


class _Choices:
    """Which experts of each mixture stay, so far.

    Args:
        prepared: the model, with all experts, and the data.
        removal: how many go.
        store: the results; those of an earlier run may be in it. A mixture is one row, a 1 for each expert.
    """

    def __init__(self, prepared: Prepared, removal: ExpertRemoval, store: ResultStore):
        self.prepared, self.removal, self.store = prepared, removal, store
        self.selection, self.solving = prepared.selection, 0.0
        self.pipeline = ModelPipeline(prepared, self)
        self.where = "the passes over the data"  # the latest mixtures
        self.of_module = {mixture.module: mixture for mixture in removal.mixtures}
        self.notes: list[str] = [*(prepared.data.notes if prepared.data else ()), *store.notes]

    @classmethod
    def open(cls, prepared: Prepared, removal: ExpertRemoval, folder: str | os.PathLike[str] | None) -> "_Choices":
        """With results that are kept in `folder`, or in memory without one."""
        return cls(prepared, removal, open_store(prepared, prepared.selection, folder, "resume_dir"))

    def lacks(self, layer: PrunableLayer) -> bool:
        """Whether the mixture of a parameter has no result yet."""
        mixture = self.of_module.get(layer.modules[0])
        return mixture is not None and mixture.name not in self.store.reports

    def skip(self, layer: PrunableLayer) -> None:
        """No data reach a parameter, although all mixtures lose as many experts, or none does.

        Raises:
            MoonshotError: always.
        """
        raise MoonshotError(self.pipeline.reason(layer)).within(layer.name)

    def gather(self) -> None:
        """Pass the data, and choose for each mixture at the stage of its block.

        Raises:
            MoonshotError: bad statistics, or a mixture that no data reach.
        """
        prepared, shown = self.prepared, self.prepared.subject.progress
        with progress_bar(total=len(self.of_module), desc="pruning", unit="mixture", shown=shown) as bar:
            bar.update(sum(mixture.name in self.store.reports for mixture in self.removal.mixtures))
            visit = partial(self._visit, bar=bar)
            run_pipeline(self.pipeline, visit, prepared.backoff, lambda: prepared.batches, lambda: self.where)
        self.notes += self.pipeline.notes

    def _visit(self, stage: Stage, bar: tqdm) -> None:
        modules = dict.fromkeys(layer.modules[0] for layer in stage.layers if self.lacks(layer))
        mixtures = [self.of_module[module] for module in modules]
        if not mixtures:
            return
        self.where = mixtures[0].name
        prepared, gradients = self.prepared, self.selection.needs_gradients
        samples, backoff = prepared.calibration.num_samples, prepared.backoff
        here = backoff.samples_here(samples)
        observer = MixtureObserver(mixtures, gradients, samples, prepared.storage, here)
        with backoff.passing(observer, merge_mixtures):
            stage.observe(observer, advance=True)
        for mixture in mixtures:
            bar.set_postfix_str(mixture.name)
            self._choose(mixture, observer.sums[mixture.name].result())
            bar.update(1)

    def _choose(self, mixture: Mixture, statistics: MixtureStatistics) -> None:
        started = time.perf_counter()
        pattern, lam = self.removal.pattern, self.selection.lam
        problem = Removal.build(statistics.gram, statistics.gradients, statistics.norms, statistics.tokens, lam)
        keep, losses = _compared(self.selection.solver, self.selection.config.solver, problem, pattern)
        (loss,) = problem.losses(keep)
        gone = (~keep).nonzero().flatten().tolist()
        seconds = time.perf_counter() - started
        report = LayerReport(
            name=mixture.name,
            shape=(mixture.count, mixture.size),
            sparsity=len(gone) / mixture.count,
            seconds=seconds,
            peak_memory=peak_bytes(mixture.parameters[0].device),
            notes=problem.scales.notes,
            target_sparsity=pattern.sparsity,
            experts=ExpertChoice(tuple(gone), losses),
            **loss_fields(problem.scales.lam, loss, loss),
        )
        self.solving += seconds
        self.store.put(report, keep.float()[None])

    def kept(self, mixture: Mixture) -> Tensor:
        """The numbers of the experts that stay, int64."""
        choice = self.store.reports[mixture.name].experts
        assert choice is not None  # as `_choose` reports
        return torch.tensor([expert for expert in range(mixture.count) if expert not in choice.removed])

    def report(self, before: int, seconds: dict[str, float]) -> PruneReport:
        """What was done; it is noted in the model's configuration too.

        Args:
            before: parameters of the model as it was.
            seconds: calibration, solver, total.
        """
        model, config, bytes_on_disk = self.prepared.model, self.selection.config, self.prepared.storage.spilled
        spilled = [f"{bytes_on_disk / 2**30:.2f} GiB of caches went to disk"] if bytes_on_disk else []
        layers = [self.store.reports[mixture.name] for mixture in self.removal.mixtures]
        after = sum(parameter.numel() for parameter in model.parameters())
        gone = {layer.name: len(layer.experts.removed) for layer in layers if layer.experts}
        compaction = Compaction(self.removal.changes, gone, {}, (before, after)).to_dict()
        report = PruneReport(
            config={**config.to_dict(), "offload_dir": None},
            layers=layers,
            skipped={},
            calibration=self.prepared.calibration.describe(),
            seconds=seconds,
            peak_memory=max(layer.peak_memory for layer in layers),
            versions=versions(),
            notes=[*self.notes, *self.prepared.backoff.notes, *spilled, *process_notes(self.prepared)],
            compaction=compaction,
            parameters=before,
        )
        PruningRecord(
            config=report.config,
            solver_options=config.hyperparameters(),
            lam=self.selection.lam,
            sparsity=report.sparsity,
            calibration=report.calibration,
            versions=report.versions,
            compaction=compaction,
        ).attach(model)
        return report


def _compared(solver: Solver, name: str, problem: Removal, pattern: Experts) -> tuple[Tensor, dict[str, float]]:
    """The experts that stay by a solver, bool [E], and the loss L_λ of its choice and of the other solvers' own."""
    keeps = {name: solver.solve(problem, pattern).keep[0]}
    others = [other for other in solver_names(Experts) if other != name]
    keeps |= {other: make_solver(other, {}).solve(problem, pattern).keep[0] for other in others}
    losses = problem.losses(*keeps.values())
    return keeps[name], {other: loss.total for other, loss in zip(keeps, losses, strict=True)}
