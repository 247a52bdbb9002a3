"""Products of groups of inputs with a stack of packed matrices: the sum of each, rows of a stack, with every route."""

import pytest
import reference_packing as reference
import torch

from optimum_moonshot.kernels import find_library
from optimum_moonshot.objective.patterns import NM
from optimum_moonshot.packing import bitmask, bitmask_codec, find_codec

GROUPS, D_OUT = 5, 7
ATOL = {torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 1e-1}
COUNTS = {
    "one row": [0, 0, 1, 0, 0],
    "all in one group": [0, 40, 0, 0, 0],
    "all groups": [3, 1, 30, 2, 4],
    "rows of no group": [2, 0, 1, 0, 0],
    "none": [0, 0, 0, 0, 0],
}


@pytest.fixture(params=["library", "torch"])
def route(request, monkeypatch):
    if request.param == "torch":
        for module in (bitmask, bitmask_codec):
            monkeypatch.setattr(module, "find_library", lambda: None)
    elif find_library() is None:
        pytest.skip("installed without a C compiler")


def stack(pattern, dtype, d_in):
    """Matrices [groups, d_out, d_in], and the same packed."""
    dense = torch.stack([reference.random_matrix(D_OUT, d_in, pattern, dtype) for _ in range(GROUPS)])
    codec = find_codec("bitmask")
    return dense, codec.stack([codec.pack(matrix, pattern) for matrix in dense], [(D_OUT, d_in)] * GROUPS)


def expected(dense, inputs, counts, beyond):
    parts = [part @ matrix.T for part, matrix in zip(inputs.split([*counts, beyond]), dense, strict=False)]
    return torch.cat([*parts, inputs.new_zeros(beyond, D_OUT)])


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS.keys())
@pytest.mark.parametrize("dtype", list(ATOL), ids=str)
@pytest.mark.parametrize("pattern, d_in", [(None, 50), (NM(2, 4), 64)], ids=str)
def test_every_group_is_multiplied_by_its_matrix(pattern, d_in, dtype, counts, route):
    torch.manual_seed(0)
    codec, (dense, parts), shape = find_codec("bitmask"), stack(pattern, dtype, d_in), (GROUPS * D_OUT, d_in)
    codec.check(parts, shape, dtype, pattern)
    assert torch.equal(codec.unpack(parts, shape), dense.flatten(0, 1))
    beyond = 2
    inputs = torch.randn(sum(counts) + beyond, d_in).to(dtype)
    exact = expected(dense.double(), inputs.double(), counts, beyond)
    for plan in (None, codec.plan(parts, shape)):
        outputs = codec.grouped(inputs, torch.tensor(counts), parts, shape, plan)
        assert outputs.dtype == dtype and torch.allclose(
            outputs.double(), exact, atol=ATOL[dtype], rtol=ATOL[dtype] / 10
        )


@pytest.mark.parametrize("pattern, d_in", [(None, 50), (NM(2, 4), 64)], ids=str)
def test_gradients_of_the_inputs_are_those_of_the_dense_products(pattern, d_in, route):
    dense, parts = stack(pattern, torch.float32, d_in)
    counts, shape = torch.tensor(COUNTS["rows of no group"]), (GROUPS * D_OUT, d_in)
    inputs = torch.randn(5, d_in, requires_grad=True)
    weights = torch.randn(5, D_OUT)
    codec = find_codec("bitmask")
    outputs = codec.grouped(inputs, counts, parts, shape, codec.plan(parts, shape))
    (gradient,) = torch.autograd.grad((outputs * weights).sum(), inputs)
    (exact,) = torch.autograd.grad((expected(dense, inputs, counts.tolist(), 2) * weights).sum(), inputs)
    assert torch.allclose(gradient, exact, atol=1e-5)


@pytest.mark.parametrize("pattern, d_in", [(None, 50), (NM(2, 4), 64)], ids=str)
def test_rows_of_a_matrix_are_packed_tensors_themselves(pattern, d_in, route):
    codec, (dense, parts), shape = find_codec("bitmask"), stack(pattern, torch.bfloat16, d_in), (GROUPS * D_OUT, d_in)
    for plan in (None, codec.plan(parts, shape)):
        for first, stop in ((0, 7), (10, 35)):
            rows, planned = codec.rows(parts, shape, first, stop, plan)
            codec.check(rows, (stop - first, d_in))
            for each in (None, planned):
                assert torch.equal(codec.unpack(rows, (stop - first, d_in), each), dense.flatten(0, 1)[first:stop])


def test_matrices_of_equal_and_of_unequal_rows_are_stacked():
    codec = find_codec("bitmask")
    matrices = [reference.random_matrix(4, 16, pattern, torch.float32) for pattern in (NM(2, 4), None, NM(1, 4))]
    packed = [codec.pack(matrix, pattern) for matrix, pattern in zip(matrices, (NM(2, 4), None, NM(1, 4)), strict=True)]
    parts = codec.stack(packed, [(4, 16)] * 3)
    codec.check(parts, (12, 16))
    assert torch.equal(codec.unpack(parts, (12, 16)), torch.cat(matrices))


def test_the_operator_compiles():
    _, parts = stack(None, torch.float32, 50)
    inputs, counts = torch.randn(40, 50), torch.tensor(COUNTS["all groups"])
    torch.library.opcheck(torch.ops.moonshot.packed_grouped.default, (inputs, counts, *parts.values(), None))
