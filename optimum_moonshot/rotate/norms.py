"""Identifies norms by calling them: their gain, their shift, and the rotations that commute with them.

A norm maps x to ``γ ⊙ n(x) + β``. In an RMS norm, n commutes with every orthogonal matrix; in a layer norm, which
subtracts the mean, n commutes only with orthogonal matrices that fix the vector of ones. Tests on a copy, not names,
show which parameter defines γ, and whether it is γ or γ - 1.
"""

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..model.weights import bare_copy

# Relative tolerance between two results of a norm: some compute in float32 whatever the dtype of the input.
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Norm:
    """``x → gain ⊙ n(x) + shift`` of a module, and the parameters that define gain and shift."""

    module: nn.Module
    weight: str | None  # name of the parameter for which the gain is offset + slope · weight
    bias: str | None  # name of the parameter that is the shift
    offset: float
    slope: float
    gain: Tensor | None  # γ [width] in float64; None if it is 1 everywhere
    shift: Tensor | None  # β [width] in float64; None if there is no shift
    fixes_ones: bool = False  # n commutes only with orthogonal matrices that fix the vector of ones

    @property
    def neutral(self) -> float:
        """The value of `weight` at which the gain is 1."""
        return (1 - self.offset) / self.slope


def may_be_norm(module: nn.Module, inputs: Tensor, output: Tensor) -> bool:
    """Whether a call may be a norm's: equal shapes of input and output, and at most two parameters [width]."""
    parameters = list(module.parameters(recurse=False))
    if next(module.children(), None) is not None or len(parameters) > 2 or inputs.shape != output.shape:
        return False
    return all(parameter.shape == inputs.shape[-1:] for parameter in parameters)


@torch.no_grad()
def find_norm(module: nn.Module, width: int) -> Norm | None:
    """The norm that a module with parameters [width] computes; None if it is another function."""
    try:
        return _find(module, width)
    except (TypeError, ValueError, RuntimeError, IndexError):
        return None  # it does not accept a single tensor of this width


def _find(module: nn.Module, width: int) -> Norm | None:
    twin = bare_copy(module, {}).to("cpu").double().eval()
    twin._forward_hooks.clear()
    twin._forward_pre_hooks.clear()
    actual = {name: parameter.clone() for name, parameter in twin.named_parameters()}
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    def call(inputs: Tensor, values: dict[str, Tensor]) -> Tensor:
        for name, parameter in twin.named_parameters():
            parameter.copy_(values[name])
        return twin(inputs[None])[0].double()

    # Rows of ±1 with mean 0 are already normalised; scaled up, so that the norm's ε is negligible.
    signs = torch.ones(2, width, dtype=torch.float64)
    signs[:, torch.randperm(width, generator=generator)[: width // 2]] = -1
    large = 2.0**20 * torch.tensor([[1.0], [-1.0]], dtype=torch.float64) * signs
    signs = large.sign()
    zeros = {name: torch.zeros_like(value) for name, value in actual.items()}
    empty = call(large, zeros)
    offset = float((empty * signs).mean())
    if width % 2 or not _close(empty, offset * signs, 1.0):
        return None
    weight = bias = None
    slope = 1.0
    for name in actual:
        vector = 1 + random(width).abs()
        change = call(large, {**zeros, name: vector}) - empty
        factor = float((change * signs / vector).mean())
        if bias is None and _close(change, vector.expand_as(change), 1.0):
            bias = name
        elif weight is None and factor and _close(change, factor * vector * signs, 1.0):
            weight, slope = name, _whole(factor)
        else:
            return None
    if weight is None and not _close(empty, signs, 1.0):
        return None  # another function, or a constant
    gain = None if weight is None else _whole(offset) + slope * actual[weight]
    gain = None if gain is None or bool((gain == 1).all()) else gain
    candidate = Norm(module, weight, bias, _whole(offset), slope, gain, None if bias is None else actual[bias])
    neutral = {} if weight is None else {weight: torch.full_like(actual[weight], candidate.neutral)}

    def bare(inputs: Tensor) -> Tensor:
        return call(inputs, zeros | neutral)

    x = 3 * random(4, width)
    plain, norm = bare(x), float(bare(x).norm())
    if not _close(bare(5 * x), plain, norm):
        return None
    expected = plain if candidate.gain is None else plain * candidate.gain
    if not _close(call(x, actual), expected if candidate.shift is None else expected + candidate.shift, norm):
        return None
    for fixes_ones in (False, True):
        mirror = random(width)
        mirror -= mirror.mean() if fixes_ones else 0
        if _close(bare(_reflected(x, mirror)), _reflected(plain, mirror), norm):
            return dataclasses.replace(candidate, fixes_ones=fixes_ones)
    return None


def _reflected(rows: Tensor, mirror: Tensor) -> Tensor:
    """Rows [n, width], reflected along `mirror` [width]."""
    return rows - 2 * (rows @ mirror)[:, None] * mirror / mirror.square().sum()


def _close(actual: Tensor, expected: Tensor, size: float) -> bool:
    return bool((actual - expected).norm() <= TOLERANCE * max(size, float(expected.norm())))


def _whole(value: float) -> float:
    """A factor, rounded if it is a whole number up to the error of its measurement."""
    return float(round(value)) if abs(value - round(value)) < TOLERANCE else value
