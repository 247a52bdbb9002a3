"""The operators of packed products: compiled, exported, differentiated, any shape, with and without the library."""

import pytest
import reference_packing as reference
import torch
from torch import nn
from torch.nn import functional

from optimum_moonshot.kernels import find_library
from optimum_moonshot.objective.patterns import NM
from optimum_moonshot.packing import bitmask, bitmask_codec, find_codec
from optimum_moonshot.runtime.packed_linear import PackedLinear

PATTERNS = [None, NM(2, 4)]
ATOL = {torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 1e-1}


@pytest.fixture(params=["library", "torch"])
def route(request, monkeypatch):
    """With the compiled library, and without."""
    if request.param == "torch":
        for module in (bitmask, bitmask_codec):
            monkeypatch.setattr(module, "find_library", lambda: None)
    elif find_library() is None:
        pytest.skip("installed without a C compiler")


def pair(pattern, dtype=torch.float32, d_out=24, d_in=64, bias=True):
    """A sparse Linear, and the same packed."""
    linear = nn.Linear(d_in, d_out, bias, dtype=dtype)
    with torch.no_grad():
        linear.weight.copy_(reference.random_matrix(d_out, d_in, pattern, dtype))
    return linear, pack(linear, pattern)


def pack(linear, pattern):
    codec = find_codec("bitmask")
    return PackedLinear(codec, tuple(linear.weight.shape), codec.pack(linear.weight.detach(), pattern), linear.bias)


def inputs_of_every_shape(d_in, dtype):
    for shape in [(d_in,), (1, d_in), (3, 2, d_in), (100, d_in), (0, d_in), (2, 0, d_in), (1, 1, 1, d_in)]:
        yield torch.randn(shape).to(dtype)
    yield torch.randn(5, 2 * d_in).to(dtype)[:, ::2]
    yield torch.randn(d_in, 7).to(dtype).T
    yield torch.randn(4, d_in).to(dtype)[1:3]
    yield torch.randn(1, d_in).to(dtype).expand(6, d_in)


@pytest.mark.parametrize("dtype", list(ATOL), ids=str)
@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_inputs_of_every_shape_and_stride(pattern, dtype, route):
    for d_in, bias in ((64, True), (100, False)):
        linear, packed = pair(pattern, dtype, d_in=d_in, bias=bias)
        for inputs in inputs_of_every_shape(d_in, dtype):
            with torch.no_grad():
                ours, theirs = packed(inputs), linear(inputs)
            assert ours.shape == theirs.shape and ours.dtype == dtype
            assert torch.allclose(ours, theirs, atol=ATOL[dtype])


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_compiled_to_one_node_with_gradients(pattern, route):
    linear, packed = pair(pattern)
    graphs = []

    def backend(graph, example):
        graphs.append(graph)
        return graph.forward

    for planned in (False, True):
        torch.compiler.reset()
        if planned:
            packed.plan  # noqa: B018
        compiled, inputs = torch.compile(packed, fullgraph=True, backend=backend), torch.randn(3, 64)
        assert torch.allclose(compiled(inputs), linear(inputs), atol=1e-5)
        assert bool(packed._plans) == planned
        operators = [node.target for node in graphs.pop().graph.nodes if node.op == "call_function"]
        assert operators == [torch.ops.moonshot.packed_linear.default]
    torch.compiler.reset()
    gradients = []
    for module in (torch.compile(packed, fullgraph=True, backend="aot_eager"), linear):
        inputs.requires_grad_()
        inputs.grad = linear.bias.grad = None
        module(inputs).square().sum().backward()
        gradients.append((inputs.grad, linear.bias.grad))
    for ours, theirs in zip(*gradients, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-3)


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_exported_for_any_number_of_rows(pattern, route):
    linear, packed = pair(pattern)
    rows = torch.export.Dim("rows")
    for planned in (False, True):
        if planned:
            packed.plan  # noqa: B018
        program = torch.export.export(packed, (torch.randn(2, 64),), dynamic_shapes=({0: rows},))
        assert sum("packed_linear" in str(node.target) for node in program.graph.nodes) == 1
        for count in (1, 5):
            inputs = torch.randn(count, 64)
            assert torch.allclose(program.module()(inputs), linear(inputs), atol=1e-5)


@pytest.mark.parametrize("dtype", list(ATOL), ids=str)
@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_gradients_are_those_of_a_dense_layer(pattern, dtype, route, monkeypatch):
    monkeypatch.setattr(bitmask_codec, "_TILE", 64 * dtype.itemsize * 7)  # more than one tile, the last one smaller
    linear, packed = pair(pattern, dtype)
    for shape in ((64,), (5, 64), (2, 3, 64), (0, 64)):
        result = []
        for module in (packed, linear):
            inputs = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
            linear.bias.grad = None
            module(inputs).float().square().sum().backward()
            result.append((inputs.grad, linear.bias.grad))
        for ours, theirs in zip(*result, strict=True):
            assert ours.dtype == dtype
            assert torch.allclose(ours, theirs, rtol=0.05 if dtype.itemsize == 2 else 1e-4, atol=20 * ATOL[dtype])


def test_gradients_match_finite_differences(route):
    """In float64, for which only torch has a product."""
    for pattern in PATTERNS:
        _, packed = pair(pattern, torch.float64, d_out=5, d_in=8)
        assert torch.autograd.gradcheck(packed, torch.randn(3, 8, dtype=torch.float64, requires_grad=True))


def test_many_rows_are_unpacked_in_tiles_where_torch_is_faster(route, monkeypatch):
    if find_library() is None:
        pytest.skip("installed without a C compiler")
    monkeypatch.setattr(find_library(), "most_rows", 16)
    monkeypatch.setattr(bitmask_codec, "_TILE", 64 * 4 * 7)
    for pattern in PATTERNS:
        linear, packed = pair(pattern)
        inputs = torch.randn(17, 64)
        assert torch.allclose(packed(inputs), linear(inputs), atol=1e-5)


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_the_operators_pass_opcheck(pattern, route):
    _, packed = pair(pattern)
    parts, plan = packed.parts.values(), packed.plan
    inputs = torch.randn(3, 64, requires_grad=True)
    arguments = (inputs, *parts, plan.offsets, packed.bias, plan.window)
    torch.library.opcheck(torch.ops.moonshot.packed_linear.default, arguments)
    detached = [part.detach() if isinstance(part, torch.Tensor) else part for part in arguments]
    torch.library.opcheck(torch.ops.moonshot.packed_product.default, detached)
    outputs = torch.randn(3, 24), *parts, plan.offsets, 64, plan.window
    torch.library.opcheck(torch.ops.moonshot.packed_transposed.default, outputs)


def test_mismatched_inputs_raise_torchs_error(route):
    _, packed = pair(NM(2, 4))
    for wrong in (torch.randn(3, 60), torch.randn(3, 64).bfloat16()):
        with torch.no_grad(), pytest.raises(RuntimeError, match="shape|dtype|size"):
            packed(wrong)
    packed.bias = nn.Parameter(torch.randn(23))
    with torch.no_grad(), pytest.raises(RuntimeError):
        packed(torch.randn(3, 64))


def test_autocast_multiplies_in_its_own_dtype(route):
    for pattern in PATTERNS:
        linear, packed = pair(pattern)
        inputs = torch.randn(3, 64)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(packed(inputs), linear(inputs)) and packed(inputs).dtype == torch.bfloat16


def test_a_plan_is_recomputed_after_moving_or_loading(route):
    """A stale plan would read rows of other lengths at the old offsets."""
    torch.manual_seed(0)
    linear, packed = pair(None)
    inputs = torch.randn(2, 64)
    assert torch.allclose(packed(inputs), linear(inputs), atol=1e-5)
    with torch.no_grad():
        linear.weight.copy_(linear.weight.flip(0).clone())
    packed.load_state_dict(pack(linear, None).state_dict())
    assert torch.allclose(packed(inputs), linear(inputs), atol=1e-5)
    for dtype in (torch.float64, torch.bfloat16, torch.float32):
        linear.to(dtype), packed.to(dtype)
        expected = functional.linear(inputs.to(dtype), linear.weight, linear.bias)
        assert torch.allclose(packed(inputs.to(dtype)), expected, atol=0.1)
