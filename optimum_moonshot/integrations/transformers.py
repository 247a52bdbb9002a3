"""The quantizer of transformers for packed checkpoints, and for pruning while loading.

Registered as "moonshot" by registration.py. The loaded model has no quantizer attached: it is an ordinary dense model,
unless the caller selects another runtime.
"""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..checkpoint.folder import Checkpoint, check_complete, checksums_wanted
from ..checkpoint.weight_files import EXPLICIT, PACKED_INDEX, MoonshotPrunedCheckpoint, StoredTensors, followed_names
from ..config import MoonshotConfig
from ..devices import default_device
from ..errors import error_context, require
from ..model.layer_kinds import find_layer
from ..reports.record import PruningRecord

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .conversion import PackedWeights, StoredWeight

_WEIGHT = ".weight"


class MoonshotQuantizer(HfQuantizer):
    """Unpacks a packed checkpoint or keeps it packed, or prunes a dense one by a `MoonshotConfig`; then detaches.

    The `quantization_config` comes from config.json, or from the caller of `from_pretrained`.
    """

    requires_calibration = False

    def __init__(self, quantization_config: MoonshotPrunedCheckpoint | MoonshotConfig, **kwargs: Any):
        super().__init__(cast(QuantizationConfigMixin, quantization_config), **kwargs)
        self.pruning = quantization_config if isinstance(quantization_config, MoonshotConfig) else None
        choice = MoonshotPrunedCheckpoint() if isinstance(quantization_config, MoonshotConfig) else quantization_config
        self.runtime, self.inputs, self.verified = choice.runtime, choice.inputs, choice.verified
        self.processors: tuple[Any, Any] = (None, None)
        self.weights: PackedWeights | None = None  # of the files
        self.staying: list[str] = []  # modules and fused weights that stay packed in memory
        self.stacked: dict[str, str] = {}  # fused weight that stays packed → `StoredWeight.target`
        self.resized: set[str] = set()  # packed tensors of `stacked`; their sizes depend on the files
        self.tied: dict[str, str] = {}  # entries of `all_tied_weights_keys` for `staying`, no parameters while packed
        self.chosen: dict[str, str] = {}  # packed layer → runtime and reason, unless all become dense
        self.shapes: dict[str, torch.Size] = {}  # shapes of all loaded tensors, from config.json
        self.dtypes: dict[str, torch.dtype] = {}  # dtypes of all loaded tensors, from the caller's dtype

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        if self.pruning:
            inference = torch.is_inference_mode_enabled()
            require(not inference, "torch.inference_mode() disables gradients", hint="load and prune outside of it")
            places = device_map.values() if isinstance(device_map, dict) else ()
            require("disk" not in places, "a model to prune must not be offloaded to disk", field="device_map")

    def update_tp_plan(self, config: PreTrainedConfig) -> PreTrainedConfig:
        """Name the index in the configuration, which other hooks get only after transformers looks for an index."""
        if self.pre_quantized:
            setattr(config, EXPLICIT, PACKED_INDEX)
        return config

    update_attn_implementation = update_tp_plan  # transformers calls one or both, depending on its release

    def preprocess_model(self, model: "PreTrainedModel", dtype: torch.dtype | None = None, **kwargs: Any) -> None:
        """Like the base method, but also record the dtype of every weight, which depends on the caller's dtype."""
        super().preprocess_model(model, dtype=dtype, **kwargs)
        if not self.pre_quantized:
            return
        # Some layers stay in float32.
        plan: dict[str, torch.dtype] = cast(Any, model)._get_dtype_plan(dtype)
        wide = {re.compile(pattern.replace("*", ".*")): wider for pattern, wider in plan.items()}
        self.dtypes = {
            name: next((wider for pattern, wider in wide.items() if pattern.search(name)), tensor.dtype)
            for name, tensor in model.state_dict().items()
            if tensor.is_floating_point()
        }

    def _process_model_before_weight_loading(
        self, model: "PreTrainedModel", checkpoint_files: list[str] | None = None, device_map: Any = None, **kwargs: Any
    ) -> None:
        # Imported late: these import transformers' loader, which imports the quantizers.
        from ..checkpoint.in_memory import DENSE
        from .conversion import PackedWeights

        self.sharding = model.register_state_dict_pre_hook(_refuse_shards)
        if self.pruning is not None:
            self._prepare_pruning(self.pruning, model, checkpoint_files or [])
        elif not self.pre_quantized:
            PruningRecord.require_of(model)
        else:
            self._verify(checkpoint_files or [])
            names = model.config.architectures
            if isinstance(names, list) and type(model).__name__ in names:
                _require_complete(model)
            packing = self.runtime in ("packed", "auto")
            with StoredTensors(checkpoint_files or []) as tensors:
                weights = _packed_weights(model, tensors)
                self.weights = PackedWeights.find(model, tensors)
            stacks = self.weights.stacks(model) if packing else {}
            if packing:
                self.chosen = _keep_packed(model, {**weights, **stacks}, self.runtime, device_map, self.inputs)
                self.staying = [name for name, entry in self.chosen.items() if not entry.startswith(DENSE)]
            tied = model.all_tied_weights_keys if self.staying else {}
            self.tied = {name: tied.pop(name) for name in [*tied] if name.removesuffix(_WEIGHT) in self.staying}
            self.stacked = {name: stacks[name].target(name) for name in self.staying if name in stacks}
            self.resized = {tensor for name in self.stacked for tensor in stacks[name].layer.names(name)}
            shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
            self.shapes = {name: shape for name, shape in shapes.items() if name not in self.resized}

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> None:
        from transformers import PreTrainedModel

        from ..checkpoint.in_memory import initialize_buffers, set_runtime, to_runtime
        from ..pruner import MoonshotPruner

        model.config.__dict__.pop(EXPLICIT, None)
        self.sharding.remove()
        loaded = model.state_dict()  # with a quantizer, transformers < 5.23 loads parameters of any shape
        check_complete((), (), [name for name, shape in self.shapes.items() if loaded[name].shape != shape])
        # Most releases of transformers do not cast the tensors that they rename.
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name in self.dtypes:
                tensor.data = tensor.data.to(self.dtypes[name])
        if self.weights is not None:
            self.weights.restore(model)
        self.remove_quantization_config(model)
        for module in model.modules():
            if isinstance(module, PreTrainedModel):
                module.config.__dict__.pop("_is_quantized", None)
        if self.pruning is not None:
            with torch.enable_grad():
                model.moonshot_report = MoonshotPruner(model, self.pruning, *self.processors).prune()
        elif self.chosen:
            model.all_tied_weights_keys |= self.tied
            initialize_buffers(model)
            set_runtime(model, self.chosen)
        elif not self.pre_quantized and self.runtime != "dense":
            to_runtime(model, self.runtime, inputs=self.inputs)

    def _verify(self, files: Sequence[str]) -> None:
        """Verify that transformers loads the files of the index, unless `load_pruned` has verified them."""
        paths = {os.path.abspath(path) for path in files}
        if paths <= self.verified:
            return
        folder = Path(files[0]).parent
        checkpoint = Checkpoint(folder, packed=True)
        with torch.device("cpu"):  # transformers calls this inside its "meta" device context
            checkpoint.check_files(checksums_wanted())
        others = paths.symmetric_difference(map(os.path.abspath, checkpoint.files))
        require(not others, f"{folder}: transformers would not load the files of the index, but {sorted(paths)}")

    def _prepare_pruning(self, config: MoonshotConfig, model: "PreTrainedModel", files: Sequence[str]) -> None:
        from ..model.model_info import TOKENIZER_FILES, load_processor, load_tokenizer

        pruned = PruningRecord.of(model) is not None
        message = f"{model.name_or_path} is pruned already; load it without one"
        require(not pruned, message, field="quantization_config")
        ready = config.calibration is not None or not config.make_solver().calibrated
        text = f"solver={config.solver!r} needs data"
        hint = "such as MoonshotConfig(…, calibration='c4')"
        require(ready, text, field="calibration", value=None, hint=hint)
        name: Any = model.name_or_path
        if files and os.path.isdir(name):  # `subfolder` is not passed to this hook
            folder = Path(files[0]).parent
            name = folder if any((folder / file).is_file() for file in TOKENIZER_FILES) else name
        self.processors = load_tokenizer(name), load_processor(model, name)

    def get_weight_conversions(self) -> list[Any]:
        """Return the conversions of the packed tensors.

        `serialized_names` and `get_load_operations` of transformers ≥ 5.23 do not suffice: their operation receives
        only the suffixes of the tensors, but the format of a matrix is stored under its full name in the files.
        """
        if self.weights is None:
            return []
        others = [f"{name}{_WEIGHT}" for name in self.staying if name not in self.stacked]
        return self.weights.conversions(self.dtypes, self.stacked, others)

    def param_needs_quantization(self, model: "PreTrainedModel", param_name: str, **kwargs: Any) -> bool:
        """Whether a tensor may have any shape; transformers calls this for nothing else in a quantized checkpoint."""
        return param_name in self.resized

    def is_serializable(self) -> bool:
        return False  # it is detached before the model can be saved

    @property
    def is_trainable(self) -> bool:
        return False


def _refuse_shards(model: nn.Module, *_: Any) -> None:
    """Refuse weights that transformers has sharded, when it lists the tensors to load: other hooks run too early.

    Raises:
        MoonshotError: the model is distributed over several processes.
    """
    message = "packed weights, and models to prune, cannot be sharded between processes"
    hint = "convert the checkpoint to the dense format, or use vLLM"
    sharded = getattr(model, "_device_mesh", None) is not None
    require(not sharded, message, field="tp_plan", hint=hint)


def _require_complete(model: Any) -> None:
    """Raise an error for missing or unexpected weights, where transformers only warns.

    Only for models of the saved class: another class, such as one with a new head, has additional weights.
    """
    adjust = model._adjust_missing_and_unexpected_keys

    def adjust_and_check(info: Any) -> None:
        del model._adjust_missing_and_unexpected_keys
        adjust(info)
        check_complete(info.missing_keys, info.unexpected_keys)

    model._adjust_missing_and_unexpected_keys = adjust_and_check


def _packed_weights(model: nn.Module, tensors: StoredTensors) -> dict[str, "StoredWeight"]:
    """Return the packed weights that need no `PackedExperts`, by name in the model."""
    from .conversion import StoredWeight

    weights = {}
    for stored, name in followed_names(model, tensors.layers).items():
        layer, shape = tensors.layers[stored], tuple(model.get_parameter(name).shape)
        module = model.get_submodule(name.rpartition(".")[0])
        adapter = find_layer(module)
        with error_context(name):
            require(layer.shape == shape, f"it was saved as {layer.shape}, config.json says {shape}")
            matching = layer.stacked or layer.transposed == (adapter is not None and adapter.axes == (1, 0))
            message = f"its module is a {type(module).__name__}"
            require(matching, message, field="transposed", value=layer.transposed)
            empty = {suffix: part.to("meta") for suffix, part in layer.parts(stored, tensors).items()}
        weights[name] = StoredWeight(layer, empty, [*empty.values()])
    return weights


def _keep_packed(
    model: nn.Module, weights: Mapping[str, "StoredWeight"], runtime: str, device_map: Any, inputs: str
) -> dict[str, str]:
    """Replace every weight that stays packed by empty packed tensors; return all entries of `moonshot_runtime`."""
    from ..checkpoint.in_memory import (
        DENSE,
        log_choices,
        packing_obstacle,
        packing_verdict,
        register_packed,
        runtime_entry,
    )

    tied, chosen, sizes = getattr(model, "all_tied_weights_keys", {}), dict[str, str](), [0, 0]
    for name, stored in weights.items():
        layer, source = stored.layer, tied.get(name, name)
        names = [name, *(other for other in (source, *tied) if other != name and tied.get(other, other) == source)]
        modules = [model.get_submodule(name.rpartition(".")[0]) for name in names]
        device, *others = dict.fromkeys(_device_of(name.rpartition(".")[0], device_map) for name in names)
        why = "offloaded" if device is None else stored.obstacle or packing_obstacle(modules, layer)
        why = "tied to a weight on another device" if others else why
        layers = [name.removesuffix(_WEIGHT) for name in names]
        if why is not None or device is None:
            chosen |= dict.fromkeys(layers, f"{DENSE}{why}")
            continue
        weight = model.get_parameter(name)
        packed_bytes = stored.packed_bytes(weight)
        verdict = packing_verdict(runtime, modules, layer, packed_bytes, weight.dtype, device, inputs)
        chosen |= dict.fromkeys(layers, runtime_entry(verdict))
        if verdict.faster:
            sizes = [sizes[0] + packed_bytes, sizes[1] + weight.nbytes]
            register_packed(model, names, layer, stored.empty_parts(weight), inputs)
    log_choices(runtime, chosen, *sizes)
    return chosen


def _device_of(path: str, device_map: Any) -> torch.device | None:
    """Return the device of a module; None if accelerate onloads it for every call.

    A strategy such as "auto" in place of a map fills the accelerator first.
    """
    if not isinstance(device_map, Mapping):
        return default_device() if isinstance(device_map, str) else torch.device("cpu")
    matches = [name for name in device_map if not name or path == name or path.startswith(f"{name}.")]
    place = device_map[max(matches, key=len)] if matches else "cpu"
    accelerated = any(str(other) not in ("cpu", "disk") for other in device_map.values())
    if place == "disk" or (accelerated and str(place) == "cpu"):
        return None
    return torch.device("cuda", place) if isinstance(place, int) else torch.device(place)
