"""Mixtures of experts as wholes: what each expert contributes to each token, whatever the family.

A module of experts (experts.py) reads tokens [T, H] and, of each token, the numbers of its k experts and their weights,
[T, k]. Given T·k tokens with one expert each, the same module gives every contribution c_e(t) = gate_e(t)·f_e(x_t) by
itself; what it gave for a token is the sum of that token's. Where experts are computed in one batched product (Llama
4), the module reads all tokens once for every expert, [E·T, H], already weighted, and gives the contributions as they
are. Which of both a module does, and that the sum is what it gives, is tried and not known from its name.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ..data.batches import Batch
from ..errors import MoonshotError, reason, require
from .calls import close, first_tensor, run_model
from .experts import expert_keys, routing, with_others
from .layers import onloading_in, visited
from .onloading import onloaded_in_turn

# Bytes of the contributions that are in memory at a time.
ROOM = 64 * 2**20
_NO_SUM = "what its experts contribute to a token is not added up, as pattern='experts' takes it to be"


@dataclass(frozen=True, eq=False)
class Mixture:
    """The experts of one layer."""

    name: str  # of the module that holds them
    module: nn.Module

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Those that have a matrix for each expert."""
        return [self.module._parameters[key] for key in expert_keys(self.module)]

    @property
    def count(self) -> int:
        """E, how many experts it has."""
        return len(self.parameters[0])

    @property
    def size(self) -> int:
        """How many weights one expert has."""
        own = (parameter for parameter in self.module._parameters.values() if parameter is not None)
        return sum(parameter.numel() for parameter in own) // self.count

    def watch(self, see: "SeeMixture") -> Any:
        """Show every call until what this returns is removed.

        Args:
            see: what is shown every call, with its output; what it returns is given in place of that.

        Raises:
            MoonshotError: in the call, where it does not say which token goes to which expert.
        """

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            return see(self.call(args, kwargs, output), output)

        return self.module.register_forward_hook(hook, with_kwargs=True)

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> "MixtureCall":
        """What a call of the module was.

        Args:
            args, kwargs: of the call.
            output: what it gave.

        Raises:
            MoonshotError: it does not say which token goes to which expert.
        """
        given = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
        found = routing(args, kwargs)
        whole = isinstance(output, Tensor) and output.ndim == 2
        if whole and found is not None:
            index, weights = found
            hidden = [each for each in given if each is not index and each is not weights]
            if len(hidden) == 1 and hidden[0].ndim == 2 and len(hidden[0]) == len(index) == len(output):
                return RoutedCall(self, args, kwargs, hidden[0], index, weights, output)
        if whole and len(given) == 1 and given[0].shape == output.shape and len(output) % self.count == 0:
            return RepeatedCall(self, given[0].detach(), output.detach())
        raise MoonshotError(
            f"{self.name}: {type(self.module).__name__} does not say which token it sends to which expert, as "
            "pattern='experts' has to know"
        )


class Piece(NamedTuple):
    """The contributions to some tokens."""

    experts: Tensor  # int64 [t, k]: whose; E where there is none
    parts: Tensor  # c_e(t)  [t, k, H] in float32
    slopes: Tensor | None  # <∂ℓ/∂y_t, c_e(t)>  [t, k]; None without gradients


class MixtureCall(Protocol):
    """One call of a module of experts."""

    @property
    def chosen(self) -> int:
        """How many experts a token has, at most."""

    def pieces(self, delta: Tensor | None, room: int = ROOM) -> Iterator[Piece]:
        """All contributions, of some tokens at a time.

        Args:
            delta: the gradient at what the module gave, [T, H] or [E·T, H]; None without.
            room: bytes that those of a piece may take.
        """

    def instead(self) -> Tensor | None:
        """What the module could have given as well, of its output's shape, if all that counts is what the contributions
        to a token add up to; None where that sum is what it gave.

        Raises:
            MoonshotError: it should be, and is not.
        """


class SeeMixture(Protocol):
    """What a watched mixture is shown to."""

    def __call__(self, call: MixtureCall, output: Tensor) -> Tensor | None:
        """A call.

        Args:
            call: with the contributions.
            output: what the module gave.

        Returns:
            What is given instead; None for the output itself.
        """


class RoutedCall:
    """A call that says which token goes to which expert.

    Args:
        mixture: that was called.
        args, kwargs: of the call.
        hidden: the tokens among them, [T, H].
        index: the numbers of their experts, [T, k].
        weights: of these, [T, k].
        output: what it gave, [T, H].

    Raises:
        MoonshotError: a number beyond the last expert's, as of a choice that is none.
    """

    def __init__(
        self,
        mixture: Mixture,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        hidden: Tensor,
        index: Tensor,
        weights: Tensor,
        output: Tensor,
    ):
        require(
            bool((index < mixture.count).all()),
            f"{mixture.name}: its router has more choices than its {mixture.count} experts",
        )
        self.mixture, self.hidden, self.index, self.weights = mixture, hidden, index, weights
        self.args, self.kwargs, self.output = args, kwargs, output.detach()
        self.tokens = hidden.detach().clone()  # a model may work on its own in place before the gradients are known

    @property
    def chosen(self) -> int:
        return self.index.shape[1]

    def pieces(self, delta: Tensor | None, room: int = ROOM) -> Iterator[Piece]:
        together = max(1, room // (self.chosen * (8 * self.tokens.shape[1] + 16 * self.mixture.count)))
        for first in range(0, len(self.tokens), together):
            some = slice(first, first + together)
            parts = self._parts(some).float()
            slopes = None if delta is None else (parts * delta[some, None].float()).sum(2)
            yield Piece(self.index[some], parts, slopes)

    def instead(self) -> None:
        kind = type(self.mixture.module).__name__
        try:
            total = torch.cat([piece.parts.sum(1) for piece in self.pieces(None)])
        except Exception as error:  # a module may fail in any way at a call that it does not expect
            raise MoonshotError(
                f"{self.mixture.name}: {kind} does not take tokens with one expert each ({reason(error)}), by which "
                "pattern='experts' sees what an expert contributes"
            ) from error
        require(close(total, self.output), f"{self.mixture.name}: {_NO_SUM}")

    @torch.no_grad()
    def _parts(self, some: slice) -> Tensor:
        """The contributions to some tokens, [t, k, H]: each choice is given as a token of its own."""
        index, weights = (each.detach()[some].reshape(-1, 1) for each in (self.index, self.weights))
        alone = self.tokens[some].repeat_interleave(self.chosen, 0)
        changes = (self.hidden, alone), (self.index, index), (self.weights, weights)
        args, kwargs = with_others(self.args, self.kwargs, *changes)
        output = self.mixture.module.forward(*args, **kwargs)
        return output.unflatten(0, (-1, self.chosen))


class RepeatedCall:
    """A call that has all tokens once for every expert, those that are not sent there as zeros.

    Args:
        mixture: that was called.
        inputs: [E·T, H].
        output: [E·T, H].
    """

    def __init__(self, mixture: Mixture, inputs: Tensor, output: Tensor):
        self.mixture = mixture
        self.sent = self._by_token(inputs).any(2)
        self.output = self._by_token(output)

    def _by_token(self, tensor: Tensor) -> Tensor:
        """[T, E, H] of what has one expert's tokens after another's."""
        return tensor.unflatten(0, (self.mixture.count, -1)).transpose(0, 1)

    @property
    def chosen(self) -> int:
        return int(self.sent.sum(1).max())

    def pieces(self, delta: Tensor | None, room: int = ROOM) -> Iterator[Piece]:
        count = self.mixture.count
        together = max(1, room // (count * (8 * self.output.shape[2] + 16 * count)))
        numbers = torch.arange(count, device=self.output.device)
        by_token = None if delta is None else self._by_token(delta)
        for first in range(0, len(self.output), together):
            some = slice(first, first + together)
            parts = self.output[some].float()
            slopes = None if by_token is None else (parts * by_token[some].float()).sum(2)
            yield Piece(torch.where(self.sent[some], numbers, count), parts, slopes)

    def instead(self) -> Tensor:
        mean = self.output.mean(1, keepdim=True).expand_as(self.output)
        return mean.transpose(0, 1).flatten(0, 1)


@dataclass(frozen=True)
class Mixtures:
    """All mixtures of a model, which have equally many experts."""

    each: tuple[Mixture, ...]
    count: int  # E
    chosen: int  # k, experts of a token

    def __iter__(self) -> Iterator[Mixture]:
        return iter(self.each)


@torch.no_grad()
def find_mixtures(model: nn.Module, probe: Batch) -> Mixtures:
    """The mixtures of a model, tried on a small batch.

    Args:
        model: in evaluation mode; the weights of its blocks come in turn where they are elsewhere.
        probe: its inputs, on its device.

    Raises:
        MoonshotError: there are none, they are not equally large, or what an expert contributes cannot be seen.
    """
    name = type(model).__name__
    found = [Mixture(key, module) for key, module in model.named_modules() if expert_keys(module)]
    found = [mixture for mixture in found if mixture.count > 1]
    require(bool(found), f"pattern='experts': {name} has no experts in fused parameters; give a mixture of experts")
    looks = [_Look(mixture, model) for mixture in found]
    with ExitStack() as hooks:
        for look in looks:
            look.enter(hooks)
        hooks.enter_context(onloaded_in_turn(visited(model)))
        run_model(model, probe)
    understood = [look for look in looks if look.chosen and not look.reason]
    counts = {look.mixture.count for look in understood}
    for look in looks:  # those with as many experts must go with the others
        require(look in understood or look.mixture.count not in (counts or {look.mixture.count}), look.why)
    require(
        len(counts) == 1,
        f"pattern='experts': {name} has mixtures of {' and '.join(map(str, sorted(counts)))} experts; as many must go "
        "of every layer",
    )
    present = onloading_in(model)
    for look in understood:
        with present(look.around):
            look.check()
    return Mixtures(tuple(look.mixture for look in understood), counts.pop(), max(look.chosen for look in understood))


class _Look:
    """What the calls of a module of experts show: how many experts a token has, or why that cannot be told.

    Args:
        mixture: whose calls they are.
        model: that it is of.
    """

    def __init__(self, mixture: Mixture, model: nn.Module):
        self.mixture, self.chosen, self.reason = mixture, 0, ""
        self.call: MixtureCall | None = None  # the last
        self.around = model.get_submodule(mixture.name.rpartition(".")[0])
        self.arguments: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})  # of the last call of what is around it
        self.given: Tensor | None = None  # what the module gives instead

    @property
    def why(self) -> str:
        """Why it is not understood."""
        lost = "no calibration data reach its experts, and as many must go of every layer; give data that it reads"
        return self.reason or f"{self.mixture.name}: {lost}"

    def enter(self, hooks: ExitStack) -> None:
        """Look at every call until `hooks` are closed."""
        hooks.callback(self.around.register_forward_pre_hook(self._before, with_kwargs=True).remove)
        hooks.callback(self.mixture.module.register_forward_hook(self._see, with_kwargs=True).remove)

    def _before(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.arguments = (args, kwargs)

    def _see(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if self.given is not None:
            return self.given
        try:
            call = self.mixture.call(args, kwargs, output)
        except MoonshotError as error:
            self.reason = str(error)
            return None
        self.chosen, self.call = max(self.chosen, call.chosen), call
        return None

    def check(self) -> None:
        """Compare what the module gave, or what is around it, with the sum of the contributions.

        Raises:
            MoonshotError: that is something else.
        """
        given = None if self.call is None else self.call.instead()
        if given is None:
            return
        args, kwargs = self.arguments
        expected = first_tensor(self.around(*args, **kwargs))
        with ExitStack() as hooks:
            self.enter(hooks)
            self.given = given
            found = first_tensor(self.around(*args, **kwargs))
        require(close(found, expected), f"{self.mixture.name}: {_NO_SUM}")
