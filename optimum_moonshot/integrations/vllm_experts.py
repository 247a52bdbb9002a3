"""Packed experts in vLLM: its fused layers load dense weights, and pack them when they are complete."""

from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe.activation import MoEActivation, apply_moe_activation
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from ..runtime.packed_layers import apply_routed, dense_grouped
from ..runtime.packed_module import packed_parts
from .vllm_linear import PackingMethod, Tally

_UP, _DOWN = "w13_weight", "w2_weight"  # [experts, out, in], gates and up-projections joined along the rows
# The activations that vLLM computes on every device outside of its fused kernels.
_ACTIVATIONS = {"silu", "gelu", "gelu_tanh", "silu_no_mul", "gelu_no_mul", "gelu_tanh_no_mul", "relu2_no_mul"}


class PackedExpertsMethod(PackingMethod, FusedMoEMethodBase):
    """The quantization method of a layer of experts: packs the matrices of all experts as one stack per weight.

    If no weight is smaller when packed, or if only the fused kernels of vLLM compute the layer's activation, the
    weights stay dense and these kernels multiply them.
    """

    def __init__(self, moe: Any, prefix: str, tally: Tally):
        super().__init__(moe)
        self.dense = UnquantizedFusedMoEMethod(moe)
        self.set_up(prefix, tally)

    @property
    def is_monolithic(self) -> bool:
        """Whether the kernel of vLLM also routes the tokens."""
        return not self.packed and bool(self.dense.is_monolithic)

    def maybe_roundup_sizes(self, *args: Any, **options: Any) -> tuple[int, int]:
        """Return the sizes of the dense layer."""
        sizes: tuple[int, int] = self.dense.maybe_roundup_sizes(*args, **options)
        return sizes

    def get_fused_moe_quant_config(self, layer: Any) -> Any:
        """Return the configuration of the dense layer."""
        return self.dense.get_fused_moe_quant_config(layer)

    def count_weights(self, layer: Any) -> int:
        return int(get_layerwise_info(layer).load_numel_total)

    def pack(self, layer: Any) -> None:
        sizes = {weight: getattr(layer, weight).nbytes for weight in (_UP, _DOWN)}
        packed_bytes = 0
        if layer.activation.value in _ACTIVATIONS and layer.swiglu_limit is None:
            for weight in sizes:
                matrices = layer.get_parameter(weight).data.flatten(0, 1)
                packed_bytes += self.pack_weight(layer, weight, matrices, f"{self.prefix}.{weight}")
        self.tally.add(sum(sizes.values()), packed_bytes if self.packed else None)
        if not self.packed:
            self.dense.process_weights_after_loading(layer)
            self.moe_kernel, self.moe_quant_config = self.dense.moe_kernel, self.dense.moe_quant_config

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any,
        shared_experts_input: Tensor | None,
    ) -> Any:
        if not self.packed:
            return self.dense.apply(layer, x, topk_weights, topk_ids, shared_experts, shared_experts_input)
        index, weights, count = topk_ids, topk_weights, layer.local_num_experts
        if layer.expert_map is not None:  # −1 for the experts of other processes
            index = layer.expert_map[index.long()]
            index = index.masked_fill(index < 0, count)
        if layer.apply_router_weight_on_input:  # for one expert per token
            x, weights = (x * weights).to(x.dtype), torch.ones_like(weights)

        def compute(inputs: Tensor, counts: Tensor, experts: Tensor) -> Tensor:
            up = self._product(layer, _UP, inputs, counts, experts)
            activation: MoEActivation = layer.activation
            inner = up.new_empty(len(up), up.shape[1] // (2 if activation.is_gated else 1))
            apply_moe_activation(activation, inner, up)
            return self._product(layer, _DOWN, inner, counts, experts)

        return apply_routed(compute, x, index, weights, count)

    def _product(self, layer: Any, weight: str, inputs: Tensor, counts: Tensor, experts: Tensor) -> Tensor:
        if weight in self.packed:
            codec, shape = self.packed[weight]
            outputs = codec.grouped(inputs, counts, packed_parts(layer, codec, weight), shape, self.plans[weight])
        else:
            outputs = dense_grouped(inputs, counts, getattr(layer, weight))
        bias = getattr(layer, weight.replace("weight", "bias"), None)
        return outputs if bias is None else outputs + bias[experts]
