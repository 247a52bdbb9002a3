"""What is gathered of mixtures while the data pass: C and B of the two objectives, and what baselines go by.

    C_ef = Σ_t <c_e(t), c_f(t)>        B_en = Σ_{t in sample n} <∂ℓ_n/∂y_t, c_e(t)>

A token has k of the E experts, so that its share of C is a k × k matrix of inner products, which a product with the
choices (0 and 1, [k, E]) brings to its place: no sum depends on the order in which threads come by.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from ..errors import Option, Text, require
from ..model.mixtures import Mixture, MixtureCall
from ..objective.linalg import all_finite
from .statistic import NOT_FINITE
from .storage import Storage


@dataclass(frozen=True)
class MixtureStatistics:
    """What the data gave, in float64."""

    gram: Tensor  # C  [E, E]
    gradients: Tensor | None  # Bᵀ  [N, E]; None at λ = 1
    norms: Tensor  # Σ_t ‖c_e(t)‖  [E]
    tokens: Tensor  # how many tokens each expert has  [E]


class MixtureSums:
    """The sums of one mixture.

    Args:
        mixture: whose experts they are of.
        gradients: whether B is gathered.
        samples: N, calibration samples in all.
        storage: where they live.
        here: how many of the samples this process sees; None is all.
    """

    def __init__(self, mixture: Mixture, gradients: bool, samples: int, storage: Storage, here: int | None = None):
        self.mixture, count = mixture, mixture.count
        self.samples = samples

        def zeros(*shape: int) -> Tensor:
            return storage.zeros(shape, torch.float64, f"{mixture.name}: statistics of its experts")

        self.gram, self.norms, self.tokens = zeros(count, count), zeros(count), zeros(count)
        self.gradients = zeros(samples if here is None else here, count) if gradients else None
        self.sample = 0
        self.waiting: list[MixtureCall] = []  # whose gradients are not known yet

    @torch.no_grad()
    def add(self, call: MixtureCall, delta: Tensor | None) -> None:
        """One call.

        Args:
            call: of the mixture.
            delta: the gradient at what it gave, of its shape, [T, H]; None where there is none.
        """
        for piece in call.pieces(delta):
            choices = one_hot(piece.experts, self.mixture.count + 1)[..., :-1].double()  # [t, k, E]
            inner = (piece.parts @ piece.parts.mT).double()
            flat = choices.flatten(0, 1)
            squares = inner.diagonal(dim1=1, dim2=2).flatten()
            self._into(self.gram, flat.T @ (inner @ choices).flatten(0, 1))
            self._into(self.norms, squares.clamp(min=0).sqrt() @ flat)
            self._into(self.tokens, flat.sum(0))
            if self.gradients is not None and piece.slopes is not None:
                self._into(self.gradients[self.sample], piece.slopes.double().flatten() @ flat)

    @staticmethod
    def _into(total: Tensor, part: Tensor) -> None:
        total += part.to(total.device)

    def end(self) -> None:
        """A batch is over: calls that the loss does not depend on have no gradient."""
        for call in self.waiting:
            self.add(call, None)
        self.waiting.clear()

    def result(self) -> MixtureStatistics:
        """What the data gave.

        Raises:
            MoonshotError: NaN or infinity.
        """
        for what, tensor in (("contributions", self.gram), ("gradients", self.gradients)):
            require(
                tensor is None or all_finite(tensor),
                f"{self.mixture.name}: the {what} of its experts hold NaN or infinite values",
                hint=NOT_FINITE,
            )
        return MixtureStatistics(self.gram, self.gradients, self.norms, self.tokens)


class MixtureObserver(AbstractContextManager["MixtureObserver"]):
    """Hooks on mixtures, removed on exit; told of the batches as an `Observer` is.

    Args:
        mixtures: to observe.
        gradients: whether B is gathered; the caller runs backward passes then, one sample at a time.
        samples: N, calibration samples in all.
        storage: where statistics live.
        here: how many of the samples this process sees, where several share them; None is all.
    """

    def __init__(
        self,
        mixtures: Sequence[Mixture],
        gradients: bool,
        samples: int,
        storage: Storage,
        here: int | None = None,
    ):
        self.sums = {mixture.name: MixtureSums(mixture, gradients, samples, storage, here) for mixture in mixtures}
        self.gradients = self.sums if gradients else {}
        self._hooks = ExitStack()

    def __enter__(self) -> "MixtureObserver":
        for sums in self.sums.values():
            self._hooks.callback(sums.mixture.watch(partial(self._see, sums)).remove)
        return self

    def __exit__(self, *exception: Any) -> None:
        self._hooks.close()

    def begin(self, first: int, count: int, mask: Tensor | None) -> None:
        """Announce a batch, as `Observer.begin`.

        Raises:
            MoonshotError: what experts read does not show which sample or which padding it is.
        """
        alone = count == 1 or not self.gradients
        require(
            alone and (mask is None or bool(mask.all())),
            "the tokens that an expert reads do not show which sample they belong to",
            hint=Text("use {}", Option("batch_size", 1)),
        )
        for sums in self.sums.values():
            sums.sample = first

    def end(self) -> None:
        """Close a batch."""
        for sums in self.sums.values():
            sums.end()

    def _see(self, sums: MixtureSums, call: MixtureCall, output: Tensor) -> Tensor | None:
        """Add a call once its gradient is known, or at once where none is wanted."""
        if not self.gradients or not torch.is_grad_enabled():
            sums.add(call, None)
            return None
        begins = not output.requires_grad
        if begins:  # the graph begins here; not as a leaf: the model may work on it in place
            output = output.detach().requires_grad_(True).clone()
        sums.waiting.append(call)

        def known(delta: Tensor) -> None:
            sums.waiting.remove(call)
            sums.add(call, delta)

        output.register_hook(known)
        return output if begins else None
