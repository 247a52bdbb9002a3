"""The compiled loops over columns against the loops in Python, which they replace on CPUs: bit for bit."""

import pytest
import torch

from optimum_moonshot.kernels.library import find_library
from optimum_moonshot.objective.grid import Grid
from optimum_moonshot.objective.patterns import NM, Unstructured
from optimum_moonshot.objective.quadratic import Quadratic
from optimum_moonshot.solvers import quantization, sparsegpt
from optimum_moonshot.solvers.alps import ALPS
from optimum_moonshot.solvers.sparsegpt import SparseGPT

pytestmark = pytest.mark.skipif(find_library() is None, reason="installed without a C compiler")
GRIDS = {
    "unrounded": None,
    "int4 bfloat16": Grid(4, 64).with_dtype(torch.bfloat16),
    "int3 float16": Grid(3, 64).with_dtype(torch.float16),
    "int8 float32": Grid(8, 64).with_dtype(torch.float32),
}
PATTERNS = {
    "2:4": NM(2, 4),
    "1:4": NM(1, 4),
    "8:16": NM(8, 16),
    "64:128": NM(64, 128),
    "half": Unstructured(0.5),
    "exact": Unstructured(0.7, exact=True),
    "dense": Unstructured(0.0),
}


def with_grid(pattern, grid):
    return type(pattern)(**{**vars(pattern), "grid": grid})


def objective(rows=37, d_in=256, dead=False, zeros=False, transposed=False):
    """The quadratic of a layer with correlated inputs."""
    generator = torch.Generator().manual_seed(rows + d_in)
    inputs = torch.randn(300, d_in, generator=generator) @ torch.randn(d_in, d_in, generator=generator)
    weight = torch.randn(rows, d_in, generator=generator)
    if dead:
        inputs[:, 5:9] = 0
    if zeros:
        weight[:, ::7] = 0
    weight = weight.T.contiguous().T if transposed else weight
    return Quadratic.build(weight, inputs.T @ inputs, None, 1.0, alive=weight != 0 if zeros else None)


def both(monkeypatch, solver, problem, pattern):
    """The results of the compiled loops and of those in Python, and how often the former ran."""
    library, calls = find_library(), []

    class Counted:
        def sweep(self, *arguments):
            calls.append("sweep")
            return library.sweep(*arguments)

        def descend(self, *arguments):
            calls.append("descend")
            return library.descend(*arguments)

    results = []
    for use in (Counted(), None):
        for module in (sparsegpt, quantization):
            monkeypatch.setattr(module, "find_library", lambda use=use: use)
        results.append(solver.solve(problem, pattern))
    return *results, calls


def same(one, other):
    return torch.equal(one.weight, other.weight) and torch.equal(one.keep, other.keep)


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_compiled_loops_have_the_bits_of_those_in_python(pattern, grid, monkeypatch):
    pruned = with_grid(PATTERNS[pattern], GRIDS[grid])
    for problem in (objective(), objective(rows=1, d_in=128), objective(rows=16, d_in=128, zeros=True, dead=True)):
        compiled, literal, calls = both(monkeypatch, SparseGPT(), problem, pruned)
        assert same(compiled, literal)
        assert "sweep" in calls and ("descend" in calls) == (GRIDS[grid] is not None)


def test_a_transposed_weight_changes_no_bit(monkeypatch):
    pattern = with_grid(NM(2, 4), GRIDS["int4 bfloat16"])
    for zeros in (False, True):
        problem = objective(transposed=True, zeros=zeros)
        assert not zeros or problem.alive.stride(0) == 1  # transposed as the weight is
        compiled, literal, _ = both(monkeypatch, SparseGPT(), problem, pattern)
        assert same(compiled, literal)


def test_the_number_of_threads_changes_no_bit():
    generator, threads = torch.Generator().manual_seed(0), torch.get_num_threads()
    dense, factor = torch.randn(3000, 32, generator=generator), torch.randn(32, 32, generator=generator).triu() + 2
    results = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        weight, keep, errors = dense.clone(), torch.empty_like(dense, dtype=torch.bool), torch.empty_like(dense)
        assert find_library().sweep(weight, keep, factor, errors, (2, 4))
        results.append((weight, keep, errors))
    torch.set_num_threads(threads)
    for result in results[1:]:
        assert all(torch.equal(one, other) for one, other in zip(results[0], result, strict=True))
    assert (results[0][1].view(-1, 4).sum(1) == 2).all()


def test_a_block_that_is_too_wide_takes_the_loop_in_python(monkeypatch):
    problem = objective(rows=3, d_in=1024)
    compiled, literal, calls = both(monkeypatch, SparseGPT(block_size=1024), problem, NM(256, 512))
    assert calls and same(compiled, literal)
    library, weight = find_library(), torch.randn(4, 512)
    keep, errors = torch.zeros(4, 512, dtype=torch.bool), torch.zeros(4, 512)
    assert not library.sweep(weight, keep, torch.eye(512), errors, (256, 512)) and not keep.any()


def test_codes_of_another_solver_are_changed_alike(monkeypatch):
    pattern = with_grid(NM(2, 4), GRIDS["int4 bfloat16"])
    problem = objective(rows=24, d_in=128)
    pruned = ALPS().solve(problem, NM(2, 4))
    results = []
    for use in (find_library(), None):
        monkeypatch.setattr(quantization, "find_library", lambda use=use: use)
        results.append(quantization.on_grid(ALPS(), problem, pruned, pattern).weight)
    assert torch.equal(*results)


def test_infinite_scores_and_equal_ones_are_ordered_alike(monkeypatch):
    problem = objective(rows=20, d_in=64)
    problem.weight[:, :32] = 1.0  # ties
    problem.weight[3, 40] = torch.inf
    compiled, literal, _ = both(monkeypatch, SparseGPT(), problem, NM(2, 4))
    assert torch.equal(compiled.keep, literal.keep)
    assert torch.equal(compiled.weight.nan_to_num(7), literal.weight.nan_to_num(7))
