"""Calls of packed layers without torch's operators: equal bits, and only where nothing has to see the operators."""

import copy
import pickle

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from optimum_moonshot.kernels.library import find_library
from optimum_moonshot.packing import Quantized, find_codec
from optimum_moonshot.runtime.packed_layers import PackedLinear

pytestmark = pytest.mark.skipif(find_library() is None, reason="needs the compiled library")
FORMATS = ("bitmask", "int4g64", "int8g64")
DTYPES = (torch.float32, torch.bfloat16)


def packed(name, dtype=torch.float32, bias=True, seed=0, shape=(24, 128)):
    torch.manual_seed(seed)
    weight = ((torch.rand(shape) + 0.5) * torch.randn(shape).sign()).to(dtype)  # none is rounded to 0
    keep = torch.rand(shape, generator=torch.Generator().manual_seed(0)) < 0.5  # of all seeds
    weight[~keep] = 0
    codec = find_codec(name)
    if isinstance(codec, Quantized):
        grid = codec.grid(dtype)
        weight = grid.rounded(weight.float(), grid.search(weight.float(), torch.ones(1, shape[1]))).to(dtype)
    bias = torch.nn.Parameter(torch.randn(shape[0], dtype=dtype), requires_grad=False) if bias else None
    return PackedLinear(codec, shape, codec.pack(weight, None), bias)


def by_operators(layer, inputs):
    return layer.codec.linear(inputs, layer.parts, layer.shape, layer.bias, layer.plan)


@pytest.fixture
def directly(monkeypatch):
    """The number of direct products of every call."""
    calls, original = [], PackedLinear._directly

    def counted(self, inputs):
        outputs = original(self, inputs)
        calls.append(outputs is not None)
        return outputs

    monkeypatch.setattr(PackedLinear, "_directly", counted)
    return calls


@torch.no_grad()
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("size", [(128,), (1, 1, 128), (3, 128), (2, 5, 128), (0, 128)])
def test_the_bits_are_those_of_the_operator(name, dtype, bias, size, directly):
    layer, inputs = packed(name, dtype, bias), torch.randn(size).to(dtype)
    for _ in range(2):
        outputs = layer(inputs)
        assert outputs.shape == (*size[:-1], 24) and torch.equal(outputs, by_operators(layer, inputs))
    assert directly == [inputs.numel() > 0] * 2


@torch.no_grad()
@pytest.mark.parametrize("name", FORMATS)
def test_other_tensors_are_noticed(name):
    layer, other, inputs = packed(name), packed(name, seed=1), torch.randn(2, 128)
    layer(inputs)
    for suffix, part in other.parts.items():
        layer._buffers["weight" + suffix] = part  # as tools do that place weights on devices
    layer._plans.pop("weight")
    layer.bias = other.bias
    assert torch.equal(layer(inputs), by_operators(other, inputs))
    layer, before = packed(name), packed(name)
    layer(inputs)
    layer.load_state_dict(other.state_dict())
    assert torch.equal(layer(inputs), by_operators(other, inputs))
    clone, restored = copy.deepcopy(before), pickle.loads(pickle.dumps(before))
    expected = before(inputs)
    del before
    for same in (clone, restored):
        assert torch.equal(same(inputs), expected)
        same.load_state_dict(other.state_dict())
        assert torch.equal(same(inputs), by_operators(other, inputs))
    layer = packed(name).to(torch.bfloat16).to(torch.float32)
    assert torch.equal(layer(inputs), by_operators(layer, inputs))


@pytest.mark.parametrize("name", FORMATS)
def test_gradients_tracers_and_modes_see_operators(name, directly):
    layer, inputs = packed(name), torch.randn(3, 128)
    expected = layer(inputs)  # no gradient is needed
    assert directly.pop()
    with_gradient = inputs.clone().requires_grad_(True)
    layer(with_gradient).sum().backward()
    assert with_gradient.grad is not None and not directly.pop()
    with torch.no_grad():
        layer(with_gradient)
    assert directly.pop()
    layer.bias.requires_grad_(True)
    layer(inputs).sum().backward()
    assert layer.bias.grad is not None and not directly.pop()
    layer.bias.requires_grad_(False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(inputs).dtype == torch.bfloat16
    assert not directly.pop()
    with FlopCounterMode(display=False):
        layer(inputs)
    assert not directly.pop()
    torch.testing.assert_close(torch.func.vmap(layer)(inputs[:, None])[:, 0], expected)
    assert not directly.pop()
    torch.testing.assert_close(torch.compile(layer, fullgraph=True, backend="eager")(inputs), expected)
    traced = torch.jit.trace(layer, inputs)
    torch.testing.assert_close(traced(2 * inputs), layer(2 * inputs))


@torch.no_grad()
@pytest.mark.parametrize("name", FORMATS)
def test_other_inputs_are_passed_to_the_operator(name, directly):
    layer = packed(name)
    for inputs in (torch.randn(128, 3).T, torch.randn(4, 256)[:, ::2]):  # not contiguous
        assert torch.equal(layer(inputs), by_operators(layer, inputs)) and not directly.pop()
    for inputs in (torch.randn(2, 64), torch.randn(2, 128, dtype=torch.float64)):
        with pytest.raises(RuntimeError):
            layer(inputs)
        assert not directly.pop()
