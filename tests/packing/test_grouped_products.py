"""Products of groups of inputs with a stack of packed matrices: the sum of each, rows of a stack, with every route."""

import pytest
import reference_packing as reference
import torch
from grid_matrices import on_grid, random_matrix

from optimum_moonshot.objective.grid import Grid
from optimum_moonshot.objective.patterns import NM
from optimum_moonshot.packing import Codec, find_codec

GROUPS, D_OUT = 5, 7
FORMATS = [  # name, pattern, d_in, and whether all weights are stored
    ("bitmask", None, 50, False),
    ("bitmask", NM(2, 4), 64, False),
    ("int4g64", None, 203, True),
    ("int4g64", NM(2, 4), 200, False),
    ("int4g64", None, 203, False),
]
ATOL = {torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 1e-1}
COUNTS = {
    "one row": [0, 0, 1, 0, 0],
    "all in one group": [0, 40, 0, 0, 0],
    "all groups": [3, 1, 30, 2, 4],
    "rows of no group": [2, 0, 1, 0, 0],
    "none": [0, 0, 0, 0, 0],
}


def stack(name, pattern, d_in, full, dtype=torch.float32):
    """Matrices [groups, d_out, d_in], their codec, the same packed, and the shape of the stack."""
    codec, shape = find_codec(name), (GROUPS * D_OUT, d_in)
    if name == "bitmask":
        dense = [reference.random_matrix(D_OUT, d_in, pattern, dtype) for _ in range(GROUPS)]
    else:
        grid = Grid(codec.bits, 64, dtype)
        dense = [
            torch.rand(D_OUT, d_in) + 0.5 if full else random_matrix(grid, D_OUT, d_in, pattern, 0.3, seed)
            for seed in range(GROUPS)
        ]
        dense = [on_grid(grid, matrix.to(dtype) / matrix.abs().max()) for matrix in dense]
    parts = codec.stack([codec.pack(matrix, pattern) for matrix in dense], [(D_OUT, d_in)] * GROUPS)
    assert bool(parts["_meta"].shape[1]) != full
    return torch.stack(dense), codec, parts, shape


def expected(dense, inputs, counts):
    """The products of the groups; 0 in the rows after them."""
    sizes = [*counts, len(inputs) - sum(counts)]
    products = [rows @ matrix.T for rows, matrix in zip(inputs.split(sizes), dense, strict=False)]
    return torch.cat([*products, inputs.new_zeros(sizes[-1], D_OUT)])


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS.keys())
@pytest.mark.parametrize("dtype", list(ATOL), ids=str)
@pytest.mark.parametrize("case", FORMATS, ids=str)
def test_every_group_is_multiplied_by_its_matrix(case, dtype, counts, route):
    torch.manual_seed(0)
    dense, codec, parts, shape = stack(*case, dtype)
    codec.check(parts, shape, dtype, case[1])
    assert torch.equal(codec.unpack(parts, shape), dense.flatten(0, 1))
    inputs, wanted = torch.randn(sum(counts) + 2, shape[1]).to(dtype), codec.with_inputs("float")
    exact = expected(dense.double(), inputs.double(), counts)
    for plan in (None, wanted.plan(parts, shape)):
        outputs = wanted.grouped(inputs, torch.tensor(counts), parts, shape, plan)
        assert outputs.dtype == dtype
        assert torch.allclose(outputs.double(), exact, atol=ATOL[dtype], rtol=ATOL[dtype] / 10)


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS.keys())
@pytest.mark.parametrize("dtype", list(ATOL), ids=str)
@pytest.mark.parametrize("case", FORMATS[2:], ids=str)
def test_integers_are_multiplied_as_in_a_loop_over_the_groups(case, dtype, counts, route):
    """Bit for bit, with inputs that are rounded, or not, or not finite."""
    torch.manual_seed(0)
    for bits in (8, 4, 3):
        dense, codec, parts, shape = stack(f"int{bits}g64", *case[1:], dtype)
        inputs = torch.randn(sum(counts) + 2, shape[1]).to(dtype)
        special = inputs.clone()
        special[0, 3], special[1, 150] = torch.inf, torch.nan
        for choice in ("int8", "float"):
            wanted = codec.with_inputs(choice)
            for plan in (None, wanted.plan(parts, shape)):
                for rows in (inputs, special):
                    outputs = wanted.grouped(rows, torch.tensor(counts), parts, shape, plan)
                    loop = Codec.grouped(wanted, rows, torch.tensor(counts), parts, shape, plan)
                    assert outputs.dtype == dtype and not outputs[sum(counts) :].any()
                    assert torch.equal(outputs.nan_to_num(nan=-3), loop.nan_to_num(nan=-3))
        exact = expected(dense.double(), inputs.double(), counts)
        outputs = wanted.grouped(inputs, torch.tensor(counts), parts, shape)
        atol = ATOL[dtype] / 2 if dtype == torch.float16 else ATOL[dtype]
        assert torch.allclose(outputs.double(), exact, atol=atol, rtol=atol / 10)


@pytest.mark.parametrize("counts", [COUNTS["all groups"], COUNTS["rows of no group"]], ids=str)
@pytest.mark.parametrize("case", FORMATS, ids=str)
def test_gradients_of_the_inputs_are_those_of_the_dense_products(case, counts, route):
    dense, codec, parts, shape = stack(*case)
    inputs, weights = torch.randn(sum(counts) + 2, shape[1], requires_grad=True), torch.randn(sum(counts) + 2, D_OUT)
    outputs = codec.grouped(inputs, torch.tensor(counts), parts, shape, codec.plan(parts, shape))
    (gradient,) = torch.autograd.grad((outputs * weights).sum(), inputs)
    (exact,) = torch.autograd.grad((expected(dense, inputs, counts) * weights).sum(), inputs)
    assert torch.allclose(gradient, exact, atol=1e-5)


@pytest.mark.parametrize("case", FORMATS[:2], ids=str)
def test_rows_of_a_matrix_are_packed_tensors_themselves(case, route):
    dense, codec, parts, shape = stack(*case, torch.bfloat16)
    for plan in (None, codec.plan(parts, shape)):
        for first, stop in ((0, 7), (10, 35)):
            size = (stop - first, shape[1])
            rows, planned = codec.rows(parts, shape, first, stop, plan)
            codec.check(rows, size)
            for of_rows in (None, planned):
                assert torch.equal(codec.unpack(rows, size, of_rows), dense.flatten(0, 1)[first:stop])


def test_matrices_of_equal_and_of_unequal_rows_are_stacked():
    codec = find_codec("bitmask")
    matrices = [reference.random_matrix(4, 16, pattern, torch.float32) for pattern in (NM(2, 4), None, NM(1, 4))]
    packed = [codec.pack(matrix, pattern) for matrix, pattern in zip(matrices, (NM(2, 4), None, NM(1, 4)), strict=True)]
    parts = codec.stack(packed, [(4, 16)] * 3)
    codec.check(parts, (12, 16))
    assert torch.equal(codec.unpack(parts, (12, 16)), torch.cat(matrices))


@pytest.mark.parametrize("name", ["bitmask", "int4g64"])
def test_mismatched_inputs_raise_torchs_error(name, route):
    _, codec, parts, shape = stack(name, NM(2, 4), 200, False)
    for wrong in (torch.randn(3, 60), torch.randn(3, 200).bfloat16()):
        with pytest.raises(RuntimeError, match="shape|dtype|size"):
            codec.grouped(wrong, torch.tensor([2, 0, 0, 1, 0]), parts, shape)


@pytest.mark.parametrize("name", ["bitmask", "int4g64"])
def test_autocast_multiplies_in_its_own_dtype(name, route):
    dense, codec, parts, shape = stack(name, NM(2, 4), 200, False)
    inputs = torch.randn(3, 200)
    with torch.autocast("cpu", torch.bfloat16):
        outputs = codec.grouped(inputs, torch.tensor([2, 0, 0, 1, 0]), parts, shape)
        assert torch.equal(outputs[2:].bfloat16(), inputs[2:] @ dense[3].T)


@pytest.mark.parametrize("wide", [False, True])
def test_the_operators_compile(wide, route):
    for case in FORMATS:
        _, _, parts, shape = stack(*case)
        inputs, counts = torch.randn(40, shape[1]), torch.tensor(COUNTS["all groups"])
        operator, rest = torch.ops.moonshot.quantized_grouped, (4, 64, wide)
        if case[0] == "bitmask":
            operator, rest = torch.ops.moonshot.packed_grouped, ()
        torch.library.opcheck(operator.default, (inputs, counts, *parts.values(), None, *rest))
