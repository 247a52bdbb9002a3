"""Sparsity-preserving training with any optimizer, in plain PyTorch or under a trainer.

It uses two kinds of hooks. One sets the gradients of removed weights to 0, so that gradient clipping and the
optimizer's state depend on the sparse model only. The other sets the removed weights to 0 after every optimizer step,
to undo the effects of momentum, weight decay and rounding.
"""

import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from .errors import MoonshotError, check_expressions, require
from .model.layers import PrunableLayer, adapted_layers, named_layers
from .objective.patterns import NM
from .packing.bitmask import INTEGERS
from .runtime.packed_module import is_packed

Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer]

# Matrices with a smaller fraction of zeros do not count as pruned: padding rows of a head are not a mask.
LEAST_SPARSITY = 0.05


@contextmanager
def keep_sparsity(
    model: nn.Module,
    optimizer: Optimizers,
    *,
    targets: Sequence[str] | None = None,
    ignore: Sequence[str] = (),
) -> Iterator["Masks"]:
    """Preserve the zeros of a pruned model during training.

    ```python
    with keep_sparsity(model, optimizer):
        for batch in loader:
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    ```

    Weights that are zero on entry remain zero. A normal exit verifies this; every exit removes the hooks.

    Args:
        model: with pruned layers; wrap it in `DistributedDataParallel`, compile it or shard it by `fully_shard` before.
        optimizer: one or several that train it.
        targets: as in `find_pruned`.
        ignore: as in `find_pruned`.

    Raises:
        MoonshotError: no layer is pruned, the optimizer trains another model, or (on exit) a removed weight is not 0.
    """
    masks = Masks(find_pruned(model, targets, ignore))
    optimizers = torch_optimizers(optimizer)
    parameters = {id(parameter) for parameter in model.parameters()}
    groups = (group for torch_optimizer in optimizers for group in torch_optimizer.param_groups)
    trained = (id(parameter) for group in groups for parameter in group["params"])
    require(not parameters.isdisjoint(trained), "it trains no parameter of this model", field="optimizer")
    masks.attach(optimizers)
    try:
        yield masks
    finally:
        masks.detach()
    masks.check()


def find_pruned(
    model: nn.Module, targets: Sequence[str] | None = None, ignore: Sequence[str] = ()
) -> list[PrunableLayer]:
    """The pruned layers of a model.

    Args:
        model: any module.
        targets: regular expressions matched against parts of module names; all zeros of matching layers are preserved.
            None selects every Linear, Conv1D and Conv2d with at least 5% zeros and at least one nonzero. PEFT's
            adapters are never selected.
        ignore: regular expressions matched against parts of the names of modules to exclude.

    Raises:
        MoonshotError: there are none, or FSDP version 1 has flattened the weights.
    """
    require(isinstance(model, nn.Module), f"model is a {type(model).__name__}: give a torch.nn.Module")
    targets, ignore = check_expressions("targets", targets), check_expressions("ignore", ignore) or ()
    kinds = {type(module) for module in model.modules()}
    fsdp = sys.modules.get("torch.distributed.fsdp")  # slow to import, and not used where it is not imported
    flattened = fsdp is not None and any(issubclass(kind, fsdp.FullyShardedDataParallel) for kind in kinds)
    require(not flattened, "FullyShardedDataParallel flattens the weights", hint="use fully_shard")
    hint = 'load it with load_pruned(folder), or call pruner.to_runtime("dense")'
    require(not is_packed(model), 'runtime="packed" cannot be trained', field="model", hint=hint)
    pruned = dense_pruned(model, targets, ignore)
    if not pruned:
        usage = "prune it first, or select layers by `targets` (a compacted model needs no masks)"
        raise MoonshotError("no layer of the model is pruned", hint=usage)
    return pruned


def dense_pruned(
    model: nn.Module, targets: tuple[str, ...] | None = None, ignore: tuple[str, ...] = ()
) -> list[PrunableLayer]:
    """Like `find_pruned`, but possibly none, and without the layers that are packed in memory."""
    layers = _selected_layers(model, targets, ignore)
    return [layer for layer in layers if targets is not None or is_pruned(layer.parameter)]


def _selected_layers(
    model: nn.Module, targets: tuple[str, ...] | None, ignore: tuple[str, ...]
) -> Iterator[PrunableLayer]:
    """The layers selected by `targets` and `ignore`, without adapters."""
    tied: dict[int, PrunableLayer] = {}  # by their parameter
    adapted = adapted_layers(model)
    for name, module, layer in named_layers(model):
        outer = (layer_name for layer_name in adapted if name.startswith(f"{layer_name}."))
        if any(not name.startswith(f"{layer_name}.base_layer") for layer_name in outer):
            continue  # weights of an adapter, which PEFT stores in submodules next to `base_layer`
        weight = None if layer is None else module._parameters.get(layer.key)
        if layer is None or weight is None or not weight.is_floating_point():
            continue
        if any(re.search(part, name) for part in ignore):
            continue
        if targets is not None and not any(re.search(target, name) for target in targets):
            continue
        first = tied.get(id(weight))
        tied[id(weight)] = replace(first, modules=(*first.modules, module)) if first else layer
    return iter(tied.values())


class Masks:
    """The masks of some layers, taken from the current zeros of their weights."""

    def __init__(self, layers: list[PrunableLayer]):
        self.layers = layers
        self.keep: dict[str, Tensor] = {}  # True where a weight survives; like the local shard of the parameter
        self._handles: list[RemovableHandle] = []
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Replace the masks by the current zeros."""
        self.keep = {layer.name: _local(layer.parameter) != 0 for layer in self.layers}

    @torch.no_grad()
    def apply(self) -> None:
        """Set the removed weights to zero."""
        for layer in self.layers:
            clear(layer.parameter, self.keep[layer.name])

    def attach(self, optimizer: Optimizers) -> None:
        """Add the hooks, which preserve the zeros through every step of these optimizers until `detach`."""
        optimizers = torch_optimizers(optimizer)
        self.detach()
        for torch_optimizer in optimizers:
            self._handles.append(torch_optimizer.register_step_post_hook(lambda *_: self.apply()))
        for layer in self.layers:
            if layer.parameter.requires_grad:
                # fully_shard runs this hook on the sharded gradient; the one of DistributedDataParallel runs after it.
                hook = lambda parameter, name=layer.name: self._mask_gradient(parameter, name)  # noqa: E731
                self._handles.append(layer.parameter.register_post_accumulate_grad_hook(hook))

    @torch.no_grad()
    def _mask_gradient(self, parameter: nn.Parameter, name: str) -> None:
        assert parameter.grad is not None  # the hook runs after accumulation
        clear(parameter.grad, self.keep[name])

    def detach(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def sparsity(self) -> float:
        """Fraction of zeros among all weights of the layers."""
        total = sum(layer.parameter.numel() for layer in self.layers)
        return sum(sharded_sparsity(layer.parameter) * layer.parameter.numel() for layer in self.layers) / total

    @torch.no_grad()
    def check(self, pattern: NM | Mapping[str, NM] | None = None) -> None:
        """Verify that all removed weights are zero, and the n:m pattern of all layers, or of the layers in a mapping.

        Raises:
            MoonshotError: for the first layer that fails.
        """
        for layer in self.layers:
            nonzero = _total(layer.parameter, _local(layer.parameter)[~self.keep[layer.name]] != 0)
            if nonzero:
                raise MoonshotError(
                    f"{layer.name}: {nonzero} of its removed weights are not zero any more; they were not written by "
                    "the optimizer, but for example by loading a checkpoint from before the pruning"
                )
            expected = pattern.get(layer.name) if isinstance(pattern, Mapping) else pattern
            follows_pattern = expected is None or layer_follows(layer, expected)
            require(follows_pattern, f"{layer.name}: its weight is not {expected!s}, as the pruning was")


def torch_optimizers(optimizer: Optimizers) -> list[torch.optim.Optimizer]:
    """One or several optimizers, without the wrappers of accelerate.

    Raises:
        MoonshotError: an object is not an optimizer, or there is none.
    """
    single = hasattr(optimizer, "step") or not isinstance(optimizer, Iterable)
    optimizers: list[torch.optim.Optimizer] = []
    unwrapped: Any
    for unwrapped in [optimizer] if single else cast(Iterable[Any], optimizer):
        while isinstance(getattr(unwrapped, "optimizer", None), torch.optim.Optimizer):
            unwrapped = unwrapped.optimizer
        # DeepSpeed's wrapper of its own optimizers has no hooks.
        usable = isinstance(unwrapped, torch.optim.Optimizer) and hasattr(unwrapped, "_optimizer_step_post_hooks")
        require(usable, f"optimizer is a {type(unwrapped).__name__}: give torch.optim.Optimizer objects")
        optimizers.append(unwrapped)
    require(bool(optimizers), "the list is empty", field="optimizer", hint="give the optimizers of the model")
    return optimizers


def clear(tensor: Tensor, keep: Tensor) -> None:
    """Set a tensor to +0 where `keep` is False, in place.

    The mask is like the local shard of the tensor. Bit patterns are multiplied as integers: NaN, infinity and -0 become
    +0 too, and a CPU takes a quarter of the time, since torch converts bool to int much faster than to float.
    """
    local = _local(tensor)
    local.view(INTEGERS[local.itemsize]).mul_(keep)


def layer_follows(layer: PrunableLayer, pattern: NM) -> bool:
    """Like `follows`, but for a layer, which may be sharded."""
    return follows(layer.as_matrix(_whole(layer.parameter)), pattern)


def follows(matrix: Tensor, pattern: NM) -> bool:
    """Whether at most n of every m consecutive inputs of [d_out, d_in] are nonzero; False if m does not divide d_in."""
    d_out, d_in = matrix.shape
    if not pattern.fits((d_out, d_in)):
        return False
    return bool(((matrix != 0).reshape(-1, pattern.m).sum(1) <= pattern.n).all())


def is_pruned(weight: Tensor) -> bool:
    """Whether a weight has at least 5% zeros, and at least one nonzero."""
    return weight.is_floating_point() and LEAST_SPARSITY <= sharded_sparsity(weight) < 1


@torch.no_grad()
def sharded_sparsity(parameter: Tensor) -> float:
    """The fraction of zeros, over all shards."""
    return _total(parameter, _local(parameter) == 0) / parameter.numel()


def _local(tensor: Tensor) -> Tensor:
    """The local shard of a sharded tensor, without a copy; else the tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _whole(tensor: Tensor) -> Tensor:
    detached = tensor.detach()
    return detached.full_tensor() if isinstance(detached, DTensor) else detached


def _total(parameter: Tensor, mask: Tensor) -> int:
    """Number of True entries of the masks of all shards of a parameter."""
    count = mask.sum()
    if isinstance(parameter, DTensor):
        for dim, placement in enumerate(parameter.placements):
            if placement.is_shard():
                torch.distributed.all_reduce(count, group=parameter.device_mesh.get_group(dim))
    return int(count)
