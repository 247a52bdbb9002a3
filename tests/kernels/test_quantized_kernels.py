"""Quantized matrices in the compiled library: every instruction set of this CPU against float64."""

import itertools
import os

import emulated_kernels
import pytest
import reference_quantized as reference
import torch
from torch.nn import functional

from optimum_moonshot.kernels.library import QuantizedMatrix, find_library

LIBRARY = find_library()
pytestmark = pytest.mark.skipif(LIBRARY is None, reason="installed without a C compiler")
SETS = LIBRARY.instruction_sets if LIBRARY else ()
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
BITS = [8, 4, 3]
KINDS = ["dense", "2:4", 0.0, 0.2, 0.6, 1.0]
ROWS = [1, 2, 3, 5, 16, 17, 70]
SHAPES = [  # and a group
    *((1, 64, 64), (2, 1, 64), (5, 257, 64), (33, 300, 128), (70, 640, 256), (6, 777, 1024)),
    *((5, 2100, 192), (3, 9000, 4224)),  # longer than the pieces and spans of the kernels
]


@pytest.fixture(scope="module")
def amx(tmp_path_factory):
    """A file with the kernels for AMX, emulated."""
    if "vbmi2" not in SETS:
        pytest.skip("the other kernels need AVX-512 VBMI2 and VNNI")
    return emulated_kernels.build(tmp_path_factory.mktemp("emulated"), emulated_kernels.AMX)


@pytest.fixture(scope="module")
def fused(tmp_path_factory):
    """A file with the portable kernels, compiled with fused multiplications and additions."""
    return emulated_kernels.build(tmp_path_factory.mktemp("fused"), emulated_kernels.PORTABLE)


COMPILED = {"emulated amx": ("amx", "amx"), "fused portable": ("fused", "portable")}  # fixture, kernel


@pytest.fixture(params=[*SETS, *(pytest.param(name, marks=pytest.mark.slow) for name in COMPILED)])
def kernels(request):
    """The library, with each instruction set in turn."""
    if request.param in COMPILED:
        file, kernel = COMPILED[request.param]
        yield emulated_kernels.emulated(LIBRARY, request.getfixturevalue(file), kernel)
        return
    LIBRARY.use(request.param)
    yield LIBRARY
    LIBRARY.use(os.environ.get("MOONSHOT_KERNELS"))


def packed(shape, bits, group, dtype, kind, seed=0):
    """A random matrix: codes times scales in float64, dense in the dtype, and packed."""
    codes, scale, keep = reference.random_quantized(shape, bits, group, dtype, kind, seed)
    rows = reference.pack(codes, torch.ones(shape, dtype=torch.bool) if keep is None else keep, bits)
    stored = torch.tensor([byte for row in rows for byte in row], dtype=torch.uint8)
    meta = offsets = None
    if keep is not None:
        meta = reference.bitmask(keep)
        offsets = LIBRARY.quantized_offsets(bits, meta, shape[1])
        assert offsets.tolist() == [0, *itertools.accumulate(map(len, rows))]
    exact = codes.double() * reference.spread(scale.double(), group, shape[1])
    matrix = QuantizedMatrix(bits, group, stored, scale, meta, offsets, shape)
    return exact, reference.dense(codes, scale, group), matrix


def assert_exact(outputs, inputs, weight, bias=None):
    """Within a few roundings of float32 sums, and the one of the outputs; inputs and weight are in float64."""
    exact, size = functional.linear(inputs, weight, bias), functional.linear(inputs.abs(), weight.abs())
    size = size if bias is None else size + bias.abs()
    rounding = torch.finfo(outputs.dtype).eps / 2 * exact.abs() + torch.finfo(outputs.dtype).tiny
    error = (outputs.double() - exact).abs()
    assert (error <= 4 * torch.finfo(torch.float32).eps * size + rounding).all()


def cases(dtype):
    """Each shape with each number of bits, and each kind in turn."""
    for number, ((d_out, d_in, group), bits) in enumerate(itertools.product(SHAPES, BITS)):
        for kind in KINDS if d_in == 300 else KINDS[number % 6 :: 3]:
            yield packed((d_out, d_in), bits, group, dtype, kind, seed=number), group


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_have_exact_sums_in_each_group(kernels, dtype):
    generator = torch.Generator().manual_seed(1)
    for number, ((exact, _, matrix), group) in enumerate(cases(dtype)):
        d_out, d_in = matrix.shape
        bias = torch.randn(d_out, generator=generator).to(dtype) if number % 2 else None
        for rows in ROWS[number % 2 :: 2]:
            inputs = torch.randn(rows, d_in, generator=generator).to(dtype)
            inputs[0, :group] = 0
            outputs = kernels.quantized_product(inputs, matrix, bias)
            assert_exact(outputs, reference.rounded(inputs, group), exact, None if bias is None else bias.double())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_wide_products_are_those_of_the_dense_matrix(kernels, dtype):
    generator = torch.Generator().manual_seed(1)
    for number, ((_, dense, matrix), _) in enumerate(cases(dtype)):
        bias = torch.randn(matrix.shape[0], generator=generator).to(dtype) if number % 2 else None
        for rows in (1, 4, 17)[number % 3 :: 2]:
            inputs = torch.randn(rows, matrix.shape[1], generator=generator).to(dtype)
            outputs = kernels.quantized_product(inputs, matrix, bias, wide=True)
            assert_exact(outputs, inputs.double(), dense.double(), None if bias is None else bias.double())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_unpacking_is_bit_for_bit_that_of_torch(kernels, dtype):
    for (_, dense, matrix), _ in cases(dtype):
        assert torch.equal(kernels.quantized_unpack(torch.full_like(dense, torch.nan), matrix), dense)
        last_row = torch.full((1, matrix.shape[1]), torch.nan, dtype=dtype)
        assert torch.equal(kernels.quantized_unpack(last_row, matrix, first=matrix.shape[0] - 1)[0], dense[-1])


def test_long_groups_and_many_rows(kernels):
    """Sums beyond 32 bits, more inputs than a strip, more rows than are multiplied together, by 1 and 2 threads."""
    threads = torch.get_num_threads()
    try:
        for (d_out, d_in, group), bits, rows in (
            ((3, 8400, 8448), 8, 2),
            ((2, 140_032, 140_032), 8, 5),
            ((35, 5000, 64), 4, 3),
            ((65, 4500, 192), 3, 50),
            ((40, 320, 128), 4, 600),
            ((2100, 512, 128), 8, 1),
        ):
            exact, _, matrix = packed((d_out, d_in), bits, group, torch.float32, 0.5)
            inputs = torch.randn(rows, d_in).abs()
            matrix.codes.copy_(matrix.codes | 1 << (bits - 1)) if d_in > 100_000 else None  # all are positive
            torch.set_num_threads(1)
            outputs = kernels.quantized_product(inputs, matrix, None)
            if d_in > 100_000:
                exact = kernels.quantized_unpack(torch.empty(d_out, d_in), matrix).double()
            assert_exact(outputs, reference.rounded(inputs, group), exact)
            torch.set_num_threads(2)
            assert torch.equal(kernels.quantized_product(inputs, matrix, None), outputs)
    finally:
        torch.set_num_threads(threads)


def test_inputs_that_are_not_finite_propagate_as_in_a_dense_product(kernels):
    for dtype, bits in zip(DTYPES, BITS, strict=True):
        _, dense, matrix = packed((9, 300), bits, 128, dtype, 0.5)
        for value, rows in itertools.product((torch.inf, -torch.inf, torch.nan), (1, 3, 40)):
            inputs = torch.ones(rows, 300, dtype=dtype)
            inputs[rows // 2, 150] = value
            ours, theirs = kernels.quantized_product(inputs, matrix, None).float(), inputs.float() @ dense.float().T
            assert torch.equal(ours.isnan(), theirs.isnan()) and torch.equal(ours.isinf(), theirs.isinf())
            assert torch.equal(ours[ours.isinf()], theirs[theirs.isinf()])
            assert not ours[rows // 2].isfinite().any() and ours.isfinite().any() == (rows > 1)


def test_inputs_of_any_size_are_rounded_or_multiplied_in_float32(kernels):
    for size in (0.0, 2.0**-140, 2.0**-120, 2.0**-95, 2.0**120):
        _, dense, matrix = packed((9, 300), 8, 128, torch.float32, "2:4")
        inputs = size * (torch.rand(5, 300) + 1)
        outputs, exact = kernels.quantized_product(inputs, matrix, None).double(), inputs.double() @ dense.double().T
        allowed = (inputs.double() @ dense.double().abs().T) / 200 + 300 * 2.0**-149  # half of 1 / 127, and more
        assert ((outputs - exact).abs() <= allowed).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_of_groups_are_those_of_their_matrices(kernels, dtype):
    """Bit for bit, with groups of any size, with and without offsets, and with inputs that are not finite."""
    generator, size, d_in = torch.Generator().manual_seed(3), 5, 203
    for number, (bits, kind, wide) in enumerate(itertools.product(BITS, ("dense", 0.3, 1.0), (False, True))):
        counts = ([0, 1, 0, 18], [40, 0, 2, 3], [0, 0, 0, 0])[number % 3]
        _, _, matrix = packed((4 * size, d_in), bits, 64, dtype, kind, seed=number)
        inputs = torch.randn(sum(counts), d_in, generator=generator).to(dtype)
        inputs[1::7, 150], inputs[4::7, 3] = torch.inf, torch.nan
        outputs, expected = inputs.new_full((sum(counts), size), 7), []
        kernels.quantized_grouped(outputs, inputs, torch.tensor(counts), matrix, wide)
        for group, rows in enumerate(inputs.split(counts)):
            of_group = slice(group * size, (group + 1) * size)
            starts = torch.arange(4 * size + 1) * len(matrix.codes) // (4 * size)
            starts = (starts if matrix.offsets is None else matrix.offsets)[group * size : (group + 1) * size + 1]
            offsets = None if matrix.offsets is None else starts - starts[0]
            meta = None if matrix.meta is None else matrix.meta[of_group]
            codes = matrix.codes[starts[0] : starts[-1]]
            part = QuantizedMatrix(bits, 64, codes, matrix.scale[of_group], meta, offsets, (size, d_in))
            expected.append(kernels.quantized_product(rows, part, None, wide))
        assert torch.equal(outputs.nan_to_num(nan=-3), torch.cat(expected).nan_to_num(nan=-3))


def test_damaged_metadata_ends_no_process(kernels):
    for bits, kind in itertools.product(BITS, (0.3, "dense")):
        _, _, matrix = packed((70, 300), bits, 64, torch.bfloat16, kind)
        full = torch.full((70, 38), 255, dtype=torch.uint8)
        for offsets in (matrix.offsets, torch.full((71,), -(2**40)), torch.arange(71) * 2**40):
            for codes in (matrix.codes, matrix.codes[:3].clone(), matrix.codes[:0].clone()):
                damaged = matrix._replace(meta=full, offsets=offsets, codes=codes)
                for rows in (1, 20):
                    kernels.quantized_product(torch.ones(rows, 300).bfloat16(), damaged, None)
                kernels.quantized_unpack(torch.empty(70, 300).bfloat16(), damaged)


@pytest.mark.slow
def test_products_with_tiles_are_those_with_vectors_bit_for_bit(amx):
    generator = torch.Generator().manual_seed(2)
    for number, ((_, _, matrix), _) in enumerate(cases(torch.float32)):
        for rows in (16, 17, 33, 40)[number % 2 :: 2]:
            inputs = torch.randn(rows, matrix.shape[1], generator=generator)
            tiles, vectors = (
                emulated_kernels.emulated(LIBRARY, amx, kernel).quantized_product(inputs, matrix, None)
                for kernel in ("amx", "vnni")
            )
            assert torch.equal(tiles, vectors)
