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
from ..calibration.observer import Observer
from ..errors import MoonshotError
from ..model.layers import PrunableLayer
from .backoff import Backoff
from .block_pipeline import Step

# An expert with fewer tokens than one for so many inputs is starved.
INPUTS_PER_TOKEN = 4
# (layer, number of the expert) of those that have the G of all tokens
Known = set[tuple[str, int]]


def is_under_calibrated(tokens: int, d_in: int) -> bool:
    """Whether an expert has read too few tokens for its Gram matrix, or for what pruning costs, to be known.

    Args:
        tokens: that it has read.
        d_in: its inputs.
    """
    return tokens * INPUTS_PER_TOKEN < d_in


class UnderCalibratedExperts:
    """What a run does about them.

    Args:
        expert_tokens, under_calibrated_experts: as in `MoonshotConfig`.
        diagonal: whether Grams are diagonals.
        samples: N.
        notes: of the run; those on starved experts are added.
        backoff: of the run, which knows where statistics live, and the processes that share the samples.
    """

    def __init__(
        self,
        expert_tokens: str,
        under_calibrated_experts: str,
        diagonal: bool,
        samples: int,
        notes: list[str],
        backoff: Backoff,
    ):
        self.everyone, self.instead = expert_tokens == "all", under_calibrated_experts
        self.diagonal, self.samples, self.notes = diagonal, samples, notes
        self.backoff, self.storage, self.ranks = backoff, backoff.storage, backoff.ranks

    @property
    def as_routed(self) -> bool:
        """Whether every expert keeps what its own tokens give."""
        return not self.everyone and self.instead == "routed"

    def starved(self, layer: PrunableLayer, observer: Observer) -> list[int]:
        """The experts of a layer, counted from its first, whose tokens are too few."""
        if self.everyone:
            return list(range(layer.groups))
        tokens = observer.tokens(layer).tolist()
        return [index for index, count in enumerate(tokens) if is_under_calibrated(count, layer.shape[1])]

    def all_tokens(
        self, step: Step, layers: Sequence[PrunableLayer], starved: Mapping[str, list[int]], sums: Mapping[str, Tensor]
    ) -> Known:
        """Put G of all tokens in the place of that of starved experts, by a pass; none where magnitude stands for it.

        Args:
            step: which shows the layers.
            layers: that have starved experts.
            starved: layer → the numbers of these, counted from its first.
            sums: layer → G of its experts, or the diagonals, which change here: [E, …], or […] of a single one.
        """
        if not self.everyone and self.instead == "magnitude":
            return set()
        parts: dict[tuple[str, int], PrunableLayer] = {}
        into: dict[str, Tensor] = {}
        for layer in layers:
            own = sums[layer.name] if layer.groups > 1 else sums[layer.name][None]
            for index in starved[layer.name]:
                part = layer.expert(index)
                name = f"{layer.name} of expert {part.adapter.experts.start}"
                parts[layer.name, index] = dataclasses.replace(part, name=name, everywhere=True)
                into[name] = own[index]
        return self._pass(step, parts, into) if parts else set()

    def _pass(self, step: Step, parts: Mapping[tuple[str, int], PrunableLayer], into: Mapping[str, Tensor]) -> Known:
        layers = list(parts.values())
        options = {"share": False, "ranks": self.ranks, "into": into}

        def observed() -> tuple[Observer, bool]:
            with Observer(layers, self.diagonal, set(), self.samples, self.storage, **options) as observer:
                try:
                    step.observe(observer, False)
                except MoonshotError:
                    if self.everyone:
                        raise
                    return observer, False
            return observer, True

        observer, shown = self.backoff.together(observed)
        if not self.ranks.all_reduce_min(shown):
            return set()  # such a module goes by magnitude
        observer.merge()
        found = {key: part for key, part in parts.items() if observer.reached(part)}
        for part in found.values():
            observer.take(part)
        return set(found)

    def complete(
        self, layer: PrunableLayer, statistics: LayerStatistics, starved: list[int], known: Known
    ) -> LayerStatistics:
        """A layer's statistics with what stands for that of its starved experts.

        Args:
            layer: the layer.
            statistics: of which those in `known` are of all tokens, the others by the model's own routing.
            starved: the numbers of the experts, counted from the layer's first.
            known: what `all_tokens` found.
        """
        unknown = frozenset(index for index in starved if (layer.name, index) not in known)
        return dataclasses.replace(statistics, unknown=unknown)

    def note(self, layer: PrunableLayer, starved: list[int], known: Known) -> None:
        """Say what becomes of a layer's starved experts, where their own tokens had to do.

        Args:
            layer, starved, known: as for `complete`, before it.
        """
        if self.everyone:
            return
        first = layer.adapter.experts.start
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
