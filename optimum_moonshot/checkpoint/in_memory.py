"""Pack and unpack the pruned layers of a model in memory, and save a model with packed layers."""

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.sparse import SparseSemiStructuredTensor
from transformers import PreTrainedModel
from transformers.quantizers.base import HfQuantizer

from ..devices import trim_host_memory
from ..errors import MoonshotError, check_choice, naming, require
from ..files import staged
from ..model.layer_kinds import find_layer
from ..model.offload import visiting
from ..packing import INPUTS, PackedLayer
from ..packing.codec import Parts
from ..runtime.packed_linear import PackedLinear
from ..runtime.runtime_selection import DENSE, check_runtime, log_choices, packing_verdict, runtime_entry, total_bytes
from ..runtime.semi_structured import check_batch_shape, use_semi_structured
from .packed_files import FORMATS, pruned_layers, save_streamed
from .quantization_config import MoonshotPrunedCheckpoint

_WEIGHT = "weight"


def to_runtime(
    model: nn.Module, runtime: str = "auto", batch_shape: tuple[int, int] = (1, 1), inputs: str = INPUTS[0]
) -> dict[str, str]:
    """Change how the pruned layers of a `PreTrainedModel` are held in memory, in place, as `MoonshotPruner.to_runtime`.

    If a layer is no longer n:m, or no longer on its grid, `MoonshotError` names it, and all layers are dense.
    """
    check_runtime(runtime)
    check_choice("inputs", inputs, INPUTS)
    check_batch_shape(batch_shape)
    if not isinstance(model, PreTrainedModel):
        raise MoonshotError(f"runtime: {type(model).__name__} is not a PreTrainedModel")
    _unsparse(model)
    with _dense_shapes(model):
        layers = pruned_layers(model)
    if runtime in ("packed", "auto"):
        return _pack(model, runtime, layers, inputs)
    _unpack_all(model)
    chosen = note(model, {name.removesuffix(f".{_WEIGHT}"): f"{DENSE}requested" for name in layers})
    return chosen if runtime == "dense" else use_semi_structured(model, batch_shape, layers)


def note(model: nn.Module, chosen: dict[str, str]) -> dict[str, str]:
    """Store the runtime of the layers as `model.moonshot_runtime`; with packed ones, the model counts as quantized."""
    vars(model)["moonshot_runtime"] = chosen
    quantizer = getattr(model, "hf_quantizer", None)
    if isinstance(quantizer, PackedQuantizer):
        quantizer.remove_quantization_config(model)
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            packed = is_packed(part)
            vars(part)["is_quantized"] = packed
            part.config.__dict__.pop("_is_quantized", None)
            for name in ("save_pretrained", "num_parameters"):
                vars(part).pop(name, None)
            if packed:
                part.config.__dict__["_is_quantized"] = True
                # A partial is copied and pickled with its model; a bound method would refer to the original.
                vars(part)["save_pretrained"] = partial(save_packed if part is model else _save_whole, part)
                vars(part)["num_parameters"] = partial(_num_parameters, part)
    if is_packed(model):
        PackedQuantizer(MoonshotPrunedCheckpoint("packed")).attach(model)
    return chosen


class PackedQuantizer(HfQuantizer):
    """The `hf_quantizer` of a model with packed layers; its weights are constant, adapters beside them can be trained.

    Without adapters, a Trainer refuses the model.
    """

    def attach(self, model: Any) -> None:
        """As transformers does for the quantizer of `from_pretrained`."""
        model.hf_quantizer, model.quantization_method = self, self.quantization_config.quant_method
        model.config.quantization_config = self.quantization_config

    def dequantize(self, model: Any, dtype: torch.dtype | None = None) -> Any:
        """Unpack all layers, in place, also below adapters of PEFT."""
        _unpack_all(model)
        note(model, dict.fromkeys(model.moonshot_runtime, f"{DENSE}requested"))
        return model if dtype is None else model.to(dtype)

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True

    @property
    def is_compileable(self) -> bool:
        return True


def _num_parameters(model: Any, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
    """Replaces `num_parameters` of a model with packed layers: packed weights are buffers."""
    parameters: int = type(model).num_parameters(model, only_trainable, exclude_embeddings)
    return parameters + (0 if only_trainable else sum(prod(each.shape) for each in _packed_layers(model).values()))


def is_packed(model: nn.Module) -> bool:
    """Whether a layer of the model is packed in memory."""
    return any(isinstance(module, PackedLinear) for module in model.modules())


def obstacle(module: nn.Module, shared: bool) -> str | None:
    """The reason why the weight of a module, `shared` with other modules or not, cannot be packed in memory, if any."""
    if shared:
        return "tied to another weight"
    adapter = find_layer(module)
    if adapter is None or adapter.images:
        return f"{type(module).__name__} layers are multiplied dense"
    return "accelerate moves it in every call" if hasattr(module, "_hf_hook") else None


def save_packed(
    model: PreTrainedModel, save_directory: str | os.PathLike[str], *, format: str = "packed", **options: Any
) -> None:
    """Replaces `save_pretrained` of a model with packed layers, of which one decoder layer at a time is unpacked."""
    if getattr(model, "_hf_peft_config_loaded", False):  # transformers saves the adapters alone
        return type(model).save_pretrained(model, save_directory, **options)
    check_choice("format", format, FORMATS)
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
    """Inside the block the model is dense, and its packed layers count as offloaded: visits unpack them.

    So one decoder layer at a time is dense; torch's 2:4 tensors become dense all at once.
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
    """The parameters of the dense original of a packed layer; every access unpacks the weight."""

    def __init__(self, name: str, packed: PackedLinear):
        self.dense, self.packed = _origin(name, packed), packed

    def __getitem__(self, name: str) -> Tensor:
        return _dense_weight(self.dense, self.packed) if name == _WEIGHT else self.packed.get_parameter(name)

    def __iter__(self) -> Iterator[str]:
        return (name for name, _ in self.dense.named_parameters())

    def __len__(self) -> int:
        return sum(1 for _ in self)


@contextmanager
def _dense_shapes(model: nn.Module) -> Iterator[None]:
    """Replace packed layers by their dense originals on the meta device, inside the block."""
    packed = _packed_layers(model)
    try:
        for name, module in packed.items():
            model.set_submodule(name, _restored(name, module, meta=True))
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


def _pack(model: PreTrainedModel, runtime: str, layers: dict[str, PackedLayer], inputs: str) -> dict[str, str]:
    """Pack the layers that the runtime selects, one after another, and unpack the others."""
    chosen: dict[str, str] = {}
    parameters = list(model.named_parameters(remove_duplicate=False))
    uses = Counter(id(parameter) for _, parameter in parameters)
    shared = {name for name, parameter in parameters if uses[id(parameter)] > 1}
    try:
        for name, layer in layers.items():
            path = name.removesuffix(f".{_WEIGHT}")
            with naming(path):
                chosen[path] = _hold(model, name, layer, runtime, name in shared, inputs)
    except BaseException:
        _unpack_all(model)
        note(model, {name.removesuffix(f".{_WEIGHT}"): f"{DENSE}packing failed" for name in layers})
        raise
    trim_host_memory()
    packed = _packed_layers(model).values()
    dense_bytes = sum(module.shape[0] * module.shape[1] * module.dtype.itemsize for module in packed)
    log_choices(runtime, chosen, sum(total_bytes(module.parts) for module in packed), dense_bytes)
    return note(model, chosen)


def _hold(model: nn.Module, name: str, layer: PackedLayer, runtime: str, shared: bool, inputs: str) -> str:
    """Pack or unpack the layer of the weight `name`, and return its runtime with the reason."""
    path = name.rpartition(".")[0]
    module = model.get_submodule(path)
    if isinstance(module, PackedLinear):
        device = next(iter(module.parts.values())).device
        verdict = packing_verdict(runtime, layer, total_bytes(module.parts), module.dtype, device, inputs)
        module.codec = module.codec.with_inputs(inputs)
        if not verdict.faster:
            _unpack(model, path, module)
        return runtime_entry(verdict)
    why = obstacle(module, shared)
    if why is not None:
        return DENSE + why
    weight = module.weight
    assert isinstance(weight, Tensor)
    packed_bytes = layer.codec.packed_bytes(layer.as_matrix(weight.detach()), layer.nm)
    if packed_bytes >= weight.nbytes:
        return f"{DENSE}packing makes it no smaller"
    verdict = packing_verdict(runtime, layer, packed_bytes, weight.dtype, weight.device, inputs)
    if verdict.faster:
        matrix = layer.as_matrix(weight.detach()).cpu()
        parts = {suffix: part.to(weight.device) for suffix, part in layer.codec.pack(matrix, layer.nm).items()}
        model.set_submodule(path, hold_packed(module, layer, parts, inputs))
    return runtime_entry(verdict)


def hold_packed(module: nn.Module, layer: PackedLayer, parts: Parts, inputs: str = INPUTS[0]) -> PackedLinear:
    """Convert a Linear, or Conv1D, to a packed one with `parts`, perhaps empty ones, and release its dense weight.

    `inputs` is the dtype of the inputs of integer products, as for `load_pruned`.
    """
    codec = layer.codec.with_inputs(inputs)
    packed = PackedLinear(codec, layer.matrix, parts, module._parameters.get("bias"), module, layer.nm)
    weight = module._parameters[_WEIGHT]
    assert weight is not None
    # The meta device keeps its shape and dtype.
    module._parameters[_WEIGHT] = nn.Parameter(weight.detach().to("meta"), weight.requires_grad)
    return packed.train(module.training)


def _unpack_all(model: nn.Module) -> None:
    for name, module in _packed_layers(model).items():
        _unpack(model, name, module)


def _unpack(model: nn.Module, name: str, module: PackedLinear) -> None:
    model.set_submodule(name, _restored(name, module, meta=False).train(module.training))
    parent: Any = model.get_submodule(name.rpartition(".")[0])
    getattr(parent, "base_unpacked", lambda: None)()  # of an adapter


def _restored(name: str, module: PackedLinear, meta: bool) -> nn.Module:
    """The dense original of a packed layer, with its weight, or an empty one on the meta device."""
    dense = _origin(name, module)
    before = dense._parameters[_WEIGHT]
    assert before is not None
    weight = before.to("meta", module.dtype) if meta else _dense_weight(dense, module)
    dense._parameters |= {_WEIGHT: nn.Parameter(weight, before.requires_grad), "bias": module.bias}
    return dense


@torch.no_grad()
def _dense_weight(dense: nn.Module, packed: PackedLinear) -> Tensor:
    adapter = find_layer(dense)
    assert adapter is not None
    return adapter.as_parameter(packed.weight).contiguous()


def _sparse_weights(model: nn.Module) -> list[tuple[nn.Module, Any]]:
    """The modules whose weights are torch's 2:4 tensors, with these."""
    weights = ((module, module._parameters.get(_WEIGHT)) for module in model.modules())
    return [(module, weight) for module, weight in weights if isinstance(weight, SparseSemiStructuredTensor)]


def _unsparse(model: nn.Module) -> None:
    for module, weight in _sparse_weights(model):
        module._parameters[_WEIGHT] = nn.Parameter(weight.detach().to_dense(), requires_grad=False)
