"""One way to prune on prepared data, with its results: a run has one, a sweep and a sparsity path have many."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from ..model.layers import PrunableLayer
from ..model.offload import Changes, Offloaded, is_on_disk
from ..objective.allocation_rules import METHODS
from ..objective.patterns import MixedNM, Pattern
from ..reports.prune_report import LayerReport, PruneReport
from ..results.store import ResultStore, fingerprint
from ..rotation.model_rotation import ModelRotation
from .inputs import Prepared
from .run_report import attach_report
from .selection import Selection


class Variant:
    """A selection of layers, patterns and λ, and the results so far.

    Args:
        selection: what is pruned, and how.
        store: the results; those of an earlier run may be in it.
        notes: for the report.
    """

    def __init__(self, selection: Selection, store: ResultStore, notes: tuple[str, ...] = ()):
        self.selection, self.store = selection, store
        self.patterns: dict[str, Pattern | MixedNM] = dict(selection.patterns)
        self.notes = [*selection.notes, *notes, *store.notes]
        self.skipped: dict[str, str] = {}  # chosen layers that stay dense, with the reason
        self.solving = 0.0  # seconds in the solver
        self.rotated: ModelRotation | None = None  # the basis that the results are of
        self.allocating = 0.0  # seconds that the curves of an allocation took

    @classmethod
    def open(
        cls, prepared: Prepared, selection: Selection, folder: str | os.PathLike[str] | None, field: str
    ) -> "Variant":
        """With results that are kept in `folder`, or in memory without one.

        Args:
            prepared: the model and the data.
            selection: of a configuration that differs from the prepared one's in λ, pattern and sparsity at most.
            folder: the same settings, model and data find their results there again.
            field: the argument that the folder came with, for messages.

        Raises:
            MoonshotError: the folder holds other files, or cannot be written.
        """
        notes = prepared.data.notes if prepared.data else ()
        return cls(selection, open_store(prepared, selection, folder, field), notes)

    def lacks(self, layer: PrunableLayer) -> bool:
        """Whether a layer has no result yet, and is to have one."""
        return layer not in self.store and layer.name not in self.skipped

    def skip(self, layer: PrunableLayer, reason: str) -> None:
        """Leave a layer dense; the report says why.

        Args:
            layer: that it lacks.
            reason: as the end of "left dense: LAYER (…)".
        """
        self.skipped[layer.name] = reason

    @property
    def layers(self) -> list[PrunableLayer]:
        """Those that are pruned."""
        return [layer for layer in self.selection.structure.layers() if layer.name not in self.skipped]

    def pattern_of(self, layer: PrunableLayer) -> Pattern:
        """What a layer is pruned by; where an allocation has not divided yet, or has left it out, what was asked."""
        pattern = self.patterns.get(layer.name, self.selection.patterns[layer.name])
        return pattern.nearest if isinstance(pattern, MixedNM) else pattern

    def weight(self, layer: PrunableLayer) -> Tensor:
        """A layer's pruned weight, [d_out, d_in] in host memory."""
        return self.store.weight(layer)

    def put(self, report: LayerReport, weight: Tensor) -> None:
        """Keep a layer's result; as `ResultStore.put`, and the time it took is added up.

        Args:
            report: which names the layer.
            weight: the pruned weight, [d_out, d_in], on any device.
        """
        self.solving += report.seconds
        self.store.put(report, weight)

    @torch.no_grad()
    def commit(self) -> None:
        """Write every result into the model, for good; if that is interrupted, the dense weights are put back.

        Each pruned weight gives its place to the dense one, so that the two never add up to two models.
        """
        with self._in_its_basis():
            _swap(self, self.store.pop).clear()

    @torch.no_grad()
    def write(self) -> "Dense":
        """Write every result into the model, and return the dense weights; if that fails, these are put back."""
        with self._in_its_basis():
            return _swap(self, self.store.weight)

    @contextmanager
    def _in_its_basis(self) -> Iterator[None]:
        """Rotate the model where the results ask for it and it is not yet; back if the block fails."""
        before = self.rotated is None or self.rotated.written
        if self.rotated is not None:
            self.rotated.write()
        try:
            yield
        except BaseException:
            if self.rotated is not None and not before:
                self.rotated.undo()
            raise

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Meanwhile the model has the results' weights; dense again on exit."""
        with nullcontext() if self.rotated is None else self.rotated.applied():
            dense = self.write()
            try:
                yield
            finally:
                dense.restore()

    def report(self, prepared: Prepared, seconds: dict[str, float]) -> PruneReport:
        """The report, whose record is attached to the model; `seconds` by phase, with the total."""
        structure, store = self.selection.structure, self.store
        layers = [store.reports[layer.name] for layer in self.layers]
        place = "on disk" if is_on_disk(structure.blocks) else "in host memory"
        rotation = None if self.rotated is None else self.rotated.report
        return attach_report(
            prepared,
            self.selection,
            layers,
            seconds,
            self.notes,
            None if prepared.block_probe is None else f"blocks stayed {place}: one at a time was brought",
            {
                "skipped": {**structure.skipped, **self.skipped},
                "parameters": sum(each.numel() for each in prepared.model.parameters()),  # tied ones once
                "recovery": [store.blocks[block.name] for block in structure.blocks if block.name in store.blocks],
                "rotation": rotation,
            },
            {
                "dense": tuple(self.skipped),
                "rotation": None if rotation is None else rotation.summary(),
                "allocated": self._allocated(layers),
            },
        )

    def _allocated(self, layers: list[LayerReport]) -> dict[str, float]:
        """Layer → the sparsity that a method gave it."""
        divided = self.selection.config.allocation in METHODS[1:]
        return {layer.name: layer.target_sparsity for layer in layers if divided and layer.target_sparsity is not None}


def open_store(
    prepared: Prepared, selection: Selection, folder: str | os.PathLike[str] | None, field: str
) -> ResultStore:
    """A store in `folder`, or in memory without one; of several processes, only the first uses the folder.

    Raises:
        MoonshotError: the folder holds other files, or cannot be written.
    """
    ranks, digest = prepared.ranks, ""
    folder = ranks.broadcast_object(folder)
    if folder is not None and ranks.is_main:
        data = prepared.data.digest if prepared.data else ""
        block_probe = prepared.block_probe
        layers = selection.structure.layers_onloaded() if block_probe is None else block_probe.sums
        digest = fingerprint(selection.config.fingerprint(), data, layers=layers)
    spilling = is_on_disk(selection.structure.blocks)
    store = ResultStore(folder if ranks.is_main else None, digest, field, spilling, selection.config.offload_dir)
    if folder is not None and ranks.size > 1:
        store.share(ranks)
    return store


class Dense:
    """The weights in whose place results are.

    Args:
        selection: of the layers.
    """

    def __init__(self, selection: Selection):
        self.selection = selection
        self.weights: dict[str, Tensor] = {}  # by layer, [d_out, d_in] in host memory
        self.elsewhere: list[tuple[Offloaded, Changes]] = []  # what had been written to blocks that are

    def clear(self) -> None:
        """The results are for good."""
        self.weights.clear()
        self.elsewhere.clear()

    @torch.no_grad()
    def restore(self) -> None:
        """Put them back."""
        for weights, changes in self.elsewhere:
            weights.restore(changes)
        structure = self.selection.structure
        for block in structure.blocks:
            if not isinstance(block.weights, Offloaded):
                with block.onloaded():
                    self._assign(block.layers)
        self._assign(structure.outside)

    def _assign(self, layers: tuple[PrunableLayer, ...]) -> None:
        for layer in layers:
            if layer.name in self.weights:
                layer.write(self.weights[layer.name])


def _swap(variant: Variant, weight: Callable[[PrunableLayer], Tensor]) -> Dense:
    """Give every layer the matrix that `weight` has for it; returns the dense ones, which a failure puts back."""
    structure, dense = variant.selection.structure, Dense(variant.selection)
    try:
        for block in (*structure.blocks, None):
            layers = structure.outside if block is None else block.layers
            layers = tuple(layer for layer in layers if layer.name not in variant.skipped)
            if block is not None and isinstance(block.weights, Offloaded):
                dense.elsewhere.append((block.weights, block.weights.changes()))
                for layer in layers:
                    block.weights.replace(layer.parameter, _parameter(layer, variant.store.loader(layer.name)))
                continue
            with nullcontext() if block is None else block.onloaded():
                for layer in layers:
                    dense.weights[layer.name] = layer.matrix.to("cpu", copy=True)
                    layer.write(weight(layer))
    except BaseException:
        dense.restore()
        raise
    return dense


def _parameter(layer: PrunableLayer, load: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """What gives a matrix in the layout of the layer's parameter."""
    return lambda: layer.as_parameter(load()).contiguous()
