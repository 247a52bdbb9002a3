"""Packing and unpacking one matrix against a literal implementation, and errors for damaged tensors."""

import numpy as np
import pytest
import reference_packing as reference
import torch
from torch import nn

from optimum_moonshot import MoonshotError
from optimum_moonshot.objective.patterns import NM
from optimum_moonshot.packing import find_codec
from optimum_moonshot.packing.bitmask import Bitmask, check_packed, find_window, is_nm, pack, unpack, unpack_bits
from optimum_moonshot.runtime.packed_layers import PackedLinear

PATTERNS = [None, NM(2, 4), NM(4, 8), NM(1, 4), NM(1, 2), NM(3, 7), NM(4, 16), NM(2, 2)]
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def rows(values, meta):
    """Flat or rectangular values as a list per row."""
    if values.ndim == 2:
        return values.tolist()
    counts = [sum(byte.bit_count() for byte in row) for row in meta.tolist()]
    return [part.tolist() for part in values.split(counts)]


@pytest.mark.parametrize("groups", [1, 3, 16])
@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_the_format_matches_the_reference(pattern, groups):
    d_in = groups * (pattern.m if pattern else 11)
    for dtype in DTYPES:
        matrix = reference.random_matrix(5, d_in, pattern, dtype)
        values, meta = pack(matrix, pattern)
        expected_values, expected_meta = reference.pack(matrix, *((pattern.n, pattern.m) if pattern else ()))
        assert values.dtype == dtype and meta.dtype == torch.uint8
        assert meta.tolist() == expected_meta
        assert rows(values, meta) == expected_values
        assert values.nbytes + meta.nbytes == Bitmask().packed_bytes(matrix, pattern)
        check_packed(values, meta, (5, d_in))
        dense = unpack(values, meta, d_in)
        assert torch.equal(dense, matrix) and dense.dtype == dtype
        assert dense.tolist() == reference.unpack(expected_values, expected_meta, d_in)
        assert not (torch.signbit(dense) & (dense == 0)).any()  # −0.0 is unpacked as 0.0


@pytest.mark.parametrize("pattern", PATTERNS[1:], ids=str)
def test_both_implementations_of_unpacking_agree(pattern):
    d_in = 8 * pattern.m
    for dtype in DTYPES:
        matrix = reference.random_matrix(6, d_in, pattern, dtype)
        values, meta = pack(matrix, pattern)
        assert torch.equal(unpack(values, meta, d_in, window=0), matrix)
        window = find_window(values, meta, d_in)
        assert window == (0 if pattern.m in (7, 16) else 8 if pattern.m == 8 else 4)
        assert torch.equal(unpack(values, meta, d_in, window=window), matrix)


def test_unpacking_in_several_steps(monkeypatch):
    monkeypatch.setattr("optimum_moonshot.packing.bitmask._STEP", 5)
    matrix = reference.random_matrix(7, 48, NM(2, 4), torch.bfloat16)
    values, meta = pack(matrix, NM(2, 4))
    assert torch.equal(unpack(values, meta, 48), matrix)


@pytest.mark.parametrize("pattern", PATTERNS[1:-1], ids=str)
def test_a_moved_value_is_no_longer_nm(pattern):
    """One more weight in the first group and one less in the last: row counts do not change."""
    for groups in (2, 8):
        d_in = groups * pattern.m
        meta = pack(reference.random_matrix(3, d_in, pattern, torch.float32), pattern)[1]
        assert is_nm(meta, d_in, pattern)
        bits = unpack_bits(meta, d_in)
        bits[2, : pattern.m] = torch.arange(pattern.m) <= pattern.n
        bits[2, -pattern.m :] = torch.arange(pattern.m) < pattern.n - 1
        moved = torch.from_numpy(np.packbits(bits.numpy(), axis=1, bitorder="little"))
        assert not is_nm(moved, d_in, pattern)


def test_every_bit_of_a_value_survives():
    """All 16-bit patterns, with infinities, NaNs and denormals; only −0.0 changes."""
    everything = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.bfloat16, torch.float16):
        matrix = torch.stack([everything.view(dtype), torch.zeros(2**16, dtype=dtype)], -1).view(8, -1)
        dense = unpack(*pack(matrix, NM(1, 2)), matrix.shape[1])
        changed = dense.view(torch.int16) != matrix.view(torch.int16)
        assert changed.sum() == 1 and matrix[changed].item() == 0 and torch.signbit(matrix[changed])


def test_two_of_four_in_16_bits_takes_nine_sixteenths():
    matrix = reference.random_matrix(32, 64, NM(2, 4), torch.bfloat16)
    values, meta = pack(matrix, NM(2, 4))
    assert values.nbytes + meta.nbytes == matrix.nbytes * 9 // 16


def test_extremes():
    empty, full = torch.zeros(3, 12), torch.ones(3, 12)
    for matrix in (empty, full):
        assert torch.equal(unpack(*pack(matrix, None), 12), matrix)
    assert pack(empty, None)[0].numel() == 0
    with pytest.raises(MoonshotError, match="it is not 2:4: 4 of 4 weights from row 0, input 0 on"):
        pack(full, NM(2, 4))
    late = torch.zeros(3, 12)
    late[1, 8:11] = 1
    with pytest.raises(MoonshotError, match="it is not 2:4: 3 of 4 weights from row 1, input 8 on"):
        pack(late, NM(2, 4))


@pytest.mark.parametrize("pattern", [None, NM(2, 4)], ids=str)
def test_inconsistent_tensors_are_refused(pattern):
    values, meta = pack(reference.random_matrix(4, 12, pattern, torch.float32), pattern)
    check_packed(values, meta, (4, 12))
    wrong = meta.clone()
    wrong[2, 0] ^= 1
    for bad, words in [
        ((values, wrong), "weight_meta marks"),
        ((values[..., :-1], meta), "values, weight_meta marks|holds"),
        ((values, meta[:-1]), r"weight_meta is torch.uint8 \[3, 2\]"),
        ((values, meta.int()), "weight_meta is torch.int32"),
        ((values.int(), meta), "dtype torch.int32"),
        ((values[None], meta), "holds"),
    ]:
        with pytest.raises(MoonshotError, match=words):
            check_packed(*bad, (4, 12))
    beyond = meta.clone()
    beyond[:, 1] = ((meta[:, 1] & 0x0F) << 4) | (meta[:, 1] >> 4)  # as many bits, but past the last input
    with pytest.raises(MoonshotError, match="beyond input 12"):
        check_packed(values, beyond, (4, 12))


@pytest.mark.parametrize("bias", [True, False])
def test_packed_linear_equals_linear(bias):
    linear = nn.Linear(12, 5, bias=bias)
    with torch.no_grad():
        linear.weight.copy_(reference.random_matrix(5, 12, NM(2, 4), torch.float32))
    codec = find_codec("bitmask")
    packed = PackedLinear(codec, (5, 12), codec.pack(linear.weight.detach(), NM(2, 4)), linear.bias)
    inputs = torch.randn(3, 2, 12)
    assert torch.equal(packed.weight, linear.weight)
    assert torch.allclose(packed(inputs), linear(inputs))
    assert torch.allclose(packed.to(torch.float64)(inputs.double()), linear.double()(inputs.double()))
