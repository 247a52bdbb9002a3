"""Experts whose statistics exceed the memory together: the data pass again for some of them at a time."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import torch

from ..calibration.layer_statistics import LayerStatistics
from ..model.layers import PrunableLayer


class ExpertChunks:
    """A layer of experts whose statistics come some experts at a time.

    Args:
        layer: the layer.
        spans: of its experts, one after the other: the first of each, and the one behind the last.
        collect: passes the data and gives the statistics of a layer that is some of the experts; None where no token
            reaches them.
        samples: N, calibration samples in all.
        diagonal: whether Grams and gradients are diagonals.
    """

    def __init__(
        self,
        layer: PrunableLayer,
        spans: Sequence[tuple[int, int]],
        collect: Callable[[PrunableLayer], LayerStatistics | None],
        samples: int,
        diagonal: bool,
    ):
        self.layer, self.spans, self.collect = layer, spans, collect
        self.samples, self.diagonal = samples, diagonal

    def groups(self, count: int) -> Iterator[LayerStatistics]:
        """Those of each expert alone, as `LayerStatistics.groups`."""
        for span in self.spans:
            part = dataclasses.replace(self.layer, span=span)
            found = self.collect(part)
            yield from (found or self._nothing(part)).groups(part.groups)

    def _nothing(self, part: PrunableLayer) -> LayerStatistics:
        """Of experts that no token reaches."""
        d_in = part.shape[1]
        shape = (part.groups, d_in) if self.diagonal else (part.groups, d_in, d_in)
        inputs = torch.zeros(shape if part.groups > 1 else shape[1:], device=part.parameter.device)
        return LayerStatistics(inputs, None, self.samples, self.diagonal)
