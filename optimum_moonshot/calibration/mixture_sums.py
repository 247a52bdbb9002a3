"""Statistics of mixtures of experts: C and B of the two objectives, and the sums of the baselines.

    C_ef = Σ_t <c_e(t), c_f(t)>        B_en = Σ_{t in sample n} <∂ℓ_n/∂y_t, c_e(t)>

A token has k of the E experts, so its contribution to C is a k × k matrix of inner products, which a product with the
choices (0 and 1, [k, E]) scatters: unlike in an indexed addition, no sum depends on the scheduling of threads.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from ..distributed.sharing import Merger
from ..errors import NOT_FINITE, MoonshotError, require
from ..model.calls import hook_gradient
from ..model.mixtures import Mixture, MixtureCall
from ..objective.linalg import all_finite
from .storage import Storage


class MixtureStatistics(NamedTuple):
    """The statistics of a mixture, in float64."""

    gram: Tensor  # C  [E, E]
    gradients: Tensor | None  # Bᵀ  [N, E]; None at λ = 1
    norms: Tensor  # Σ_t ‖c_e(t)‖  [E]
    tokens: Tensor  # number of tokens of each expert  [E]


class MixtureSums:
    """The sums of one mixture, of the samples that this process reads (`local_samples`, None for all N)."""

    def __init__(
        self, mixture: Mixture, gradients: bool, samples: int, storage: Storage, local_samples: int | None = None
    ):
        self.mixture, count = mixture, mixture.count
        self.samples = samples

        def zeros(*shape: int) -> Tensor:
            return storage.zeros(shape, torch.float64, f"{mixture.name}: statistics of its experts")

        self.gram, self.norms, self.tokens = zeros(count, count), zeros(count), zeros(count)
        self.gradients = zeros(samples if local_samples is None else local_samples, count) if gradients else None
        self.sample = 0
        self.waiting: list[MixtureCall] = []  # without a gradient yet

    @torch.no_grad()
    def add(self, call: MixtureCall, delta: Tensor | None) -> None:
        """Add a call, with the gradient at its output [T, H] if there is one."""
        for piece in call.pieces(delta):
            choices = one_hot(piece.experts, self.mixture.count + 1)[..., :-1].double()  # [t, k, E]
            inner = (piece.parts @ piece.parts.mT).double()
            flat = choices.flatten(0, 1)
            squares = inner.diagonal(dim1=1, dim2=2).flatten()
            self.gram += (flat.T @ (inner @ choices).flatten(0, 1)).to(self.gram.device)
            self.norms += (squares.clamp(min=0).sqrt() @ flat).to(self.norms.device)
            self.tokens += flat.sum(0).to(self.tokens.device)
            if self.gradients is not None and piece.slopes is not None:
                slopes = piece.slopes.double().flatten() @ flat
                self.gradients[self.sample] += slopes.to(self.gradients.device)

    def end(self) -> None:
        """End a batch: calls that the loss does not depend on have no gradient."""
        for call in self.waiting:
            self.add(call, None)
        self.waiting.clear()

    def result(self) -> MixtureStatistics:
        """The statistics of all data; raise `MoonshotError` if they have NaN or infinity."""
        for what, tensor in (("contributions", self.gram), ("gradients", self.gradients)):
            message = f"{self.mixture.name}: the {what} of its experts hold NaN or infinite values"
            require(tensor is None or all_finite(tensor), message, hint=NOT_FINITE)
        return MixtureStatistics(self.gram, self.gradients, self.norms, self.tokens)


class MixtureObserver(AbstractContextManager["MixtureObserver"]):
    """Hooks on mixtures, removed on exit, with the batches of an `Observer`.

    Args:
        mixtures: to observe.
        gradients: whether to collect B; the caller then runs backward passes, one sample at a time.
        samples: N, calibration samples in all.
        storage: allocates the statistics.
        local_samples: the samples of this process, if several share them; None is all.
    """

    def __init__(
        self,
        mixtures: Sequence[Mixture],
        gradients: bool,
        samples: int,
        storage: Storage,
        local_samples: int | None = None,
    ):
        self.sums = {
            mixture.name: MixtureSums(mixture, gradients, samples, storage, local_samples) for mixture in mixtures
        }
        self.gradients = self.sums if gradients else {}
        self._hooks = ExitStack()

    def __enter__(self) -> "MixtureObserver":
        for sums in self.sums.values():
            self._hooks.callback(sums.mixture.watch(partial(self._observe, sums)).remove)
        return self

    def __exit__(self, *exception: Any) -> None:
        self._hooks.close()

    def begin(self, first: int, count: int, mask: Tensor | None) -> None:
        """Begin a batch, like `Observer.begin`.

        Raises:
            MoonshotError: the experts' inputs do not show the sample or the padding that they belong to.
        """
        if (count > 1 and self.gradients) or not (mask is None or bool(mask.all())):
            message = "the tokens that an expert reads do not show which sample they belong to"
            raise MoonshotError(message, hint="use batch_size=1")
        for sums in self.sums.values():
            sums.sample = first

    def end(self) -> None:
        for sums in self.sums.values():
            sums.end()

    def _observe(self, sums: MixtureSums, call: MixtureCall, output: Tensor) -> Tensor | None:
        """Add a call once its gradient is computed, or at once if none is needed."""
        if not self.gradients or not torch.is_grad_enabled():
            sums.add(call, None)
            return None
        sums.waiting.append(call)

        def add(delta: Tensor) -> None:
            sums.waiting.remove(call)
            sums.add(call, delta)

        return hook_gradient(output, add)


def merge_mixtures(observer: MixtureObserver, merger: Merger) -> None:
    """Merge the statistics of mixtures, each from the samples of one process."""
    for sums in observer.sums.values():
        for total in (sums.gram, sums.norms, sums.tokens):
            merger.summed(total)
        if (shard := sums.gradients) is not None:
            of_samples = merger.of_layer(None, merger.values(len(shard)))
            sums.gradients = of_samples.stacked(shard, shard.new_empty)
