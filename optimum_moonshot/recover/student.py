"""Masters that a recovery trains: float32 tensors of a block, or of all parameters of a copy of the model.

The model itself does not change. Zeros of pruned matrices have zero gradients, and so stay zeros.

Weights on a grid have latent masters, which every forward pass rounds, with a straight-through gradient: the codes are
c = round(v/s), clipped to ±top, and the weights c·s. Scales have the gradient of LSQ (Esser et al., arXiv
1902.08153): dw/ds = c - v/s where v/s is inside the grid, ±top outside. Latent weights outside receive gradients too;
zero gradients there gave the same results.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from weakref import proxy

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..masks import is_pruned
from ..model.calls import replace_call
from ..model.layers import Block, PrunableLayer, by_visit, find_blocks
from ..model.weights import bare_copy
from ..objective.grid import Grid
from ..objective.patterns import MixedNM, Pattern, Structured, nonzeros

HOST = torch.device("cpu")
SCALE_LR = 0.3  # learning rate of the scales of a grid, relative to that of weights
VECTOR_LR = 0.3  # learning rate of norms and biases in a block, relative to that of weights

Tensors = dict[str, Tensor]


@dataclass(eq=False)
class Master:
    """A parameter that trains, in float32."""

    value: nn.Parameter  # latent weights, if there is a grid
    dtype: torch.dtype  # of the model
    layer: PrunableLayer | None = None  # the pruned layer whose weight it is
    keep: Tensor | None = None  # bool, True where a weight survives and trains; None: everywhere
    used: nn.Parameter | None = None  # the parameter of a copy, which has the rounded value; None: `value`
    grid: Grid | None = None
    scale: nn.Parameter | None = None  # [d_out, groups] in float32, if there is a grid

    def __post_init__(self) -> None:
        if self.layer is not None:
            self.layer = replace(self.layer, substitute=self.value)

    def put_on_grid(self, pattern: Pattern, dense: Tensor) -> None:
        """Train on the grid of a pattern, if it has one, from now on; `dense` is the weight before the run.

        Raises:
            MoonshotError: the weights are not on the grid.
        """
        if pattern.grid is None:
            return
        assert self.layer is not None
        self.grid = pattern.grid
        self.scale = nn.Parameter(self.grid.scales_of(self.layer.matrix.to(self.grid.dtype)).float())
        if not pattern.sparsity:  # a zero is a code, unless the weight was zero before the run
            self.keep = nonzeros(dense.to(self.value.device))

    def weight(self) -> Tensor:
        """The value, or the weights on the grid in float32, with gradients."""
        if self.grid is None or self.scale is None or self.layer is None:
            return self.value
        return self.layer.as_parameter(on_grid(self.layer.as_matrix(self.value), self.scale, self.grid))

    @torch.no_grad()
    def rounded(self) -> Tensor:
        """The weight in the model's dtype."""
        return self.weight().detach().to(self.dtype)

    @torch.no_grad()
    def collect_gradient(self, _: Tensor | None = None) -> None:
        """Move the gradient of the copy's parameter to the master."""
        if self.used is not None and self.used.grad is not None:
            self.gradient().add_(self.used.grad.to(self.value.device, self.value.dtype))
            self.used.grad = None

    def gradient(self) -> Tensor:
        """The gradient of the value; zeros if no pass has used the parameter."""
        if self.value.grad is None:
            self.value.grad = torch.zeros_like(self.value)
        return self.value.grad


def _root_mean_square(values: Tensor) -> float:
    return float(values.square().mean().sqrt()) if values.numel() else 0.0


def on_grid(latent: Tensor, scale: Tensor, grid: Grid) -> Tensor:
    """Round latent weights to a grid, with gradients for both tensors.

    Args:
        latent: [d_out, d_in] in float32.
        scale: [d_out, groups] in float32; it is rounded to the dtype of the grid.
        grid: has the dtype of the weights in the model.

    Returns:
        [d_out, d_in] in float32, exact in the dtype of the grid.
    """
    weight: Tensor = _StraightThrough.apply(latent, scale, grid)
    return weight


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, latent: Tensor, scale: Tensor, grid: Grid) -> Tensor:
        step = grid.per_weight(scale.to(grid.dtype), latent.shape[1])
        ctx.save_for_backward(latent, scale)
        ctx.grid = grid
        return grid.values(grid.codes(latent, step), step).float()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        (gradient,), (latent, scale), grid = gradients, ctx.saved_tensors, ctx.grid
        step = grid.per_weight(scale.to(grid.dtype), latent.shape[1]).float()
        ratio = latent / step.masked_fill(step == 0, 1)
        by_step = grid.codes(latent, step) - ratio.masked_fill(ratio.abs() > grid.top, 0)
        return gradient, grid.blocks(gradient * by_step).sum(-1), None


class Student:
    """Parameters that train, by name."""

    prefix = ""  # prefix + name here is the name in the model
    snapshot_device: torch.device | None = None  # None: the device of each value

    def __init__(self) -> None:
        self.masters: dict[str, Master] = {}

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """All tensors that the optimizer changes, by unique names."""
        for name, master in self.masters.items():
            yield name, master.value
            if master.scale is not None:
                yield f"{name} scale", master.scale

    def rates(self) -> Iterator[tuple[nn.Parameter, float]]:
        """The tensors of `named_parameters` with their learning rates, relative to the configured rate."""
        for name, master in self.masters.items():
            yield master.value, self.rate(name)
            if master.scale is not None:
                scale = master.scale.detach()
                yield master.scale, SCALE_LR * _root_mean_square(scale[scale != 0])

    def rate(self, name: str) -> float:
        """The relative learning rate of a master: the root mean square of the values that train."""
        value, keep = self.masters[name].value.detach(), self.masters[name].keep
        return _root_mean_square(value if keep is None else value[keep])

    def finish_gradients(self) -> None:
        """Set the gradients of removed weights to zero, so that Adam does not change them."""
        for master in self.masters.values():
            if master.keep is not None and master.value.grad is not None:  # a pass may not use every parameter
                master.value.grad.mul_(master.keep)

    def clear_gradients(self) -> None:
        for master in self.masters.values():
            for parameter in (master.value, master.scale, master.used):
                if parameter is not None:
                    parameter.grad = None

    @torch.no_grad()
    def round(self) -> None:
        """Give the parameters of a copy their rounded values."""
        for master in self.masters.values():
            if master.used is not None:
                master.used.copy_(master.rounded())

    def snapshot(self) -> Tensors:
        """A copy of all tensors of `named_parameters`."""
        device, named = self.snapshot_device, self.named_parameters()
        return {name: value.detach().to(device or value.device, copy=True) for name, value in named}

    @torch.no_grad()
    def restore(self, snapshot: Tensors) -> None:
        for name, value in self.named_parameters():
            value.copy_(snapshot[name])
        self.round()

    def results(self) -> tuple[Tensors, Tensors]:
        """The weights in the model's dtype.

        Returns:
            The weights [d_out, d_in] of pruned layers, by layer name, and other parameters, by name in the model.
        """
        layers, others = Tensors(), Tensors()
        for name, master in self.masters.items():
            if master.layer is None:
                others[f"{self.prefix}{name}"] = master.rounded()
            else:
                layers[master.layer.name] = master.layer.as_matrix(master.rounded())
        return layers, others


class StudentBlock(Student):
    """A dense block with its pruned weights. `torch.func.functional_call` runs the block's code with `tensors`.

    Args:
        block: onloaded.
        weights: the matrices [d_out, d_in] of all pruned layers with a parameter in the block.
        tuned: names of the layers that train, unless all of their weights are zeros.
        patterns: layer name → pattern; a grid has the dtype of the model.
        others: names in the block of other parameters that train; zeros of matrices do not train.
        replacements: tensors that replace dense tensors, by name in the block; they may be smaller.
    """

    def __init__(
        self,
        block: Block,
        weights: list[tuple[PrunableLayer, Tensor]],
        tuned: set[str],
        patterns: Mapping[str, Pattern] | None = None,
        others: Collection[str] = (),
        replacements: Mapping[str, Tensor] | None = None,
    ):
        super().__init__()
        self.prefix, self.patterns = f"{block.name}.", patterns or {}
        parameters = dict(block.module.named_parameters())
        names = {id(parameter): name for name, parameter in parameters.items()}
        self.dense: Tensors = {**parameters, **dict(block.module.named_buffers())}
        pruned = {names[id(layer.parameter)]: (layer, weight) for layer, weight in weights}
        rest = {name: tensor.detach() for name, tensor in self.dense.items() if name not in pruned}
        rest |= {name: tensor.to(self.dense[name].device) for name, tensor in (replacements or {}).items()}
        self.fixed = {name: to_float32(tensor) for name, tensor in rest.items()}  # tensors that do not train
        for name, (layer, weight) in pruned.items():
            value = layer.as_parameter(weight).to(layer.parameter.device, torch.float32, copy=True).contiguous()
            if layer.name in tuned and bool(value.any()):
                self.masters[name] = Master(nn.Parameter(value), layer.parameter.dtype, layer, value != 0)
            else:
                self.fixed[name] = value
        for name in (name for name in others if name not in pruned):
            value, matrix = self.fixed[name], self.fixed[name].ndim > 1
            if not matrix or bool(value.any()):
                keep, parameter = nonzeros(value) if matrix else None, nn.Parameter(self.fixed.pop(name).clone())
                self.masters[name] = Master(parameter, self.dense[name].dtype, keep=keep)
        self.to_grids()

    @property
    def tensors(self) -> Tensors:
        """The block's tensors in float32, with gradients of all that trains."""
        return {**self.fixed, **{name: master.weight() for name, master in self.masters.items()}}

    def rounded(self) -> Tensors:
        """The block's tensors in the dtypes of the model."""
        fixed = {name: tensor.to(self.dense[name].dtype) for name, tensor in self.fixed.items()}
        return {**fixed, **{name: master.rounded() for name, master in self.masters.items()}}

    @property
    def layers(self) -> dict[str, PrunableLayer]:
        """The pruned layers that train, by the names of their masters."""
        return {name: master.layer for name, master in self.masters.items() if master.layer is not None}

    def rate(self, name: str) -> float:
        """Like `Student.rate`, but smaller for vectors; for a bias, which may be zero, by the weight beside it."""
        if self.masters[name].value.ndim > 1:
            return super().rate(name)
        values = {**self.fixed, **dict(self.named_parameters())}
        owner, _, key = name.rpartition(".")
        beside = f"{owner}.weight" if key == "bias" else name
        return VECTOR_LR * _root_mean_square(values.get(beside, values[name]).detach())

    @torch.no_grad()
    def to_dense(self) -> None:
        """Reset every pruned layer to its dense weight; it trains without a grid until `to_grids`."""
        for name in self.layers:
            master = self.masters[name]
            master.grid = master.scale = None
            master.value.copy_(self.dense[name])

    @torch.no_grad()
    def prune(self, weights: Tensors) -> None:
        """Replace the weights [d_out, d_in] of the pruned layers, by layer; their zeros are the new masks."""
        for name, layer in self.layers.items():
            layer.assign(weights[layer.name])
            self.masters[name].keep = layer.parameter.detach() != 0

    def to_grids(self) -> None:
        """Train the layers whose patterns have grids on them from now on.

        Raises:
            MoonshotError: their weights are not on the grids.
        """
        for name, layer in self.layers.items():
            if layer.name in self.patterns:
                self.masters[name].put_on_grid(self.patterns[layer.name], self.dense[name].detach())


class StudentModel(Student):
    """A copy of a model with pruned weights that trains.

    The passes use masters rounded to the model's dtype, so that every loss is the loss of the resulting weights;
    float16 weights are widened to float32, because their gradients would underflow.

    Args:
        model: dense; its blocks may be offloaded.
        pruned: the pruned layers and their matrices [d_out, d_in]. Their zeros stay zeros, like the zeros of other
            matrices that were pruned before.
        patterns: layer name → pattern; a grid has the dtype of the model.
        on_host: whether masters, gradients and moments are in host memory.
        trained: names of the parameters that train; None is all.
    """

    snapshot_device = HOST

    def __init__(
        self,
        model: nn.Module,
        pruned: Sequence[tuple[PrunableLayer, Tensor]],
        patterns: Mapping[str, Pattern],
        on_host: bool = False,
        trained: Collection[str] | None = None,
    ):
        super().__init__()
        self.on_host, self.trained = on_host, trained
        parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
        first_names = {id(parameter): name for name, parameter in parameters.items()}
        tied = dict(model.named_parameters(remove_duplicate=False))
        layers = {first_names[id(tied[layer.weight_name])]: (layer, weight) for layer, weight in pruned}
        copies: dict[int, Any] = {}
        for visit, names in by_visit(model, [*parameters, *buffers]):
            with visit():
                for name in names:
                    if name not in parameters:
                        copies[id(buffers[name])] = widened(model.get_buffer(name).detach()).clone()
                        continue
                    dense = value = model.get_parameter(name).detach()
                    layer, pattern = None, None
                    if name in layers:
                        layer, weight = layers[name]
                        value, pattern = layer.as_parameter(weight).to(dense.device), patterns[layer.name]
                    copies[id(parameters[name])] = self._add(name, value, dense, layer, pattern)
        self.module = bare_copy(model, copies).eval()

    def _add(
        self, name: str, value: Tensor, dense: Tensor, layer: PrunableLayer | None, pattern: Pattern | None
    ) -> nn.Parameter:
        """Return the parameter of the copy; add a master if the parameter trains."""
        trains = value.is_floating_point() and (self.trained is None or name in self.trained)
        used = nn.Parameter(widened(value).contiguous().clone(), requires_grad=trains)
        if not trains:
            return used
        wide = torch.promote_types(value.dtype, torch.float32)
        quantized = pattern is not None and pattern.grid is not None and bool(value.any())
        if value.dtype == wide and not quantized and not self.on_host:
            master = Master(used, value.dtype, layer)
        else:
            latent = nn.Parameter(value.to(HOST if self.on_host else value.device, wide, copy=True))
            master = Master(latent, value.dtype, layer, used=used)
            # A weak reference to the master, because a cycle through this hook would never be collected.
            used.register_post_accumulate_grad_hook(partial(Master.collect_gradient, proxy(master)))
        if pattern is not None or (value.ndim > 1 and is_pruned(value)):
            master.keep = master.value.detach() != 0
        if pattern is not None and quantized:
            master.put_on_grid(pattern, dense)
        self.masters[name] = master
        return used

    def rates(self) -> Iterator[tuple[nn.Parameter, float]]:
        """Like `Student.rates`, but tensors of zeros get the root mean square of the whole model."""
        values = [master.value.detach() for master in self.masters.values()]
        total, count = sum(float(value.square().sum()) for value in values), sum(map(torch.numel, values))
        whole = math.sqrt(total / max(1, count))
        return ((parameter, rate or whole) for parameter, rate in super().rates())

    def finish_gradients(self) -> None:
        """Like `Student.finish_gradients`, after the sum over processes; also for latent weights and scales."""
        for master in self.masters.values():
            if master.grid is not None:
                gradient, master.value.grad = master.value.grad, None
                master.weight().backward(gradient)
        super().finish_gradients()

    @contextmanager
    def checkpointed(self, applies: bool) -> Iterator[None]:
        """A context in which, if it `applies`, the blocks recompute their activations in the backward pass."""
        recomputing = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
        with ExitStack() as stack:
            for _, block in find_blocks(self.module) if applies else ():
                replace_call(block, partial(recomputing, block.forward), stack)
            yield


def to_float32(tensor: Tensor) -> Tensor:
    """Return a floating-point tensor in float32, and any other tensor unchanged."""
    return tensor.float() if tensor.is_floating_point() else tensor


def widened(tensor: Tensor) -> Tensor:
    """Return a tensor in the dtype of the passes: float32 for float16, else its own dtype."""
    return tensor.float() if tensor.dtype == torch.float16 else tensor


def changes_structure(patterns: Iterable[Pattern | MixedNM]) -> bool:
    """Whether patterns of a block's layers remove neurons or heads."""
    return any(isinstance(pattern, Structured) for pattern in patterns)


def trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    """The floating-point parameters of a block by name, except embeddings.

    An embedding in a block may produce an argument of other blocks, like the relative positions of T5.
    """
    embeddings = {id(module.weight) for module in module.modules() if isinstance(module, nn.Embedding)}
    return {
        name: parameter
        for name, parameter in module.named_parameters()
        if parameter.is_floating_point() and id(parameter) not in embeddings
    }


def shared_names(model: nn.Module, blocks: Iterable[Block]) -> set[str]:
    """The names of parameters in blocks that are also used outside of their block; no block is onloaded."""
    prefixes = [f"{block.name}." for block in blocks]
    uses: dict[int, list[tuple[str, str]]] = {}  # id of a parameter → (name, prefix of its block) of every use
    for name, parameter in model.named_parameters(remove_duplicate=False):
        inside = next((prefix for prefix in prefixes if name.startswith(prefix)), "")
        uses.setdefault(id(parameter), []).append((name, inside))
    shared = [names for names in uses.values() if len({inside for _, inside in names}) > 1]
    return {name for names in shared for name, _ in names}
