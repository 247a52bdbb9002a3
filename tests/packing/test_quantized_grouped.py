"""Products of groups of inputs with a stack of matrices of integer codes: those of one matrix after another."""

import pytest
import torch
from grid_matrices import on_grid, random_matrix

from optimum_moonshot.kernels import find_library
from optimum_moonshot.objective.grid import Grid
from optimum_moonshot.objective.patterns import NM
from optimum_moonshot.packing import Codec, Quantized, quantized, quantized_codec

GROUPS, D_OUT = 5, 7
ATOL = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 1e-1}
KINDS = {"dense": (None, 203), "2:4": (NM(2, 4), 200), "0.3": (None, 203)}  # pattern, d_in
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
        for module in (quantized, quantized_codec):
            monkeypatch.setattr(module, "find_library", lambda: None)
    elif find_library() is None:
        pytest.skip("installed without a C compiler")


def stack(kind, bits, dtype):
    """Matrices [groups, d_out, d_in], their codec, and the same packed."""
    (pattern, d_in), grid = KINDS[kind], Grid(bits, 64, dtype)
    codec = Quantized.of(grid)
    dense = [
        torch.rand(D_OUT, d_in) + 0.5 if kind == "dense" else random_matrix(grid, D_OUT, d_in, pattern, 0.3, seed)
        for seed in range(GROUPS)
    ]
    dense = [on_grid(grid, matrix.to(dtype) / matrix.abs().max()) for matrix in dense]
    parts = codec.stack([codec.pack(matrix, pattern) for matrix in dense], [(D_OUT, d_in)] * GROUPS)
    assert bool(parts["_meta"].shape[1]) == (kind != "dense")
    return torch.stack(dense), codec, parts


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS.keys())
@pytest.mark.parametrize("dtype", list(ATOL), ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_every_group_is_multiplied_by_its_matrix(kind, dtype, counts, route):
    """Bit for bit as in the loop over the groups, with inputs that are rounded, or not, or not finite."""
    torch.manual_seed(0)
    for bits in (8, 4, 3):
        dense, codec, parts = stack(kind, bits, dtype)
        d_in = dense.shape[2]
        shape, inputs = (GROUPS * D_OUT, d_in), torch.randn(sum(counts) + 2, d_in).to(dtype)
        exact = [rows.double() @ matrix.double().T for rows, matrix in zip(inputs.split([*counts, 2]), dense)]  # noqa: B905
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
        outputs = wanted.grouped(inputs, torch.tensor(counts), parts, shape)[: sum(counts)]
        assert torch.allclose(outputs.double(), torch.cat(exact), atol=ATOL[dtype], rtol=ATOL[dtype] / 10)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_the_inputs_are_those_of_the_dense_products(kind, route):
    dense, codec, parts = stack(kind, 4, torch.float32)
    counts, shape = torch.tensor(COUNTS["all groups"]), (GROUPS * D_OUT, dense.shape[2])
    inputs, weights = torch.randn(40, dense.shape[2], requires_grad=True), torch.randn(40, D_OUT)
    outputs = codec.grouped(inputs, counts, parts, shape, codec.plan(parts, shape))
    (gradient,) = torch.autograd.grad((outputs * weights).sum(), inputs)
    exact = [part @ matrix for part, matrix in zip(weights.split(counts.tolist()), dense, strict=True)]
    assert torch.allclose(gradient, torch.cat(exact), atol=1e-5)


def test_mismatched_inputs_raise_torchs_error(route):
    _, codec, parts = stack("2:4", 4, torch.float32)
    for wrong in (torch.randn(3, 60), torch.randn(3, 200).bfloat16()):
        with pytest.raises(RuntimeError, match="shape|dtype|size"):
            codec.grouped(wrong, torch.tensor([2, 0, 0, 1, 0]), parts, (GROUPS * D_OUT, 200))


def test_autocast_multiplies_in_its_own_dtype(route):
    dense, codec, parts = stack("2:4", 4, torch.float32)
    counts, inputs = torch.tensor([2, 0, 0, 1, 0]), torch.randn(3, 200)
    with torch.autocast("cpu", torch.bfloat16):
        outputs = codec.grouped(inputs, counts, parts, (GROUPS * D_OUT, 200))
        assert torch.equal(outputs[2:].bfloat16(), inputs[2:] @ dense[3].T)


@pytest.mark.parametrize("wide", [False, True])
def test_the_operator_compiles(wide, route):
    for kind in KINDS:
        _, _, parts = stack(kind, 4, torch.float32)
        inputs, counts = torch.randn(40, KINDS[kind][1]), torch.tensor(COUNTS["all groups"])
        arguments = inputs, counts, *parts.values(), None, 4, 64, wide
        torch.library.opcheck(torch.ops.moonshot.quantized_grouped.default, arguments)
