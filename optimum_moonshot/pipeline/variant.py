"""One way to prune on prepared data, with its results: a run has one, a sweep and a sparsity path have many.

The functions below exchange results between processes that solve some of the layers each.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn

from ..config import ALLOCATIONS
from ..model.layers import NamedParameter, PrunableLayer, rest_onloaded
from ..model.weight_sums import LOSSES, model_parts, model_sums
from ..model.weights import Weights
from ..model.word_embeddings import bytes_beside
from ..reports.prune_report import MODEL, BlockReport, LayerReport, PruneReport
from ..reports.record import PruningRecord, versions
from .run_context import holding_variant
from .store import ResultStore

if TYPE_CHECKING:
    from ..objective.loss_allocation import LossCurve
    from ..objective.patterns import MixedNM, Pattern
    from ..rotate.report import RotationReport
    from .inputs import Prepared
    from .run_folder import Parts
    from .selection import Selection

Value = TypeVar("Value")
Written = PrunableLayer | NamedParameter  # a layer's matrix, or another parameter that a recovery has changed


class Rotated(Protocol):
    """A basis of the model in which it is pruned."""

    written: bool  # whether the weights are in this basis

    @property
    def report(self) -> RotationReport: ...

    def write(self) -> None:
        """Write the basis into the weights, unless it is written."""

    def undo(self) -> None:
        """Restore the dense weights."""

    def applied(self) -> AbstractContextManager[None]:
        """A context in which the weights are in this basis."""


class Variant:
    """A selection of layers, patterns and λ, and the results so far, some of which may be of an earlier run."""

    def __init__(self, model: nn.Module, selection: Selection, store: ResultStore, notes: tuple[str, ...] = ()):
        self.model, self.selection, self.store = model, selection, store
        self.patterns: dict[str, Pattern | MixedNM] = dict(selection.patterns)
        self.notes = [*selection.notes, *notes, *store.notes]  # for the report
        self.skipped: dict[str, str] = {}  # chosen layers that stay dense, with the reason
        self.solving = 0.0  # seconds in the solver
        self.rotated: Rotated | None = None  # the basis that the results are of
        self.allocating = 0.0  # seconds that the curves of an allocation took

    @classmethod
    def open(
        cls,
        prepared: Prepared,
        selection: Selection,
        folder: str | os.PathLike[str] | None,
        field: str,
        spilling: bool = False,
    ) -> Variant:
        """A variant whose selection differs from that of the prepared run by λ, pattern or sparsity at most.

        Its store is in `folder`, named by `field` in messages; without one in memory, or in a temporary file where
        `spilling` or blocks are on disk. Of several processes, the first one's is in the folder. The same settings,
        model and data have their results there again.

        Raises:
            MoonshotError: the folder holds other files, or cannot be written.
        """
        ranks = prepared.subject.ranks
        folder = ranks.broadcast_object(folder)
        parts = run_parts(prepared, selection) if folder is not None and ranks.is_main else {}
        spilling = spilling or selection.structure.on_disk
        written_to = folder if ranks.is_main else None
        store = ResultStore(written_to, parts, field, spilling, spill_to=prepared.storage.folder)
        if folder is not None and ranks.size > 1:
            store.share(ranks.broadcast_object)
        return cls(prepared.model, selection, store, prepared.notes)

    def lacks(self, layer: PrunableLayer) -> bool:
        """Whether a layer has no result yet, and is to have one."""
        return layer.name not in self.store.reports and layer.name not in self.skipped

    def skip(self, layer: PrunableLayer, reason: str) -> None:
        """Leave a layer dense; the report gives the reason as the end of "left dense: LAYER (…)"."""
        self.skipped[layer.name] = reason

    @property
    def layers(self) -> list[PrunableLayer]:
        """The layers that are pruned."""
        return [layer for layer in self.selection.structure.layers() if layer.name not in self.skipped]

    @property
    def recovered(self) -> list[BlockReport]:
        """The reports of the recovered blocks, in the model's order, and of the distilled model."""
        names, reports = [*(block.name for block in self.selection.structure.blocks), MODEL], self.store.blocks
        return [reports[name] for name in names if name in reports]

    def pattern_of(self, layer: PrunableLayer) -> Pattern:
        """The pattern of a layer; that of the configuration before an allocation, or where it skips the layer."""
        return self.selection.pattern_of(layer, self.patterns.get(layer.name))

    def written(self) -> Iterator[tuple[Weights, list[Written]]]:
        """The layers and parameters with results, by the weights of their block; last those outside of blocks."""
        structure, names = self.selection.structure, sorted(self.store.parameters)
        for block in (*structure.blocks, None):
            layers = structure.outside if block is None else block.layers
            inside = [name for name in names if block is None or name.startswith(f"{block.name}.")]
            names = [name for name in names if name not in inside]
            parameters = [NamedParameter.of(self.model, name) for name in inside]
            if block is None:
                recovered = {id(parameter.parameter) for parameter in parameters}
                embeddings = self.selection.embeddings(self.model)
                parameters += [embedding for embedding in embeddings if id(embedding.parameter) not in recovered]
            pruned = [layer for layer in layers if layer.name not in self.skipped]
            yield _Rest(self.model) if block is None else block.weights, [*pruned, *parameters]

    def pruned_weight(self, layer: PrunableLayer) -> Tensor:
        """The weight [d_out, d_in] of a layer that has been solved, or stays dense, before a recovery.

        An interrupted run may have replaced it by a recovered one in the store.
        """
        if layer.name in self.skipped:
            return layer.matrix
        return (self.store.before_recovery.get(layer.name) or self.store.loader(layer.name))()

    def commit(self, keep: bool = False) -> None:
        """Write every result into the model, for good; if that is interrupted, the dense weights are put back.

        Unless the results are kept, each is freed as the dense weight is copied: the two never add up to two models.
        """
        rotates = self.rotated is not None and not self.rotated.written
        if self.rotated is not None:
            self.rotated.write()
        try:
            _swap(self, self.store.weight if keep else self.store.pop)
        except BaseException:
            if self.rotated is not None and rotates:
                self.rotated.undo()
            raise

    @contextmanager
    def applied(self) -> Iterator[None]:
        """A context in which the model has the pruned weights; it is dense again on exit."""
        rotated = nullcontext() if self.rotated is None else self.rotated.applied()
        with holding_variant(self.model), rotated:
            dense = _swap(self, self.store.weight)
            try:
                yield
            finally:
                dense.restore()

    def report(self, prepared: Prepared, seconds: dict[str, float]) -> PruneReport:
        """The report, whose record is attached to the model; `seconds` by phase, with the total."""
        structure, store = self.selection.structure, self.store
        layers = [store.reports[layer.name] for layer in self.layers]
        place = "on disk" if structure.on_disk else "in host memory"
        rotation = None if self.rotated is None else self.rotated.report
        allocated = layers if self.selection.config.allocation in ALLOCATIONS[1:] else ()
        targets = {layer.name: layer.target_sparsity for layer in allocated if layer.target_sparsity is not None}
        bits = {layer.name: layer.bits for layer in layers if layer.bits is not None}
        zeros = [layer.zeros_before for layer in layers if layer.zeros_before]
        embeddings = self.selection.embeddings(self.model)
        embedding_bits = self.selection.config.embedding_bits if embeddings else None
        remained = [f"{sum(zeros):,} zeros that {len(zeros)} layers had before the run remain"] if zeros else []
        return attach_report(
            prepared,
            self.selection,
            layers,
            seconds,
            [*self.notes, *remained],
            [] if prepared.block_probe is None else [f"blocks stayed {place}: one at a time was onloaded"],
            {
                "skipped": {**structure.skipped, **self.skipped},
                "parameters": sum(parameter.numel() for parameter in prepared.model.parameters()),  # tied ones once
                "recovery": self.recovered,
                "rotation": rotation,
                "other_bytes": bytes_beside(self.model, self.layers, self.selection.config.embedding_grid),
                "embedding_bits": embedding_bits,
            },
            {
                "dense": tuple(self.skipped),
                "rotation": None if rotation is None else rotation.summary(),
                "allocated": targets,
                "bits": bits if self.selection.config.has_budget else None,
                "embedding_bits": embedding_bits,
            },
        )


@dataclass(frozen=True)
class _Rest(Weights):
    """The weights outside of blocks, which may be offloaded."""

    model: nn.Module

    def onloaded(self) -> AbstractContextManager[None]:
        return rest_onloaded(self.model)


@dataclass
class _Dense:
    """The dense weights that results have replaced."""

    variant: Variant
    weights: dict[str, Tensor] = field(default_factory=dict)  # by layer or parameter, in host memory
    changes: list[tuple[Weights, Any]] = field(default_factory=list)  # the earlier ones of weights that are stored

    @torch.no_grad()
    def restore(self) -> None:
        """Put them back."""
        for weights, changes in self.changes:
            weights.restore(changes)
        for weights, written in self.variant.written():
            replaced = [item for item in written if item.name in self.weights]  # none of those stored elsewhere
            with weights.onloaded() if replaced else nullcontext():
                for item in replaced:
                    item.write(self.weights[item.name])


@torch.no_grad()
def _swap(variant: Variant, weight: Callable[[Written], Tensor]) -> _Dense:
    """Give every layer and parameter the tensor `weight(…)`; returns the dense ones, which a failure puts back."""
    dense, embeddings = _Dense(variant), variant.selection.embeddings(variant.model)
    try:
        for weights, written in variant.written():
            if weights.stored:
                dense.changes.append((weights, weights.changes()))
                for item in written:
                    weights.replace(item.parameter, _parameter(item, variant.store.loader(item.name)))
                continue
            with weights.onloaded():
                for item in written:
                    dense.weights[item.name] = item.matrix.to("cpu", copy=True)
                    stored = isinstance(item, PrunableLayer) or item.name in variant.store.parameters
                    result = weight(item) if stored else item.matrix
                    if any(item.parameter is embedding.parameter for embedding in embeddings):
                        result = variant.selection.rounded(result)
                    item.write(result)
    except BaseException:
        dense.restore()
        raise
    return dense


def _parameter(layer: Written, load: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Loads a tensor in the layout of the parameter."""
    return lambda: layer.as_parameter(load()).contiguous()


def run_parts(prepared: Prepared, selection: Selection) -> Parts:
    """All that the results of a run depend on, by section and name."""
    data = {} if prepared.data is None else {"the samples": prepared.data.digest}
    blocks = selection.structure.blocks
    sums = prepared.block_probe.sums if prepared.block_probe else model_sums(prepared.model, blocks)
    model = model_parts(prepared.model, sums)
    function = prepared.function
    if not selection.needs_losses:  # a sweep that does computes them for all its variants
        function = {name: value for name, value in function.items() if name != LOSSES}
    return {"the configuration": selection.settings, "the data": data, **model, "the model's function": function}


def share_results(prepared: Prepared, variants: Sequence[Variant], solved: Sequence[PrunableLayer]) -> int:
    """Exchange results: `solved` are the layers of this process; returns how many others have their results now.

    Of a layer that several processes have solved, all keep the first one's result: all end with the same bits.
    """
    ranks = prepared.subject.ranks
    if ranks.size == 1:
        return 0
    reports = [
        (index, variant.store.reports[layer.name])
        for layer in solved
        for index, variant in enumerate(variants)
        if layer.name in variant.store.reports
    ]
    layers = {layer.name: layer for layer in prepared.selection.layers}
    shared: set[tuple[int, str]] = set()
    for rank, of_process in enumerate(ranks.all_gather_object(reports)):
        for index, report in of_process:
            if (index, report.name) not in shared:
                shared.add((index, report.name))
                weight = _broadcast(prepared, variants[index].store, layers[report.name], rank)
                if ranks.rank != rank:
                    variants[index].store.put(report, weight)  # without the seconds, which another process took
    return len({name for _, name in shared}) - len(solved)


def _broadcast(prepared: Prepared, store: ResultStore, written: Written, rank: int) -> Tensor:
    """The result of one process for a layer or a parameter, in all of them."""
    ranks = prepared.subject.ranks
    result = store.weight(written) if ranks.rank == rank else None
    shape = written.shape if result is None else result.shape
    if isinstance(written, NamedParameter):  # a recovered one may have fewer experts
        shape = ranks.broadcast_object(shape, rank)
    return ranks.broadcast(result, torch.empty(shape, dtype=written.parameter.dtype, device="meta"), rank)


def share_curves(prepared: Prepared, variants: Sequence[Variant], measured: list[tuple[int, str, LossCurve]]) -> None:
    """Exchange loss curves: `measured` has this process's curves, by the variant's index and the layer's name."""
    if prepared.subject.ranks.size == 1:
        return
    for curves in reversed(prepared.subject.ranks.all_gather_object(measured)):  # the first process takes precedence
        for index, name, curve in curves:
            variants[index].store.put_curve(name, curve)


def share_recovered(prepared: Prepared, variant: Variant) -> None:
    """Give all processes the blocks that the first one has recovered."""
    ranks, store = prepared.subject.ranks, variant.store
    if ranks.size == 1:
        return
    layers = {layer.name: layer for layer in variant.layers}
    blocks, recovered, others = ranks.broadcast_object((store.blocks, store.recovered, store.parameters))
    for name, report in blocks.items():
        weights, parameters = dict[str, Tensor](), dict[str, Tensor]()
        for result in recovered[name]:
            if result in others:
                parameters[result] = _broadcast(prepared, store, NamedParameter.of(prepared.model, result), 0)
            else:
                weights[result] = _broadcast(prepared, store, layers[result], 0)
        if not ranks.is_main:
            store.put_block(report, weights, parameters)


def broadcast_first(prepared: Prepared, work: Callable[[], Value]) -> Value:
    """The result of work that the first process does while the others wait, in all processes."""
    ranks = prepared.subject.ranks
    return ranks.broadcast_object(cast(Value, work() if ranks.is_main else None))


def attach_report(
    prepared: Prepared,
    selection: Selection,
    layers: list[LayerReport],
    seconds: dict[str, float],
    notes: Iterable[str],
    memory_notes: Iterable[str] = (),
    report: Mapping[str, Any] | None = None,
    record: Mapping[str, Any] | None = None,
) -> PruneReport:
    """The report of a run; its record is attached to the pruned model.

    `layers` are the reports of the layers, `seconds` by phase with the total, and `notes` come before those on
    memory, to which `memory_notes` are added, and on processes; `report` and `record` are further fields of the
    `PruneReport` and the `PruningRecord`.
    """
    config, processes = selection.config, prepared.backoff.ranks.size
    alone = ["the rotation was learned"] if config.rotation is not None else []
    alone += ["the blocks were recovered"] if config.recover is not None and not config.distills else []
    by_one = f"; {' and '.join(alone)} by one of them" if alone else ""
    batches = processes if prepared.data is None else len(prepared.data.batches)
    idle = f"; {processes - batches} without samples: lower batch_size" if batches < processes else ""
    pruned = PruneReport(
        config={**config.to_dict(), "offload_dir": None},  # a published report contains no local folders
        layers=layers,
        calibration=None if prepared.data is None else prepared.data.describe(),
        seconds=seconds,
        peak_memory=max(layer.peak_memory for layer in layers),
        versions=versions(),
        notes=[
            *notes,
            *prepared.backoff.notes,
            *memory_notes,
            *([f"{processes} processes shared the samples and the layers{idle}{by_one}"] if processes > 1 else []),
        ],
        **(report or {}),
    )
    PruningRecord(
        config=pruned.config,
        solver_options=config.hyperparameters(),
        lam=selection.lam,
        sparsity=pruned.sparsity,
        calibration=pruned.calibration,
        versions=pruned.versions,
        **(record or {}),
    ).attach(prepared.model)
    return pruned
