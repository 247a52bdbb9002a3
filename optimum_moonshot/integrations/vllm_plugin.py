"""The plugin for serving packed checkpoints with vLLM, an entry point in `vllm.general_plugins`.

vLLM calls `register` in each of its processes, before it reads a model. The loader is imported only for packed
checkpoints; others are unaffected.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase

from ..checkpoint.weight_files import METHOD, check_config_entry
from ..errors import check_choice, error_context, require
from ..packing import INPUTS
from ..reports.record import PruningRecord

if TYPE_CHECKING:
    from .vllm_linear import Tally

_EXPERTS = "RoutedExperts"  # vLLM's layer of fused experts


class MoonshotQuantization(QuantizationConfig):
    """The `quantization_config` of a packed checkpoint, or of a dense one with `quantization="moonshot"`."""

    def __init__(self) -> None:
        super().__init__()
        self.tallies: dict[str, Tally] = {}  # by kind of layer

    @classmethod
    def get_name(cls) -> str:
        return METHOD

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "MoonshotQuantization":
        """Read the entry in config.json; raise `MoonshotError` if this release cannot read it."""
        check_config_entry(config)
        return cls()

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Return the method of a linear layer or of experts named `prefix`; None for other layers, which stay dense."""
        from vllm.model_executor.layers.linear import LinearBase

        from .vllm_linear import PackedLinearMethod, unpack_while_loading

        unpack_while_loading()
        if isinstance(layer, LinearBase):
            return PackedLinearMethod(prefix, self._tally("linear layers"))
        if type(layer).__name__ == _EXPERTS:
            from .vllm_experts import PackedExpertsMethod

            return PackedExpertsMethod(layer.moe_config, prefix, self._tally("layers of experts"))
        return None

    def _tally(self, kind: str) -> "Tally":
        from .vllm_linear import Tally

        if kind not in self.tallies:
            config = get_current_vllm_config()
            record = PruningRecord.read(config.model_config.hf_config)
            grids = () if record is None else record.grids
            self.tallies[kind] = Tally(kind, grids, _inputs(config.additional_config))
        return self.tallies[kind]


def _inputs(additional_config: Any) -> str:
    """Return the inputs of products with integer codes, one of `INPUTS`, from vLLM's option for other packages."""
    options = additional_config.get(METHOD, {}) if isinstance(additional_config, Mapping) else {}
    with error_context(f"additional_config: {METHOD}"):
        valid = isinstance(options, Mapping) and set(options) <= {"inputs"}
        require(valid, f'{options!r}: give {{"inputs": "{INPUTS[0]}"}} or {{"inputs": "{INPUTS[1]}"}}')
        inputs: str = options.get("inputs", INPUTS[0])
        check_choice("inputs", inputs, INPUTS)
    return inputs


def register() -> None:
    """Register the `quant_method` "moonshot" with vLLM; idempotent."""
    register_quantization_config(METHOD)(MoonshotQuantization)
