"""A trained copy of a whole model: float32 masters of its parameters, and the optimizer that works on them.

The copy computes with the masters rounded to the model's dtype, so that every loss is that of the weights that the
model will have (float16 ones are widened for the passes, whose gradients would underflow). Zeros of pruned layers have
zero gradients and so zero moments; weights on a grid train as in grid_weights.py. Masters, gradients and moments are on
the model's device or in host memory.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from weakref import proxy

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..masks import is_pruned
from ..model.calls import calling
from ..model.layers import PrunableLayer, by_visit, find_blocks
from ..model.offload import bare_copy
from ..objective.patterns import Pattern, nonzeros
from .grid_weights import GridWeight
from .student import SCALE_LR, Tensors
from .tuning import BETAS

HOST = torch.device("cpu")


@dataclass(eq=False)
class Master:
    """A parameter in float32, and the copy's parameter, which has its rounded value."""

    name: str  # in the model
    used: nn.Parameter
    dtype: torch.dtype  # of the model
    value: nn.Parameter  # `used` itself where they do not differ
    keep: Tensor | None = None  # bool, True where a weight survives and trains; None: everywhere
    grid: GridWeight | None = None  # whose latent weights the value has

    @property
    def trained(self) -> list[nn.Parameter]:
        return [self.value] if self.grid is None else [self.value, self.grid.scale]

    @torch.no_grad()
    def tensor(self) -> Tensor:
        """The value in the model's dtype."""
        return (self.value if self.grid is None else self.grid.parameter()).detach().to(self.dtype)

    @torch.no_grad()
    def round(self) -> None:
        """Give the copy's parameter its rounded value."""
        if self.used is not self.value:
            self.used.copy_(self.tensor())

    @torch.no_grad()
    def collect(self, _: Tensor | None = None) -> None:
        """Add the gradient of the copy's parameter to that of the master, and free it."""
        if self.used is not self.value and self.used.grad is not None:
            self.gradient().add_(self.used.grad.to(self.value.device, self.value.dtype))
            self.used.grad = None

    def gradient(self) -> Tensor:
        """That of the latest passes; zeros for a parameter that they did not read."""
        if self.value.grad is None:
            self.value.grad = torch.zeros_like(self.value)
        return self.value.grad

    def finish_gradient(self) -> None:
        """After the sum over all processes: the gradients of latent weights and scales, and zeros where none trains."""
        if self.grid is not None:
            gradient, self.value.grad = self.value.grad, None
            self.grid.parameter().backward(gradient)
        if self.keep is not None:
            assert self.value.grad is not None
            self.value.grad.mul_(self.keep)

    def rates(self, fallback: float) -> list[float]:
        """The root mean square of the trained values, which scales their learning rate; `fallback` for zeros."""
        kept = self.value.detach() if self.keep is None else self.value.detach()[self.keep]
        size = float(kept.square().mean().sqrt()) if kept.numel() else 0.0
        scales = [] if self.grid is None else [self.grid.scale.detach()]
        return [size or fallback, *(SCALE_LR * float(each[each != 0].square().mean().sqrt()) for each in scales)]


class StudentModel:
    """A copy of a model with pruned weights, all of whose parameters train; the model stays as it is.

    Args:
        model: dense; its blocks may be offloaded.
        pruned: the pruned layers and their matrices [d_out, d_in], whose zeros stay zeros, as those of other matrices
            that are pruned already.
        patterns: of these layers, by name; a grid has the dtype of the model.
        on_host: whether masters, gradients and moments are in host memory.
    """

    def __init__(
        self,
        model: nn.Module,
        pruned: Sequence[tuple[PrunableLayer, Tensor]],
        patterns: Mapping[str, Pattern],
        on_host: bool = False,
    ):
        self.on_host = on_host
        self.layers = {first_names(model)[layer.weight_name]: layer for layer, _ in pruned}
        weights = {layer.name: weight for layer, weight in pruned}
        self.masters: dict[str, Master] = {}
        memo: dict[int, Any] = {}
        parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
        for visit, names in by_visit(model, [*parameters, *buffers]):
            with visit():
                for name in names:
                    if name not in parameters:
                        memo[id(buffers[name])] = widened(model.get_buffer(name).detach()).clone()
                        continue
                    before, layer = model.get_parameter(name).detach(), self.layers.get(name)
                    value = before if layer is None else layer.as_parameter(weights[layer.name]).to(before.device)
                    memo[id(parameters[name])] = self._add(name, value, before, layer, patterns)
        self.module = bare_copy(model, memo).eval()

    def _add(
        self, name: str, value: Tensor, before: Tensor, layer: PrunableLayer | None, patterns: Mapping[str, Pattern]
    ) -> nn.Parameter:
        used = nn.Parameter(widened(value).contiguous().clone(), requires_grad=value.is_floating_point())
        if not used.requires_grad:
            return used
        place = HOST if self.on_host else value.device
        wide = torch.promote_types(value.dtype, torch.float32)
        pattern = None if layer is None else patterns[layer.name]
        grid = None if pattern is None or not bool(value.any()) else pattern.grid
        same = value.dtype == wide and grid is None and not self.on_host
        master = Master(name, used, value.dtype, used if same else nn.Parameter(value.to(place, wide, copy=True)))
        if grid is not None and pattern is not None and not pattern.sparsity:
            master.keep = nonzeros(before.to(place))  # a zero is a code, unless the weight was zero before the run
        elif pattern is not None or (value.ndim > 1 and is_pruned(value)):
            master.keep = master.value.detach() != 0
        if layer is not None and grid is not None:
            master.grid = GridWeight.restore(replace(layer, substitute=master.value), grid)
        if not same:
            # Without a reference to the master, which would be a cycle that nothing collects.
            used.register_post_accumulate_grad_hook(partial(Master.collect, proxy(master)))
        self.masters[name] = master
        return used

    @contextmanager
    def checkpointed(self, applies: bool) -> Iterator[None]:
        """Inside the context, the blocks compute their activations again in the backward pass, if that `applies`."""
        again = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
        with ExitStack() as stack:
            for _, block in find_blocks(self.module) if applies else ():
                stack.enter_context(calling(block, partial(again, block.forward)))
            yield

    def snapshot(self) -> Tensors:
        """The values of all masters and scales, in host memory."""
        return {key: value.detach().to(HOST, copy=True) for key, value in self.named()}

    @torch.no_grad()
    def restore(self, snapshot: Tensors) -> None:
        for key, value in self.named():
            value.copy_(snapshot[key])
        self.round()

    def named(self) -> Iterator[tuple[str, nn.Parameter]]:
        """All that the optimizer trains, by unique names."""
        for name, master in self.masters.items():
            yield from zip((name, f"{name} scale"), master.trained, strict=False)

    def round(self) -> None:
        for master in self.masters.values():
            master.round()

    def clear_gradients(self) -> None:
        for master in self.masters.values():
            master.used.grad = None
            for value in master.trained:
                value.grad = None

    def matrices(self) -> tuple[Tensors, Tensors]:
        """The values in the model's dtype: of pruned layers [d_out, d_in] by layer, of other parameters by name."""
        weights = {layer.name: layer.as_matrix(self.masters[name].tensor()) for name, layer in self.layers.items()}
        others = {name: each.tensor() for name, each in self.masters.items() if name not in self.layers}
        return weights, others


class Optimizer:
    """Adam on the masters of a student; the rate of each is relative to the root mean square of its initial values."""

    def __init__(self, student: StudentModel, lr: float):
        self.student = student
        masters = list(student.masters.values())
        squares = [(float(each.value.detach().square().sum()), each.value.numel()) for each in masters]
        fallback = math.sqrt(sum(total for total, _ in squares) / max(1, sum(count for _, count in squares)))
        groups: list[dict[str, Any]] = []
        for master in masters:
            rates = zip(master.trained, master.rates(fallback), strict=True)
            groups += [{"params": [value], "lr": lr * rate, "initial": lr * rate} for value, rate in rates]
        self.adam = torch.optim.Adam(groups, betas=BETAS, foreach=False)

    def step(self, rate: float) -> None:
        """Take a step from the gradients of the masters, with a fraction `rate` of the initial learning rates."""
        for master in self.student.masters.values():
            master.finish_gradient()
        for group in self.adam.param_groups:
            group["lr"] = rate * group["initial"]
        self.adam.step()
        self.student.clear_gradients()
        self.student.round()

    def moments(self) -> tuple[Tensors, Tensors]:
        """Copies of the first and the second moments, in host memory; empty before the first step."""
        first, second = Tensors(), Tensors()
        for key, value in self.student.named():
            if state := self.adam.state.get(value):
                first[key] = state["exp_avg"].to(HOST, copy=True)
                second[key] = state["exp_avg_sq"].to(HOST, copy=True)
        return first, second

    def restore(self, first: Tensors, second: Tensors, step: int) -> None:
        """Continue after so many steps."""
        for key, value in self.student.named():
            moments = (moment[key].to(value.device, copy=True) for moment in (first, second))
            state = {"step": torch.tensor(float(step)), **dict(zip(("exp_avg", "exp_avg_sq"), moments, strict=True))}
            self.adam.state[value] = state


def widened(tensor: Tensor) -> Tensor:
    """A tensor in the dtype of the passes: float32 for float16."""
    return tensor.float() if tensor.dtype == torch.float16 else tensor


def first_names(model: nn.Module) -> dict[str, str]:
    """The first name of each parameter by all of its names: tied parameters have several."""
    names: dict[int, str] = {}
    named = model.named_parameters(remove_duplicate=False)
    return {name: names.setdefault(id(parameter), name) for name, parameter in named}
