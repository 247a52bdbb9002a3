"""What transformers calls: packed checkpoints through `from_pretrained`, and pruning while loading.

Registered under "moonshot" by registration.py. Both ways the model that comes back is an ordinary dense one, with no
quantizer attached; only `load_pruned(runtime="packed")` leaves one.
"""

import logging
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..checkpoint import META, METHOD, PACKED, check_version, packed_layers
from ..config import MoonshotConfig
from ..errors import require
from ..packing import PackedLinear

_log = logging.getLogger(__name__)


class MoonshotPrunedCheckpoint(QuantizationConfigMixin):
    """`quantization_config` of a packed checkpoint. transformers names this class in the error for a `MoonshotConfig`
    that is given for a model that is pruned already."""

    quant_method = METHOD

    def __init__(self, format: str, version: int, runtime: str = "dense", quant_method: str = METHOD):
        self.format, self.version, self.runtime, self.quant_method = format, version, runtime, quant_method
        check_version({"format": format, "version": version})

    def to_dict(self) -> dict[str, Any]:
        return {"quant_method": self.quant_method, "format": self.format, "version": self.version}


class MoonshotQuantizer(HfQuantizer):
    """Unpacks a packed checkpoint, or prunes a dense one with a `MoonshotConfig`; then lets go of the model."""

    requires_calibration = False
    # "weight" too: all of a model's weights pass through the converter, which leaves plain ones as they are.
    serialized_names = {"weight": ["weight", "weight" + PACKED, "weight" + META]}

    def __init__(self, quantization_config: MoonshotPrunedCheckpoint | MoonshotConfig, **kwargs: Any):
        super().__init__(quantization_config, **kwargs)
        self.runtime = getattr(quantization_config, "runtime", "dense")
        self.processors: tuple[Any, Any] = (None, None)

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        if isinstance(self.quantization_config, MoonshotConfig):
            inference = torch.is_inference_mode_enabled()
            require(not inference, "torch.inference_mode() forbids gradients: load and prune outside of it")
            places = device_map.values() if isinstance(device_map, dict) else ()
            require("disk" not in places, "device_map: a model to prune must not be offloaded to disk")

    def _process_model_before_weight_loading(
        self, model: nn.Module, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> None:
        if isinstance(self.quantization_config, MoonshotConfig):
            self._prepare_pruning(model)
        elif self.runtime == "packed":
            _keep_packed(model, checkpoint_files or [])

    def _process_model_after_weight_loading(self, model: nn.Module, **kwargs: Any) -> None:
        from transformers import PreTrainedModel

        from .conversion import is_ours

        # Saving would reverse it; what is saved is dense.
        model._weight_conversions = [entry for entry in model._weight_conversions if not is_ours(entry)]
        if self.runtime == "packed":
            return
        self.remove_quantization_config(model)
        for module in model.modules():
            if isinstance(module, PreTrainedModel):
                module.config.__dict__.pop("_is_quantized", None)
        if isinstance(self.quantization_config, MoonshotConfig):
            self._prune(model)

    def _prepare_pruning(self, model: nn.Module) -> None:
        from ..pruner import load_processor, load_tokenizer

        run = getattr(model.config, "moonshot", None)
        require(run is None, f"quantization_config: {model.name_or_path} is pruned already; load it without one")
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

    def get_load_operations(self) -> dict[str, type]:
        from .conversion import Unpack  # transformers' loader is imported after its quantizers

        return {"deserialize": Unpack}

    def is_serializable(self) -> bool:
        _log.warning('a model loaded with runtime="packed" is not saved again: copy or convert the folder it came from')
        return False

    @property
    def is_trainable(self) -> bool:
        return False


def _keep_packed(model: nn.Module, files: list[str]) -> None:
    """Put a `PackedLinear` wherever the files hold a packed Linear; tied and other weights become dense."""
    tied = getattr(model, "all_tied_weights_keys", {})
    shared = {*tied, *tied.values()}
    for path in files:
        with safe_open(path, "pt") as file:
            for name, layer in packed_layers(file.metadata() or {})[0].items():
                parent, _, child = name.removesuffix(".weight").rpartition(".")
                module = model.get_submodule(parent).get_submodule(child)
                if isinstance(module, nn.Linear | Conv1D) and name not in shared:
                    values = tuple(file.get_slice(name + PACKED).get_shape())
                    packed = PackedLinear(layer.matrix, values, module.bias, module.weight.dtype)
                    setattr(model.get_submodule(parent), child, packed)
