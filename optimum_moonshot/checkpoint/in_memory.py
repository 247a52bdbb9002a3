"""Pruned layers of a model in memory, packed and dense again, and saving a model that is packed."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.sparse import SparseSemiStructuredTensor
from transformers import PreTrainedModel

from ..errors import MoonshotError, naming, require
from ..files import staged
from ..malloc_trim import trim_host_memory
from ..model.layer_adapters import find_adapter
from ..model.offload import visiting
from ..packing import PackedLayer
from ..packing.codec import Parts
from ..runtime.packed_linear import PackedLinear
from ..runtime.runtime_selection import DENSE, check_runtime, held_bytes, said, tell, wanted
from ..runtime.semi_structured import check_batch_shape, use_semi_structured
from .packed_files import check_format, pruned_layers
from .streamed_files import save_streamed

_WEIGHT = "weight"
_SAVE = "save_pretrained"


def to_runtime(model: nn.Module, runtime: str = "auto", batch_shape: tuple[int, int] = (1, 1)) -> dict[str, str]:
    """Hold the pruned layers of a model in another way, in place.

    Args:
        model: a pruned `PreTrainedModel`, whose layers are held in any of these ways.
        runtime: "packed": every Linear whose packed weight is smaller; "auto": those that this device multiplies faster
            packed, by one row of inputs, and a line in the log says which and why; "semi_structured": torch's 2:4
            tensors, where they measure faster on a GPU; "dense".
        batch_shape: samples and tokens that a layer sees at once, for which "semi_structured" measures.

    Returns:
        What became of every pruned layer and why, also kept as `model.moonshot_runtime`.

    Raises:
        MoonshotError: an unknown runtime, a model that is not pruned, or a layer that is not n:m any more, with its
            name; all layers are dense then.
    """
    check_runtime(runtime)
    check_batch_shape(batch_shape)
    require(isinstance(model, PreTrainedModel), f"runtime: {type(model).__name__} is no PreTrainedModel")
    _unsparse(model)
    with _dense_shapes(model):
        layers = pruned_layers(model)
    if runtime in ("packed", "auto"):
        return _pack(model, runtime, layers)
    _unpack_all(model)
    chosen = note(model, {name.removesuffix(f".{_WEIGHT}"): f"{DENSE}asked for" for name in layers})
    return chosen if runtime == "dense" else use_semi_structured(model, batch_shape, layers)


def note(model: nn.Module, chosen: dict[str, str]) -> dict[str, str]:
    """Keep what became of the layers as `model.moonshot_runtime`, and how the model is saved now.

    Args:
        model: a `PreTrainedModel`.
        chosen: what became of every pruned layer.

    Returns:
        `chosen`.
    """
    model.moonshot_runtime = chosen  # type: ignore[assignment] # a module takes any attribute
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            packed = is_packed(part)
            part.is_quantized = packed  # a Trainer stops at it: packed weights are no parameters
            vars(part).pop(_SAVE, None)
            if packed:
                # A partial is copied and pickled with its model, a method is not.
                vars(part)[_SAVE] = partial(save_packed if part is model else _save_whole, part)
    return chosen


def is_packed(model: nn.Module) -> bool:
    """Whether a layer of the model is packed in memory."""
    return any(isinstance(module, PackedLinear) for module in model.modules())


def obstacle(module: nn.Module, shared: bool) -> str | None:
    """Why the weight of a module cannot be held packed; None where it can.

    Args:
        module: which holds it.
        shared: whether others hold it too.
    """
    if shared:
        return "tied to another weight"
    form = find_adapter(module)
    if form is None or form.images:
        return f"{type(module).__name__} layers are multiplied dense"
    return "accelerate moves it for every call" if hasattr(module, "_hf_hook") else None


def save_packed(
    model: PreTrainedModel, save_directory: str | os.PathLike[str], *, format: str = "packed", **options: Any
) -> None:
    """What `save_pretrained` is of a model that is packed in memory: the files are those of the dense model.

    Args:
        model: with packed layers, of which those of one decoder layer at a time become dense.
        save_directory: a folder, made if need be; the files appear in it when all are written.
        format: "packed" or "dense".
        options: of the class's `save_pretrained`, such as `max_shard_size`.

    Raises:
        MoonshotError: the folder cannot be written, or an option that cannot be met.
    """
    check_format(format)
    for name in ("push_to_hub", "state_dict", "variant"):
        mend = "call model.push_to_hub" if name == "push_to_hub" else 'call pruner.to_runtime("dense") first'
        require(not options.get(name), f"{name}: the model is packed in memory; {mend}")
    if not options.pop("is_main_process", True):  # another one writes everything
        return
    with staged("save_directory", save_directory) as staging, to_save(model):
        save_streamed(model, staging, format == "packed", **options)


def _save_whole(part: nn.Module, *args: Any, **options: Any) -> None:
    """In place of `save_pretrained` of a part of a packed model, whose file nothing would read."""
    raise MoonshotError(
        f"save_pretrained: {type(part).__name__} is a part of a model that is packed in memory: save the whole, or "
        'call pruner.to_runtime("dense") first'
    )


@contextmanager
def to_save(model: nn.Module) -> Iterator[None]:
    """Inside the block the model is an ordinary dense one, the weights of its packed layers elsewhere.

    They come for the time of a visit, as offloaded ones do: one decoder layer is dense at a time.

    Args:
        model: whose layers may be packed, or torch's 2:4 tensors, which are dense together.
    """
    packed, sparse = _places(model), _sparse_weights(model)
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
    """The parameters of the dense layer that a packed one was; the weight is unpacked whenever it is asked for.

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
    """The dense layer that a packed one was, with the shape and the present dtype of its weight alone."""
    dense = _origin(name, packed)
    before = dense._parameters[_WEIGHT]
    assert before is not None
    away = nn.Parameter(before.to("meta", packed.dtype), before.requires_grad)
    dense._parameters |= {_WEIGHT: away, "bias": packed.bias}
    return dense


@contextmanager
def _dense_shapes(model: nn.Module) -> Iterator[None]:
    """Inside the block the layers that are packed are the dense ones that they were, without weights."""
    places = _places(model)
    try:
        for name, module in places.items():
            model.set_submodule(name, _without_weight(name, module))
        yield
    finally:
        for name, module in places.items():
            model.set_submodule(name, module)


def _places(model: nn.Module) -> dict[str, PackedLinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, PackedLinear)}


def _origin(name: str, module: PackedLinear) -> nn.Module:
    with naming(name):
        require(module.origin is not None, "it was made packed: there is no dense layer that it was")
    assert module.origin is not None
    return module.origin


def _pack(model: PreTrainedModel, runtime: str, layers: dict[str, PackedLayer]) -> dict[str, str]:
    """Pack the layers that shall be, one after another, and unpack those that shall not."""
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
    packed = _places(model).values()
    dense_bytes = sum(module.shape[0] * module.shape[1] * module.dtype.itemsize for module in packed)
    tell(runtime, chosen, sum(held_bytes(module.parts) for module in packed), dense_bytes)
    return note(model, chosen)


def _shared(model: nn.Module) -> set[str]:
    """The names of the weights that have several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {name for several in names.values() if len(several) > 1 for name in several}


def _hold(model: nn.Module, name: str, layer: PackedLayer, runtime: str, shared: bool) -> str:
    """Hold one layer as it shall be; what became of it.

    Args:
        model: that it is a part of.
        name: of its weight.
        layer: what is known of it.
        runtime: "packed" or "auto".
        shared: whether other modules hold its weight.
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
    """What stands in the place of a Linear whose weight is packed; the Linear lets go of it.

    Args:
        module: the Linear, or Conv1D.
        layer: what is known of its weight.
        parts: the packed tensors by their suffixes, or empty ones to load into.
    """
    packed = PackedLinear(layer.codec, layer.matrix, parts, module._parameters.get("bias"), module)
    _forget_weight(module)
    return packed.train(module.training)


def _forget_weight(module: nn.Module) -> None:
    """Leave a Linear with the shape and dtype of its weight alone."""
    weight = module._parameters[_WEIGHT]
    assert weight is not None
    module._parameters[_WEIGHT] = nn.Parameter(weight.detach().to("meta"), weight.requires_grad)


def _unpack_all(model: nn.Module) -> None:
    for name, module in _places(model).items():
        model.set_submodule(name, _unpacked(name, module))


def _unpacked(name: str, module: PackedLinear) -> nn.Module:
    """The dense layer that a packed one was, with its weight again."""
    dense = _origin(name, module)
    before = dense._parameters[_WEIGHT]
    assert before is not None
    weight = nn.Parameter(_dense_weight(dense, module), before.requires_grad)
    dense._parameters |= {_WEIGHT: weight, "bias": module.bias}
    return dense.train(module.training)


@torch.no_grad()
def _dense_weight(dense: nn.Module, packed: PackedLinear) -> Tensor:
    form = find_adapter(dense)
    assert form is not None
    return form.as_parameter(packed.weight).contiguous()


def _sparse_weights(model: nn.Module) -> list[tuple[nn.Module, nn.Parameter]]:
    """The modules whose weights are torch's 2:4 tensors, and these."""
    weights = ((module, module._parameters.get("weight")) for module in model.modules())
    return [(module, weight) for module, weight in weights if isinstance(weight, SparseSemiStructuredTensor)]


def _unsparse(model: nn.Module) -> None:
    for module, weight in _sparse_weights(model):
        module._parameters["weight"] = nn.Parameter(weight.detach().to_dense(), requires_grad=False)
