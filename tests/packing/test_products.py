"""The operators of packed products: compiled, exported, differentiated, any shape, with and without the library."""

import copy
import pickle

import grid_matrices
import pytest
import reference_packing
import reference_quantized
import torch
from torch import nn
from torch.nn import functional

from optimum_moonshot.kernels.library import find_library
from optimum_moonshot.objective.grid import Grid
from optimum_moonshot.objective.patterns import NM
from optimum_moonshot.packing import bitmask, find_codec, quantized, timing
from optimum_moonshot.runtime.packed_layers import PackedLinear

FORMATS = [("bitmask", None), ("bitmask", NM(2, 4)), ("int4g64", None), ("int4g64", NM(2, 4)), ("int4g64", NM(4, 4))]
INTEGERS = FORMATS[2:]
CODECS = {"bitmask": bitmask, "int4g64": quantized}
LINEAR = {"bitmask": torch.ops.moonshot.packed_linear, "int4g64": torch.ops.moonshot.quantized_linear}
ATOL = {torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 1e-1}


def pair(name, pattern, dtype=torch.float32, d_out=24, d_in=200, bias=True, inputs="float"):
    """A Linear whose weight the format represents, and the same packed; integers in float64 on the grid of float32."""
    on_grid = name != "bitmask"
    codec = find_codec(name).with_inputs(inputs)
    grid = Grid(codec.bits, 64, torch.float32 if dtype == torch.float64 else dtype) if on_grid else None
    linear = nn.Linear(d_in, d_out, bias, dtype=grid.dtype if on_grid else dtype)
    with torch.no_grad():
        if on_grid:
            linear.weight.copy_(50 * grid_matrices.random_matrix(grid, d_out, d_in, pattern))
            linear.weight.copy_(grid_matrices.on_grid(grid, linear.weight))
        else:
            linear.weight.copy_(reference_packing.random_matrix(d_out, d_in, pattern, dtype))
    packed = pack(codec, linear, pattern).to(dtype)
    if on_grid and dtype == torch.float64:
        linear.weight.data = packed.weight
    return linear, packed


def pack(codec, linear, pattern):
    return PackedLinear(codec, tuple(linear.weight.shape), codec.pack(linear.weight.detach(), pattern), linear.bias)


def inputs_of_every_shape(d_in, dtype):
    for shape in [(d_in,), (1, d_in), (3, 2, d_in), (100, d_in), (0, d_in), (2, 0, d_in), (1, 1, 1, d_in)]:
        yield torch.randn(shape).to(dtype)
    yield torch.randn(5, 2 * d_in).to(dtype)[:, ::2]
    yield torch.randn(d_in, 7).to(dtype).T
    yield torch.randn(4, d_in).to(dtype)[1:3]
    yield torch.randn(1, d_in).to(dtype).expand(6, d_in)


@pytest.mark.parametrize("dtype", list(ATOL), ids=str)
@pytest.mark.parametrize("name, pattern", FORMATS, ids=str)
def test_inputs_of_every_shape_and_stride(name, pattern, dtype, route):
    atol, rtol = (ATOL[dtype], 1e-5) if name == "bitmask" else (2 * ATOL[dtype], 0.01)
    layers = (("int8g64", 64, True), ("int4g64", 200, False), ("int3g64", 100, True))
    for format, d_in, bias in (("bitmask", 64, True), ("bitmask", 100, False)) if name == "bitmask" else layers:
        linear, packed = pair(format, pattern, dtype, d_in=d_in, bias=bias)
        for inputs in inputs_of_every_shape(d_in, dtype):
            with torch.no_grad():
                ours, theirs = packed(inputs), linear(inputs)
            assert ours.shape == theirs.shape and ours.dtype == dtype
            assert torch.allclose(ours, theirs, atol=atol, rtol=rtol)


@pytest.mark.parametrize("name, pattern", INTEGERS, ids=str)
def test_inputs_are_rounded_only_if_they_may_be(name, pattern, route):
    """To 8 bits per row and group, by a library; the other products are those of the weights in float64."""
    inputs = torch.randn(5, 200)
    for choice in ("int8", "float"):
        linear, packed = pair(name, pattern, inputs=choice)
        rounded = choice == "int8" and route == "library"
        exact = reference_quantized.rounded(inputs, 64) if rounded else inputs.double()
        expected = exact @ linear.weight.detach().double().T + linear.bias.detach().double()
        with torch.no_grad():
            assert torch.allclose(packed(inputs).double(), expected, atol=1e-4, rtol=1e-5)
        assert ((packed(inputs) - linear(inputs)).abs().max() > 1e-3) == rounded


@pytest.mark.parametrize("name, pattern", INTEGERS, ids=str)
def test_unpacked_weights_are_the_same_by_both_routes(name, pattern, route):
    for dtype in ATOL:
        for bits in (8, 4, 3):
            d_in = 133 - 133 % (pattern.m if pattern else 1)
            linear, packed = pair(f"int{bits}g64", pattern, dtype, d_in=d_in)
            assert torch.equal(packed.weight, linear.weight)


@pytest.mark.parametrize("name, pattern", FORMATS, ids=str)
def test_compiled_to_one_node_with_gradients(name, pattern, route):
    linear, packed = pair(name, pattern)
    atol, graphs = 1e-5 if name == "bitmask" else 1e-4, []

    def backend(graph, example):
        graphs.append(graph)
        return graph.forward

    for planned in (False, True):
        torch.compiler.reset()
        if planned:
            packed.plan  # noqa: B018
        compiled, inputs = torch.compile(packed, fullgraph=True, backend=backend), torch.randn(3, 200)
        assert torch.allclose(compiled(inputs), linear(inputs), atol=atol)
        assert bool(packed._plans) == planned
        operators = [node.target for node in graphs.pop().graph.nodes if node.op == "call_function"]
        assert operators == [LINEAR[name].default]
    torch.compiler.reset()
    gradients = []
    for module in (torch.compile(packed, fullgraph=True, backend="aot_eager"), linear):
        inputs.requires_grad_()
        inputs.grad = linear.bias.grad = None
        module(inputs).square().sum().backward()
        gradients.append((inputs.grad, linear.bias.grad))
    for ours, theirs in zip(*gradients, strict=True):
        assert torch.allclose(ours, theirs, atol=100 * atol)


@pytest.mark.parametrize("name, pattern", FORMATS[:3], ids=str)
def test_exported_for_any_number_of_rows(name, pattern, route):
    linear, packed = pair(name, pattern)
    rows = torch.export.Dim("rows")
    for planned in (False, True):
        if planned:
            packed.plan  # noqa: B018
        program = torch.export.export(packed, (torch.randn(2, 200),), dynamic_shapes=({0: rows},))
        operator = str(LINEAR[name].default)
        assert sum(operator in str(node.target) for node in program.graph.nodes) == 1
        for count in (1, 5):
            inputs = torch.randn(count, 200)
            atol = 1e-5 if name == "bitmask" else 1e-4
            assert torch.allclose(program.module()(inputs), linear(inputs), atol=atol)


@pytest.mark.parametrize("dtype", list(ATOL), ids=str)
@pytest.mark.parametrize("name, pattern", FORMATS, ids=str)
def test_gradients_are_those_of_a_dense_layer(name, pattern, dtype, route, monkeypatch):
    monkeypatch.setattr(CODECS[name], "_TILE", 200 * dtype.itemsize * 7)  # several tiles, the last one smaller
    linear, packed = pair(name, pattern, dtype)
    rtol, atol = 0.05 if dtype.itemsize == 2 else 1e-4, (20 if name == "bitmask" else 100) * ATOL[dtype]
    for shape in ((200,), (5, 200), (2, 3, 200), (0, 200)):
        result = []
        for module in (packed, linear):
            inputs = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
            linear.bias.grad = None
            module(inputs).float().square().sum().backward()
            result.append((inputs.grad, linear.bias.grad))
        for ours, theirs in zip(*result, strict=True):
            assert ours.dtype == dtype
            assert torch.allclose(ours, theirs, rtol=rtol, atol=atol)


@pytest.mark.parametrize("name, pattern", FORMATS, ids=str)
def test_gradients_match_finite_differences(name, pattern, route):
    """In float64, for which only torch has a product."""
    _, packed = pair(name, pattern, torch.float64, d_out=5, d_in=8)
    assert torch.autograd.gradcheck(packed, torch.randn(3, 8, dtype=torch.float64, requires_grad=True))


def test_many_rows_are_unpacked_in_tiles_where_torch_is_faster(route, monkeypatch):
    if find_library() is None:
        pytest.skip("installed without a C compiler")
    monkeypatch.setattr(find_library(), "most_rows", 16)
    monkeypatch.setattr(bitmask, "_TILE", 64 * 4 * 7)
    for name, pattern in FORMATS[:2]:
        linear, packed = pair(name, pattern, d_in=64)
        inputs = torch.randn(17, 64)
        assert torch.allclose(packed(inputs), linear(inputs), atol=1e-5)


@pytest.mark.parametrize("name, pattern", FORMATS, ids=str)
def test_the_operators_pass_opcheck(name, pattern, route):
    _, packed = pair(name, pattern)
    kind, matrix, after = "quantized", (*packed.parts.values(), packed.plan, 4, 64), (True,)
    if name == "bitmask":
        window, offsets = packed.plan
        kind, matrix, after = "packed", (*packed.parts.values(), offsets), (window,)
    operators = torch.ops.moonshot
    inputs, last = torch.randn(3, 200, requires_grad=True), after if name == "bitmask" else ()
    torch.library.opcheck(getattr(operators, f"{kind}_linear").default, (inputs, *matrix, packed.bias, *after))
    arguments = inputs.detach(), *matrix, packed.bias.detach(), *(after if name == "bitmask" else (False,))
    torch.library.opcheck(getattr(operators, f"{kind}_product").default, arguments)
    torch.library.opcheck(getattr(operators, f"{kind}_transposed").default, (torch.randn(3, 24), *matrix, 200, *last))


@pytest.mark.parametrize("name", CODECS)
def test_mismatched_inputs_raise_torchs_error(name, route):
    _, packed = pair(name, NM(2, 4))
    for wrong in (torch.randn(3, 60), torch.randn(3, 200).bfloat16()):
        with torch.no_grad(), pytest.raises(RuntimeError, match="shape|dtype|size"):
            packed(wrong)
    packed.bias = nn.Parameter(torch.randn(23))
    with torch.no_grad(), pytest.raises(RuntimeError):
        packed(torch.randn(3, 200))


@pytest.mark.parametrize("name, pattern", FORMATS[:4], ids=str)
def test_autocast_multiplies_in_its_own_dtype(name, pattern, route):
    linear, packed = pair(name, pattern)
    inputs = torch.randn(3, 200)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(packed(inputs), linear(inputs)) and packed(inputs).dtype == torch.bfloat16


def test_a_plan_is_recomputed_after_moving_or_loading(route):
    """A stale plan would read rows of other lengths at the old offsets."""
    torch.manual_seed(0)
    linear, packed = pair("bitmask", None, d_in=64)
    inputs = torch.randn(2, 64)
    assert torch.allclose(packed(inputs), linear(inputs), atol=1e-5)
    with torch.no_grad():
        linear.weight.copy_(linear.weight.flip(0).clone())
    packed.load_state_dict(pack(find_codec("bitmask"), linear, None).state_dict())
    assert torch.allclose(packed(inputs), linear(inputs), atol=1e-5)
    for dtype in (torch.float64, torch.bfloat16, torch.float32):
        linear.to(dtype), packed.to(dtype)
        expected = functional.linear(inputs.to(dtype), linear.weight, linear.bias)
        assert torch.allclose(packed(inputs.to(dtype)), expected, atol=0.1)


def test_a_packed_layer_is_copied_and_moved(route):
    linear, packed = pair("int4g64", None)
    inputs = torch.randn(2, 200)
    expected = packed(inputs)
    for again in (copy.deepcopy(packed), pickle.loads(pickle.dumps(packed))):
        assert torch.equal(again(inputs), expected) and again.codec.inputs == "float"
    for dtype in (torch.float64, torch.float32):
        assert torch.allclose(packed.to(dtype)(inputs.to(dtype)).float(), expected, atol=1e-4)
        assert packed.dtype == packed.weight.dtype == dtype


def test_a_layer_decodes_faster_with_a_compiled_integer_product(monkeypatch):
    library, codec = find_library(), find_codec("int4g128")

    def verdict(shape=(1024, 1024), dtype=torch.bfloat16, device="cpu"):
        return codec.decoding(shape, NM(2, 4), 0.2, dtype, torch.device(device))

    if library is not None:
        monkeypatch.setattr(library, "instruction_set", "vbmi2")
        assert verdict() == (True, "vbmi2 kernels for int4g128")
        assert verdict((8, 8)) == (False, f"smaller than {timing.LEAST_QUANTIZED} weights")
        kept = codec.with_inputs("float").decoding((1024, 1024), None, 0.2, torch.bfloat16, torch.device("cpu"))
        assert kept == (False, "the kernel is slower for inputs that are not rounded")
        assert verdict(dtype=torch.float64) == (False, "no kernel for torch.float64")
        monkeypatch.setattr(library, "instruction_set", "portable")
        assert verdict() == (False, "the portable kernel is slower")
        monkeypatch.setattr(timing, "_gain", lambda *_: 0.9)
        monkeypatch.setattr(library, "instruction_set", "avx2")
        assert verdict() == (False, "avx2 kernels, 0.90 times the dense speed when tried")
    monkeypatch.setattr(timing, "find_library", lambda: None)
    assert verdict() == (False, "no compiled kernel here")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("name", "pattern"), [("int4g128", NM(2, 4)), ("int8g64", None), ("int3g128", None)])
def test_the_kernels_of_gpus_are_timed_with_as_many_weights(name, pattern, dtype, monkeypatch):
    timed = []
    codec, device = find_codec(name), torch.device("cuda")
    monkeypatch.setattr(timing, "find_gpu_kernels", lambda *_: timing)
    monkeypatch.setattr(timing, "_gain", lambda *facts: timed.append(facts) or 1.25)
    for share in (1.0, 0.3):
        weight = torch.where(torch.rand(512, 1024) < share, 1, 0).to(dtype)
        weight = weight if pattern is None else weight * pattern.keep(torch.rand(512, 1024))
        fraction = codec.packed_bytes(weight, pattern) / weight.nbytes
        verdict = codec.decoding((512, 1024), pattern, fraction, dtype, device)
        assert verdict == (True, "Triton kernels, 1.25 times the dense speed when tried")
        assert timed[-1][:3] == (codec, (512, 1024), pattern) and timed[-1][4:] == (dtype, device)
        assert abs(timed[-1][3] - (1 if pattern else share)) <= 0.03  # blocks are padded
    assert codec.decoding((8, 8), pattern, 0.2, dtype, device) == (False, f"smaller than {timing.LEAST} weights")
    assert codec.decoding((512, 1024), pattern, 0.2, torch.float64, device) == (False, "no kernel for torch.float64")
    assert codec.decoding((512, 1024), pattern, 0.2, dtype, torch.device("mps")) == (False, "no kernel for mps")
    monkeypatch.setattr(timing, "find_gpu_kernels", lambda *_: None)
    missing = codec.decoding((512, 1024), pattern, 0.2, dtype, device)
    assert missing == (False, "no kernel for cuda: Triton is missing")
