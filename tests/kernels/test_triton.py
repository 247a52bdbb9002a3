"""The GPU kernels, on a GPU or interpreted on the CPU (conftest.py decides): the same numbers as the dense product."""

import os

import pytest
import torch
from compiled_kernels import compiled_lines

pytest.importorskip("triton", reason="comes with torch's builds for CUDA")

from optimum_moonshot.kernels import triton_bitmask
from optimum_moonshot.objective.patterns import NM
from optimum_moonshot.packing import Bitmask, bitmask

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def sparse(d_out, d_in, pattern, dtype, seed=0):
    """A matrix with an n:m pattern or a fraction of zeros."""
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(d_out, d_in, generator=generator)
    scores = torch.rand(d_out, d_in, generator=generator)
    if isinstance(pattern, NM):
        groups = scores.view(-1, pattern.m)
        keep = (groups.argsort(1).argsort(1) < pattern.n).view(d_out, d_in)
    else:
        keep = scores >= pattern
    return torch.where(keep, matrix, 0).to(dtype)  # in host memory, where it is packed


def packed(matrix, pattern):
    """The arguments of the kernels: values, meta, offsets, window."""
    nm = pattern if isinstance(pattern, NM) else None
    values, meta = bitmask.pack(matrix, nm)
    counts = (matrix != 0).sum(1)
    offsets = None if nm else torch.cat([counts.new_zeros(1), counts.cumsum(0)[:-1]])
    parts = [None if part is None else part.to(DEVICE) for part in (values, meta, offsets)]
    return *parts, bitmask.find_window(values, meta, matrix.shape[1])


CASES = [(NM(2, 4), 64), (NM(1, 4), 40), (NM(4, 8), 520), (NM(8, 16), 48), (NM(16, 32), 96)]
CASES += [(share, d_in) for share in (0.0, 0.5, 0.9, 1.0) for d_in in (1, 7, 33, 600)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("pattern", "d_in"), CASES)
def test_the_product_equals_the_dense_one(pattern, d_in, dtype):
    matrix = sparse(9, d_in, pattern, dtype)
    values, meta, offsets, window = packed(matrix, pattern)
    assert bool(window) == (isinstance(pattern, NM) and pattern.m <= 8)
    for rows in (1, 3, 4, 5, 16):
        inputs = torch.randn(rows, d_in, generator=torch.Generator().manual_seed(rows)).to(DEVICE, dtype)
        weight = matrix.to(DEVICE).double()
        exact = inputs.double() @ weight.T
        result = triton_bitmask.linear(inputs, values, meta, offsets, window)
        assert result.dtype == dtype and result.shape == (rows, 9)
        bound = torch.finfo(dtype).eps * exact.abs() + 1e-6 * (inputs.double().abs() @ weight.abs().T) + 1e-30
        assert bool(((result - exact).abs() <= bound).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("pattern", "d_in"), CASES)
def test_unpacking_gives_every_bit_back(pattern, d_in, dtype):
    matrix = sparse(9, d_in, pattern, dtype)
    values, meta, offsets, _ = packed(matrix, pattern)
    dense = triton_bitmask.unpack(values, meta, d_in, offsets)
    assert torch.equal(dense.cpu(), matrix)
    assert torch.equal(dense, bitmask.unpack(values, meta, d_in))


@pytest.mark.parametrize("pattern", [NM(2, 4), NM(8, 16), 0.7], ids=str)
@pytest.mark.parametrize("rows", [(), (2, 3), (4, 9)], ids=str)
def test_packed_layers_use_the_kernels(pattern, rows, monkeypatch):
    monkeypatch.setattr(bitmask, "_is_for_gpu", lambda *_: True)
    matrix = sparse(9, 48, pattern, torch.float32)
    values, meta, _, window = packed(matrix, pattern)
    inputs, bias = torch.randn(*rows, 48, device=DEVICE), torch.randn(9, device=DEVICE)
    expected = torch.nn.functional.linear(inputs, matrix.to(DEVICE), bias)
    for width in (-1, window):
        result = Bitmask().linear(inputs, {"_packed": values, "_meta": meta}, (9, 48), bias, (width, None))
        torch.testing.assert_close(result, expected)


def test_offsets_count_the_values_of_earlier_rows():
    matrix = sparse(9, 37, 0.6, torch.float32)
    _, meta, offsets, _ = packed(matrix, 0.6)
    assert torch.equal(bitmask.row_offsets(meta)[:-1], offsets)
    assert int(bitmask.row_offsets(meta)[-1]) == int(matrix.count_nonzero())


def test_rows_without_values_and_no_rows():
    matrix = sparse(6, 40, 0.5, torch.float32)
    matrix[::2] = 0
    values, meta, offsets, window = packed(matrix, 0.5)
    inputs = torch.randn(3, 40, device=DEVICE)
    torch.testing.assert_close(
        triton_bitmask.linear(inputs, values, meta, offsets, window), inputs @ matrix.to(DEVICE).T
    )
    assert triton_bitmask.linear(inputs[:0], values, meta, offsets, window).shape == (0, 6)


COMPILE = """
for capability in (80, 90):
    tensors = {name: "*bf16" for name in ("inputs", "values", "outputs", "dense")} | {"meta": "*u8", "offsets": "*i64"}
    regular = {"M": kernels.FEW_ROWS, "PER": 4, **kernels._REGULAR}
    compiled(kernels._regular, tensors | {"places": "*u8"}, regular, capability)
    for one, tile in ((True, kernels._ANY), (False, kernels._DOT)):
        compiled(kernels._any, tensors, {"FLAT": True, "ONE": one, "WIDEN": False, **tile}, capability)
    compiled(kernels._unpack, tensors, {"FLAT": True, **kernels._UNPACK}, capability)
"""


@pytest.mark.slow
def test_the_kernels_compile_for_other_gpus(tmp_path):
    assert len(compiled_lines("triton_bitmask", COMPILE, tmp_path)) == 8
