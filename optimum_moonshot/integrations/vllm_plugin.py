"""The plugin by which vLLM serves packed checkpoints: an entry point `vllm.general_plugins`.

vLLM calls `register` in each of its processes, before it looks at a model. What loads a model is imported when a packed
checkpoint is there: for others nothing changes.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase

from ..checkpoint.packed_format import METHOD, check_config_entry

if TYPE_CHECKING:
    from .vllm_linear import Tally


_EXPERTS = ("FusedMoE", "RoutedExperts")  # vLLM's layers of fused experts, in earlier releases and in later ones


class MoonshotQuantization(QuantizationConfig):
    """`quantization_config` of a packed checkpoint, or what `quantization="moonshot"` makes of a dense one."""

    def __init__(self) -> None:
        super().__init__()
        self.tally: Tally | None = None

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
        """From what config.json has.

        Raises:
            MoonshotError: a version that this release does not read, or an unknown field.
        """
        check_config_entry(config)
        return cls()

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """How a layer is loaded and multiplied by; embeddings and fused experts are dense, as vLLM has them.

        Args:
            layer: of the model that is being made.
            prefix: its name.
        """
        from vllm.model_executor.layers.linear import LinearBase

        from .vllm_linear import PackedLinearMethod, Tally
        from .vllm_loading import unpack_while_loading

        unpack_while_loading()
        self.tally = self.tally or Tally()
        if not isinstance(layer, LinearBase):
            self.tally.experts += type(layer).__name__ in _EXPERTS
            return None
        return PackedLinearMethod(prefix, self.tally)


def register() -> None:
    """Tell vLLM about `quant_method` "moonshot"; again is harmless."""
    register_quantization_config(METHOD)(MoonshotQuantization)
