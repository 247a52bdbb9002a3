"""Experts that receive too few calibration tokens, and the statistics that replace theirs.

A router sends most tokens to some experts and few or none to others. The Gram matrix of an expert means little if the
expert has read far fewer tokens than it has inputs. The report names such experts; as configured, they get the Gram
matrix of all tokens of their layer (computed by the expert, whatever the router decides), are pruned by magnitude, or
keep their statistics. Gradients always follow the model's routing.
"""

import dataclasses
from collections.abc import Sequence

from torch import Tensor

from ..calibration.observer import LayerStatistics, Observer
from ..errors import MoonshotError
from ..model.experts import ExpertsLayer
from ..model.layers import PrunableLayer
from .backoff import Backoff
from .partition import StatisticsSpec
from .walk import Stage

# An expert is under-calibrated with fewer tokens than one for this many inputs.
INPUTS_PER_TOKEN = 4


def is_under_calibrated(tokens: int, d_in: int) -> bool:
    """Whether an expert has read too few tokens for its Gram matrix or its loss to be meaningful."""
    return tokens * INPUTS_PER_TOKEN < d_in


class UnderCalibratedExperts:
    """The under-calibrated experts of a pass; each layer with such experts adds a line to `notes`."""

    def __init__(self, spec: StatisticsSpec, backoff: Backoff, notes: list[str]):
        self.spec, self.backoff, self.notes = spec, backoff, notes
        self.experts: dict[str, list[int]] = {}  # layer → indices, counted from the layer's first expert
        self.replaced: set[tuple[str, int]] = set()  # experts that have the Gram matrix of all tokens

    def observe(self, stage: Stage, layers: Sequence[PrunableLayer], observer: Observer) -> None:
        """Replace the Gram matrices of under-calibrated experts, by a pass of all tokens if one is needed.

        `observer` has the merged statistics by the model's routing.
        """
        if self.spec.keeps_routing:
            return
        experts: dict[tuple[str, int], PrunableLayer] = {}
        into: dict[str, Tensor] = {}
        self.experts = {}
        for layer in layers:
            if not layer.separate or not observer.reached(layer):
                continue
            tokens, d_in = observer.tokens(layer).tolist(), layer.shape[1]
            few = [index for index, count in enumerate(tokens) if is_under_calibrated(count, d_in)]
            self.experts[layer.name] = few
            if few and self.spec.under_calibrated_experts == "all":
                sums = observer.sums(layer) if layer.groups > 1 else observer.sums(layer)[None]
                for index in few:
                    expert = layer.expert(index)
                    name = f"{layer.name} of expert {_experts_of(expert).start}"
                    experts[layer.name, index] = dataclasses.replace(expert, name=name, everywhere=True)
                    into[name] = sums[index]
        if experts:
            self.replaced = self._observe_all_tokens(stage, experts, into)

    def _observe_all_tokens(
        self, stage: Stage, experts: dict[tuple[str, int], PrunableLayer], into: dict[str, Tensor]
    ) -> set[tuple[str, int]]:
        """Sum the Gram matrices of all tokens into `into`; returns the experts that the tokens have reached."""
        spec, storage, computable = self.spec, self.backoff.storage, True
        observer = Observer(list(experts.values()), spec.diagonal, set(), spec.samples, storage, share=False, into=into)
        with self.backoff.passing(observer):
            try:
                stage.observe(observer)
            except MoonshotError:
                computable = False
        if not all(self.backoff.gather(computable)):
            return set()  # these experts are pruned by magnitude
        reached = {key: expert for key, expert in experts.items() if observer.reached(expert)}
        for expert in reached.values():
            observer.take(expert)
        return set(reached)

    def complete(self, layer: PrunableLayer, statistics: LayerStatistics) -> LayerStatistics:
        """A layer's statistics, with the experts marked that have none; adds the note of `note`."""
        self.note(layer)
        unknown = (index for index in self.experts.get(layer.name, ()) if (layer.name, index) not in self.replaced)
        return dataclasses.replace(statistics, unknown=frozenset(unknown))

    def note(self, layer: PrunableLayer) -> None:
        """Report the under-calibrated experts of a layer."""
        experts = self.experts.get(layer.name)
        if not experts:
            return
        first = _experts_of(layer).start
        numbers = _numbers([first + index for index in experts])
        least = -(-layer.shape[1] // INPUTS_PER_TOKEN)
        replaced = all((layer.name, index) in self.replaced for index in experts)
        outcome = "have the Gram matrix of all tokens" if replaced else "are pruned by magnitude"
        self.notes.append(f"{layer.name}: experts {numbers} read fewer than {least} tokens, and {outcome}")


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
