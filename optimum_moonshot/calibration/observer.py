"""Hooks that observe layers during a pass over the data, and the statistics that they collect.

Calls are read piece by piece in the normal form of model/layers.py, without padding tokens. `InputSums` has the
statistics of the inputs, once for all layers with the same input tensor (q, k and v), and `GradientSums` the statistics
of a layer's gradients; accumulators.py has the statistics themselves and their interface. `merge_statistics`
merges the statistics of several processes that share the samples.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ..distributed.sharing import Merger, Owner
from ..errors import NO_BACKWARD, NOT_FINITE, MoonshotError, error_context, require
from ..model.calls import hook_gradient
from ..model.layers import PrunableLayer
from ..objective.fisher import Fisher
from ..objective.linalg import all_finite
from ..objective.quadratic import DiagonalQuadratic, Objective, Quadratic, Totals, reconstruction
from .accumulators import (
    GradientPlan,
    GradientStatistic,
    Gram,
    InputSquares,
    InputStatistic,
    InputSum,
    LayerTotals,
    RowMatrices,
    Samples,
    Squares,
    TokenCounts,
    TokenWeights,
    WeightedGram,
)
from .storage import Storage


@dataclass
class LayerStatistics:
    """The statistics of a layer's objective: Σ x xᵀ and the Fisher term of its rows or, diagonal, Σ x² and Σ_n A_n².

    Inputs are [d_in, d_in] or [d_in], with groups in front if there are several. Gradients are a `Fisher`, or
    [d_out, d_in] where diagonal; None at λ = 1. They may have some of the rows only.
    """

    inputs: Tensor
    gradients: Fisher | Tensor | None
    samples: int  # N
    diagonal: bool = False
    totals: tuple[float, float] | None = None  # L_F(0) and mean Σ_n A_n² of all rows, as in `GradientPlan.totals`
    extra: Mapping[type, Any] = field(default_factory=dict)  # results of the observer's further statistics, by class
    unknown: frozenset[int] = frozenset()  # groups that are pruned by magnitude
    tokens: Tensor | None = None  # int64 [groups]: the number that each group has read, where groups are experts

    def groups(self, count: int) -> Iterator["LayerStatistics"]:
        """The statistics of each of `count` groups of rows alone, where every group is a separate matrix."""
        shared = self.inputs.ndim == (1 if self.diagonal else 2)  # one G for all, as without data
        for index in range(count):
            inputs, gradients = self.inputs if shared else self.inputs[index], self.gradients
            if index in self.unknown:
                inputs, gradients = torch.zeros_like(self.inputs[index]), None
            elif isinstance(gradients, Tensor):
                gradients = gradients.unflatten(0, (count, -1))[index]
            elif gradients is not None:
                size = gradients.count // count
                gradients = gradients.part(slice(index * size, (index + 1) * size))
            tokens = None if self.tokens is None else self.tokens[index : index + 1]
            yield replace(self, inputs=inputs, gradients=gradients, extra={}, unknown=frozenset(), tokens=tokens)

    def objective(
        self, weight: Tensor, lam: float, column_block: int | None = None, alive: Tensor | None = None
    ) -> Objective:
        """The layer's quadratic at its weight [d_out, d_in], as a whole or for column blocks; `alive` as in `build`."""
        gradients = self.gradients if lam < 1 else None
        if self.diagonal:
            # The statistics may be in host memory, and are no larger than the weight.
            assert not isinstance(gradients, Fisher)
            inputs, squares = self.inputs.to(weight.device), None if gradients is None else gradients.to(weight.device)
            return DiagonalQuadratic.build(weight, inputs, squares, self.samples, lam, alive)
        assert not isinstance(gradients, Tensor)
        return Quadratic.build(weight, self.inputs, gradients, lam, None, column_block, alive)

    def layer_objective(
        self, weight: Tensor, lam: float, column_block: int | None = None, alive: Tensor | None = None
    ) -> Quadratic:
        """The `objective` without gradients, with the `totals` collected beside the gradients of some rows."""
        assert self.totals is not None
        totals = Totals(reconstruction(weight, self.inputs, column_block), *self.totals, self.samples)
        return Quadratic.build(weight, self.inputs, None, lam, totals, column_block, alive)


@dataclass(frozen=True)
class LayerCall:
    """One call of a layer on a batch."""

    layer: PrunableLayer
    called: PrunableLayer  # of the called module: one of several, where they share the weight
    inputs: Tensor
    version: int  # of the inputs: in-place changes increase it
    mask: Tensor | None  # True where a token counts, laid out as the inputs
    samples: int  # of the batch


@dataclass
class SharedSums:
    """The statistics of the inputs that some layers share."""

    statistics: dict[type, InputStatistic]
    readers: dict[str, list[Hashable]] = field(default_factory=dict)  # layer → the tensors it read in this batch
    first: bool = True  # during the first batch, other layers may join


@dataclass
class InputSums:
    """The statistics of all layers' inputs, shared by layers that read the same tensors in the same way if `share`.

    A batch's inputs then live until its end, so that their addresses identify them. `storage`, `share` and `into` are
    arguments of `Observer`.
    """

    kinds: Sequence[type[InputStatistic]]
    storage: Storage
    share: bool
    into: Mapping[str, Tensor]
    of_layer: dict[str, SharedSums] = field(default_factory=dict)
    # Of the present batch, by the address, shape, strides and version of a tensor and how layers read it:
    by_key: dict[Hashable, SharedSums] = field(default_factory=dict)
    added: set[tuple[int, Hashable]] = field(default_factory=set)  # with the identity of the statistics
    held: dict[Hashable, LayerCall] = field(default_factory=dict)

    def lacking(self, call: LayerCall) -> SharedSums | None:
        """The statistics to which the inputs of a call are to be added; None if another layer's call has added them."""
        name, inputs = call.layer.name, call.inputs
        if not inputs.numel():
            return None  # its address would not identify it
        key = (inputs.data_ptr(), inputs.shape, inputs.stride(), call.version, call.called.input_key)
        if name not in self.of_layer:
            other = self.by_key.get(key)
            self.of_layer[name] = other if other and other.first else self._make(call.layer, inputs.device)
        shared = self.of_layer[name]
        if self.share:
            self.by_key.setdefault(key, shared)
            self.held.setdefault(key, call)
            shared.readers.setdefault(name, []).append(key)
            if (id(shared), key) in self.added:
                return None
            self.added.add((id(shared), key))
        return shared

    def _make(self, layer: PrunableLayer, device: torch.device) -> SharedSums:
        arguments, into = (layer, self.storage, device), self.into.get(layer.name)
        statistics: dict[type, InputStatistic] = {}
        for kind in self.kinds:
            statistics[kind] = kind(*arguments, into) if issubclass(kind, InputSum) else kind(*arguments)
        return SharedSums(statistics)

    def end(self) -> None:
        """End a batch; layers that shared statistics in earlier batches must have read the same tensors."""
        for shared in {id(shared): shared for shared in self.of_layer.values()}.values():
            if len(set(map(tuple, shared.readers.values()))) > 1:
                self._separate(shared)
        for shared in self.of_layer.values():
            shared.first = False
            for reads in shared.readers.values():
                reads.clear()
        self.forget()

    def _separate(self, shared: SharedSums) -> None:
        """Give layers that shared statistics in this first batch, but also read other tensors, separate ones."""
        calls = [self.held[key] for reads in shared.readers.values() for key in reads]
        require(
            shared.first and all(call.inputs._version == call.version for call in calls),
            f"layers {sorted(shared.readers)} read the same tensor in some batches only",
        )
        by_reads: dict[tuple[Hashable, ...], SharedSums] = {}
        for name, reads in shared.readers.items():
            if tuple(reads) not in by_reads:
                call = self.held[reads[0]]
                by_reads[tuple(reads)] = sums = self._make(call.layer, call.inputs.device)
                for held in (self.held[key] for key in dict.fromkeys(reads)):
                    for tokens in held.called.tokens(held.inputs, held.mask):
                        for statistic in sums.statistics.values():
                            statistic.add(tokens, held.called.called_groups)
            self.of_layer[name] = by_reads[tuple(reads)]
            by_reads[tuple(reads)].readers[name] = []

    def forget(self) -> None:
        """Release the batch's inputs."""
        self.by_key.clear()
        self.added.clear()
        self.held.clear()

    def sums_of(self, layer: PrunableLayer) -> SharedSums:
        """The statistics of a layer, also if no sample of this process has reached it."""
        if layer.name in self.of_layer:
            return self.of_layer[layer.name]
        device = layer.parameter.device
        return self._make(layer, self.storage.device if device.type == "meta" else device)


@dataclass
class GradientSums:
    """The statistics of a layer's gradients, by class; the gradients of its objective are under `GradientStatistic`."""

    statistics: dict[type, GradientStatistic]
    weights: TokenWeights | None = None  # of the dense model, in place of gradients
    pending: int = 0  # calls of this batch without a gradient yet

    def add(self, call: LayerCall, delta: Tensor) -> None:
        """Add the gradients of a call, from `delta`, ∂ℓ/∂y in the shape of its output.

        Raises:
            MoonshotError: the inputs have changed, or do not show which sample a token belongs to.
        """
        self.pending -= 1
        require(
            call.inputs._version == call.version,
            f"{call.layer.name}: the model changes this layer's input in place after the call",
            hint=f"use inplace=False, or {NO_BACKWARD}",
        )
        with error_context(call.layer.name):
            for inputs, piece, last in call.called.pairs(call.inputs, delta, call.mask, call.samples):
                for statistic in self.statistics.values():
                    statistic.add(inputs, piece, last and self.pending == 0, call.called.called_groups)


class Observer(AbstractContextManager["Observer"]):
    """Hooks on layers, removed on exit.

    For every batch, the caller calls `begin`, runs the model (and a backward pass, if `gradients` is not empty), and
    calls `end`; `take` then returns each layer's statistics.

    Args:
        layers: to observe.
        diagonal: collect only the diagonals (Wanda): A_n is squared and added sample by sample, never stored.
        with_gradients: names of the layers with gradient statistics; the caller runs backward passes.
        samples: N, calibration samples in all.
        storage: allocates the statistics.
        plans: the statistics of the gradients of layers, by name; the gradients of other layers are stored.
        share: layers that read the same tensor have one Gram matrix; a batch's inputs then live until its end.
        extra: further statistics, of all layers, or of the layers with gradients where they need gradients.
        local_samples: the samples of this process, if several share them; None is all.
        into: layer → memory for the sums over its inputs, of their shape; other layers have new memory.
    """

    def __init__(
        self,
        layers: Sequence[PrunableLayer],
        diagonal: bool,
        with_gradients: set[str],
        samples: int,
        storage: Storage,
        plans: Mapping[str, GradientPlan] | None = None,
        share: bool = True,
        extra: Sequence[type[InputStatistic] | type[GradientStatistic]] = (),
        local_samples: int | None = None,
        into: Mapping[str, Tensor] | None = None,
    ):
        self.layers, self.diagonal, self.samples = layers, diagonal, samples
        self.local_samples = samples if local_samples is None else local_samples
        self.kind: type[InputSum] = InputSquares if diagonal else Gram
        kinds: list[type[InputStatistic]] = [self.kind, *(kind for kind in extra if issubclass(kind, InputStatistic))]
        kinds += [TokenCounts] if any(layer.separate for layer in layers) else []
        self.inputs = InputSums(kinds, storage, share, into or {})
        self.gradients: dict[str, GradientSums] = {}
        for layer in layers:
            if layer.name not in with_gradients:
                continue
            plan, statistics = (plans or {}).get(layer.name, GradientPlan()), dict[type, GradientStatistic]()
            if not plan.nothing and plan.shared:
                statistics[GradientStatistic] = WeightedGram(layer, samples, storage, plan)
            elif not plan.nothing and diagonal:
                statistics[GradientStatistic] = Squares(layer, storage)
            elif not plan.nothing and plan.column_block is not None:
                statistics[GradientStatistic] = RowMatrices(layer, samples, storage, plan)
            elif not plan.nothing:
                statistics[GradientStatistic] = Samples(layer, samples, storage, plan, local_samples)
            if plan.totals is not None:
                statistics[LayerTotals] = LayerTotals(layer, samples, plan.totals)
            more = [kind for kind in extra if issubclass(kind, GradientStatistic)]
            statistics |= {kind: kind(layer, samples, storage) for kind in more}
            self.gradients[layer.name] = GradientSums(statistics, plan.weights)
        self.mask: Tensor | None = None
        self.first = self.count = 0
        self.watching = False  # between `begin` and `end`; calls outside of a batch do not count
        self._hooks = ExitStack()

    def __enter__(self) -> "Observer":
        for layer in self.layers:
            layer.watch(partial(self._observe, layer), self._hooks)
        return self

    def __exit__(self, *exception: Any) -> None:
        self._hooks.close()
        self.inputs.forget()

    def begin(self, first: int, count: int, mask: Tensor | None) -> None:
        """Begin a batch of B = `count` samples, from index `first` among the samples of this process.

        `mask` is bool [B, T], True where a token counts; None where all do.
        """
        self.first, self.count, self.mask, self.watching = first, count, mask, True
        for sums in self.gradients.values():
            sums.pending = 0
            for statistic in sums.statistics.values():
                statistic.begin(first, count)

    def end(self) -> None:
        """End a batch; raise `MoonshotError` if layers that share a Gram matrix did not read the same tensors."""
        self.watching = False
        self.inputs.end()
        for sums in self.gradients.values():
            for statistic in sums.statistics.values():
                statistic.end()

    def _observe(self, layer: PrunableLayer, called: PrunableLayer, inputs: Tensor, output: Tensor) -> Tensor | None:
        """Add a call's inputs, and later its gradient; returns a new output if the autograd graph begins here."""
        if not self.watching:
            return None
        inputs = inputs.detach()
        with error_context(layer.name):
            mask = called.token_mask(inputs, self.mask)
        call = LayerCall(layer, called, inputs, inputs._version, mask, self.count)
        if (shared := self.inputs.lacking(call)) is not None:
            for tokens in called.tokens(inputs, mask):
                for statistic in shared.statistics.values():
                    statistic.add(tokens, called.called_groups)
        sums = self.gradients.get(layer.name)
        if sums is None or (sums.weights is None and not torch.is_grad_enabled()):
            return None
        if sums.weights is not None:
            roots = sums.weights.of_batch(self.first, self.count)
            if roots is not None:
                sums.pending += 1
                sums.add(call, roots[..., None])
            return None
        sums.pending += 1
        return hook_gradient(output, lambda delta: sums.add(call, delta))

    def reached(self, layer: PrunableLayer) -> bool:
        """Whether a call of the layer was observed."""
        return layer.name in self.inputs.of_layer

    def forget(self, layer: PrunableLayer) -> None:
        """Release the statistics of a layer."""
        self.inputs.of_layer.pop(layer.name)
        self.gradients.pop(layer.name, None)

    def tokens(self, layer: PrunableLayer) -> Tensor:
        """The number of tokens that each expert of a layer has read, int64 [groups]."""
        return self.inputs.of_layer[layer.name].statistics[TokenCounts].result()

    def sums(self, layer: PrunableLayer) -> Tensor:
        """The current sums over a layer's inputs, which `take` will return: G or its diagonal, by group."""
        return self.inputs.of_layer[layer.name].statistics[self.kind].result()

    def take(self, layer: PrunableLayer) -> LayerStatistics:
        """Check a layer's statistics, release them here, and return them.

        Raises:
            MoonshotError: the calibration data never reached the layer, or gave NaN or infinity.
        """
        name = layer.name
        if not self.reached(layer):
            hint = "add its name to `ignore` to skip it"
            raise MoonshotError(f"{name}: no calibration data reached this layer", hint=hint)
        statistics: dict[type, InputStatistic | GradientStatistic] = {**self.inputs.of_layer.pop(name).statistics}
        if name in self.gradients:
            statistics |= self.gradients.pop(name).statistics
        results: dict[type, Any] = {kind: statistic.result() for kind, statistic in statistics.items()}
        inputs, gradients = results.pop(self.kind), results.pop(GradientStatistic, None)
        finite = all_finite(inputs if self.diagonal else inputs.diagonal(dim1=-2, dim2=-1))
        require(finite, f"{name}: its inputs (activations) hold NaN or infinite values", hint=NOT_FINITE)
        if gradients is not None:
            finite = all_finite(gradients) if self.diagonal else gradients.is_finite()
            require(finite, f"{name}: its gradients hold NaN or infinite values", hint=NOT_FINITE)
        tokens, totals = results.pop(TokenCounts, None), results.pop(LayerTotals, None)
        return LayerStatistics(inputs, gradients, self.samples, self.diagonal, totals, results, tokens=tokens)


def merge_statistics(observer: Observer, merger: Merger, owners: Mapping[str, Owner] = MappingProxyType({})) -> None:
    """Merge the statistics of a pass, each from the samples of one process.

    `owners` has the processes that need a layer's statistics, by its name; all processes need the other layers. A
    process that does not need a layer only knows that it was reached.

    Raises:
        MoonshotError: layers share their statistics in some processes only, or a statistic cannot be merged.
    """
    _merge_inputs(observer, merger)
    sizes = merger.values(observer.local_samples) if observer.gradients else []
    for layer in observer.layers:
        of_layer, sums = merger.of_layer(owners.get(layer.name), sizes), observer.gradients.get(layer.name)
        for statistic in sums.statistics.values() if sums is not None else ():
            statistic.merge(of_layer)
        if of_layer.is_elsewhere:
            observer.gradients.pop(layer.name, None)


def _merge_inputs(observer: Observer, merger: Merger) -> None:
    """Layers that share a tensor have one statistic in all processes, also where a process has not reached them."""
    inputs, numbers = observer.inputs, dict[int, int]()
    shared = {name: numbers.setdefault(id(sums), len(numbers)) for name, sums in inputs.of_layer.items()}
    processes = merger.values(shared)
    merged: dict[tuple[int | None, ...], SharedSums] = {}
    for layer in observer.layers:
        key = tuple(numbered.get(layer.name) for numbered in processes)
        if all(number is None for number in key):
            continue
        if key not in merged:
            sums = inputs.sums_of(layer)
            message = f"{layer.name} reads the same tensor as another layer in some batches only"
            require(all(sums is not other for other in merged.values()), message)
            for statistic in sums.statistics.values():
                for tensor in statistic.sums():
                    merger.summed(tensor)
            merged[key] = sums
        inputs.of_layer[layer.name] = merged[key]
