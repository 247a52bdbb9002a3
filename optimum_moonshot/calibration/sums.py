"""What is made of the calls of layers: sums over their inputs, and sums over the gradients of their samples.

Calls arrive from the hooks of observer.py and are read in the normal form of model/layer_kinds.py, piece by piece.
`InputSums` keeps what needs the inputs alone, `Gram` or `InputSquares`, once for all layers that read the same tensor
(q, k and v); `GradientSums` keeps a layer's accumulator (accumulators.py). statistic.py says how to add one.
"""

from abc import abstractmethod
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..errors import NO_BACKWARD, Text, naming, require
from ..model.layer_kinds import Pair, PrunableLayer
from .accumulators import GradientPlan, LayerTotals, RowMatrices, Samples, Squares
from .statistic import GradientStatistic, InputStatistic
from .storage import Storage


@dataclass(frozen=True)
class LayerCall:
    """One call of a layer on a batch."""

    layer: PrunableLayer
    adapter: PrunableLayer  # of the module that was called: one of several, where they share the weight
    inputs: Tensor  # as the module read them
    version: int  # of the inputs: it grows when they are changed in place
    mask: Tensor | None  # of the tokens that count, laid out as the inputs
    samples: int  # of the batch

    @property
    def key(self) -> Hashable:
        """What calls share that read the same matrix from the same tensor, while that tensor lives."""
        inputs = self.inputs
        return inputs.data_ptr(), inputs.shape, inputs.stride(), self.version, self.adapter.reads

    def tokens(self) -> Iterator[Tensor]:
        """The inputs of the tokens that count, [groups, tokens, in], in pieces."""
        return self.adapter.tokens(self.inputs, self.mask)

    def pairs(self, delta: Tensor) -> Iterator[Pair]:
        """The inputs, and their gradients from that of the call's output, sample by sample, in pieces.

        Raises:
            MoonshotError: the inputs have changed, or do not show which sample a token belongs to.
        """
        require(
            self.inputs._version == self.version,
            f"{self.layer.name}: the model changes this layer's input in place after the call",
            hint=Text("use inplace=False, or {}", NO_BACKWARD),
        )
        with naming(self.layer.name):
            yield from self.adapter.pairs(self.inputs, delta, self.mask, self.samples)


class _Sum(InputStatistic):
    """A sum over tokens, in memory of its own, or in some that is there: what that holds is forgotten."""

    def __init__(self, layer: PrunableLayer, storage: Storage, device: torch.device, into: Tensor | None = None):
        if into is None:
            self.value = storage.zeros(self.shape(layer), torch.float32, f"{layer.name}: Gram matrix").to(device)
        else:
            self.value = into.zero_()

    @staticmethod
    @abstractmethod
    def shape(layer: PrunableLayer) -> tuple[int, ...]:
        """Of the sum."""

    @abstractmethod
    def squares(self) -> Tensor:
        """Σ x², [d_in] or [groups, d_in]."""

    def result(self) -> Tensor:
        return self.value

    def sums(self) -> Sequence[Tensor]:
        return [self.value]


class Gram(_Sum):
    """``G = Σ x xᵀ``, [d_in, d_in], or [groups, d_in, d_in] where there are several."""

    @staticmethod
    def shape(layer: PrunableLayer) -> tuple[int, ...]:
        d_in = layer.shape[1]
        return (d_in, d_in) if layer.groups == 1 else (layer.groups, d_in, d_in)

    def add(self, inputs: Tensor, groups: slice) -> None:
        if self.value.ndim == 2:
            self.value.addmm_(inputs[0].T, inputs[0])
        else:
            self.value[groups].baddbmm_(inputs.mT, inputs)

    def squares(self) -> Tensor:
        return self.value.diagonal(dim1=-2, dim2=-1)


class InputSquares(_Sum):
    """Σ x², the diagonal of G alone, [d_in] or [groups, d_in]."""

    @staticmethod
    def shape(layer: PrunableLayer) -> tuple[int, ...]:
        d_in = layer.shape[1]
        return (d_in,) if layer.groups == 1 else (layer.groups, d_in)

    def add(self, inputs: Tensor, groups: slice) -> None:
        squares = inputs.square().sum(-2)
        if self.value.ndim == 1:
            self.value += squares[0]
        else:
            self.value[groups] += squares

    def squares(self) -> Tensor:
        return self.value


class TokenCounts(InputStatistic):
    """How many tokens each group reads, int64 [groups]."""

    def __init__(self, layer: PrunableLayer, storage: Storage, device: torch.device):
        self.value = torch.zeros(layer.groups, dtype=torch.int64)

    def add(self, inputs: Tensor, groups: slice) -> None:
        self.value[groups] += inputs.shape[1]

    def sums(self) -> Sequence[Tensor]:
        return [self.value]

    def result(self) -> Tensor:
        return self.value


@dataclass
class SharedSums:
    """The statistics of what some layers read, and which tensors each of them read in this batch."""

    statistics: dict[type, InputStatistic]
    readers: dict[str, list[Hashable]] = field(default_factory=dict)
    first: bool = True  # no batch is over yet: other layers may join


class InputSums:
    """The statistics of every layer's inputs, once per tensor: layers that read it alike have one object of each.

    Args:
        kinds: to gather.
        storage: where they live.
        share: between layers; a batch's inputs then live until its end, for their addresses to name them.
        into: layer → the memory that its `Gram` or `InputSquares` is put into, of its shape, [groups, d_in, d_in] or
            [groups, d_in], without the groups where there is one; other layers have their own.
    """

    def __init__(
        self,
        kinds: Iterable[type[InputStatistic]],
        storage: Storage,
        share: bool,
        into: Mapping[str, Tensor] | None = None,
    ):
        self.kinds, self.storage, self.share, self.into = tuple(kinds), storage, share, into or {}
        self.of_layer: dict[str, SharedSums] = {}
        self.by_key: dict[Hashable, SharedSums] = {}
        self.added: set[tuple[int, Hashable]] = set()
        self.held: dict[Hashable, LayerCall] = {}

    def add(self, call: LayerCall) -> None:
        """Add the inputs of a call, unless another layer's call has added them."""
        if not call.inputs.numel():
            return  # its address would not identify it
        name, key = call.layer.name, call.key
        if name not in self.of_layer:
            other = self.by_key.get(key)
            if other is None or not other.first:
                other = self._make(call.layer, call.inputs.device)
            self.of_layer[name] = other
        shared = self.of_layer[name]
        if self.share:
            self.by_key.setdefault(key, shared)
            self.held.setdefault(key, call)
            shared.readers.setdefault(name, []).append(key)
            if (id(shared), key) in self.added:
                return
            self.added.add((id(shared), key))
        for inputs in call.tokens():
            for statistic in shared.statistics.values():
                statistic.add(inputs, call.adapter.part)

    def _make(self, layer: PrunableLayer, device: torch.device) -> SharedSums:
        into = self.into.get(layer.name)
        return SharedSums(
            {
                kind: kind(layer, self.storage, device, into)
                if issubclass(kind, _Sum)
                else kind(layer, self.storage, device)
                for kind in self.kinds
            }
        )

    def end(self) -> None:
        """Close a batch: layers that share their statistics must have read the same tensors.

        Raises:
            MoonshotError: they did in earlier batches, and do no more.
        """
        for shared in {id(shared): shared for shared in self.of_layer.values()}.values():
            if len(set(map(tuple, shared.readers.values()))) > 1:
                self._divide(shared)
        for shared in self.of_layer.values():
            shared.first = False
            for reads in shared.readers.values():
                reads.clear()
        self.forget()

    def _divide(self, shared: SharedSums) -> None:
        """Give layers that have shared in this first batch, but read other tensors besides, statistics of their own."""
        calls = [self.held[key] for reads in shared.readers.values() for key in reads]
        require(
            shared.first and all(call.inputs._version == call.version for call in calls),
            f"layers {sorted(shared.readers)} read the same tensor in some batches only",
        )
        found: dict[tuple[Hashable, ...], SharedSums] = {}
        for name, reads in shared.readers.items():
            if tuple(reads) not in found:
                call = self.held[reads[0]]
                found[tuple(reads)] = mine = self._make(call.layer, call.inputs.device)
                for call in map(self.held.__getitem__, dict.fromkeys(reads)):
                    for inputs in call.tokens():
                        for statistic in mine.statistics.values():
                            statistic.add(inputs, call.adapter.part)
            self.of_layer[name] = found[tuple(reads)]
            found[tuple(reads)].readers[name] = []

    def made(self, layer: PrunableLayer) -> SharedSums:
        """The statistics of a layer, also where no sample of this process has reached it."""
        if layer.name in self.of_layer:
            return self.of_layer[layer.name]
        device = layer.parameter.device
        return self._make(layer, self.storage.device if device.type == "meta" else device)

    def forget(self) -> None:
        """Let the batch's inputs go."""
        self.by_key.clear()
        self.added.clear()
        self.held.clear()

    def take(self, name: str) -> dict[type, InputStatistic]:
        """Those of a layer, no longer held here.

        Raises:
            MoonshotError: no call of the layer was seen.
        """
        hint = Text("add its name to {} to skip it", "ignore")
        require(name in self.of_layer, f"{name}: no calibration data reached this layer", hint=hint)
        return self.of_layer.pop(name).statistics


class GradientSums:
    """What is summed over the gradients of a layer's samples.

    Args:
        layer: the layer.
        diagonal: A_n is squared and added sample by sample, never stored.
        samples: N, calibration samples in all.
        storage: where the sums live.
        plan: how to gather the gradients where they are stored, and whether the layer's totals are wanted.
        kinds: further statistics.
        here: how many of the samples this process sees; None is all.
    """

    def __init__(
        self,
        layer: PrunableLayer,
        diagonal: bool,
        samples: int,
        storage: Storage,
        plan: GradientPlan,
        kinds: Iterable[type[GradientStatistic]],
        here: int | None = None,
    ):
        self.totals = None if plan.totals is None else LayerTotals(layer, samples, plan.totals)
        self.gradients: GradientStatistic | None = None
        if plan.nothing:
            pass
        elif diagonal:
            self.gradients = Squares(layer, storage)
        elif plan.column_block is None:
            self.gradients = Samples(layer, samples, storage, plan, here)
        else:
            self.gradients = RowMatrices(layer, samples, storage, plan)
        self.extra = {kind: kind(layer, samples, storage) for kind in kinds}
        own = [each for each in (self.gradients, self.totals) if each is not None]
        self.statistics = [*own, *self.extra.values()]
        self.open = 0  # calls of this batch whose gradient is to come

    def begin(self, first: int, count: int) -> None:
        """A batch follows.

        Args:
            first: the number of its first sample among all.
            count: its samples.
        """
        self.open = 0
        for statistic in self.statistics:
            statistic.begin(first, count)

    def expect(self) -> None:
        """A call was seen whose gradient is to come."""
        self.open += 1

    def add(self, call: LayerCall, delta: Tensor) -> None:
        """Add the gradients of a call.

        Args:
            call: which was expected.
            delta: ∂ℓ/∂y, of the output's shape: [B, T, d_out], or what the layer's kind gives.

        Raises:
            MoonshotError: the inputs have changed, or do not show which sample a token belongs to.
        """
        self.open -= 1
        for inputs, part, last in call.pairs(delta):
            for statistic in self.statistics:
                statistic.add(inputs, part, last and self.open == 0, call.adapter.part)

    def end(self) -> None:
        """The batch is over."""
        for statistic in self.statistics:
            statistic.end()
