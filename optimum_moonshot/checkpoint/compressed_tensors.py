"""Write quantized models in the format "pack-quantized" of compressed-tensors, which vLLM and transformers read.

``X.weight`` of a linear layer becomes ``X.weight_packed``, ``X.weight_scale`` and ``X.weight_shape`` in the files of a
dense checkpoint. A packed weight has rows of int32 words with the codes plus 2^(bits-1), low bits first. It has no zero
points: a pruned weight is the code 0. ``quantization_config`` in config.json has the bits, the group size and the
layers that are dense.
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import error_context, require
from ..model.layer_kinds import expert_parameters
from ..objective.grid import Grid
from ..objective.linalg import CPU_BYTES, slices_within
from ..packing import Quantized
from .folder import Checkpoint
from .packed_files import pruned_layers, rewrite
from .weight_files import EXPORT, Layers, Tensors, merged_weights, parameter_names, read_header

_BITS = (8, 4)
# vLLM's kernels for GPUs support groups of 128, 64 and 32 inputs; larger groups are written as several equal ones.
_LARGEST, _SMALLEST = 128, 32
_WEIGHT = ".weight"
WORDS, BESIDE = "_packed", ("_scale", "_shape")  # suffixes of the tensors of a weight
_log = logging.getLogger(__name__)

Shapes = Mapping[str, tuple[int, ...]]  # of the tensors in the files, by name


class _Weight(NamedTuple):
    """A weight in the files."""

    module: str  # the module that it is loaded into; for single experts, the fused parameter
    expert: bool
    d_in: int
    grid: Grid | None
    reason: str  # why it stays dense; "" if it is packed


@dataclass(frozen=True)
class Export:
    """The weights to pack in the files of a dense checkpoint, and the layers that stay dense."""

    packed: Mapping[str, tuple[str, Grid]]  # weight in the files → the module that it is loaded into, its grid
    groups: Mapping[int, int]  # bits → inputs that share a scale in the files
    ignore: tuple[str, ...]  # dense modules, by their names in the files and in the model

    @classmethod
    def of(cls, model: nn.Module, shapes: Shapes, grids: Mapping[str, Grid]) -> "Export":
        """Choose the weights to pack; log messages name the quantized layers that stay dense, with the reason.

        Args:
            model: may be on the meta device.
            shapes: of the tensors in the files.
            grids: parameter of the model → its grid.

        Raises:
            MoonshotError: no layer can be packed, or not all experts.
        """
        weights = _weights(model, shapes, grids)
        stored = weights.values()
        reasons = {weight.module: weight.reason for weight in stored if weight.grid is not None and weight.reason}
        present = {weight.module for weight in stored}
        tied = (name.removesuffix(_WEIGHT) for name in grids)
        reasons |= {name: "its weight is not stored under its name" for name in tied if name not in present}
        on_grid = {name: weight for name, weight in weights.items() if not weight.reason}
        packed = {name: (weight.module, weight.grid) for name, weight in on_grid.items() if weight.grid}
        listed = "; ".join(f"{name}: {reason}" for name, reason in list(reasons.items())[:3])
        require(bool(packed), f"no layer can be packed: {listed}", field="format", value=EXPORT, hint='use "packed"')
        sizes: dict[int, list[int]] = {}
        for name, (_, grid) in packed.items():
            sizes.setdefault(grid.bits, [_LARGEST]).extend((grid.group, weights[name].d_in))
        for weight in stored:
            reason = weight.reason or ("the model has layers of different bits" if len(sizes) > 1 else "")
            with error_context(weight.module):
                message = f"{reason}; transformers reads experts only if all are packed, like all other layers"
                require(not (weight.expert and reason), message, field="format", value=EXPORT, hint='use "packed"')
        for name, reason in reasons.items():
            _log.warning("%s stays dense: %s", name, reason)
        groups = {bits: math.gcd(*numbers) for bits, numbers in sizes.items()}
        quantized = {module for module, _ in packed.values()}
        linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
        dense = [name.removesuffix(_WEIGHT) for name in weights if name not in packed]
        return cls(packed, groups, tuple(dict.fromkeys(name for name in (*dense, *linear) if name not in quantized)))

    def pack(self, name: str, weight: Tensor) -> Tensors:
        """The tensors of a weight [d_out, d_in]; `MoonshotError` if it is not on its grid."""
        module, grid = self.packed[name]
        grid = replace(grid, dtype=weight.dtype)
        with error_context(module):
            scale = grid.scales_of(weight)
        group, d_in = self.groups[grid.bits], weight.shape[1]
        words = torch.empty(len(weight), d_in * grid.bits // 32, dtype=torch.int32)
        for rows in slices_within(slice(0, len(weight)), 16 * d_in, CPU_BYTES):
            codes = grid.codes(weight[rows], grid.per_weight(scale[rows], d_in)).add_(grid.zero_point).to(torch.uint8)
            if grid.bits == 4:
                codes = codes[:, ::2] | codes[:, 1::2] << 4
            words[rows] = codes.contiguous().view(torch.int32)
        scale = scale.repeat_interleave(grid.group // group, 1)[:, : d_in // group].contiguous()
        tensors = (words, scale, torch.tensor(weight.shape))
        return {name + suffix: tensor for suffix, tensor in zip((WORDS, *BESIDE), tensors, strict=True)}

    def config_entry(self) -> dict[str, Any]:
        """`quantization_config`; without a `sparsity_config` for the zeros, which vLLM refuses."""
        return {
            "quant_method": EXPORT,
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": {f"group_{number}": self._group(bits) for number, bits in enumerate(sorted(self.groups))},
            "ignore": list(self.ignore),
        }

    def _group(self, bits: int) -> dict[str, Any]:
        """The scheme of all layers with these bits; it targets every linear layer if there are no others."""
        layers = [(name, module) for name, (module, grid) in self.packed.items() if grid.bits == bits]
        names = dict.fromkeys(name.removesuffix(_WEIGHT) for layer in layers for name in layer)
        weights = {"num_bits": bits, "type": "int", "symmetric": True, "dynamic": False, "actorder": None}
        return {
            "targets": ["Linear"] if len(self.groups) == 1 else list(names),
            "weights": {**weights, "strategy": "group", "group_size": self.groups[bits]},
            "input_activations": None,
            "output_activations": None,
        }


def _weights(model: nn.Module, shapes: Shapes, grids: Mapping[str, Grid]) -> dict[str, _Weight]:
    """All weights of layers in the files, by name, except embeddings."""
    names, merged, modules = parameter_names(model, shapes), merged_weights(model, shapes), dict(model.named_modules())
    experts = {f"{name}.{key}" for name, module in modules.items() for key in expert_parameters(module)}
    weights = {}
    for stored, shape in shapes.items():
        target = merged.get(stored)
        parameter = target.weight if target else names.get(stored, stored)
        layer, expert, reason = parameter.removesuffix(_WEIGHT), parameter in experts, ""
        module = modules.get(layer)
        if len(shape) < 2 or isinstance(module, nn.Embedding) or not (expert or stored.endswith(_WEIGHT)):
            continue
        if parameter not in grids:
            reason = "it is not quantized"
        elif expert and not (
            len(shape) == 2 and stored.endswith(_WEIGHT) and target and target.keeps_rows(model, shape)
        ):
            reason = "its experts are not stored as linear layers"
        elif not expert and not isinstance(module, nn.Linear):
            reason = f"it is not a Linear: {type(module).__name__}"
        elif shape[1] % _SMALLEST:
            reason = f"its {shape[1]} inputs are not a multiple of {_SMALLEST}"
        weights[stored] = _Weight(layer, expert, shape[1], grids.get(parameter), reason)
    return weights


def unpack_words(tensors: Tensors) -> tuple[Tensor, int]:
    """A weight [d_out, d_in] and its bits, from its tensors by suffix; the inverse of `Export.pack`."""
    words, scale, shape = (tensors[suffix] for suffix in (WORDS, *BESIDE))
    d_out, d_in = shape.tolist()
    bits, rest = divmod(32 * words.shape[1], d_in)
    supported = words.dtype == torch.int32 and bits in _BITS and rest == 0 and d_in % scale.shape[1] == 0
    require(supported, f"it is stored as {list(words.shape)} words for {d_out}×{d_in} weights: not supported")
    codes = (words[..., None] >> torch.arange(0, 32, bits, dtype=torch.int32) & 2**bits - 1) - 2 ** (bits - 1)
    return codes.flatten(1) * scale.repeat_interleave(d_in // scale.shape[1], 1), bits


def quantized_grids(model: nn.Module) -> dict[str, Grid]:
    """The grid of every quantized parameter, by the model's record; `MoonshotError` if this format supports none."""
    codecs = {name: layer.codec for name, layer in pruned_layers(model).items()}
    grids = {name: codec.grid(torch.float32) for name, codec in codecs.items() if isinstance(codec, Quantized)}
    require(bool(grids), "the model is not quantized", field="format", value=EXPORT, hint="prune it with bits=8 or 4")
    for name, grid in grids.items():
        with error_context(name.removesuffix(_WEIGHT)):
            message = f"{EXPORT} has 8 or 4 bits"
            require(grid.bits in _BITS, message, field="bits", value=grid.bits, hint='use format="packed"')
    return grids


def export_files(source: Path, target: Path, model: nn.Module) -> None:
    """Write the weight files, index and config.json for a dense checkpoint, with one file in memory at a time.

    Args:
        source: folder of the dense checkpoint.
        target: existing folder; may be the same.
        model: of the checkpoint, with its record; may be on the meta device.

    Raises:
        MoonshotError: like `quantized_grids` and `Export.of`, or for a weight that is no longer on its grid.
    """
    grids, checkpoint = quantized_grids(model), Checkpoint(source)
    shapes = {name: shape for path in checkpoint.files for name, shape in read_header(path).shapes.items()}
    export = Export.of(model, shapes, grids)

    def change(tensors: Tensors, layers: Layers) -> tuple[Tensors, Layers]:
        for name in tensors.keys() & export.packed.keys():
            tensors |= export.pack(name, tensors.pop(name))
        return tensors, layers

    rewrite(checkpoint, target, change, packed=False, entry=export.config_entry())
