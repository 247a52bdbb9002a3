"""What transformers calls: packed checkpoints through `from_pretrained`, and pruning while loading.

Registered under "moonshot" by registration.py. The model that comes back has no quantizer attached: it is an ordinary
dense one, unless the caller asked for another runtime.
"""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedConfig
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..checkpoint.file_integrity import check_complete, check_files, checksums_wanted
from ..checkpoint.packed_format import EXPLICIT, METHOD, Description, check_config_entry, config_entry
from ..checkpoint.request import current_request
from ..checkpoint.weight_files import PACKED_INDEX
from ..checkpoint.weight_names import followed_names
from ..config import MoonshotConfig
from ..devices import default_device
from ..errors import naming, require
from ..model.layer_adapters import find_adapter
from ..packing import PackedLayer
from ..reports.record import PruningRecord
from ..runtime.runtime_selection import DENSE, check_runtime, held_bytes, said, tell, wanted

if TYPE_CHECKING:
    from .packed_experts import PackedExperts

_RUNTIMES = ("dense", "packed", "auto")
_WEIGHT = ".weight"


class MoonshotPrunedCheckpoint(QuantizationConfigMixin):
    """How the layers of a pruned checkpoint are held in memory, as `quantization_config` of `from_pretrained`.

    ```python
    config = MoonshotPrunedCheckpoint(runtime="auto")
    model = AutoModelForCausalLM.from_pretrained("Llama-3.2-1B-2of4-packed", quantization_config=config)
    ```

    It is also what transformers makes of the entry in config.json of a packed checkpoint, and names in its error for a
    `MoonshotConfig` that is given for a model that is pruned already.

    Args:
        runtime: "dense", "packed" or "auto", as for `load_pruned`.

    Raises:
        MoonshotError: another runtime.
    """

    quant_method = METHOD

    def __init__(self, runtime: str = "dense"):
        check_runtime(runtime, _RUNTIMES)
        self.runtime = runtime

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> "MoonshotPrunedCheckpoint":
        """From the entry in config.json; nothing in it is a choice: those are the caller's.

        Args:
            config_dict: the entry.
            kwargs: of transformers, without a meaning here.

        Raises:
            MoonshotError: a version that this release does not read, or an unknown field.
        """
        check_config_entry(config_dict)
        return cls()

    def to_dict(self) -> dict[str, Any]:
        return config_entry()

    def get_loading_attributes(self) -> dict[str, Any]:
        """What transformers takes over from the caller's to the one of config.json."""
        return {"runtime": self.runtime}


class MoonshotQuantizer(HfQuantizer):
    """Unpacks a packed checkpoint or keeps it packed, or prunes a dense one by a `MoonshotConfig`; then lets go of it.

    Args:
        quantization_config: what config.json has, or what the caller of `from_pretrained` gave.
        kwargs: of transformers.
    """

    requires_calibration = False

    def __init__(self, quantization_config: MoonshotPrunedCheckpoint | MoonshotConfig, **kwargs: Any):
        super().__init__(quantization_config, **kwargs)
        self.request = current_request()
        self.pruning = isinstance(quantization_config, MoonshotConfig)
        self.runtime = "dense" if self.pruning else self.request.runtime or quantization_config.runtime
        self.processors: tuple[Any, Any] = (None, None)
        self.packed: dict[str, PackedLayer] = {}  # the packed weights of the files, by their names in the model
        self.experts: PackedExperts | None = None  # packed weights that need more than to be unpacked
        self.kept: list[str] = []  # modules that stay packed in memory
        self.chosen: dict[str, str] = {}  # what becomes of every packed layer, unless all become dense
        self.shapes: dict[str, torch.Size] = {}  # of everything that is loaded, by config.json
        self.dtypes: dict[str, torch.dtype] = {}  # of the same, by what the caller asked for

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        if self.pruning:
            inference = torch.is_inference_mode_enabled()
            require(not inference, "torch.inference_mode() forbids gradients: load and prune outside of it")
            places = device_map.values() if isinstance(device_map, dict) else ()
            require("disk" not in places, "device_map: a model to prune must not be offloaded to disk")

    def update_tp_plan(self, config: PreTrainedConfig) -> PreTrainedConfig:
        """Name the index that transformers shall read: no other hook sees the configuration before it looks for one."""
        if self.pre_quantized:
            setattr(config, EXPLICIT, PACKED_INDEX)
        return config

    update_attn_implementation = update_tp_plan  # releases of transformers call one of the two, or both

    def preprocess_model(self, model: nn.Module, dtype: torch.dtype | None = None, **kwargs: Any) -> None:
        """As transformers', which keeps the dtype to itself.

        Args:
            model: on the meta device.
            dtype: what it is loaded in.
            kwargs: for `_process_model_before_weight_loading`.
        """
        super().preprocess_model(model, dtype=dtype, **kwargs)
        if self.pre_quantized:
            self.dtypes = _dtypes(model, dtype)

    def _process_model_before_weight_loading(
        self, model: nn.Module, checkpoint_files: list[str] | None = None, device_map: Any = None, **kwargs: Any
    ) -> None:
        from .packed_experts import PackedExperts

        if self.pruning:
            self._prepare_pruning(model)
        elif not self.pre_quantized:
            PruningRecord.require_of(model)
        else:
            self._verify(checkpoint_files or [])
            names = model.config.architectures
            if isinstance(names, list) and type(model).__name__ in names:
                _require_complete(model)
            found = _packed_layers(model, checkpoint_files or [])
            self.experts = PackedExperts.find(model, checkpoint_files or [])
            self.packed = {name: packed.layer for name, packed in found.items()}
            if self.runtime in ("packed", "auto"):
                self.chosen = _keep_packed(model, found, self.runtime, device_map)
                self.kept = [name for name, what in self.chosen.items() if not what.startswith(DENSE)]
            self.shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}

    def _process_model_after_weight_loading(self, model: nn.Module, **kwargs: Any) -> None:
        from transformers import PreTrainedModel

        from ..checkpoint.in_memory import note, to_runtime
        from .conversion import Unpacking

        model.config.__dict__.pop(EXPLICIT, None)
        loaded = model.state_dict()  # before 5.23 transformers sets parameters of any shape where there is a quantizer
        check_complete((), (), [name for name, shape in self.shapes.items() if loaded[name].shape != shape])
        _cast(model, self.dtypes)
        # Saving would reverse it; what is saved is dense.
        model._weight_conversions = [entry for entry in model._weight_conversions if not isinstance(entry, Unpacking)]
        if self.experts is not None:
            self.experts.restore(model)
        self.remove_quantization_config(model)
        for module in model.modules():
            if isinstance(module, PreTrainedModel):
                module.config.__dict__.pop("_is_quantized", None)
        if self.pruning:
            self._prune(model)
        elif self.chosen:
            note(model, self.chosen)
        elif not self.pre_quantized and self.runtime != "dense":
            to_runtime(model, self.runtime)

    def _verify(self, files: Sequence[str]) -> None:
        """Check what transformers is about to load, unless `load_pruned` has done so.

        Raises:
            MoonshotError: damaged, or not the checkpoint's own files.
        """
        paths = {os.path.abspath(path) for path in files}
        if paths <= self.request.verified:
            return
        folder = Path(files[0]).parent
        with torch.device("cpu"):  # transformers makes the model on "meta", and calls this in there
            checked = check_files(folder, True, checksums_wanted())
        others = paths.symmetric_difference(map(os.path.abspath, checked))
        require(not others, f"{folder}: transformers would not load the files of the index, but {sorted(paths)}")

    def _prepare_pruning(self, model: nn.Module) -> None:
        from ..model.model_info import load_processor, load_tokenizer

        pruned = PruningRecord.of(model) is not None
        require(not pruned, f"quantization_config: {model.name_or_path} is pruned already; load it without one")
        config = self.quantization_config
        require(
            config.calibration is not None or not config.make_solver().calibrated,
            f"calibration=None: solver={config.solver!r} needs data, such as MoonshotConfig(…, calibration='c4')",
        )
        self.processors = load_tokenizer(model.name_or_path), load_processor(model, model.name_or_path)

    def _prune(self, model: nn.Module) -> None:
        from ..pruner import MoonshotPruner

        with torch.enable_grad():
            model.moonshot_report = MoonshotPruner(model, self.quantization_config, *self.processors).prune()

    def get_weight_conversions(self) -> list[Any]:
        from .conversion import Unpacking  # transformers' loader is imported after its quantizers

        if not self.pre_quantized:
            return []
        lasts = sorted({"weight", *(name.rpartition(".")[2] for name in self.packed)})
        conversions = [Unpacking(self.packed, self.dtypes, self.kept, last) for last in lasts]
        return conversions if self.experts is None else [*conversions, *self.experts.conversions(self.dtypes)]

    def is_serializable(self) -> bool:
        return False  # it has let go of the model before it can be saved

    @property
    def is_trainable(self) -> bool:
        return False


def _require_complete(model: nn.Module) -> None:
    """Make an error of what transformers only warns of: weights that are in the model or in the files alone.

    For models of the class that was saved; others, such as one with a new head, have weights of their own.
    """
    adjust = model._adjust_missing_and_unexpected_keys

    def adjust_and_check(info: Any) -> None:
        del model._adjust_missing_and_unexpected_keys
        adjust(info)
        check_complete(info.missing_keys, info.unexpected_keys)

    model._adjust_missing_and_unexpected_keys = adjust_and_check


def _dtypes(model: nn.Module, dtype: torch.dtype | None) -> dict[str, torch.dtype]:
    """The dtype of every parameter and buffer as transformers loads it: the model's, but float32 of some layers."""
    wide = {re.compile(part.replace("*", ".*")): kept for part, kept in model._get_dtype_plan(dtype).items()}
    return {
        name: next((kept for part, kept in wide.items() if part.search(name)), tensor.dtype)
        for name, tensor in model.state_dict().items()
        if tensor.is_floating_point()
    }


def _cast(model: nn.Module, dtypes: Mapping[str, torch.dtype]) -> None:
    """Make what was loaded of these dtypes: most releases of transformers leave what they rename as it was saved."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name in dtypes:
            tensor.data = tensor.data.to(dtypes[name])


class _Found(NamedTuple):
    """A packed weight in the files."""

    layer: PackedLayer
    stored: str  # its name in the file
    path: str


def _packed_layers(model: nn.Module, files: list[str]) -> dict[str, _Found]:
    """The packed weights of the files by their names in the model, without `PackedExperts`.

    Raises:
        MoonshotError: a weight that is not of the model's shape, with its name.
    """
    found = {}
    for path in files:
        with safe_open(path, "pt") as file:
            layers = Description.read(file.metadata()).layers
        for stored, name in followed_names(model, layers).items():
            layer, shape = layers[stored], tuple(model.get_parameter(name).shape)
            module = model.get_submodule(name.rpartition(".")[0])
            form = find_adapter(module)
            with naming(name):
                require(layer.shape == shape, f"it was saved as {layer.shape}, config.json says {shape}")
                turned = layer.transposed == (form is not None and form.axes == (1, 0))
                require(turned, f"transposed={layer.transposed}, but its module is a {type(module).__name__}")
            found[name] = _Found(layer, stored, path)
    return found


def _keep_packed(model: nn.Module, found: dict[str, _Found], runtime: str, device_map: Any) -> dict[str, str]:
    """Put an empty `PackedLinear` in the place of every Linear that stays packed.

    Args:
        model: on the meta device.
        found: the packed weights of the files.
        runtime: "packed" or "auto".
        device_map: of the caller.

    Returns:
        What becomes of every packed weight.
    """
    from ..checkpoint.in_memory import obstacle, packed_linear

    tied = getattr(model, "all_tied_weights_keys", {})
    shared, chosen, sizes = {*tied, *tied.values()}, {}, [0, 0]
    for name, stored in found.items():
        path, layer = name.rpartition(".")[0], stored.layer
        module, device = model.get_submodule(path), _device_of(path, device_map)
        why = obstacle(module, name in shared) if device is not None else "offloaded"
        if why is not None or device is None:
            chosen[name.removesuffix(_WEIGHT)] = f"{DENSE}{why}"
            continue
        parts = _empty(stored, module.weight)
        verdict = wanted(runtime, layer, held_bytes(parts), module.weight.dtype, device)
        chosen[path] = said(verdict)
        if verdict.faster:
            sizes = [sizes[0] + held_bytes(parts), sizes[1] + module.weight.nbytes]
            model.set_submodule(path, packed_linear(module, layer, parts))
    tell(runtime, chosen, *sizes)
    return chosen


def _device_of(path: str, device_map: Any) -> torch.device | None:
    """Where a module will be; None where accelerate brings it from elsewhere for every call.

    Args:
        path: the module's name.
        device_map: as the caller or transformers gave it; a strategy such as "auto" fills the accelerator first.
    """
    if not isinstance(device_map, Mapping):
        return default_device() if isinstance(device_map, str) else torch.device("cpu")
    fitting = [name for name in device_map if not name or path == name or path.startswith(f"{name}.")]
    place = device_map[max(fitting, key=len)] if fitting else "cpu"
    accelerated = any(str(other) not in ("cpu", "disk") for other in device_map.values())
    if place == "disk" or (accelerated and str(place) == "cpu"):
        return None
    return torch.device("cuda", place) if isinstance(place, int) else torch.device(place)


def _empty(packed: _Found, weight: nn.Parameter) -> dict[str, torch.Tensor]:
    """Packed tensors to load into, by their suffixes: on the weight's device, values in its dtype."""
    with safe_open(packed.path, "pt") as file:
        stored = packed.layer.parts(
            packed.stored, {name: file.get_tensor(name) for name in packed.layer.names(packed.stored)}
        )
    return {
        suffix: torch.empty_like(part, dtype=weight.dtype if part.is_floating_point() else None, device=weight.device)
        for suffix, part in stored.items()
    }
