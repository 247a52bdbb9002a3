"""Every representation of the Fisher term equals Σ_n a_n a_nᵀ of each row and is read-only."""

from dataclasses import dataclass, replace

import pytest
import reference
import torch
from golden.make import grouped_layer, layer
from objectives import full, matrices

from optimum_moonshot.objective import fisher as fisher_module
from optimum_moonshot.objective.fisher import Fisher, FisherMatrices, SampleGradients, SharedFisher
from optimum_moonshot.objective.grid import Grid
from optimum_moonshot.objective.patterns import NM, Structured, Unstructured
from optimum_moonshot.objective.quadratic import Quadratic, Totals
from optimum_moonshot.solvers.alps import ALPS
from optimum_moonshot.solvers.base import make_solver

CPU = torch.device("cpu")
# Samples, rows, inputs: fewer samples than inputs, as many, more, one of each.
SHAPES = [(3, 5, 8), (8, 4, 8), (30, 5, 6), (1, 1, 1), (2, 6, 12)]


@dataclass(frozen=True, eq=False)
class Bare(Fisher):
    """A new representation that implements the abstract methods of the interface alone."""

    values: torch.Tensor
    samples: int
    count = property(lambda self: len(self.values))
    size = property(lambda self: self.values.shape[1])
    max_rank = size

    def part(self, rows):
        return Bare(self.values[rows], self.samples)

    def column_blocks(self, size):
        return Bare(FisherMatrices(self.values, self.samples).column_blocks(size).values, self.samples)

    def matrices(self, rows, device):
        return self.values[rows].double().clone()

    def losses(self, deltas):
        return torch.einsum("wki,kij,wkj->w", deltas.double(), self.values.double(), deltas.double()) / self.samples

    def mean_square(self):
        return float(self.values.diagonal(dim1=1, dim2=2).mean())

    def is_finite(self):
        return bool(torch.isfinite(self.values).all())


def random_gradients(samples, rows, size, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(samples, rows, size, generator=generator)


def of_samples(gradients):
    return SampleGradients(gradients), gradients


def of_half_samples(gradients):
    half = gradients.bfloat16()
    return SampleGradients(half), half


def of_matrices(gradients):
    return matrices(gradients), gradients


def of_exact_matrices(gradients):
    return matrices(gradients.double()), gradients


def of_a_new_form(gradients):
    return Bare(matrices(gradients).values, len(gradients)), gradients


def shared_by(groups):
    """The rows of each of some groups have the gradients of its first row."""

    def make(gradients):
        count = gradients.shape[1]
        which = torch.arange(count) * min(groups, count) // count
        first = [which.tolist().index(group) for group in range(int(which.max()) + 1)]
        leaders = gradients[:, first]
        return SharedFisher(matrices(leaders).values, which, len(gradients)), leaders[:, which]

    return make


def among_more(form):
    """A part of a term with more rows before and after it."""

    def make(gradients):
        samples, rows, size = gradients.shape
        around = random_gradients(samples, 3, size, seed=1)
        term, values = form(torch.cat([around[:, :2], gradients, around[:, 2:]], 1))
        return term.part(slice(2, 2 + rows)), values[:, 2 : 2 + rows]

    return make


def as_blocks(form):
    """Column blocks of a third of longer rows; the gradients are those of the blocks."""

    def make(gradients):
        samples, rows, size = gradients.shape
        more = random_gradients(samples, 2 * rows, size, seed=2)
        long = torch.stack([gradients, more[:, :rows], more[:, rows:]], 2).flatten(2)
        term, values = form(long)
        return term.column_blocks(size), values.unflatten(2, (3, size)).flatten(1, 2)

    return make


PLAIN = {
    "samples": of_samples,
    "half samples": of_half_samples,
    "matrices": of_matrices,
    "exact matrices": of_exact_matrices,
    "new form": of_a_new_form,
}
FORMS = {**PLAIN, "one matrix": shared_by(1), "two matrices": shared_by(2)}
ADAPTERS = {
    **FORMS,
    **{f"part of {name}": among_more(form) for name, form in FORMS.items()},
    **{f"blocks of {name}": as_blocks(form) for name, form in FORMS.items()},
    **{f"part of blocks of {name}": among_more(as_blocks(form)) for name, form in FORMS.items()},
}
CASES = pytest.mark.parametrize(
    ("form", "shape"),
    [
        pytest.param(form, shape, id=f"{name}-{'x'.join(map(str, shape))}")
        for name, form in ADAPTERS.items()
        for shape in SHAPES
    ],
)


def same(result, expected, tolerance=1e-5):
    torch.testing.assert_close(result.double(), expected.double(), rtol=tolerance, atol=tolerance)


def case(form, shape):
    """A term and its gradients [N, rows, size] in float64."""
    term, gradients = form(random_gradients(*shape))
    return term, gradients.double()


@CASES
def test_sizes_equal_those_of_the_gradients(form, shape):
    term, gradients = case(form, shape)
    assert (term.samples, term.count, term.size) == tuple(gradients.shape)
    assert term.max_rank <= term.size


@CASES
def test_matrices_are_the_sums_over_samples(form, shape):
    term, gradients = case(form, shape)
    truth = reference.row_fishers(gradients)
    for rows in (slice(0, term.count), slice(None), slice(0, 1), slice(term.count // 2, term.count)):
        result = term.matrices(rows, CPU)
        assert result.dtype == torch.float64
        same(result, truth[rows])


@CASES
def test_factors_multiply_to_the_matrices(form, shape):
    term, gradients = case(form, shape)
    truth = reference.row_fishers(gradients)
    for rows in (slice(0, term.count), slice(term.count // 2, term.count)):
        for dtype in (torch.float64, torch.float32):
            result = term.factors(rows, CPU, dtype)
            assert result.dtype == dtype and result.shape == (len(truth[rows]), term.max_rank, term.size)
            same(result.double().mT @ result.double(), truth[rows])


@CASES
@pytest.mark.parametrize(("a", "b"), [(0.0, 1.0), (0.7, 0.3)])
def test_combined_adds_a_shared_matrix(form, shape, a, b):
    term, gradients = case(form, shape)
    rows = slice(term.count // 2, term.count)
    root = random_gradients(term.count, term.size, term.size, seed=3).double()[rows]
    shared = root @ root.mT
    before = shared.clone()
    result = term.combined(shared, rows, a, b)
    assert result.dtype == torch.float64 and torch.equal(shared, before)
    same(result, a * shared + b * reference.row_fishers(gradients)[rows])


@CASES
@pytest.mark.parametrize("slice_bytes", [1, 500, 2**28])
def test_losses_equal_the_formula(form, shape, slice_bytes, monkeypatch):
    monkeypatch.setattr(fisher_module, "SLICE_BYTES", slice_bytes)
    term, gradients = case(form, shape)
    deltas = random_gradients(3, term.count, term.size, seed=4)
    expected = torch.stack([(gradients * delta).sum(2).square().sum() for delta in deltas.double()]) / len(gradients)
    result = term.losses(deltas)
    assert result.dtype == torch.float64
    same(result, expected, 1e-4)
    assert not term.losses(torch.zeros_like(deltas)).any()


@CASES
def test_the_mean_square_is_the_mean_of_the_diagonals(form, shape):
    term, gradients = case(form, shape)
    assert term.mean_square() == pytest.approx(float(gradients.square().sum(0).mean()), rel=1e-5)


@CASES
def test_a_part_consists_of_its_rows(form, shape):
    term, gradients = case(form, shape)
    rows = slice(term.count // 3, term.count)
    part, truth = term.part(rows), reference.row_fishers(gradients[:, rows])
    assert (part.samples, part.count, part.size) == tuple(gradients[:, rows].shape)
    same(part.matrices(slice(0, part.count), CPU), truth)
    same(part.part(slice(0, 1)).matrices(slice(None), CPU), truth[:1])


@CASES
def test_column_blocks_are_the_diagonal_blocks_of_each_row(form, shape):
    term, gradients = case(form, shape)
    truth = reference.row_fishers(gradients)
    for size in (size for size in range(1, term.size + 1) if term.size % size == 0):
        blocks = term.column_blocks(size)
        per_row = term.size // size
        assert (blocks.samples, blocks.count, blocks.size) == (term.samples, term.count * per_row, size)
        expected = [
            matrix[first : first + size, first : first + size]
            for matrix in truth
            for first in range(0, term.size, size)
        ]
        same(blocks.matrices(slice(None), CPU), torch.stack(expected))
        same(blocks.column_blocks(size).matrices(slice(None), CPU), torch.stack(expected))


@CASES
def test_results_do_not_alias_the_term(form, shape):
    term, _ = case(form, shape)
    rows = slice(0, term.count)
    before = term.matrices(rows, CPU).clone()
    term.matrices(rows, CPU).zero_()
    term.combined(torch.zeros_like(before), rows, 0.5, 2.0).zero_()
    term.factors(rows, CPU)
    term.losses(torch.ones(1, term.count, term.size))
    assert torch.equal(term.matrices(rows, CPU), before)


@pytest.mark.parametrize("form", PLAIN.values(), ids=PLAIN)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_are_detected(form, value):
    gradients = random_gradients(3, 5, 8)
    assert form(gradients)[0].is_finite()
    gradients[1, 3, 7] = value
    corrupt = form(gradients)[0]
    assert not corrupt.is_finite() and not corrupt.part(slice(3, 4)).is_finite()
    assert corrupt.part(slice(0, 3)).is_finite()


def test_blocks_that_do_not_divide_a_row_are_refused():
    for form in PLAIN.values():
        with pytest.raises(RuntimeError, match="unflatten"):
            form(random_gradients(3, 4, 8))[0].column_blocks(3)


@pytest.mark.parametrize("lam", [0.0, 0.5])
@pytest.mark.parametrize(
    ("solver", "options", "pattern"),
    [
        ("sparsegpt", {"block_size": 8}, Unstructured(0.5)),
        ("sparsegpt", {}, NM(2, 4)),
        ("obc", {}, Unstructured(0.5)),
        ("cap", {"block_size": 6}, Unstructured(0.5)),
        ("osscar", {}, Structured(0.5, 2)),
    ],
)
@pytest.mark.parametrize("grouped", [False, True])
def test_solvers_use_the_interface_alone(solver, options, pattern, lam, grouped):
    if grouped and solver == "osscar":
        pytest.skip("its rows share columns")
    weight, gram, gradients = grouped_layer(3, 4, 24, 40, seed=5) if grouped else layer(12, 24, 40, seed=5)
    solver = make_solver(solver, options)
    size = solver.column_block(24, pattern)
    term = Bare(matrices(gradients).values, len(gradients))
    result = solver.solve(Quadratic.build(weight, gram, term, lam, column_block=size), pattern)
    expected = solver.solve(full(weight, gram, gradients, lam, column_block=size), pattern)
    assert torch.equal(result.keep, expected.keep)
    torch.testing.assert_close(result.weight, expected.weight, rtol=1e-3, atol=1e-4)


SOLVED = [
    ("sparsegpt", {"block_size": 8}, Unstructured(0.5)),
    ("sparsegpt", {"block_size": 8}, NM(2, 4, grid=Grid(4, 64))),
    ("alps", {}, NM(2, 4)),
    ("obc", {}, Unstructured(0.5)),
    ("obc", {}, NM(2, 4)),
    ("cap", {"block_size": 6}, Unstructured(0.5)),
    ("osscar", {}, Structured(0.5, 2)),
]


@pytest.mark.parametrize("lam", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(("solver", "options", "pattern"), SOLVED)
@pytest.mark.parametrize("grouped", [False, True])
def test_a_shared_term_is_solved_as_equal_terms_of_the_rows(solver, options, pattern, lam, grouped):
    if grouped and solver == "osscar":
        pytest.skip("its rows share columns")
    weight, gram, gradients = grouped_layer(3, 4, 24, 40, seed=6) if grouped else layer(12, 24, 40, seed=6)
    shared, equal = shared_by(3 if grouped else 1)(gradients)
    solver = make_solver(solver, options)
    size = solver.column_block(24, pattern)
    alive = torch.rand(weight.shape, generator=torch.Generator().manual_seed(0)) > 0.1 if lam == 0.5 else None
    built = [Quadratic.build(weight, gram, term, lam, None, size, alive) for term in (shared, matrices(equal))]
    results = [solver.solve(each, pattern) for each in built]
    assert built[0].scales.b == 0 and built[0].damping_unit == pytest.approx(built[1].damping_unit, rel=1e-5)
    assert built[0].mean_diagonal() == pytest.approx(built[1].mean_diagonal(), rel=1e-4)
    if isinstance(solver, ALPS):  # whose steps differ where rows have terms of their own
        least, most = sorted(built[1].losses(*(each.weight for each in results)), key=lambda loss: loss.total)
        assert most.total <= 1.1 * least.total
    else:
        assert torch.equal(results[0].keep, results[1].keep)
        torch.testing.assert_close(results[0].weight, results[1].weight, rtol=1e-3, atol=1e-3)
    losses = [each.losses(torch.zeros_like(weight), results[1].weight) for each in built]
    for one, other in zip(*losses, strict=True):
        assert one == pytest.approx(other, rel=1e-4)
    assert losses[0][0].total == pytest.approx(1, rel=1e-5)


def test_a_quadratic_of_some_rows_has_the_whole_shared_matrix():
    weight, gram, gradients = grouped_layer(3, 4, 24, 40, seed=7)
    shared, _ = shared_by(3)(gradients)
    whole = Quadratic.build(weight, gram, shared, 0.5)
    for index in range(3):
        rows = slice(4 * index, 4 * index + 4)
        matrix = shared.part(rows).matrices(slice(None), CPU)
        totals = Totals(*whole.losses_at_zero, 0.0, 40)
        alone = Quadratic.build(weight[rows], gram[index], shared.part(rows), 0.5, totals)
        same(alone.gram, whole.gram[index], 1e-4)
        same(matrix, shared.shared[index].expand(4, -1, -1))


def with_importance(lam, squares=None, alive=None, grouped=False):
    """A weight, and its quadratic with a shared term and the diagonals of the rows' own terms."""
    weight, gram, gradients = grouped_layer(3, 4, 24, 40, seed=8) if grouped else layer(12, 24, 40, seed=8)
    shared, _ = shared_by(3 if grouped else 1)(gradients)
    if squares is None:
        squares = torch.rand(12, 24, generator=torch.Generator().manual_seed(1)) + 0.1
    term = SharedFisher(shared.shared, shared.which, shared.samples, squares)
    return weight, Quadratic.build(weight, gram, term, lam, alive=alive), Quadratic.build(weight, gram, shared, lam)


@pytest.mark.parametrize("grouped", [False, True])
def test_importance_is_the_ratio_of_the_own_diagonal_to_the_shared_one(grouped):
    weight, objective, _ = with_importance(0.5, grouped=grouped)
    _, both, _ = with_importance(0.0, grouped=grouped)
    for row in range(12):
        gram = objective.input_gram if not grouped else objective.input_gram[row // 4]
        shared = objective.fisher.matrices(slice(row, row + 1), CPU)[0].float()
        a, b = 0.5 / objective.losses_at_zero[0], 0.5 / (40 * objective.losses_at_zero[1])
        squares = objective.fisher.squares[row]
        expected = (a * gram.diagonal() + b * squares) / (a * gram.diagonal() + b * shared.diagonal())
        torch.testing.assert_close(objective.importance[row], expected, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(
            both.importance[row], (squares / shared.diagonal()).clamp(min=1e-3), rtol=1e-4, atol=1e-6
        )
    assert with_importance(1.0, grouped=grouped)[1].importance is None


@pytest.mark.parametrize("solver", ["sparsegpt", "alps"])
@pytest.mark.parametrize("grouped", [False, True])
def test_diagonals_equal_to_the_shared_one_change_nothing(solver, grouped):
    _, _, plain = with_importance(0.5, grouped=grouped)
    equal = plain.fisher.matrices(slice(None), CPU).diagonal(dim1=1, dim2=2).float()
    _, objective, _ = with_importance(0.5, equal, grouped=grouped)
    torch.testing.assert_close(objective.importance, torch.ones(12, 24))
    results = [make_solver(solver, {}).solve(each, Unstructured(0.5)) for each in (objective, plain)]
    assert torch.equal(results[0].keep, results[1].keep)
    assert torch.equal(results[0].weight, results[1].weight)


@pytest.mark.parametrize("solver", ["sparsegpt", "alps"])
@pytest.mark.parametrize("lam", [0.0, 0.5])
@pytest.mark.parametrize("grouped", [False, True])
def test_importance_moves_weights_between_rows_at_an_exact_count(solver, lam, grouped):
    squares = torch.ones(12, 24)
    squares[::2] *= 100
    alive = torch.rand(12, 24, generator=torch.Generator().manual_seed(2)) > 0.1
    weight, objective, plain = with_importance(lam, squares, alive, grouped)
    solved = make_solver(solver, {}).solve(objective, Unstructured(0.5))
    expected = make_solver(solver, {}).solve(plain, Unstructured(0.5))
    assert solved.keep[::2].sum() > expected.keep[::2].sum() + 5
    assert int(solved.keep.sum()) == 144 and not solved.weight[~solved.keep].any() and not solved.keep[~alive].any()
    fixed = [
        make_solver(solver, {}).solve(each, NM(2, 4)).weight
        for each in (objective, replace(objective, importance=None))
    ]
    assert torch.equal(*fixed)  # the weights of a row compete


def test_the_scores_of_sparsegpt_are_multiplied_by_the_importance():
    weight, objective, _ = with_importance(0.5)
    matrix = objective.gram.double() + 0.01 * objective.damping_unit * torch.eye(24)
    pivots = torch.linalg.cholesky(torch.linalg.inv(matrix), upper=True).diagonal()
    keep = reference.remove((weight / pivots) ** 2 * objective.importance, 144)
    assert torch.equal(make_solver("sparsegpt", {}).solve(objective, Unstructured(0.5)).keep, keep)


def test_parts_and_blocks_keep_the_diagonals_of_their_rows():
    _, objective, _ = with_importance(0.5)
    term = objective.fisher
    assert torch.equal(term.part(slice(3, 7)).squares, term.squares[3:7])
    assert torch.equal(term.column_blocks(6).squares, term.squares.reshape(48, 6))
    weight, gram, _ = layer(12, 24, 40, seed=8)
    blocks = Quadratic.build(weight, gram, term, 0.5, column_block=6)
    scales = blocks.losses_at_zero
    a, b = 0.5 / scales[0], 0.5 / (40 * scales[1])
    shared = a * gram.diagonal() + b * term.shared[0].diagonal()
    expected = (a * gram.diagonal() + b * term.squares) / shared
    torch.testing.assert_close(blocks.importance, expected, rtol=1e-4, atol=1e-6)
