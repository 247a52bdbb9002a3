"""Linear layers of vLLM with weights packed in memory."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import get_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.linear import LinearMethodBase, UnquantizedLinearMethod
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info, initialize_online_processing

from ..devices import trim_host_memory
from ..errors import naming, require
from ..packing import Codec
from ..runtime.packed_linear import held_parts
from ..runtime.smallest import pack_if_smaller

_log = init_logger(f"vllm.{__name__}")  # vLLM shows only the loggers below its own
_WEIGHT = "weight"
_DONE = "_already_called_process_weights_after_loading"  # vLLM removes it when it reloads a layer


@dataclass
class Tally:
    """Counts of a model's linear layers, for one line in vLLM's log."""

    packed: int = 0
    dense: int = 0
    experts: int = 0  # layers of fused experts, which stay dense for vLLM's kernels
    bytes: int = 0  # of the weights in memory
    dense_bytes: int = 0  # of the same weights, dense
    reported: bool = False

    def add(self, dense_bytes: int, packed_bytes: int | None = None) -> None:
        """Count a layer.

        Args:
            dense_bytes: of its dense weight.
            packed_bytes: of its packed weight; None if it stays dense.
        """
        self.packed += packed_bytes is not None
        self.dense += packed_bytes is None
        self.bytes += dense_bytes if packed_bytes is None else packed_bytes
        self.dense_bytes += dense_bytes

    def report(self) -> None:
        """Log the counts once after loading, and release unused host memory."""
        if not self.reported:
            self.reported = True
            trim_host_memory()
            sizes = f"{self.bytes / 2**20:.1f} MiB in place of {self.dense_bytes / 2**20:.1f}"
            _log.info("%d linear layers are packed in memory, %d dense: %s", self.packed, self.dense, sizes)
            if self.experts:
                _log.info("the experts of %d layers are dense in memory, for vLLM's kernels", self.experts)


class PackedLinearMethod(LinearMethodBase):
    """Loads the weight of a linear layer as a dense one, and packs it as soon as it is complete.

    vLLM allocates the dense weight when all of its parts have been read, as for weights that it quantizes online. Each
    process packs its shard. A weight that is not smaller when packed stays dense.

    Args:
        prefix: the layer's name in the model.
        tally: counts the layer.
    """

    uses_meta_device = True

    def __init__(self, prefix: str, tally: Tally):
        self.dense = UnquantizedLinearMethod()
        self.prefix = prefix
        self.tally = tally
        self.random = get_current_vllm_config().load_config.load_format == "dummy"
        self.codec: Codec | None = None  # None if the weight is dense
        self.shape = (0, 0)
        self.plan: Any = None

    def create_weights(self, layer: nn.Module, *sizes: Any, **attributes: Any) -> None:
        with torch.device("meta"):
            self.dense.create_weights(layer, *sizes, **attributes)
        initialize_online_processing(layer)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Pack the weight; vLLM calls this when the layer is complete, and again when all layers are.

        Args:
            layer: with its dense weight [d_out, d_in].

        Raises:
            MoonshotError: parts of the weight were not in the files, or it was packed before.
        """
        if getattr(layer, _DONE, False):
            self.tally.report()
            return
        setattr(layer, _DONE, True)
        with naming(self.prefix):  # a captured graph keeps the old plan
            require(self.codec is None, "it is packed and cannot be reloaded", hint="create a new engine")
        weight = layer.weight
        read = get_layerwise_info(layer).load_numel
        complete = self.random or read >= weight.numel()
        with naming(self.prefix):
            require(complete, f"only {read} of its {weight.numel()} weights were read from the files")
        packed = pack_if_smaller(weight.data) if weight.ndim == 2 else None
        self.codec = None if packed is None else packed.codec
        if packed is None:
            self.tally.add(weight.nbytes)
            self.dense.process_weights_after_loading(layer)
            return
        self.shape = (weight.shape[0], weight.shape[1])
        del layer.weight
        for suffix, name in packed.codec.names(_WEIGHT).items():
            part = packed.parts[suffix].to(weight.device)
            layer.register_parameter(name, nn.Parameter(part, requires_grad=False))
        parts = held_parts(layer, packed.codec)
        self.plan = packed.codec.plan(parts, self.shape)
        self.tally.add(weight.nbytes, sum(part.nbytes for part in parts.values()))

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """[..., d_in] → [..., d_out].

        Args:
            layer: after `process_weights_after_loading`.
            x: [..., d_in].
            bias: [d_out], or None.
        """
        if self.codec is None:
            return self.dense.apply(layer, x, bias)
        return self.codec.linear(x, held_parts(layer, self.codec), self.shape, bias, self.plan)
