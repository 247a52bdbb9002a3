"""Quantized linear layers of torch and torchao, which the benchmarks compare with packed ones; groups of 128 inputs.

"torch int4pack" and "torch int8pack" call torch's kernels directly. "torchao …" are the layers of
`torchao.quantization.quantize_`, which is optional (`pip install torchao --no-deps`; torchao 0.18 for torch 2.13).
"""

import logging
import warnings
from collections.abc import Iterable

import torch
from torch import Tensor, nn

GROUP = 128
for _name in ("torchao", "torch.utils._pytree"):  # warnings of torchao's import
    logging.getLogger(_name).setLevel(logging.ERROR)


class Int4(nn.Module):
    """torch's product with 4 bits per weight."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        blocks = linear.weight.detach().float().unflatten(1, (-1, GROUP))
        scale = blocks.abs().amax(-1, keepdim=True) / 7
        codes = (blocks / scale).round().clamp(-7, 7).add(8).flatten(1).int()
        if codes.is_cuda:
            pairs = (codes[:, ::2] << 4 | codes[:, 1::2]).to(torch.uint8)
            packed = torch.ops.aten._convert_weight_to_int4pack(pairs, 8)
            self.multiply = torch.ops.aten._weight_int4pack_mm
        else:
            packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
            self.multiply = torch.ops.aten._weight_int4pack_mm_for_cpu
        self.register_buffer("codes", packed)
        scale = scale[..., 0].T.to(linear.weight.dtype)
        self.register_buffer("scale", torch.stack([scale, torch.zeros_like(scale)], -1).contiguous())

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        outputs = self.multiply(flat, self.codes, GROUP, self.scale)
        return outputs.view(*x.shape[:-1], -1)


class Int8(nn.Module):
    """torch's product with 8 bits per weight and a scale per row."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        weight = linear.weight.detach().float()
        scale = weight.abs().amax(1) / 127
        self.register_buffer("codes", (weight / scale[:, None]).round().to(torch.int8))
        self.register_buffer("scale", scale.to(linear.weight.dtype))

    def forward(self, x: Tensor) -> Tensor:
        outputs = torch.ops.aten._weight_int8pack_mm(x.reshape(-1, x.shape[-1]), self.codes, self.scale)
        return outputs.view(*x.shape[:-1], -1)


def _torchao(name: str):
    """The configuration of a layer of torchao; it has its layout of 4 bits for CPUs among its prototypes."""
    from torchao import quantization as ao

    if name == "torchao int8":
        return ao.Int8WeightOnlyConfig(set_inductor_config=False)
    if name == "torchao int8 dynamic":
        return ao.Int8DynamicActivationInt8WeightConfig(set_inductor_config=False)
    from torchao.prototype.quantization import int4

    if name == "torchao int4":
        return int4.PrototypeInt4WeightOnlyConfig(group_size=GROUP, set_inductor_config=False)
    return int4.Int8DynamicActivationInt4WeightConfig(group_size=GROUP, set_inductor_config=False)


TORCH = {"torch int4pack": Int4, "torch int8pack": Int8}
ALTERNATIVES = (*TORCH, "torchao int4", "torchao int4 dynamic", "torchao int8", "torchao int8 dynamic")


@torch.no_grad()
def converted(name: str, linear: nn.Linear) -> nn.Module:
    """An alternative in place of a linear layer without a bias, which may be changed."""
    if name in TORCH:
        return TORCH[name](linear)
    from torchao.quantization import quantize_

    holder = nn.Sequential(linear)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantize_(holder, _torchao(name))
    return holder[0]


def convert_layers(name: str, model: nn.Module) -> None:
    """Convert all linear layers of a causal language model but its head."""
    for parent_name, parent in model.named_modules():
        for child_name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear) and (parent_name or child_name != "lm_head"):
                setattr(parent, child_name, converted(name, child))


@torch.no_grad()
def available(names: Iterable[str], device: str = "cpu") -> list[str]:
    """The names without the alternatives that fail here, whose reasons are printed."""
    working = []
    for name in names:
        try:
            if name in ALTERNATIVES:
                linear = nn.Linear(256, 64, bias=False, dtype=torch.bfloat16, device=device)
                converted(name, linear)(torch.randn(2, 256, dtype=torch.bfloat16, device=device))
        except Exception as error:  # other libraries can raise anything
            print(f"without {name}: {type(error).__name__}: {str(error).splitlines()[0][:200]}", flush=True)
        else:
            working.append(name)
    return working


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of tensors, those of wrapped tensors included; tied ones count once."""
    return sum({inner.data_ptr(): inner.nbytes for tensor in tensors for inner in _inner(tensor)}.values())


def _inner(tensor: Tensor) -> list[Tensor]:
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    parts = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
    return [inner for part in parts if part is not None for inner in _inner(part)]
