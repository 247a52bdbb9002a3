"""Zeros that stay zero while the other weights train, with any optimizer, in plain PyTorch or under a trainer.

Two hooks per weight do it. The gradient of a removed weight is 0, so that gradient clipping and the optimizer's state
see the sparse model alone; and after every optimizer step the removed weights are set to 0 again, whatever momentum,
weight decay or rounding made of them.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from .errors import MoonshotError, check_expressions, require
from .model.layers import PrunableLayer, adapted_layers, adapter_at, holders
from .objective.patterns import NM
from .packing.bitmask import INTEGERS
from .runtime.packed_linear import PackedLinear

Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer]

# A matrix with a smaller share of zeros was hardly pruned: padding rows of a head are no mask.
LEAST_SPARSITY = 0.05


@contextmanager
def keep_sparsity(
    model: nn.Module,
    optimizer: Optimizers,
    *,
    targets: Sequence[str] | None = None,
    ignore: Sequence[str] = (),
) -> Iterator["Masks"]:
    """Keep the zeros of a pruned model at zero while it trains.

    ```python
    with keep_sparsity(model, optimizer):
        for batch in loader:
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    ```

    What is zero on entry stays zero. On a normal exit that is verified; on every exit the hooks come off.

    Args:
        model: with pruned layers; wrapped in `DistributedDataParallel`, compiled, or sharded by `fully_shard`, if it is
            at all, before.
        optimizer: one or several that train it.
        targets, ignore: as in `find_pruned`.

    Raises:
        MoonshotError: no layer is pruned, the optimizer trains another model, or (on exit) something else wrote to a
            removed weight.
    """
    masks = Masks(find_pruned(model, targets, ignore))
    optimizers = torch_optimizers(optimizer)
    own = {id(parameter) for parameter in model.parameters()}
    trained = (id(parameter) for each in optimizers for group in each.param_groups for parameter in group["params"])
    require(any(parameter in own for parameter in trained), "optimizer: it trains no parameter of this model")
    masks.attach(optimizers)
    try:
        yield masks
    finally:
        masks.detach()
    masks.check()


def find_pruned(
    model: nn.Module, targets: Sequence[str] | None = None, ignore: Sequence[str] = ()
) -> list[PrunableLayer]:
    """The layers of a model that hold zeros to keep.

    Args:
        model: any module.
        targets: regular expressions searched for in module names; the zeros of those layers are kept, however few.
            None is every Linear, Conv1D and Conv2d with 5% zeros or more that has something else too. PEFT's adapters
            are no layers of the model.
        ignore: regular expressions searched for in the names of modules that are left out.

    Raises:
        MoonshotError: there are none, or FSDP's first version has flattened the weights.
    """
    require(isinstance(model, nn.Module), f"model is a {type(model).__name__}: give a torch.nn.Module")
    targets, ignore = check_expressions("targets", targets), check_expressions("ignore", ignore) or ()
    kinds = {type(module) for module in model.modules()}
    flattened = any(issubclass(kind, FullyShardedDataParallel) for kind in kinds)
    require(not flattened, "FullyShardedDataParallel flattens weights and their masks with them: use fully_shard")
    mend = 'load it with load_pruned(folder), or call pruner.to_runtime("dense")'
    require(PackedLinear not in kinds, f'model: runtime="packed" cannot be trained; {mend}')
    layers = _chosen_layers(model, targets, ignore)
    pruned = [layer for layer in layers if targets is not None or is_pruned(layer.parameter)]
    require(
        bool(pruned),
        "no layer of the model is pruned: prune it first, or name layers with targets= (a compacted model has no zeros "
        "to keep: train it as it is)",
    )
    return pruned


def _chosen_layers(
    model: nn.Module, targets: tuple[str, ...] | None, ignore: tuple[str, ...]
) -> Iterator[PrunableLayer]:
    """The layers whose names `targets` and `ignore` choose, but no adapters."""
    modules: dict[int, list[nn.Module]] = {}
    names: dict[int, tuple[str, str]] = {}
    adapted = adapted_layers(model)
    for name, module, key in holders(model):
        if any(name.startswith(f"{each}.") and not name.startswith(f"{each}.base_layer") for each in adapted):
            continue  # an adapter's own weights, as PEFT lays them beside the layer
        form = adapter_at(module, key)
        weight = None if form is None else form.weight
        if weight is None or not weight.is_floating_point() or any(re.search(part, name) for part in ignore):
            continue
        if targets is not None and not any(re.search(target, name) for target in targets):
            continue
        modules.setdefault(id(weight), []).append(module)
        names.setdefault(id(weight), (name, key))
    return (PrunableLayer(name, tuple(modules[weight]), False, key) for weight, (name, key) in names.items())


class Masks:
    """The zeros of some layers.

    Args:
        layers: whose weights at zero, now, are to stay there.
    """

    def __init__(self, layers: list[PrunableLayer]):
        self.layers = layers
        self.keep: dict[str, Tensor] = {}  # True where a weight survives, like this process's part of the parameter
        self._handles: list[RemovableHandle] = []
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """What is zero now stays zero from here on."""
        self.keep = {layer.name: _local(layer.parameter) != 0 for layer in self.layers}

    @torch.no_grad()
    def apply(self) -> None:
        """Set the removed weights to zero."""
        for layer in self.layers:
            clear(layer.parameter, self.keep[layer.name])

    def attach(self, optimizer: Optimizers) -> None:
        """Keep the zeros through every step of these optimizers, until `detach`."""
        optimizers = torch_optimizers(optimizer)
        self.detach()
        for each in optimizers:
            self._handles.append(each.register_step_post_hook(lambda *_: self.apply()))
        for layer in self.layers:
            if layer.parameter.requires_grad:
                # fully_shard runs this hook on its own, DistributedDataParallel's own hook follows it.
                hook = lambda parameter, name=layer.name: self._mask_gradient(parameter, name)  # noqa: E731
                self._handles.append(layer.parameter.register_post_accumulate_grad_hook(hook))

    @torch.no_grad()
    def _mask_gradient(self, parameter: nn.Parameter, name: str) -> None:
        assert parameter.grad is not None  # the hook runs once it is accumulated
        clear(parameter.grad, self.keep[name])

    def detach(self) -> None:
        """Remove every hook."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def sparsity(self) -> float:
        """Zeros among all weights of the layers."""
        total = sum(layer.parameter.numel() for layer in self.layers)
        return sum(sparsity_of(layer.parameter) * layer.parameter.numel() for layer in self.layers) / total

    @torch.no_grad()
    def check(self, pattern: NM | Mapping[str, NM] | None = None) -> None:
        """Verify that every removed weight is zero, and the n:m pattern: that of every layer, or of those it names.

        Raises:
            MoonshotError: with the first layer where it is not so.
        """
        for layer in self.layers:
            back = _total(layer.parameter, _local(layer.parameter)[~self.keep[layer.name]] != 0)
            if back:
                raise MoonshotError(
                    f"{layer.name}: {back} of its removed weights are not zero any more: something other than the "
                    "optimizer wrote to them, such as a checkpoint from before the pruning"
                )
            wanted = pattern.get(layer.name) if isinstance(pattern, Mapping) else pattern
            require(
                wanted is None or layer_follows(layer, wanted),
                f"{layer.name}: its weight is not {wanted!s}, as the pruning was",
            )


def torch_optimizers(optimizer: Optimizers) -> list[torch.optim.Optimizer]:
    """One or several optimizers, without what accelerate wraps around them.

    Raises:
        MoonshotError: there is none, or something else.
    """
    alone = hasattr(optimizer, "step") or not isinstance(optimizer, Iterable)
    found: list[torch.optim.Optimizer] = []
    each: Any
    for each in [optimizer] if alone else cast(Iterable[Any], optimizer):
        while isinstance(getattr(each, "optimizer", None), torch.optim.Optimizer):
            each = each.optimizer
        # DeepSpeed's own optimizers hide behind a wrapper without hooks.
        usable = isinstance(each, torch.optim.Optimizer) and hasattr(each, "_optimizer_step_post_hooks")
        require(usable, f"optimizer is a {type(each).__name__}: give torch.optim.Optimizer objects")
        found.append(each)
    require(bool(found), "optimizer: the list is empty; give what trains the model")
    return found


def clear(tensor: Tensor, keep: Tensor) -> None:
    """Set a tensor to +0 where `keep` is not True, in place.

    As whole numbers: NaN, infinity and -0 become +0 too, and on a CPU torch takes a quarter of the work, since it turns
    bool into int quickly, and into float slowly.

    Args:
        tensor: of any shape, or sharded.
        keep: bool, like this process's part of the tensor.
    """
    local = _local(tensor)
    local.view(INTEGERS[local.itemsize]).mul_(keep)


def layer_follows(layer: PrunableLayer, pattern: NM) -> bool:
    """As `follows`, for a layer, which may be sharded.

    Args:
        layer: the layer.
        pattern: as for `follows`.
    """
    return follows(layer.as_matrix(_whole(layer.parameter)), pattern)


def follows(matrix: Tensor, pattern: NM) -> bool:
    """Whether at most n of every m consecutive inputs are there; never where m does not divide d_in.

    Args:
        matrix: a weight, [d_out, d_in].
        pattern: n:m.
    """
    d_out, d_in = matrix.shape
    if not pattern.fits((d_out, d_in)):
        return False
    return bool(((matrix != 0).reshape(-1, pattern.m).sum(1) <= pattern.n).all())


def is_pruned(weight: Tensor) -> bool:
    """Whether a weight holds zeros to keep, and something else too."""
    return weight.is_floating_point() and LEAST_SPARSITY <= sparsity_of(weight) < 1


@torch.no_grad()
def sparsity_of(parameter: Tensor) -> float:
    """The share of zeros, of all processes' parts together."""
    return _total(parameter, _local(parameter) == 0) / parameter.numel()


def _local(tensor: Tensor) -> Tensor:
    """This process's part of a sharded tensor, which shares its memory; else the tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _whole(tensor: Tensor) -> Tensor:
    detached = tensor.detach()
    return detached.full_tensor() if isinstance(detached, DTensor) else detached


def _total(parameter: Tensor, found: Tensor) -> int:
    """How many are True, over all processes that share a parameter."""
    count = found.sum()
    if isinstance(parameter, DTensor):
        for dim, placement in enumerate(parameter.placements):
            if placement.is_shard():
                torch.distributed.all_reduce(count, group=parameter.device_mesh.get_group(dim))
    return int(count)
