"""The GPU kernels of quantized matrices, on a GPU or interpreted (conftest.py decides): the same numbers as dense."""

import itertools
import os

import pytest
import reference_quantized as reference
import torch
from compiled_kernels import compiled_lines
from marks import slow_but
from torch.nn import functional

pytest.importorskip("triton", reason="comes with torch's builds for CUDA")

from optimum_moonshot.kernels import triton_quantized
from optimum_moonshot.packing import Quantized, quantized

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# d_out, d_in, group: one input, a part of a byte, a part of a block, several tiles, groups longer than a tile or a row
SHAPES = [(2, 1, 64), (5, 64, 64), (9, 300, 64), (6, 777, 320), (4, 100, 1024)]
CASES = list(itertools.product(SHAPES, (8, 4, 3), ("dense", "2:4", 0.6)))


def packed(shape, bits, group, dtype, kind):
    """The dense weights, and the arguments of the kernels."""
    codes, scale, keep = reference.random_quantized(shape, bits, group, dtype, kind)
    stored = reference.pack(codes, torch.ones(shape, dtype=torch.bool) if keep is None else keep, bits)
    meta = torch.empty(shape[0], 0, dtype=torch.uint8) if keep is None else reference.bitmask(keep)
    offsets = None if keep is None else torch.tensor([0, *itertools.accumulate(map(len, stored))]).to(DEVICE)
    stream = torch.tensor([byte for row in stored for byte in row], dtype=torch.uint8)
    tensors = (part.to(DEVICE) for part in (stream, scale, meta))
    return reference.dense(codes, scale, group), (*tensors, offsets, bits, group)


def assert_exact(outputs, inputs, weight, bias=None):
    """Within a few roundings of float32 sums, and the one of the outputs, which the interpreter truncates."""
    inputs, weight = inputs.double(), weight.to(DEVICE).double()
    exact, size = functional.linear(inputs, weight, bias), functional.linear(inputs.abs(), weight.abs())
    bound = torch.finfo(outputs.dtype).eps * exact.abs() + 4 * torch.finfo(torch.float32).eps * size
    assert ((outputs.double() - exact).abs() <= bound + torch.finfo(outputs.dtype).tiny).all()


@pytest.mark.parametrize("dtype", slow_but(DTYPES[:1], DTYPES), ids=str)
@pytest.mark.parametrize(("shape", "bits", "kind"), CASES, ids=str)
def test_products_are_those_of_the_dense_matrix(shape, bits, kind, dtype):
    d_out, d_in, group = shape
    weight, matrix = packed((d_out, d_in), bits, group, dtype, kind)
    for rows in (1, 3, 16):
        inputs = torch.randn(rows, d_in, generator=torch.Generator().manual_seed(rows)).to(DEVICE, dtype)
        outputs = triton_quantized.linear(inputs, *matrix)
        assert outputs.dtype == dtype and outputs.shape == (rows, d_out)
        assert_exact(outputs, inputs, weight)
    assert triton_quantized.linear(inputs[:0], *matrix).shape == (0, d_out)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "bits", "kind"), CASES, ids=str)
def test_unpacking_is_bit_for_bit_that_of_torch(shape, bits, kind, dtype):
    d_out, d_in, group = shape
    weight, matrix = packed((d_out, d_in), bits, group, dtype, kind)
    assert torch.equal(triton_quantized.unpack(*matrix, d_in).cpu(), weight)


@pytest.mark.parametrize("bits", [8, 4, 3])
def test_rows_of_equal_sizes_need_no_offsets(bits):
    weight, (codes, scale, meta, offsets, *grid) = packed((4, 128), bits, 64, torch.float32, "2:4")
    keep = quantized.unpack_bits(meta.cpu(), 128)  # also in the rows that the reference leaves empty
    assert bool((keep.sum(1) == 64).all()) and offsets[1] == codes.numel() // 4
    assert torch.equal(triton_quantized.unpack(codes, scale, meta, None, *grid, 128).cpu(), weight)


@pytest.mark.parametrize("kind", ["dense", 0.5])
@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
def test_numbers_that_are_not_finite_pass_as_in_the_dense_product(kind, number):
    weight, matrix = packed((4, 70), 4, 64, torch.float32, kind)
    for rows in (1, 2):
        inputs = torch.ones(rows, 70, device=DEVICE)
        inputs[0, 65] = number
        expected = functional.linear(inputs, weight.to(DEVICE))
        result = triton_quantized.linear(inputs, *matrix)
        torch.testing.assert_close(result, expected, equal_nan=True)


def test_the_largest_scales_do_not_overflow_beyond_the_last_input():
    """The lowest code, -8, is never stored, and its weight would be infinite."""
    codes, scale = torch.full((1, 70), 7), torch.full((1, 2), 9000.0, dtype=torch.float16)
    stored = torch.tensor(reference.pack(codes, codes != 0, 4)[0], dtype=torch.uint8)
    matrix = (stored.to(DEVICE), scale.to(DEVICE), torch.empty(1, 0, dtype=torch.uint8, device=DEVICE), None, 4, 64)
    for rows in (1, 2):
        inputs = torch.full((rows, 70), 1 / 128, dtype=torch.float16, device=DEVICE)
        assert_exact(triton_quantized.linear(inputs, *matrix), inputs, reference.dense(codes, scale, 64))


@pytest.mark.parametrize("kind", ["dense", "2:4", 0.6])
@pytest.mark.parametrize("rows", [(), (2, 3), (4, 9)], ids=str)
def test_the_operators_use_the_kernels(kind, rows, monkeypatch):
    monkeypatch.setattr(quantized, "_is_for_gpu", lambda *_: True)
    monkeypatch.setattr(quantized._Matrix, "tiles", lambda *_: pytest.fail("torch unpacked the weights"))
    weight, (codes, scale, meta, offsets, bits, group) = packed((9, 100), 4, 64, torch.float32, kind)
    inputs = torch.randn(*rows, 100, device=DEVICE, requires_grad=True)
    bias = torch.randn(9, device=DEVICE, requires_grad=True)
    expected = functional.linear(inputs, weight.to(DEVICE), bias)
    gradients = torch.autograd.grad(expected.square().sum(), (inputs, bias))
    for starts in (None, offsets):
        parts = {"_codes": codes, "_scale": scale, "_meta": meta}
        result = Quantized(bits, group).linear(inputs, parts, (9, 100), bias, starts)
        torch.testing.assert_close(result, expected)
        torch.testing.assert_close(torch.autograd.grad(result.square().sum(), (inputs, bias)), gradients)


COMPILE = """
tensors = {name: "*bf16" for name in ("inputs", "scale", "outputs", "dense")}
tensors |= {"codes": "*u8", "meta": "*u8", "offsets": "*i64"}
for capability, bits, dense in itertools.product((80, 90), (8, 4, 3), (True, False)):
    constants = {"BITS": bits, "DENSE": dense, "FLAT": not dense, "EMULATED": False}
    for one, tile in ((True, kernels._ONE), (False, kernels._DOT)):
        compiled(kernels._linear, tensors, {**constants, "ONE": one, **tile}, capability)
    compiled(kernels._unpack, tensors, {**constants, **kernels._UNPACK}, capability)
"""


@pytest.mark.slow
def test_the_kernels_compile_for_other_gpus(tmp_path):
    assert len(compiled_lines("triton_quantized", COMPILE, tmp_path)) == 36
