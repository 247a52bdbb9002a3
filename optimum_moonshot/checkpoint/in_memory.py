"""Pack and unpack the pruned layers of a model in memory, and save a model with packed layers.

A layer is packed unless there is an obstacle, or its dense weights are faster; its entry in the model says which.
"""

import logging
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
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
from ..runtime.packed_layers import PackedEmbedding, PackedLinear, PackedMixture, lookup_obstacle, mixture_obstacle
from ..runtime.packed_module import PackedMatrix, PackedModule
from ..runtime.packed_module import is_packed as is_packed  # of the state that this file changes
from .packed_files import FORMATS, check_reloads, packed_weights, save_streamed, shared_names
from .weight_files import MoonshotPrunedCheckpoint, check_runtime

_WEIGHT = "weight"
PACKED, DENSE = "packed: ", "dense: "  # prefixes of a layer's entry in `model.moonshot_runtime`
_EMBEDDINGS = (nn.Embedding, PackedEmbedding)
_log = logging.getLogger(__name__)


def to_runtime(model: nn.Module, runtime: str = "auto", inputs: str = INPUTS[0]) -> dict[str, str]:
    """Pack or unpack the pruned layers of a `PreTrainedModel` in memory, in place, like `MoonshotPruner.to_runtime`.

    Returns the runtime of every layer, with the reason. `MoonshotError` names a layer that is no longer n:m, or not on
    its grid; then all layers are dense.
    """
    check_runtime(runtime, inputs)
    if not isinstance(model, PreTrainedModel):
        raise MoonshotError(f"runtime: {type(model).__name__} is not a PreTrainedModel")
    with _dense_shapes(model):
        layers, names = packed_weights(model), shared_names(model)
    if runtime != "dense":
        return _pack(model, runtime, layers, names, inputs)
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
            save = save_packed if module is model else _refuse_save
            replaced = {
                "save_pretrained": save,
                "num_parameters": _num_parameters,
                "tie_weights": _tie_weights,
                "resize_token_embeddings": _refuse_resize,
            }
            for name in replaced:
                if getattr(vars(module).get(name), "func", None) in (*replaced.values(), save_packed, _refuse_save):
                    del vars(module)[name]
            if packed:
                module.config.__dict__["_is_quantized"] = True
                # A partial is copied and pickled with its model; a bound method would refer to the original.
                vars(module).update({name: partial(function, module) for name, function in replaced.items()})
    if is_packed(model):
        PackedQuantizer(MoonshotPrunedCheckpoint("packed")).attach(model)
    return chosen


class PackedQuantizer(HfQuantizer):
    """The `hf_quantizer` of a model with packed layers; the weights are constant, adapters beside them can be trained.

    Without adapters, a Trainer raises an error for the model.
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
    modules = [] if only_trainable else _packed_layers(model).values()
    counted = [module for module in modules if not (exclude_embeddings and isinstance(module.owner, PackedEmbedding))]
    return parameters + sum(prod(matrix.shape) for module in counted for matrix in module.owned.values())


def _tie_weights(model: Any, *args: Any, **options: Any) -> None:
    """Replaces `tie_weights` of a model with packed layers: packed weights that are tied have the same tensors."""
    tied, packed = model.all_tied_weights_keys, _packed_layers(model)
    names = {f"{name}.{weight}" for name, module in packed.items() for weight in module.packed}
    model.all_tied_weights_keys = {name: source for name, source in tied.items() if not {name, source} & names}
    try:
        type(model).tie_weights(model, *args, **{**options, "recompute_mapping": False})
    finally:
        model.all_tied_weights_keys = tied


def _refuse_resize(model: Any, new_num_tokens: int | None = None, *args: Any, **options: Any) -> Any:
    """Replaces `resize_token_embeddings` of a model with packed layers, which could not pack new rows again."""
    embeddings = model.get_input_embeddings()
    if not isinstance(embeddings, PackedEmbedding):
        return type(model).resize_token_embeddings(model, new_num_tokens, *args, **options)
    if new_num_tokens in (None, embeddings.num_embeddings) and not (any(args) or options.get("pad_to_multiple_of")):
        return embeddings
    raise MoonshotError(
        f"resize_token_embeddings: the word embeddings of {type(model).__name__} are packed in memory",
        hint='call pruner.to_runtime("dense") or model.dequantize() first, and save the resized model dense',
    )


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
    """The packed modules by name; modules that own their tensors come first."""
    packed = {name: module for name, module in model.named_modules() if isinstance(module, PackedModule)}
    return dict(sorted(packed.items(), key=lambda item: item[1].owner is not item[1]))


def _origin(name: str, module: PackedModule) -> nn.Module:
    if module.origin is None:
        raise MoonshotError("it was created packed: it has no dense original").within(name)
    return module.origin


def _pack(
    model: PreTrainedModel, runtime: str, layers: dict[str, PackedLayer], names: dict[str, list[str]], inputs: str
) -> dict[str, str]:
    """Pack the weights that the runtime selects, one after another, and unpack the others; `names`: all tied ones."""
    chosen: dict[str, str] = {}
    try:
        for name, layer in layers.items():
            path = name.removesuffix(f".{_WEIGHT}")
            if path not in chosen:
                with error_context(path):
                    entry = _pack_or_unpack(model, names[name], layer, runtime, inputs)
                chosen |= dict.fromkeys((tied.removesuffix(f".{_WEIGHT}") for tied in names[name]), entry)
    except BaseException:
        _unpack_all(model)
        set_runtime(model, {name.removesuffix(f".{_WEIGHT}"): f"{DENSE}packing failed" for name in layers})
        raise
    trim_host_memory()
    packed = _packed_layers(model).values()
    sizes = sum(module.packed_bytes for module in packed), sum(module.dense_bytes for module in packed)
    log_choices(runtime, chosen, *sizes)
    return set_runtime(model, chosen)


def _pack_or_unpack(model: nn.Module, names: list[str], layer: PackedLayer, runtime: str, inputs: str) -> str:
    """Pack or unpack the weight with these names, several if it is tied; return its runtime with the reason."""
    key = names[0].rpartition(".")[2]
    modules = [model.get_submodule(name.rpartition(".")[0]) for name in names]
    module = modules[0]
    if isinstance(module, PackedModule) and key in module.packed:
        parts = module.parts_of(key)
        packed_bytes, device = sum(part.nbytes for part in parts.values()), next(iter(parts.values())).device
        verdict = packing_verdict(runtime, modules, layer, packed_bytes, module.dtype_of(key), device, inputs)
        for name, packed in zip(names, modules, strict=True):
            assert isinstance(packed, PackedModule)
            packed.packed[key] = PackedMatrix(layer.codec.with_inputs(inputs), packed.packed[key].shape)
            if not verdict.faster:
                _unpack(model, name.rpartition(".")[0], packed, key)
        return runtime_entry(verdict)
    why = packing_obstacle(modules, layer)
    if why is not None:
        return DENSE + why
    _, single = matrices_of(module, layer)
    weight = module.get_parameter(key).detach()
    matrices = [single.as_matrix(tensor) for tensor in ([weight] if single is layer else weight)]
    packed_bytes = sum(layer.codec.packed_bytes(matrix, single.nm) for matrix in matrices)
    if packed_bytes >= weight.nbytes:
        return f"{DENSE}packing does not make it smaller"
    verdict = packing_verdict(runtime, modules, layer, packed_bytes, weight.dtype, weight.device, inputs)
    if verdict.faster:
        packed_matrices = [layer.codec.pack(matrix.cpu(), single.nm) for matrix in matrices]
        stacked = layer.codec.stack(packed_matrices, [single.matrix] * len(packed_matrices))
        placed = {suffix: part.to(weight.device) for suffix, part in stacked.items()}
        register_packed(model, names, layer, placed, inputs)
    return runtime_entry(verdict)


def register_packed(
    model: nn.Module, names: Sequence[str], layer: PackedLayer, parts: Parts, inputs: str = INPUTS[0]
) -> None:
    """Replace a weight of a module, or tied ones of several, by packed tensors, and release the dense tensor.

    The tensors may be empty. They are registered in the first module: a Linear, a Conv1D, an Embedding or a module of
    experts, whose weight is the stack of all experts' matrices. `inputs`: see `load_pruned`.
    """
    codec, owner = layer.codec.with_inputs(inputs), None
    for name in names:
        path, _, key = name.rpartition(".")
        module = model.get_submodule(path)
        packed: PackedModule
        if isinstance(module, nn.Embedding):
            packed = PackedEmbedding(codec, layer.matrix, parts, module, owner)
        elif find_layer(module) is not None:
            bias = module._parameters.get("bias")
            packed = PackedLinear(codec, layer.matrix, parts, bias, module, layer.nm, owner)
        else:
            count, single = matrices_of(module, layer)
            packed = module if isinstance(module, PackedMixture) else PackedMixture(module)
            packed.register_packed(key, PackedMatrix(codec, (count * single.matrix[0], single.matrix[1])), parts)
        if packed is not module:
            model.set_submodule(path, packed.train(module.training))
        owner = packed if owner is None else owner


def initialize_buffers(model: nn.Module) -> None:
    """Compute the buffers of packed embeddings that no file has, such as a scale, as transformers does for dense ones.

    The buffers are on their device already, with arbitrary values.
    """
    models = {name: module for name, module in model.named_modules() if isinstance(module, PreTrainedModel)}
    for name, module in model.named_modules():
        if isinstance(module, PackedEmbedding) and module._buffers.keys() & module._non_persistent_buffers_set:
            dense, owner = _origin(name, module), max((parent for parent in models if name.startswith(parent)), key=len)
            dense._buffers |= {key: module._buffers[key] for key in dense._buffers}
            with torch.no_grad():
                models[owner]._init_weights(dense)


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
        if module.owner is not module:  # restored before
            weights[key] = cast(nn.Module, module.owner.origin)._parameters[key]
            continue
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
    matrix = packed.matrix_of(key)
    return matrix if adapter is None else adapter.as_parameter(matrix).contiguous()


def packing_obstacle(modules: Sequence[nn.Module], layer: PackedLayer) -> str | None:
    """The reason why the weight of one module, or of several that share it, cannot be packed in memory, if any.

    Only embeddings may share a weight, with each other and with heads.
    """
    embeds = layer.codec.looks_up and any(isinstance(module, nn.Embedding) for module in modules)
    alike = all(isinstance(module, nn.Embedding | nn.Linear) for module in modules)
    if len(modules) > 1 and not (embeds and alike):
        return "tied to another weight"
    return next((why for module in modules if (why := _obstacle(module, layer)) is not None), None)


def _obstacle(module: nn.Module, layer: PackedLayer) -> str | None:
    """Like `packing_obstacle`, for one of the modules."""
    if isinstance(module, nn.Embedding) and lookup_obstacle(module) is not None:
        return lookup_obstacle(module)
    adapter = find_layer(module)
    if adapter is not None and adapter.images:
        return f"{type(module).__name__} layers are multiplied dense"
    if adapter is None and not isinstance(module, PackedMixture | nn.Embedding):
        why = mixture_obstacle(module) if len(layer.shape) == 3 else f"{type(module).__name__} is multiplied dense"
        if why is not None:
            return why
    return "accelerate moves it in every call" if hasattr(module, "_hf_hook") else None


def packing_verdict(
    runtime: str,
    modules: Sequence[nn.Module],
    layer: PackedLayer,
    packed_bytes: int,
    dtype: torch.dtype,
    device: torch.device,
    inputs: str,
) -> Verdict:
    """Whether to pack a weight that can be packed: always, or for "auto" if it makes the product of one row faster.

    `packed_bytes`, `dtype` and `device` describe the weight of the modules in memory.
    """
    if runtime == "packed":
        return Verdict(True, "requested")
    module = next((module for module in modules if not isinstance(module, _EMBEDDINGS)), None)
    if module is None:
        return Verdict(True, "rows are looked up")
    count, single = matrices_of(module, layer)
    (d_out, d_in), codec = single.matrix, single.codec.with_inputs(inputs)
    ratio = packed_bytes // count / (d_out * d_in * dtype.itemsize)
    return codec.decoding(single.matrix, single.nm, ratio, dtype, device)


def runtime_entry(verdict: Verdict) -> str:
    """A layer's entry in `model.moonshot_runtime`."""
    return (PACKED if verdict.faster else DENSE) + verdict.why


def log_choices(runtime: str, chosen: Mapping[str, str], packed_bytes: int, dense_bytes: int) -> None:
    """Log the choices of "auto" and their reasons in one line.

    `chosen` has each pruned layer's entry in `model.moonshot_runtime`. The bytes are the sizes of
    the packed weights, packed and dense.
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


def matrices_of(module: nn.Module, layer: PackedLayer) -> tuple[int, PackedLayer]:
    """The number of matrices of a weight that can be packed in memory, and the entry of one."""
    if find_layer(module) is not None or isinstance(module, (PackedLinear, *_EMBEDDINGS)):
        return 1, layer
    return layer.shape[0], layer.expert(cast(Any, module).is_transposed)
