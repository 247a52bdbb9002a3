"""Experts that too few calibration tokens reach: what stands for the tokens that they do not have.

A router sends most tokens to some experts and few or none to others. The Gram matrix of an expert says little once it
has far fewer tokens than inputs. Such an expert is named in the report, and has, as configured, the Gram matrix of all
tokens that its layer sees (each computed by the expert, whatever the router says), goes by magnitude, or keeps what it
has. With ``expert_tokens="all"`` every expert has all tokens. Gradients are those of the model's own routing, always.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from torch import Tensor

from ..calibration.layer_statistics import LayerStatistics
from ..calibration.memory import Storage
from ..calibration.observer import Observer
from ..calibration.passes import Step
from ..errors import MoonshotError
from ..model.layers import PrunableLayer
from .retrying import Retrying

# An expert with fewer tokens than one for so many inputs is starved.
INPUTS_PER_TOKEN = 4
# (layer, number of the expert) → G of all tokens
Known = dict[tuple[str, int], Tensor]


def is_starved(tokens: int, d_in: int) -> bool:
    """Whether an expert has read too few tokens for its Gram matrix, or for what pruning costs, to be known.

    Args:
        tokens: that it has read.
        d_in: its inputs.
    """
    return tokens * INPUTS_PER_TOKEN < d_in


class StarvedExperts:
    """What a run does about them.

    Args:
        expert_tokens, starved_experts: as in `MoonshotConfig`.
        diagonal: whether Grams are diagonals.
        samples: N.
        storage: where statistics live.
        notes: of the run; those on starved experts are added.
        retrying: of the run, which knows the processes that share the samples.
    """

    def __init__(
        self,
        expert_tokens: str,
        starved_experts: str,
        diagonal: bool,
        samples: int,
        storage: Storage,
        notes: list[str],
        retrying: Retrying,
    ):
        self.everyone, self.instead = expert_tokens == "all", starved_experts
        self.diagonal, self.samples, self.storage, self.notes = diagonal, samples, storage, notes
        self.retrying, self.ranks = retrying, retrying.ranks

    @property
    def as_routed(self) -> bool:
        """Whether every expert keeps what its own tokens give."""
        return not self.everyone and self.instead == "routed"

    def starved(self, layer: PrunableLayer, observer: Observer) -> list[int]:
        """The experts of a layer, counted from its first, whose tokens are too few."""
        if self.everyone:
            return list(range(layer.groups))
        tokens = observer.tokens(layer).tolist()
        return [index for index, count in enumerate(tokens) if is_starved(count, layer.shape[1])]

    def all_tokens(self, step: Step, layers: Sequence[PrunableLayer], starved: Mapping[str, list[int]]) -> Known:
        """G of all tokens of starved experts, by passes of their own; nothing where magnitude stands for it.

        Args:
            step: which shows the layers.
            layers: that have starved experts.
            starved: layer → the numbers of these.
        """
        if not self.everyone and self.instead == "magnitude":
            return {}
        parts: list[tuple[tuple[str, int], PrunableLayer]] = []
        for layer in layers:
            first = layer.form.experts.start
            for index in starved[layer.name]:
                span, name = (first + index, first + index + 1), f"{layer.name} of expert {first + index}"
                part = dataclasses.replace(layer, name=name, span=span, everywhere=True)
                parts.append(((layer.name, index), part))
        found: Known = {}
        for together in self.storage.rounds(parts, self._bytes, lambda: self.ranks.least(self.storage.available())):
            found |= self._pass(step, together)
        return found

    def _bytes(self, part: tuple[tuple[str, int], PrunableLayer]) -> int:
        d_in = part[1].shape[1]
        return 4 * d_in * (1 if self.diagonal else d_in)

    def _pass(self, step: Step, parts: Sequence[tuple[tuple[str, int], PrunableLayer]]) -> Known:
        layers = [part for _, part in parts]
        options = {"share": False, "ranks": self.ranks}

        def observed() -> tuple[Observer, bool]:
            with Observer(layers, self.diagonal, set(), self.samples, self.storage, **options) as observer:
                try:
                    step.observe(observer, False)
                except MoonshotError:
                    if self.everyone:
                        raise
                    return observer, False
            return observer, True

        observer, shown = self.retrying.together(observed)
        if not self.ranks.least(shown):
            return {}  # such a module goes by magnitude
        observer.merge()
        return {key: observer.take(part).inputs for key, part in parts if observer.reached(part)}

    def complete(
        self, layer: PrunableLayer, statistics: LayerStatistics, starved: list[int], known: Known
    ) -> LayerStatistics:
        """A layer's statistics with what stands for that of its starved experts.

        Args:
            layer: the layer.
            statistics: by the model's own routing.
            starved: the numbers of the experts, counted from the layer's first.
            known: what `all_tokens` found.
        """
        inputs = statistics.inputs if layer.groups > 1 else statistics.inputs[None]
        unknown = []
        for index in starved:
            if (layer.name, index) in known:
                inputs[index] = known.pop((layer.name, index))
            else:
                unknown.append(index)
        return dataclasses.replace(statistics, unknown=frozenset(unknown))

    def note(self, layer: PrunableLayer, starved: list[int], known: Known) -> None:
        """Say what becomes of a layer's starved experts, where their own tokens had to do.

        Args:
            layer, starved, known: as for `complete`, before it.
        """
        if self.everyone:
            return
        first = layer.form.experts.start
        numbers = _numbers([first + index for index in starved])
        least = -(-layer.shape[1] // INPUTS_PER_TOKEN)
        alike = all((layer.name, index) in known for index in starved)
        instead = "have the Gram matrix of all tokens" if alike else "go by magnitude"
        self.notes.append(f"{layer.name}: experts {numbers} read fewer than {least} tokens, and {instead}")


def _numbers(ascending: Sequence[int]) -> str:
    """Whole numbers in words: "0, 3 to 6, 9"."""
    runs: list[list[int]] = []
    for number in ascending:
        if not runs or number != runs[-1][-1] + 1:
            runs.append([])
        runs[-1].append(number)
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)
