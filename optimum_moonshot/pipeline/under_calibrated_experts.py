"""Experts that too few calibration tokens reach, and the statistics that replace theirs.

A router sends most tokens to some experts and few or none to others. The Gram matrix of an expert has little meaning
once the expert reads far fewer tokens than it has inputs. Such an expert is named in the report; as configured, it gets
the Gram matrix of all tokens that its layer reads (each computed by the expert, whatever the router decides), is pruned
by magnitude, or keeps its statistics. With ``expert_tokens="all"`` every expert gets all tokens. Gradients are
always those of the model's routing.
"""

import dataclasses
from collections.abc import Sequence

from torch import Tensor

from ..calibration.observer import LayerStatistics, Observer
from ..errors import MoonshotError
from ..model.experts import ExpertsLayer
from ..model.layers import PrunableLayer
from .backoff import Backoff
from .spec import StatisticsSpec
from .stages import Stage

# An expert is under-calibrated with fewer tokens than one for this many inputs.
INPUTS_PER_TOKEN = 4


def is_under_calibrated(tokens: int, d_in: int) -> bool:
    """Whether an expert has read too few tokens for its Gram matrix, or its loss, to have a meaning."""
    return tokens * INPUTS_PER_TOKEN < d_in


class UnderCalibratedExperts:
    """The under-calibrated experts of a pass; `notes` of the run gets one for each layer that has some."""

    def __init__(self, spec: StatisticsSpec, backoff: Backoff, notes: list[str]):
        self.spec, self.backoff, self.notes = spec, backoff, notes
        self.everyone = spec.expert_tokens == "all"
        self.experts: dict[str, list[int]] = {}  # layer → the experts, counted from its first
        self.replaced: set[tuple[str, int]] = set()  # those that have the Gram matrix of all tokens

    def observe(self, stage: Stage, layers: Sequence[PrunableLayer], observer: Observer) -> None:
        """Replace the Gram matrices of under-calibrated experts, by a pass of all tokens where one is needed.

        `observer` has the merged statistics by the model's routing.
        """
        if self.spec.keeps_routing:
            return
        separate = [layer for layer in layers if layer.separate and observer.reached(layer)]
        self.experts = {layer.name: self._experts(layer, observer) for layer in separate}
        if not self.everyone and self.spec.under_calibrated_experts == "magnitude":
            return
        parts: dict[tuple[str, int], PrunableLayer] = {}
        into: dict[str, Tensor] = {}
        for layer in separate:
            sums = observer.sums(layer) if layer.groups > 1 else observer.sums(layer)[None]
            for index in self.experts[layer.name]:
                part = layer.expert(index)
                name = f"{layer.name} of expert {_experts_of(part).start}"
                parts[layer.name, index] = dataclasses.replace(part, name=name, everywhere=True)
                into[name] = sums[index]
        if parts:
            self.replaced = self._pass(stage, parts, into)

    def _experts(self, layer: PrunableLayer, observer: Observer) -> list[int]:
        if self.everyone:
            return list(range(layer.groups))
        tokens = observer.tokens(layer).tolist()
        return [index for index, count in enumerate(tokens) if is_under_calibrated(count, layer.shape[1])]

    def _pass(
        self, stage: Stage, parts: dict[tuple[str, int], PrunableLayer], into: dict[str, Tensor]
    ) -> set[tuple[str, int]]:
        """Sum the Gram matrices of all tokens into `into`; those that all tokens have reached."""
        spec, storage, computable = self.spec, self.backoff.storage, True
        layers = list(parts.values())
        observer = Observer(layers, spec.diagonal, set(), spec.samples, storage, share=False, into=into)
        with self.backoff.passing(observer):
            try:
                stage.observe(observer)
            except MoonshotError:
                if self.everyone:
                    raise
                computable = False
        if not self.backoff.all_reduce_min(computable):
            return set()  # such a module is pruned by magnitude
        reached = {key: part for key, part in parts.items() if observer.reached(part)}
        for part in reached.values():
            observer.take(part)
        return set(reached)

    def complete(self, layer: PrunableLayer, statistics: LayerStatistics) -> LayerStatistics:
        """A layer's statistics, in which the experts without any are marked; as `note`.

        Those of replaced experts are of all tokens, the others by the model's routing.
        """
        self.note(layer)
        unknown = (index for index in self.experts.get(layer.name, ()) if (layer.name, index) not in self.replaced)
        return dataclasses.replace(statistics, unknown=frozenset(unknown))

    def note(self, layer: PrunableLayer) -> None:
        """Report the under-calibrated experts of a layer, unless all experts get all tokens."""
        experts = self.experts.get(layer.name)
        if self.everyone or not experts:
            return
        first = _experts_of(layer).start
        numbers = _numbers([first + index for index in experts])
        least = -(-layer.shape[1] // INPUTS_PER_TOKEN)
        replaced = all((layer.name, index) in self.replaced for index in experts)
        instead = "have the Gram matrix of all tokens" if replaced else "are pruned by magnitude"
        self.notes.append(f"{layer.name}: experts {numbers} read fewer than {least} tokens, and {instead}")


def _experts_of(layer: PrunableLayer) -> range:
    """The indices of a layer's experts."""
    assert isinstance(layer, ExpertsLayer)
    return layer.experts


def _numbers(ascending: Sequence[int]) -> str:
    """Whole numbers in words: "0, 3 to 6, 9"."""
    runs: list[list[int]] = []
    for number in ascending:
        if not runs or number != runs[-1][-1] + 1:
            runs.append([])
        runs[-1].append(number)
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)
