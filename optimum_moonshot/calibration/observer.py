"""Hooks that watch layers while data passes, and hand every call on in the normal form.

What is made of the calls is elsewhere: sums.py adds up inputs and gradients, and statistic.py says how to add a
statistic of another kind. Padding tokens count in none.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..errors import naming, require
from ..model.layers import PrunableLayer
from ..objective.linalg import all_finite
from .accumulators import GradientPlan
from .layer_statistics import LayerStatistics
from .statistic import NOT_FINITE, GradientStatistic, InputStatistic
from .storage import Storage
from .sums import GradientSums, Gram, InputSquares, InputSums, LayerCall, TokenCounts


class Observer(AbstractContextManager["Observer"]):
    """Hooks on layers, removed on exit, whatever happens.

    The caller announces every batch by `begin`, runs the model (and a backward pass, where `gradients` is not empty)
    and closes it by `end`; `take` then gives each layer's statistics.

    Args:
        layers: to observe.
        diagonal: gather only the diagonals (Wanda): A_n is squared and added sample by sample, never stored.
        with_gradients: names of the layers whose gradients are wanted; the caller runs backward passes.
        samples: N, calibration samples in all.
        storage: where the statistics live.
        plans: how to gather the gradients of layers by their name; those of the others are kept as they are.
        share: layers that read the same tensor have one Gram matrix; a batch's inputs then live until its end.
        extra: further statistics, of all layers, or of those with gradients where they need them.
        here: how many of the samples this process sees, where several share them; None is all.
        into: layer → the memory that the sums over its inputs are put into, of their shape; others have their own.
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
        here: int | None = None,
        into: Mapping[str, Tensor] | None = None,
    ):
        self.layers, self.diagonal, self.samples = layers, diagonal, samples
        of_inputs = [kind for kind in extra if issubclass(kind, InputStatistic)]
        of_gradients = [kind for kind in extra if issubclass(kind, GradientStatistic)]
        self.kind = InputSquares if diagonal else Gram
        kinds = [self.kind, *of_inputs]
        kinds += [TokenCounts] if any(layer.separate for layer in layers) else []
        self.inputs = InputSums(kinds, storage, share, into)
        self.gradients = {
            layer.name: GradientSums(
                layer, diagonal, samples, storage, (plans or {}).get(layer.name, GradientPlan()), of_gradients, here
            )
            for layer in layers
            if layer.name in with_gradients
        }
        self.mask: Tensor | None = None
        self.count = 0
        self.watching = False  # between `begin` and `end`; other calls of the layers are none of its business
        self._hooks = ExitStack()

    def __enter__(self) -> "Observer":
        for layer in self.layers:
            for module in layer.modules:
                self._hooks.callback(layer.at(module).watch(partial(self._observe, layer)).remove)
        return self

    def __exit__(self, *exception: Any) -> None:
        self._hooks.close()
        self.inputs.forget()

    def begin(self, first: int, count: int, mask: Tensor | None) -> None:
        """Announce a batch.

        Args:
            first: the number of its first sample among all that this process sees.
            count: B, its samples.
            mask: bool [B, T], True where a token counts; None where all do.
        """
        self.count, self.mask, self.watching = count, mask, True
        for sums in self.gradients.values():
            sums.begin(first, count)

    def end(self) -> None:
        """Close a batch.

        Raises:
            MoonshotError: layers that share a Gram matrix did not read the same tensors.
        """
        self.watching = False
        self.inputs.end()
        for sums in self.gradients.values():
            sums.end()

    def _observe(self, layer: PrunableLayer, form: PrunableLayer, inputs: Tensor, output: Tensor) -> Tensor | None:
        """Hand on a call's inputs, and its gradient once it is known.

        Returns:
            A new output where the graph begins here, else None.
        """
        if not self.watching:
            return None
        inputs = inputs.detach()
        with naming(layer.name):
            mask = form.token_mask(inputs, self.mask)
        call = LayerCall(layer, form, inputs, inputs._version, mask, self.count)
        self.inputs.add(call)
        sums = self.gradients.get(layer.name)
        if sums is None or not torch.is_grad_enabled():
            return None
        begins = not output.requires_grad
        if begins:  # not as a leaf: an activation may work on it in place
            output = output.detach().requires_grad_(True).clone()
        sums.expect()
        output.register_hook(lambda delta: sums.add(call, delta))
        return output if begins else None

    def reached(self, layer: PrunableLayer) -> bool:
        """Whether a call of the layer was seen."""
        return layer.name in self.inputs.of_layer

    def forget(self, layer: PrunableLayer) -> None:
        """Let go of what was gathered for a layer."""
        self.inputs.take(layer.name)
        self.gradients.pop(layer.name, None)

    def tokens(self, layer: PrunableLayer) -> Tensor:
        """How many tokens each expert of a layer has read, int64 [groups]."""
        return self.inputs.of_layer[layer.name].statistics[TokenCounts].result()

    def sums(self, layer: PrunableLayer) -> Tensor:
        """The sums over a layer's inputs as they are now, which `take` will give: G or its diagonal, by group."""
        return self.inputs.of_layer[layer.name].statistics[self.kind].result()

    def take(self, layer: PrunableLayer) -> LayerStatistics:
        """What was gathered for a layer, checked, and forgotten here, so that its memory ends with the caller's use.

        Raises:
            MoonshotError: the calibration data never reached the layer, or gave NaN or infinity.
        """
        name, kind = layer.name, self.kind
        found, sums = self.inputs.take(name), self.gradients.pop(name, None)
        sum_of_inputs = found[kind]
        assert isinstance(sum_of_inputs, Gram | InputSquares)
        _check_finite(all_finite(sum_of_inputs.squares()), f"{name}: its inputs (activations)")
        tokens = found.pop(TokenCounts).result() if TokenCounts in found else None
        extra = {other: statistic.result() for other, statistic in found.items() if other is not kind}
        inputs = sum_of_inputs.result()
        if sums is None:
            return LayerStatistics(inputs, None, self.samples, self.diagonal, extra=extra, tokens=tokens)
        gradients = None if sums.gradients is None else sums.gradients.result()
        if gradients is not None:
            finite = all_finite(gradients) if self.diagonal else gradients.is_finite()
            _check_finite(finite, f"{name}: its gradients")
        extra |= {other: statistic.result() for other, statistic in sums.extra.items()}
        return LayerStatistics(
            inputs, gradients, self.samples, self.diagonal, totals=sums.totals, extra=extra, tokens=tokens
        )


def _check_finite(finite: bool, what: str) -> None:
    require(finite, f"{what} hold NaN or infinite values", hint=NOT_FINITE)
