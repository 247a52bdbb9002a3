"""Pack and unpack the pruned layers of a model in memory, and save a model with packed layers."""

import logging
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from math import prod
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.quantizers.base import HfQuantizer

from ..devices import trim_host_memory
from ..errors import MoonshotError, check_choice, error_context, require
from ..files import staged
from ..model.layer_kinds import find_layer
from ..model.offload import offloaded_from
from ..packing import INPUTS, PackedLayer, Verdict
from ..packing.codec import Parts
from ..runtime.packed_linear import PackedLinear
from ..runtime.packed_mixture import PackedMixture, mixture_obstacle
from ..runtime.packed_module import PackedMatrix, PackedModule
from ..runtime.packed_module import is_packed as is_packed  # of the state that this file changes
from .packed_files import FORMATS, check_reloads, pruned_layers, save_streamed
from .weight_files import RUNTIMES, MoonshotPrunedCheckpoint

PACKED, DENSE = "packed: ", "dense: "  # prefixes of a layer's entry in `model.moonshot_runtime`
_WEIGHT = "weight"
_log = logging.getLogger(__name__)


def to_runtime(model: nn.Module, runtime: str = "auto", inputs: str = INPUTS[0]) -> dict[str, str]:
    """Pack or unpack the pruned layers of a `PreTrainedModel` in memory, in place, like `MoonshotPruner.to_runtime`.

    If a layer is no longer n:m, or no longer on its grid, `MoonshotError` names it, and all layers are dense.
    """
    check_choice("runtime", runtime, RUNTIMES)
    check_choice("inputs", inputs, INPUTS)
    if not isinstance(model, PreTrainedModel):
        raise MoonshotError(f"runtime: {type(model).__name__} is not a PreTrainedModel")
    with _dense_shapes(model):
        layers = pruned_layers(model)
    if runtime != "dense":
        return _pack(model, runtime, layers, inputs)
    _unpack_all(model)
    return set_runtime(model, {name.removesuffix(f".{_WEIGHT}"): f"{DENSE}requested" for name in layers})


def set_runtime(model: nn.Module, chosen: dict[str, str]) -> dict[str, str]:
    """Store the runtime of the layers as `model.moonshot_runtime`; with packed ones, the model counts as quantized."""
    vars(model)["moonshot_runtime"] = chosen
    quantizer = getattr(model, "hf_quantizer", None)
    if isinstance(quantizer, PackedQuantizer):
        quantizer.remove_quantization_config(model)
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            packed = is_packed(module)
            vars(module)["is_quantized"] = packed
            module.config.__dict__.pop("_is_quantized", None)
            for name in ("save_pretrained", "num_parameters"):
                if getattr(vars(module).get(name), "func", None) in (save_packed, _refuse_save, _num_parameters):
                    del vars(module)[name]
            if packed:
                module.config.__dict__["_is_quantized"] = True
                # A partial is copied and pickled with its model; a bound method would refer to the original.
                vars(module)["save_pretrained"] = partial(save_packed if module is model else _refuse_save, module)
                vars(module)["num_parameters"] = partial(_num_parameters, module)
    if is_packed(model):
        PackedQuantizer(MoonshotPrunedCheckpoint("packed")).attach(model)
    return chosen


class PackedQuantizer(HfQuantizer):
    """The `hf_quantizer` of a model with packed layers; the weights are constant, adapters beside them can be trained.

    Without adapters, a Trainer refuses the model.
    """

    def attach(self, model: Any) -> None:
        """Attach the quantizer to a model, like `from_pretrained` of transformers."""
        model.hf_quantizer, model.quantization_method = self, self.quantization_config.quant_method
        model.config.quantization_config = self.quantization_config

    def dequantize(self, model: Any, dtype: torch.dtype | None = None) -> Any:
        """Unpack all layers, in place, also below adapters of PEFT."""
        _unpack_all(model)
        set_runtime(model, dict.fromkeys(model.moonshot_runtime, f"{DENSE}requested"))
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
    """Replaces `num_parameters` of a model with packed layers, whose packed weights are buffers."""
    parameters: int = type(model).num_parameters(model, only_trainable, exclude_embeddings)
    packed = (matrix for module in _packed_layers(model).values() for matrix in module.packed.values())
    return parameters + (0 if only_trainable else sum(prod(matrix.shape) for matrix in packed))


def packing_obstacle(module: nn.Module, layer: PackedLayer, shared: bool) -> str | None:
    """The reason why a weight of a module, which may be `shared` with others, cannot be packed in memory, if any."""
    if shared:
        return "tied to another weight"
    adapter = find_layer(module)
    if adapter is not None and adapter.images:
        return f"{type(module).__name__} layers are multiplied dense"
    if adapter is None and not isinstance(module, PackedMixture):
        why = mixture_obstacle(module) if len(layer.shape) == 3 else f"{type(module).__name__} is multiplied dense"
        if why is not None:
            return why
    return "accelerate moves it in every call" if hasattr(module, "_hf_hook") else None


def packing_verdict(
    runtime: str,
    module: nn.Module,
    layer: PackedLayer,
    packed_bytes: int,
    dtype: torch.dtype,
    device: torch.device,
    inputs: str,
) -> Verdict:
    """Whether to pack a weight that can be packed: always, or for "auto" if it makes the product of one row faster.

    `packed_bytes`, `dtype` and `device` describe the weight of the module in memory.
    """
    if runtime == "packed":
        return Verdict(True, "requested")
    count, single = _matrices_of(module, layer)
    (d_out, d_in), codec = single.matrix, single.codec.with_inputs(inputs)
    ratio = packed_bytes // count / (d_out * d_in * dtype.itemsize)
    return codec.decoding(single.matrix, single.nm, ratio, dtype, device)


def runtime_entry(verdict: Verdict) -> str:
    """A layer's entry in `model.moonshot_runtime`."""
    return (PACKED if verdict.faster else DENSE) + verdict.why


def log_choices(runtime: str, chosen: Mapping[str, str], packed_bytes: int, dense_bytes: int) -> None:
    """Log the choices of "auto" and their reasons in one line.

    `chosen` has each pruned layer's entry in `model.moonshot_runtime`. The bytes are those of the packed weights and of
    the same weights when dense.
    """
    if runtime != "auto":
        return
    packed, dense = (
        Counter(entry.removeprefix(prefix) for entry in chosen.values() if entry.startswith(prefix))
        for prefix in (PACKED, DENSE)
    )
    sizes = f", {packed_bytes / 2**20:.1f} MiB in place of {dense_bytes / 2**20:.1f}"
    of = f" of {len(chosen)} layers"
    texts = [f"packed: {packed.total()}{of}{sizes} {_reasons(packed)}"] if packed else []
    if dense or not packed:
        texts.append(f"dense: {dense.total()}{'' if packed else of} {_reasons(dense)}")
    _log.warning("runtime='auto': %s", "; ".join(texts))


def _reasons(counts: Counter[str]) -> str:
    """The reasons, the most frequent first."""
    several = len(counts) > 1
    return f"({', '.join(f'{count} {why}' if several else why for why, count in counts.most_common())})"


def _matrices_of(module: nn.Module, layer: PackedLayer) -> tuple[int, PackedLayer]:
    """The number of matrices of a weight that can be packed in memory, and the entry of one."""
    if find_layer(module) is not None or isinstance(module, PackedLinear):
        return 1, layer
    return layer.shape[0], layer.expert(cast(Any, module).is_transposed)


def save_packed(
    model: PreTrainedModel, save_directory: str | os.PathLike[str], *, format: str = "packed", **options: Any
) -> None:
    """Replaces `save_pretrained` of a model with packed layers; unpacks one decoder layer at a time."""
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
        check_reloads(model, staging)


def _refuse_save(module: nn.Module, *args: Any, **options: Any) -> None:
    """Replaces `save_pretrained` of a part of a packed model, which no class could load."""
    raise MoonshotError(
        f"save_pretrained: {type(module).__name__} is a part of a model that is packed in memory",
        hint='save the whole model, or call pruner.to_runtime("dense") first',
    )


@contextmanager
def to_save(model: nn.Module) -> Iterator[None]:
    """A context in which the model is dense: packed layers count as offloaded, so that visits unpack them in turn."""
    packed, chosen = _packed_layers(model), getattr(model, "moonshot_runtime", {})
    sources = {_origin(name, module): _Unpacked(name, module) for name, module in packed.items()}
    try:
        with _dense_shapes(model), offloaded_from(model, sources):
            if packed:
                set_runtime(model, chosen)
            yield
    finally:
        if packed:
            set_runtime(model, chosen)


class _Unpacked(Mapping[str, Tensor]):
    """The parameters of the dense original of a packed layer; every access unpacks a packed weight."""

    def __init__(self, name: str, packed: PackedModule):
        self.dense, self.packed = _origin(name, packed), packed

    def __getitem__(self, name: str) -> Tensor:
        packed = name in self.packed.packed
        return _dense_weight(self.dense, self.packed, name) if packed else self.packed.get_parameter(name)

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


def _packed_layers(model: nn.Module) -> dict[str, PackedModule]:
    return {name: module for name, module in model.named_modules() if isinstance(module, PackedModule)}


def _origin(name: str, module: PackedModule) -> nn.Module:
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
            with error_context(path):
                chosen[path] = _pack_or_unpack(model, name, layer, runtime, name in shared, inputs)
    except BaseException:
        _unpack_all(model)
        set_runtime(model, {name.removesuffix(f".{_WEIGHT}"): f"{DENSE}packing failed" for name in layers})
        raise
    trim_host_memory()
    packed = _packed_layers(model).values()
    sizes = sum(module.packed_bytes for module in packed), sum(module.dense_bytes for module in packed)
    log_choices(runtime, chosen, *sizes)
    return set_runtime(model, chosen)


def _pack_or_unpack(model: nn.Module, name: str, layer: PackedLayer, runtime: str, shared: bool, inputs: str) -> str:
    """Pack or unpack the layer of the weight `name`, and return its runtime with the reason."""
    path, _, key = name.rpartition(".")
    module = model.get_submodule(path)
    if isinstance(module, PackedModule) and key in module.packed:
        parts = module.parts_of(key)
        packed_bytes, device = sum(part.nbytes for part in parts.values()), next(iter(parts.values())).device
        verdict = packing_verdict(runtime, module, layer, packed_bytes, module.dtype_of(key), device, inputs)
        module.packed[key] = PackedMatrix(layer.codec.with_inputs(inputs), module.packed[key].shape)
        if not verdict.faster:
            _unpack(model, path, module, key)
        return runtime_entry(verdict)
    why = packing_obstacle(module, layer, shared)
    if why is not None:
        return DENSE + why
    _, single = _matrices_of(module, layer)
    weight = module.get_parameter(key).detach()
    matrices = [single.as_matrix(tensor) for tensor in ([weight] if single is layer else weight)]
    packed_bytes = sum(layer.codec.packed_bytes(matrix, single.nm) for matrix in matrices)
    if packed_bytes >= weight.nbytes:
        return f"{DENSE}packing does not make it smaller"
    verdict = packing_verdict(runtime, module, layer, packed_bytes, weight.dtype, weight.device, inputs)
    if verdict.faster:
        packed = [layer.codec.pack(matrix.cpu(), single.nm) for matrix in matrices]
        stacked = layer.codec.stack(packed, [single.matrix] * len(packed))
        parts = {suffix: part.to(weight.device) for suffix, part in stacked.items()}
        register_packed(model, name, layer, parts, inputs)
    return runtime_entry(verdict)


def register_packed(model: nn.Module, name: str, layer: PackedLayer, parts: Parts, inputs: str = INPUTS[0]) -> None:
    """Replace a weight of a module by packed tensors, perhaps empty ones, and release its dense tensor.

    The module is a Linear, a Conv1D, or a module of experts, whose weight is the stack of the matrices of all experts.
    `inputs` is the dtype of the inputs of integer products; see `load_pruned`.
    """
    codec = layer.codec.with_inputs(inputs)
    path, _, key = name.rpartition(".")
    module = model.get_submodule(path)
    count, single = _matrices_of(module, layer)
    if find_layer(module) is not None:
        bias = module._parameters.get("bias")
        packed: PackedModule = PackedLinear(codec, layer.matrix, parts, bias, module, layer.nm)
        model.set_submodule(path, packed.train(module.training))
        return
    if not isinstance(module, PackedMixture):
        module = PackedMixture(module)
        model.set_submodule(path, module)
    module.register_packed(key, PackedMatrix(codec, (count * single.matrix[0], single.matrix[1])), parts)


def _unpack_all(model: nn.Module) -> None:
    for name, module in _packed_layers(model).items():
        for key in list(module.packed):
            _unpack(model, name, module, key)


def _unpack(model: nn.Module, name: str, module: PackedModule, key: str) -> None:
    if isinstance(module, PackedMixture):
        module.unpack(key)
        if module.packed:
            return
    model.set_submodule(name, _restored(name, module, meta=False).train(module.training))
    parent: Any = model.get_submodule(name.rpartition(".")[0])
    getattr(parent, "base_unpacked", lambda: None)()  # of an adapter


def _restored(name: str, module: PackedModule, meta: bool) -> nn.Module:
    """The dense original of a packed layer, with its weights, the packed ones empty on the meta device if `meta`."""
    dense = _origin(name, module)
    weights: dict[str, nn.Parameter | None] = {}
    for key in module.packed:
        before = dense.get_parameter(key)
        weight = before.to("meta", module.dtype_of(key)) if meta else _dense_weight(dense, module, key)
        weights[key] = nn.Parameter(weight, before.requires_grad)
    dense._parameters |= weights | module._parameters
    dense._buffers |= {key: module._buffers[key] for key in dense._buffers}
    return dense


@torch.no_grad()
def _dense_weight(dense: nn.Module, packed: PackedModule, key: str) -> Tensor:
    if isinstance(packed, PackedMixture):
        return packed.dense(key)
    adapter = find_layer(dense)
    assert adapter is not None
    return adapter.as_parameter(packed.matrix_of(key)).contiguous()
