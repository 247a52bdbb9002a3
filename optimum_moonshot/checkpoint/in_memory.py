"""Pack and unpack the pruned layers of a model in memory, and save a model with packed layers."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.sparse import SparseSemiStructuredTensor
from transformers import PreTrainedModel

from ..devices import trim_host_memory
from ..errors import MoonshotError, naming, require
from ..files import staged
from ..model.layer_adapters import find_adapter
from ..model.offload import visiting
from ..packing import PackedLayer
from ..packing.codec import Parts
from ..runtime.packed_linear import PackedLinear
from ..runtime.runtime_selection import DENSE, check_runtime, held_bytes, said, tell, wanted
from ..runtime.semi_structured import check_batch_shape, use_semi_structured
from .packed_files import check_format, pruned_layers, save_streamed

_WEIGHT = "weight"
_SAVE = "save_pretrained"


def to_runtime(model: nn.Module, runtime: str = "auto", batch_shape: tuple[int, int] = (1, 1)) -> dict[str, str]:
    """Change how the pruned layers of a model are held in memory, in place.

    Args:
        model: a pruned `PreTrainedModel`, in any of these runtimes.
        runtime: "packed": every Linear whose packed weight is smaller; "auto": those that this device multiplies faster
            packed, for one row of inputs; a log message lists them with the reason; "semi_structured": torch's 2:4
            tensors, where they measure faster on a GPU; "dense".
        batch_shape: samples and tokens in a layer's inputs, for which "semi_structured" measures.

    Returns:
        The runtime of every pruned layer and the reason, also stored as `model.moonshot_runtime`.

    Raises:
        MoonshotError: an unknown runtime, a model that is not pruned, or a layer that is no longer n:m, with its name;
            then all layers are dense.
    """
    check_runtime(runtime)
    check_batch_shape(batch_shape)
    if not isinstance(model, PreTrainedModel):
        raise MoonshotError(f"runtime: {type(model).__name__} is not a PreTrainedModel")
    _unsparse(model)
    with _dense_shapes(model):
        layers = pruned_layers(model)
    if runtime in ("packed", "auto"):
        return _pack(model, runtime, layers)
    _unpack_all(model)
    chosen = note(model, {name.removesuffix(f".{_WEIGHT}"): f"{DENSE}asked for" for name in layers})
    return chosen if runtime == "dense" else use_semi_structured(model, batch_shape, layers)


def note(model: nn.Module, chosen: dict[str, str]) -> dict[str, str]:
    """Store the runtime of the layers as `model.moonshot_runtime`, and replace `save_pretrained` if any is packed.

    Args:
        model: a `PreTrainedModel`.
        chosen: the runtime of every pruned layer.

    Returns:
        `chosen`.
    """
    vars(model)["moonshot_runtime"] = chosen
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            packed = is_packed(part)
            vars(part)["is_quantized"] = packed  # makes a Trainer raise: packed weights are not parameters
            vars(part).pop(_SAVE, None)
            if packed:
                # A partial is copied and pickled with its model; a bound method would refer to the original.
                vars(part)[_SAVE] = partial(save_packed if part is model else _save_whole, part)
    return chosen


def is_packed(model: nn.Module) -> bool:
    """Whether a layer of the model is packed in memory."""
    return any(isinstance(module, PackedLinear) for module in model.modules())


def obstacle(module: nn.Module, shared: bool) -> str | None:
    """The reason why the weight of a module cannot be packed in memory; None if it can.

    Args:
        module: with the weight.
        shared: whether other modules have it too.
    """
    if shared:
        return "tied to another weight"
    adapter = find_adapter(module)
    if adapter is None or adapter.images:
        return f"{type(module).__name__} layers are multiplied dense"
    return "accelerate moves it in every call" if hasattr(module, "_hf_hook") else None


def save_packed(
    model: PreTrainedModel, save_directory: str | os.PathLike[str], *, format: str = "packed", **options: Any
) -> None:
    """Replaces `save_pretrained` of a model with packed layers: the files are those of the dense model.

    Args:
        model: with packed layers; those of one decoder layer at a time are unpacked.
        save_directory: a folder, created if missing, in which the files appear all at once.
        format: "packed" or "dense".
        options: of the class's `save_pretrained`, such as `max_shard_size`.

    Raises:
        MoonshotError: the folder cannot be written, or an option is not supported.
    """
    check_format(format)
    for name in ("push_to_hub", "state_dict", "variant"):
        hint = "call model.push_to_hub" if name == "push_to_hub" else 'call pruner.to_runtime("dense") first'
        require(not options.get(name), "the model is packed in memory", field=name, hint=hint)
    if not options.pop("is_main_process", True):  # the main process writes everything
        return
    with staged("save_directory", save_directory) as staging, to_save(model):
        save_streamed(model, staging, format == "packed", **options)


def _save_whole(part: nn.Module, *args: Any, **options: Any) -> None:
    """Replaces `save_pretrained` of a part of a packed model, which no class could load again."""
    raise MoonshotError(
        f"save_pretrained: {type(part).__name__} is a part of a model that is packed in memory",
        hint='save the whole model, or call pruner.to_runtime("dense") first',
    )


@contextmanager
def to_save(model: nn.Module) -> Iterator[None]:
    """Inside the block the model is a dense one, whose packed layers count as offloaded.

    Visits unpack them, one decoder layer at a time.

    Args:
        model: whose layers may be packed, or torch's 2:4 tensors, which all become dense.
    """
    packed, sparse = _packed_layers(model), _sparse_weights(model)
    chosen = getattr(model, "moonshot_runtime", {})
    sources = {_origin(name, module): _Unpacked(name, module) for name, module in packed.items()}
    try:
        _unsparse(model)
        with _dense_shapes(model), visiting(model, sources):
            if packed:
                note(model, chosen)
            yield
    finally:
        for module, weight in sparse:
            module.weight = weight
        if packed:
            note(model, chosen)


class _Unpacked(Mapping[str, Tensor]):
    """The parameters of the dense original of a packed layer; every access unpacks the weight.

    Args:
        name: of the layer, for messages.
        packed: the layer.
    """

    def __init__(self, name: str, packed: PackedLinear):
        self.dense, self.packed = _origin(name, packed), packed

    def __getitem__(self, name: str) -> Tensor:
        return _dense_weight(self.dense, self.packed) if name == _WEIGHT else self.packed.get_parameter(name)

    def __iter__(self) -> Iterator[str]:
        return (name for name, _ in self.dense.named_parameters())

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _without_weight(name: str, packed: PackedLinear) -> nn.Module:
    """The dense original of a packed layer, with its weight on the meta device."""
    dense = _origin(name, packed)
    before = dense._parameters[_WEIGHT]
    assert before is not None
    weight = nn.Parameter(before.to("meta", packed.dtype), before.requires_grad)
    dense._parameters |= {_WEIGHT: weight, "bias": packed.bias}
    return dense


@contextmanager
def _dense_shapes(model: nn.Module) -> Iterator[None]:
    """Replace packed layers by their dense originals on the meta device, inside the block."""
    packed = _packed_layers(model)
    try:
        for name, module in packed.items():
            model.set_submodule(name, _without_weight(name, module))
        yield
    finally:
        for name, module in packed.items():
            model.set_submodule(name, module)


def _packed_layers(model: nn.Module) -> dict[str, PackedLinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, PackedLinear)}


def _origin(name: str, module: PackedLinear) -> nn.Module:
    if module.origin is None:
        raise MoonshotError("it was created packed: it has no dense original").within(name)
    return module.origin


def _pack(model: PreTrainedModel, runtime: str, layers: dict[str, PackedLayer]) -> dict[str, str]:
    """Pack the layers that the runtime selects, one after another, and unpack the others."""
    chosen: dict[str, str] = {}
    shared = _shared(model)
    try:
        for name, layer in layers.items():
            path = name.removesuffix(f".{_WEIGHT}")
            with naming(path):
                chosen[path] = _hold(model, name, layer, runtime, name in shared)
    except BaseException:
        _unpack_all(model)
        note(model, {name.removesuffix(f".{_WEIGHT}"): f"{DENSE}packing failed" for name in layers})
        raise
    trim_host_memory()
    packed = _packed_layers(model).values()
    dense_bytes = sum(module.shape[0] * module.shape[1] * module.dtype.itemsize for module in packed)
    tell(runtime, chosen, sum(held_bytes(module.parts) for module in packed), dense_bytes)
    return note(model, chosen)


def _shared(model: nn.Module) -> set[str]:
    """The names of the weights that have several names."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {name for aliases in names.values() if len(aliases) > 1 for name in aliases}


def _hold(model: nn.Module, name: str, layer: PackedLayer, runtime: str, shared: bool) -> str:
    """Pack or unpack one layer, and return its runtime with the reason.

    Args:
        model: with the layer.
        name: of its weight.
        layer: its entry.
        runtime: "packed" or "auto".
        shared: whether other modules have its weight too.
    """
    path = name.rpartition(".")[0]
    module = model.get_submodule(path)
    if isinstance(module, PackedLinear):
        device = next(iter(module.parts.values())).device
        verdict = wanted(runtime, layer, held_bytes(module.parts), module.dtype, device)
        if not verdict.faster:
            model.set_submodule(path, _unpacked(path, module))
        return said(verdict)
    why = obstacle(module, shared)
    if why is not None:
        return DENSE + why
    weight = module.weight
    assert isinstance(weight, Tensor)
    packed_bytes = layer.codec.packed_bytes(layer.as_matrix(weight.detach()), layer.nm)
    if packed_bytes >= weight.nbytes:
        return f"{DENSE}packing makes it no smaller"
    verdict = wanted(runtime, layer, packed_bytes, weight.dtype, weight.device)
    if verdict.faster:
        matrix = layer.as_matrix(weight.detach()).cpu()
        parts = {suffix: part.to(weight.device) for suffix, part in layer.codec.pack(matrix, layer.nm).items()}
        model.set_submodule(path, packed_linear(module, layer, parts))
    return said(verdict)


def packed_linear(module: nn.Module, layer: PackedLayer, parts: Parts) -> PackedLinear:
    """Replace a Linear by a packed one, and release its dense weight.

    Args:
        module: the Linear, or Conv1D.
        layer: the entry of its weight.
        parts: the packed tensors by their suffixes, or empty ones to load into.
    """
    packed = PackedLinear(layer.codec, layer.matrix, parts, module._parameters.get("bias"), module)
    _forget_weight(module)
    return packed.train(module.training)


def _forget_weight(module: nn.Module) -> None:
    """Move the weight of a Linear to the meta device, which keeps its shape and dtype."""
    weight = module._parameters[_WEIGHT]
    assert weight is not None
    module._parameters[_WEIGHT] = nn.Parameter(weight.detach().to("meta"), weight.requires_grad)


def _unpack_all(model: nn.Module) -> None:
    for name, module in _packed_layers(model).items():
        model.set_submodule(name, _unpacked(name, module))


def _unpacked(name: str, module: PackedLinear) -> nn.Module:
    """The dense original of a packed layer, with its weight."""
    dense = _origin(name, module)
    before = dense._parameters[_WEIGHT]
    assert before is not None
    weight = nn.Parameter(_dense_weight(dense, module), before.requires_grad)
    dense._parameters |= {_WEIGHT: weight, "bias": module.bias}
    return dense.train(module.training)


@torch.no_grad()
def _dense_weight(dense: nn.Module, packed: PackedLinear) -> Tensor:
    adapter = find_adapter(dense)
    assert adapter is not None
    return adapter.as_parameter(packed.weight).contiguous()


def _sparse_weights(model: nn.Module) -> list[tuple[nn.Module, nn.Parameter]]:
    """The modules whose weights are torch's 2:4 tensors, with these."""
    weights = ((module, module._parameters.get("weight")) for module in model.modules())
    return [
        (module, weight)
        for module, weight in weights
        if weight is not None and isinstance(weight, SparseSemiStructuredTensor)
    ]


def _unsparse(model: nn.Module) -> None:
    for module, weight in _sparse_weights(model):
        module._parameters["weight"] = nn.Parameter(weight.detach().to_dense(), requires_grad=False)
