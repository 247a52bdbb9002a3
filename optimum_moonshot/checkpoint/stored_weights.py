"""Find the zeros in the weights of a checkpoint's files, written by this package or by another tool.

The supported representations of a weight ``X.weight``, besides dense and packed ones:

- integers: ``X.weight`` with ``X.weight_zero_point`` or without (round-to-nearest, bitsandbytes' 8 bits,
  compressed-tensors);
- torchao: ``X._weight_qdata`` with ``X._weight_zero_point`` or without;
- bitsandbytes' 4 bits: two indices into a code book per byte, ``X.weight`` with ``X.weight.quant_map`` and
  ``X.weight.quant_state…``;
- compressed-tensors' packed integers without zero points: ``X.weight_packed`` with ``X.weight_shape``.
"""

import json
import re
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import MoonshotError, require
from ..packing import PackedLayer, weight_of
from .weight_files import StoredTensors, dtype_name

# Names of auxiliary tensors of quantized weights. Longer suffixes first: a name is cut once.
_BESIDE = re.compile(
    r"(_zero_point|_scale_inv|_scale|_shape|_g_idx|_global_scale|_format"
    r"|\.(nested_)?(absmax|quant_map)|\.quant_state\.bitsandbytes__\w+)$"
)
_BESIDE_MODULE = re.compile(r"(^|\.)(SCB|qzeros|scales|g_idx|(input|k|v|output)_scale|input_zero_point)$")
_TORCHAO, _STATE = "_weight_qdata", ".quant_state.bitsandbytes__"
_WORDS = "_packed"  # compressed-tensors' integers, several in an int32, with a `_shape`


class Zeros(NamedTuple):
    """The zeros of a weight."""

    mask: Tensor  # bool, True at zeros, in the layout of the dense weight
    stored: str  # representation of the weight, for messages
    weight: Tensor | None = None  # the dense weight; None if another tool has quantized it
    bytes: int | None = None  # of its tensors in the files; None likewise
    format: str | None = None  # of a packed weight


class StoredWeights:
    """The weights among the tensors in the files of a checkpoint."""

    def __init__(self, tensors: StoredTensors):
        self.tensors = tensors

    def names(self) -> list[str]:
        """The dense names of all weights, sorted by the names in the files."""
        names = (self._dense_name(name) for name in sorted(self.tensors))
        return list(dict.fromkeys(name for name in names if name is not None))

    def _dense_name(self, stored: str) -> str | None:
        """The weight that a tensor belongs to; None for auxiliary tensors, and for tensors that are not weights."""
        module, _, last = stored.rpartition(".")
        if weight_of(stored) in self.tensors.layers:
            return weight_of(stored)
        if last.startswith("_weight_"):
            return f"{module}.weight" if last == _TORCHAO else None
        if last == "qweight":
            return f"{module}.weight"
        if last == f"weight{_WORDS}":
            return stored.removesuffix(_WORDS)
        if self._is_auxiliary(stored):
            return None
        integers = not self.tensors.dtype(stored).startswith(("F", "BF"))
        return None if integers and not stored.endswith("weight") else stored

    def _is_auxiliary(self, stored: str) -> bool:
        owner, cut = _BESIDE.subn("", stored)
        if cut and (owner in self.tensors or owner + _WORDS in self.tensors):
            return True
        if not _BESIDE_MODULE.search(stored):
            return False
        module = stored.rpartition(".")[0]
        return any(f"{module}.{name}" in self.tensors for name in ("weight", f"weight{_WORDS}", "qweight", _TORCHAO))

    def zeros(self, weight: str) -> Zeros:
        """Find the zeros of a weight; `MoonshotError` if its representation is not supported."""
        module = weight.removesuffix("weight")
        state = next((name for name in self.tensors if name.startswith(weight + _STATE)), None)
        if weight in self.tensors.layers:
            layer = self.tensors.layers[weight]
            parts = {name: self.tensors[name] for name in layer.names(weight) if name in self.tensors}
            dense = layer.unpack(weight, parts)
            size = sum(part.nbytes for part in parts.values())
            kind = layer.dtype if layer.format == PackedLayer.format else f"{layer.format}, {layer.dtype}"
            return Zeros(dense == 0, f"packed {kind}", dense, size, layer.format)
        if module + _TORCHAO in self.tensors:
            return self._whole(module + _TORCHAO, f"{module}_weight_zero_point", "torchao ")
        if state is not None:
            return self._four_bits(weight, state)
        if weight + _WORDS in self.tensors:
            return self._compressed(weight)
        if weight in self.tensors:
            return self._whole(weight, f"{weight}_zero_point")
        tensors = ", ".join(sorted(name.removeprefix(module) for name in self.tensors if name.startswith(module)))
        raise MoonshotError(f"it is stored as {tensors}, in which its zeros cannot be determined")

    def _whole(self, name: str, zero_point: str, by: str = "") -> Zeros:
        """Floating-point numbers, or integers for which the zero point means 0."""
        tensor = self.tensors[name]
        kind = f"{by}{dtype_name(tensor.dtype)}"
        if tensor.dtype.is_floating_point and tensor.itemsize > 1:
            return Zeros(tensor == 0, kind, tensor, tensor.nbytes)
        if tensor.dtype.is_floating_point or zero_point not in self.tensors:
            return Zeros(tensor.to(torch.float32) == 0 if tensor.itemsize == 1 else tensor == 0, kind)
        points = self.tensors[zero_point]
        fits = points.ndim == tensor.ndim == 2 and all(
            size % count == 0 for size, count in zip(tensor.shape, points.shape, strict=True)
        )
        require(fits or points.numel() == 1, f"{zero_point} has shape {list(points.shape)}, which fits no weight")
        for dim in range(tensor.ndim if points.numel() > 1 else 0):
            points = points.repeat_interleave(tensor.shape[dim] // points.shape[dim], dim)
        return Zeros(tensor == points, f"{kind} with zero points")

    def _four_bits(self, weight: str, state: str) -> Zeros:
        packed, codes = self.tensors[weight].flatten(), self.tensors[f"{weight}.quant_map"]
        shape = json.loads(bytes(self.tensors[state].tolist()).decode())["shape"]
        numbers = torch.stack((packed >> 4, packed & 15), 1).flatten()[: torch.Size(shape).numel()]
        return Zeros((codes == 0)[numbers.long()].view(shape), f"bitsandbytes {state.rpartition('__')[2]}")

    def _compressed(self, weight: str) -> Zeros:
        packed, shape = self.tensors[weight + _WORDS], self.tensors[f"{weight}_shape"].tolist()
        with_points = f"{weight}_zero_point" in self.tensors
        require(not with_points, "its zero points are packed, so that its zeros cannot be determined")
        per_word = -(-shape[1] // packed.shape[1])
        supported = 32 % per_word == 0 and packed.dtype == torch.int32
        require(supported, f"{per_word} numbers in {packed.dtype}: not supported")
        bits = 32 // per_word
        numbers = (packed[..., None] >> torch.arange(0, 32, bits, dtype=torch.int32)) & (2**bits - 1)
        return Zeros(numbers.flatten(1)[:, : shape[1]] == 2 ** (bits - 1), f"compressed-tensors int{bits}")
