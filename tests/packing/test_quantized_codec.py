"""Packed integer codes of one matrix: against a literal implementation, exact sizes, and errors for damaged tensors."""

import itertools

import grid_matrices
import pytest
import reference_quantized
import torch
from marks import slow

from optimum_moonshot import MoonshotError
from optimum_moonshot.objective.grid import Grid
from optimum_moonshot.objective.patterns import NM
from optimum_moonshot.packing import PackedLayer, find_codec, quantized
from optimum_moonshot.packing.bitmask import unpack_bits

BITS = (8, 4, 3)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SIZES = {None: (1, 63, 64, 130, 300), NM(2, 4): (4, 68, 256), NM(3, 7): (7, 133), NM(1, 16): (192,), NM(4, 4): (132,)}


def packed(bits=4, pattern=None, dtype=torch.bfloat16, d_out=5, d_in=300, group=128, **options):
    grid = Grid(bits, group, dtype)
    matrix = grid_matrices.random_matrix(grid, d_out, d_in, pattern, **options)
    return matrix, find_codec(f"int{bits}g{group}"), find_codec(f"int{bits}g{group}").pack(matrix, pattern)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("pattern", SIZES, ids=str)
def test_the_format_matches_the_reference(pattern, bits):
    for dtype, d_in, group in itertools.product(DTYPES, SIZES[pattern], (64, 192)):
        for density in (0.5,) if pattern else (0.0, 0.3, 1.0):
            matrix, codec, parts = packed(bits, pattern, dtype, 5, d_in, group, density=density)
            codes, scale, meta = parts["_codes"], parts["_scale"], parts["_meta"]
            keep = unpack_bits(meta, d_in) if meta.shape[1] else torch.ones(5, d_in, dtype=torch.bool)
            integers = codec.grid(dtype).codes(matrix, codec.grid(dtype).per_weight(scale, d_in)).int()
            assert codes.tolist() == sum(reference_quantized.pack(integers, keep, bits), [])
            assert bool(keep[matrix != 0].all()) and (scale.dtype, meta.dtype) == (dtype, torch.uint8)
            if pattern is not None:
                assert bool((keep.view(5, -1, pattern.m).sum(-1) == pattern.n).all())
            elif meta.shape[1]:
                assert torch.equal(keep, matrix != 0)
            codec.check(parts, (5, d_in), dtype, pattern)
            dense = codec.unpack(parts, (5, d_in))
            assert torch.equal(dense, matrix) and dense.dtype == dtype
            assert not (torch.signbit(dense) & (dense == 0)).any()
            assert codec.packed_bytes(matrix, pattern) == sum(part.nbytes for part in parts.values())


@pytest.mark.parametrize("bits", BITS)
def test_slices_of_rows_make_the_same_tensors(bits, monkeypatch):
    matrix, codec, whole = packed(bits, d_out=7)
    monkeypatch.setattr(quantized, "_TEMPORARY", 2**20)  # 3 rows would exceed the limit on a slice
    monkeypatch.setattr("optimum_moonshot.objective.linalg.CPU_BYTES", 2 * 2**20 * 300)
    parts = codec.pack(matrix, None)
    assert all(torch.equal(parts[suffix], whole[suffix]) for suffix in codec.suffixes)
    codec.check(parts, (7, 300))
    assert torch.equal(codec.unpack(parts, (7, 300)), matrix)


def test_bits_per_weight():
    """2:4: a bit of the mask, the codes of half of the weights, and a scale of 16 bits per group."""
    for bits, expected in ((8, 5.125), (4, 3.125), (3, 2.625)):
        matrix, codec, parts = packed(bits, NM(2, 4), d_out=32, d_in=512)
        assert 8 * sum(part.nbytes for part in parts.values()) == expected * matrix.numel()
        matrix, codec, parts = packed(bits, NM(4, 4), d_out=32, d_in=512)
        assert 8 * sum(part.nbytes for part in parts.values()) == (bits + 0.125) * matrix.numel()
        assert parts["_meta"].shape == (32, 0)


@pytest.mark.parametrize("bits", BITS)
def test_the_bitmask_is_left_out_where_that_is_smaller(bits):
    smaller = {}
    for density in (0.2, 1.0):
        matrix, codec, parts = packed(bits, d_out=16, d_in=512, density=density)
        smaller[density] = parts["_meta"].shape[1] == 0
        nonzeros = (matrix != 0).view(16, -1, 64).sum(-1)
        sparse = int((nonzeros * bits + 7).div(8, rounding_mode="floor").sum()) + 16 * 512 // 8
        size = min(sparse, 16 * 512 * bits // 8)
        assert len(parts["_codes"]) + parts["_meta"].numel() == size
    assert smaller == {0.2: False, 1.0: bits > 3}  # many weights round to 0 in 3 bits


def test_offsets_of_rows():
    _, codec, parts = packed(3, d_in=300, density=0.2)
    offsets = codec.plan(parts, (5, 300))
    assert offsets.dtype == torch.int64 and len(offsets) == 6 and offsets[-1] == len(parts["_codes"])
    alone = [codec.pack(matrix[None], None)["_codes"] for matrix in codec.unpack(parts, (5, 300))]
    assert offsets.diff().tolist() == [len(codes) for codes in alone]
    assert torch.equal(offsets, quantized.row_offsets(parts["_meta"], 300, 3))
    assert codec.plan(packed(3, NM(4, 4))[2], (5, 300)) is None


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("pattern", [None, NM(2, 4), NM(4, 4)], ids=str)
def test_rows_are_packed_matrices(pattern, bits):
    matrix, codec, parts = packed(bits, pattern)
    for first, stop in ((0, 5), (1, 4), (4, 5)):
        for plan in (None, codec.plan(parts, (5, 300))):
            rows, planned = codec.rows(parts, (5, 300), first, stop, plan)
            codec.check(rows, (stop - first, 300), torch.bfloat16, pattern)
            for each in (None, planned):
                assert torch.equal(codec.unpack(rows, (stop - first, 300), each), matrix[first:stop])


@pytest.mark.parametrize("bits", BITS)
def test_weights_off_the_grid_are_refused(bits):
    matrix, codec, _ = packed(bits, d_in=256)
    matrix[3, 5] *= 1.3
    matrix[3, 6] = 0.77
    with pytest.raises(MoonshotError, match=f"^row 3 is not on a grid of {bits} bits with groups of 128; its weights"):
        codec.pack(matrix, None)
    for value in (float("nan"), float("inf")):
        matrix[3, 6] = value
        with pytest.raises(MoonshotError, match="row 3 is not on a grid"):
            codec.pack(matrix, None)
    with pytest.raises(MoonshotError, match="dtype=torch.float64: its weights cannot be quantized"):
        codec.pack(matrix.double(), None)


@pytest.mark.parametrize("magnitude", [slow(1e-7), 1.0, slow(3e4)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", BITS)
def test_the_library_packs_as_torch_does(bits, dtype, magnitude, monkeypatch):
    library = quantized.find_library()
    if library is None:
        pytest.skip("no compiled library")
    generator, d_in = torch.Generator().manual_seed(bits), 450
    grid, results = Grid(bits, 192, dtype), []
    for pattern, density in ((None, 0.3), (None, 1.0), (NM(2, 5), 1.0)):
        codes = torch.randint(-grid.top, grid.top + 1, (70, d_in), generator=generator)
        codes[::2] = codes[::2].clamp(-grid.top + 1, grid.top - 1)  # the largest code is not the last one
        scores = torch.rand(70, d_in, generator=generator)
        codes = codes * (scores < density if pattern is None else pattern.keep(scores))
        scale = magnitude / grid.top * (0.3 + torch.rand(70, grid.groups(d_in), generator=generator))
        matrix = grid.values(codes, grid.per_weight(scale, d_in))
        shifted = matrix.clone()
        shifted[41, 400] = 0.37 * matrix[41].abs().max()
        results += [(matrix, pattern), (shifted, pattern and NM(3, 5)), (matrix[:0], pattern), (matrix * 0, pattern)]

    def pack(matrix, pattern):
        try:
            return quantized.pack(grid, matrix, pattern)
        except MoonshotError as error:
            return str(error)

    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        by_library = [pack(*each) for each in results]
    finally:
        torch.set_num_threads(threads)
    monkeypatch.setattr(quantized, "find_library", lambda: None)
    for (matrix, _), first, second in zip(results, by_library, [pack(*each) for each in results], strict=True):
        assert type(first) is type(second)
        same = first == second if isinstance(first, str) else all(map(torch.equal, first, second))
        assert same, matrix.shape


def test_more_weights_than_the_pattern_keeps_are_refused():
    matrix, codec, _ = packed(density=1.0)
    with pytest.raises(MoonshotError, match="it is not 2:4: 4 of 4 weights from row 1, input 0 on"):
        codec.pack(matrix, NM(2, 4))


def flipped(tensor, index, mask):
    changed = tensor.clone()
    changed[index] ^= mask
    return changed


def with_value(tensor, index, value):
    changed = tensor.clone()
    changed[index] = value
    return changed


DAMAGE = {
    "codes too short": ("_codes", lambda t: t[:-1], r"weight_codes is \[\d+\], weight_meta needs \[\d+\]"),
    "codes too long": ("_codes", lambda t: torch.cat([t, t[:1]]), "weight_codes is"),
    "codes as a matrix": ("_codes", lambda t: t[None], r"weight_codes is \[1, "),
    "signed codes": ("_codes", lambda t: t.view(torch.int8), "torch.int8 and torch.uint8, not uint8"),
    "a code too small": ("_codes", lambda t: with_value(t, slice(0, 8), 0), "weight_codes has the code -"),
    "scales of another group": (
        "_scale",
        lambda t: t[:, :-1],
        r"weight_scale is \[5, 2\] where .* 5×300 needs \[5, 3\]",
    ),
    "integer scales": ("_scale", lambda t: t.view(torch.int16), "weight_scale has dtype torch.int16"),
    "scales of 8 bits": ("_scale", lambda t: t.to(torch.float8_e4m3fn), "weight_scale has dtype torch.float8"),
    "a negative scale": ("_scale", lambda t: -t, "negative or infinite scale, or NaN"),
    "an infinite scale": ("_scale", lambda t: with_value(t, (1, 2), float("inf")), "infinite"),
    "a scale that is NaN": ("_scale", lambda t: with_value(t, (1, 2), float("nan")), "NaN"),
    "no scale": ("_scale", lambda t: with_value(t, (1, 2), 0), "weight_scale is 0 for a group with weights"),
    "mask of other rows": ("_meta", lambda t: t[:-1], r"weight_meta is \[4, 38\] where .* \[5, 0\] or \[5, 38\]"),
    "mask of integers": ("_meta", lambda t: t.int(), "torch.int32, not uint8"),
    "mask beyond the inputs": ("_meta", lambda t: flipped(t, (1, -1), 0x80), "marks values beyond input 300"),
    "no mask": ("_meta", lambda t: t[:, :0], "weight_codes is|it is not 2:4"),
}


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("pattern", [None, NM(2, 4)], ids=str)
@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_tensors_are_refused(damage, pattern, bits):
    suffix, change, words = DAMAGE[damage]
    _, codec, parts = packed(bits, pattern)
    with pytest.raises(MoonshotError, match=words):
        codec.check({**parts, suffix: change(parts[suffix])}, (5, 300), torch.bfloat16, pattern)


@pytest.mark.parametrize("bits", (4, 3))
def test_bits_after_the_last_code_of_a_block_are_zero(bits):
    _, codec, parts = packed(bits, d_out=2, d_in=65, group=64, density=1.0, seed=1)
    assert parts["_codes"][-1] >> bits == 0  # the last block of the last row has one code
    with pytest.raises(MoonshotError, match="nonzero bits after the last code of a block"):
        codec.check({**parts, "_codes": flipped(parts["_codes"], -1, 0x80)}, (2, 65))


def test_a_moved_weight_is_no_longer_nm():
    _, codec, parts = packed(4, NM(2, 4))
    meta = parts["_meta"].clone()
    meta[2, 0] = (int(meta[2, 0]) & 0xF0) | 0b0111
    meta[2, 1] = (int(meta[2, 1]) & 0xF0) | 0b0001
    codec.check({**parts, "_meta": meta}, (5, 300), torch.bfloat16)
    with pytest.raises(MoonshotError, match="it is not 2:4"):
        codec.check({**parts, "_meta": meta}, (5, 300), torch.bfloat16, NM(2, 4))


def test_another_dtype_is_refused():
    _, codec, parts = packed()
    with pytest.raises(MoonshotError, match="its scales are torch.bfloat16, torch.float32 was written"):
        codec.check(parts, (5, 300), torch.float32)


def test_names_of_formats():
    for name in ("int4g128", "int8g64", "int3g192", "int4g1024"):
        assert find_codec(name).name == name and find_codec(name) is find_codec(name)
        assert find_codec(name).suffixes == ("_codes", "_scale", "_meta")
    codec = find_codec("int4g128")
    assert codec.inputs == "int8" and codec.with_inputs("float").inputs == "float"
    assert (
        codec.with_inputs("float").name == "int4g128" and find_codec("bitmask").with_inputs("float").name == "bitmask"
    )
    for name in ("int5g128", "int4g100", "int4g0", "int4g", "int4", "xint4g64", "int4g064", "int4g64 ", "int٤g64"):
        with pytest.raises(MoonshotError, match="codec=.*this release reads bitmask, int3g128, int4g128, int8g128"):
            find_codec(name)


@pytest.mark.parametrize("transposed", [False, True])
def test_stacked_matrices_are_packed_by_their_rows(transposed):
    grid = Grid(4, 64, torch.float32)
    matrix = grid_matrices.random_matrix(grid, 15, 96, NM(2, 4))
    tensor = matrix.view(3, 5, 96)
    tensor = tensor.mT.contiguous() if transposed else tensor
    layer = PackedLayer(tuple(tensor.shape), transposed, "2:4", "float32", "int4g64", stacked=True)
    assert layer.matrix == (15, 96) and PackedLayer.read(layer.describe()) == layer
    parts = layer.pack("x.weight", tensor)
    layer.check("x.weight", parts)
    assert torch.equal(layer.unpack("x.weight", parts), tensor)
    assert sum(part.nbytes for part in parts.values()) == layer.stored_bytes(tensor)
    for damaged, words in (({"stacked": 1}, "stacked=1"), ({"shape": [15, 96]}, "only matrices of one size")):
        with pytest.raises(MoonshotError, match=words):
            PackedLayer.read({**layer.describe(), **damaged})


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("pattern", [None, NM(1, 1), NM(2, 4)], ids=str)
@pytest.mark.parametrize("bits", BITS)
def test_a_lookup_is_rows_of_the_dense_matrix(bits, pattern, compiled, monkeypatch):
    if not compiled:
        monkeypatch.setattr(quantized, "find_library", lambda: None)
    for dtype, density in itertools.product(DTYPES, (0.4, 1.0)):
        matrix, codec, parts = packed(bits, pattern, dtype, 9, 132, 64, density=density)
        for rows in ([[3, 0, 3], [8, 1, 7]], [5], [[]]):
            for kind in (torch.int64, torch.int32):
                looked_up = codec.lookup(torch.tensor(rows, dtype=kind), parts, (9, 132))
                assert torch.equal(looked_up, matrix[torch.tensor(rows, dtype=torch.int64)])
                assert looked_up.dtype == dtype
    for wrong in (-1, 9):
        with pytest.raises((IndexError, RuntimeError)):
            codec.lookup(torch.tensor([wrong]), parts, (9, 132))
    torch.library.opcheck(
        torch.ops.moonshot.quantized_lookup.default,
        (torch.tensor([1, 2]), *parts.values(), codec.plan(parts, (9, 132)), bits, 64, 132),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_the_lookup_of_other_formats_unpacks_the_matrix():
    matrix = torch.randn(5, 16).masked_fill_(torch.rand(5, 16) < 0.5, 0)
    codec, rows = find_codec("bitmask"), torch.tensor([[4, 0]])
    assert torch.equal(codec.lookup(rows, codec.pack(matrix, None), (5, 16)), matrix[rows]) and not codec.looks_up
