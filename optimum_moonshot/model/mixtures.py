"""Mixtures of experts as a whole: the contribution of each expert to each token, for any family.

A module of experts (experts.py) reads tokens [T, H] and the indices and weights of each token's k experts, [T, k].
With T·k tokens of one expert each as input, the same module computes every contribution c_e(t) = gate_e(t)·f_e(x_t)
separately; its output for a token is their sum. A module that computes experts in one batched product (Llama 4) reads
all tokens once per expert, [E·T, H], already weighted, and returns the contributions. A test call decides which of the
two a module does, and checks the sum; names of families are not used.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..data.batches import Batch
from ..errors import MoonshotError, reason, require
from .calls import Arguments, close, first_tensor, recorded, replace_call, run_model
from .experts import routing, with_others
from .layer_kinds import expert_parameters
from .layers import onloaded_in_turn, onloading_in, visited

# Bytes of contributions in memory at a time.
ROOM = 64 * 2**20
_NO_SUM = "its output is not the sum of its experts' contributions"


@dataclass(frozen=True, eq=False)
class Mixture:
    """The experts of one layer."""

    name: str  # of its module
    module: nn.Module

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters with a matrix per expert."""
        return list(expert_parameters(self.module).values())

    @property
    def count(self) -> int:
        """E, the number of experts."""
        return len(self.parameters[0])

    @property
    def size(self) -> int:
        """The number of weights of one expert."""
        parameters = (parameter for parameter in self.module._parameters.values() if parameter is not None)
        return sum(parameter.numel() for parameter in parameters) // self.count

    def watch(self, see: "Callable[[MixtureCall, Tensor], Tensor | None]") -> Any:
        """Pass every call to a callback, which may replace the output, until the returned handle is removed."""

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            return see(self.call(args, kwargs, output), output)

        return self.module.register_forward_hook(hook, with_kwargs=True)

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> "MixtureCall":
        """Interpret a call; `MoonshotError` if its arguments do not show which token is sent to which expert."""
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        routes = routing(args, kwargs)
        whole = isinstance(output, Tensor) and output.ndim == 2
        if whole and routes is not None:
            hidden = [tensor for tensor in tensors if all(tensor is not route for route in routes)]
            if len(hidden) == 1 and hidden[0].ndim == 2 and len(hidden[0]) == len(routes[0]) == len(output):
                return RoutedCall(self, (args, kwargs), hidden[0], routes, output)
        if whole and len(tensors) == 1 and tensors[0].shape == output.shape and len(output) % self.count == 0:
            return RepeatedCall(self, tensors[0].detach(), output.detach())
        message = f"the arguments of {type(self.module).__name__} do not show which token it sends to which expert"
        raise MoonshotError(message, field="pattern", value="experts").within(self.name)


class Piece(NamedTuple):
    """The contributions to some tokens."""

    experts: Tensor  # int64 [t, k]: indices; E for none
    parts: Tensor  # c_e(t)  [t, k, H] in float32
    slopes: Tensor | None  # <∂ℓ/∂y_t, c_e(t)>  [t, k]; None without gradients


class MixtureCall(ABC):
    """One call of a module of experts."""

    mixture: Mixture
    experts: Tensor  # int64 [T, k], as in `Piece`
    chosen: int  # the largest number of experts of a token
    output: Tensor

    def pieces(self, delta: Tensor | None, room: int = ROOM) -> Iterator[Piece]:
        """All contributions, in pieces of `room` bytes; `delta` is the gradient at the output, [T, H] or [E·T, H]."""
        tokens, choices = self.experts.shape
        together = max(1, room // (choices * (8 * self.output.shape[-1] + 16 * self.mixture.count)))
        delta = None if delta is None else self._by_token(delta)
        for first in range(0, tokens, together):
            some = slice(first, first + together)
            parts = self._contributions(some).float()
            slopes = None if delta is None else (parts * delta[some].float()).sum(2)
            yield Piece(self.experts[some], parts, slopes)

    @abstractmethod
    def equivalent(self) -> Tensor | None:
        """Another output that is equivalent if only the sum of a token's contributions matters.

        None if the module returned that sum; raises `MoonshotError` if it returned something else.
        """

    @abstractmethod
    def _contributions(self, tokens: slice) -> Tensor:
        """The contributions to some tokens, [t, k, H]."""

    @abstractmethod
    def _by_token(self, tensor: Tensor) -> Tensor:
        """A tensor in the layout of the output as [T, 1, H] or [T, E, H]."""


class RoutedCall(MixtureCall):
    """A call with the tokens [T, H] and the indices and weights of every token's experts, [T, k].

    Raises `MoonshotError` for an index beyond the last expert, such as a null choice.
    """

    def __init__(
        self, mixture: Mixture, arguments: Arguments, hidden: Tensor, routes: tuple[Tensor, Tensor], output: Tensor
    ):
        self.mixture, self.arguments, self.hidden, self.output = mixture, arguments, hidden, output.detach()
        self.experts, self.weights = routes
        self.chosen = self.experts.shape[1]
        within = bool((self.experts < mixture.count).all())
        require(within, f"{mixture.name}: its router has more choices than its {mixture.count} experts")
        self.tokens = hidden.detach().clone()  # the model may write to its tensor before the backward pass

    def equivalent(self) -> None:
        try:
            total = torch.cat([piece.parts.sum(1) for piece in self.pieces(None)])
        except Exception as error:  # a module may fail in any way at an unexpected call
            kind = type(self.mixture.module).__name__
            message = f"{kind} does not take tokens with one expert each ({reason(error)})"
            raise MoonshotError(message, field="pattern", value="experts").within(self.mixture.name) from error
        require(close(total, self.output), f"{self.mixture.name}: {_NO_SUM}", field="pattern", value="experts")

    @torch.no_grad()
    def _contributions(self, tokens: slice) -> Tensor:
        """Each choice is passed as a separate token."""
        index, weights = (choices.detach()[tokens].reshape(-1, 1) for choices in (self.experts, self.weights))
        alone = self.tokens[tokens].repeat_interleave(self.chosen, 0)
        changes = (self.hidden, alone), (self.experts, index), (self.weights, weights)
        args, kwargs = with_others(*self.arguments, *changes)
        output = self.mixture.module.forward(*args, **kwargs)
        return output.unflatten(0, (-1, self.chosen))

    def _by_token(self, tensor: Tensor) -> Tensor:
        return tensor[:, None]


class RepeatedCall(MixtureCall):
    """A call with all tokens once per expert, [E·T, H], as zeros where a token is not routed to the expert."""

    def __init__(self, mixture: Mixture, inputs: Tensor, output: Tensor):
        self.mixture, self.output = mixture, output
        sent = self._by_token(inputs).any(2)
        self.experts = torch.where(sent, torch.arange(mixture.count, device=sent.device), mixture.count)
        self.chosen = int(sent.sum(1).max())

    def equivalent(self) -> Tensor:
        mean = self._by_token(self.output).mean(1, keepdim=True)
        return mean.expand(-1, self.mixture.count, -1).transpose(0, 1).flatten(0, 1)

    def _contributions(self, tokens: slice) -> Tensor:
        return self._by_token(self.output)[tokens]

    def _by_token(self, tensor: Tensor) -> Tensor:
        return tensor.unflatten(0, (self.mixture.count, -1)).transpose(0, 1)


def router_names(model: nn.Module) -> frozenset[str]:
    """The names of the parameters that route tokens to fused experts: in modules beside the experts.

    Every parameter of such a module has a row for each expert, or one number for each.
    """
    names = set[str]()
    for name, module in model.named_modules():
        count = next(map(len, expert_parameters(module).values()), 0)
        parent, dot, _ = name.rpartition(".")
        for key, beside in model.get_submodule(parent).named_children() if count > 1 else ():
            parameters = dict(beside.named_parameters(f"{parent}{dot}{key}"))
            rows = {name for name, parameter in parameters.items() if len(parameter) == count and parameter.ndim < 3}
            if all(name in rows or parameter.numel() == count for name, parameter in parameters.items()):
                names |= rows
    return frozenset(names)


@dataclass(frozen=True)
class Mixtures:
    """All mixtures of a model, with an equal number of experts."""

    members: tuple[Mixture, ...]
    count: int  # E
    chosen: int  # k, experts of a token

    def __iter__(self) -> Iterator[Mixture]:
        return iter(self.members)


@torch.no_grad()
def find_mixtures(model: nn.Module, probe: Batch) -> Mixtures:
    """The mixtures of a model in evaluation mode, tested on a small batch.

    Raises `MoonshotError` if there are none, they differ in size, or the contributions of experts cannot be computed.
    """
    name = type(model).__name__
    mixtures = [Mixture(key, module) for key, module in model.named_modules() if expert_parameters(module)]
    mixtures = [mixture for mixture in mixtures if mixture.count > 1]
    message = f"{name} has no experts in fused parameters"
    require(bool(mixtures), message, field="pattern", value="experts", hint="use a mixture of experts")
    trials = [_Trial(mixture) for mixture in mixtures]
    parents = {mixture.name: model.get_submodule(mixture.name.rpartition(".")[0]) for mixture in mixtures}
    with recorded(parents) as arguments, onloaded_in_turn(visited(model)), ExitStack() as hooks:
        for trial in trials:
            hooks.callback(trial.mixture.module.register_forward_hook(trial.see, with_kwargs=True).remove)
        run_model(model, probe)
    understood = [trial for trial in trials if trial.chosen and not trial.reason]
    counts = {trial.mixture.count for trial in understood}
    unreached = "no calibration data reach its experts, and every layer must lose equally many; give such data"
    for trial in trials:  # experts are removed from all mixtures of one size together
        supported = trial in understood or trial.mixture.count not in (counts or {trial.mixture.count})
        require(supported, trial.reason or f"{trial.mixture.name}: {unreached}")
    sizes = " and ".join(map(str, sorted(counts)))
    message = f"{name} has mixtures of {sizes} experts; every layer must lose equally many"
    require(len(counts) == 1, message, field="pattern", value="experts")
    onloaded = onloading_in(model)
    for trial in understood:
        parent = parents[trial.mixture.name]
        with onloaded(parent):
            trial.check(parent, arguments[trial.mixture.name])
    chosen = max(trial.chosen for trial in understood)
    return Mixtures(tuple(trial.mixture for trial in understood), counts.pop(), chosen)


@dataclass(eq=False)
class _Trial:
    """The findings from the calls of a module of experts: the experts of a token, or the reason of a failure."""

    mixture: Mixture
    first: MixtureCall | None = None
    chosen: int = 0
    reason: str = ""

    def see(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        try:
            call = self.mixture.call(args, kwargs, output)
        except MoonshotError as error:
            self.reason = str(error)
            return
        self.first, self.chosen = self.first or call, max(self.chosen, call.chosen)

    def check(self, parent: nn.Module, arguments: Arguments) -> None:
        """Raise `MoonshotError` unless the output of the module, or of its parent, is the sum of the contributions."""
        replacement = None if self.first is None else self.first.equivalent()
        if replacement is None:
            return
        args, kwargs = arguments
        expected = first_tensor(parent(*args, **kwargs))
        with ExitStack() as undo:
            replace_call(self.mixture.module, lambda *_, **__: replacement, undo)
            output = first_tensor(parent(*args, **kwargs))
        require(close(output, expected), f"{self.mixture.name}: {_NO_SUM}", field="pattern", value="experts")
