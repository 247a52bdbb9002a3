"""OBC, CAP and the blocked elimination have the order and losses of the textbook, for any slices of rows."""

import itertools

import pytest
import reference
import torch
from golden.make import layer
from objectives import full, indefinite

from optimum_moonshot.config import MoonshotConfig
from optimum_moonshot.errors import FactorizationError
from optimum_moonshot.functional import prune_weight
from optimum_moonshot.objective import linalg as slices_module
from optimum_moonshot.objective.patterns import NM, Unstructured
from optimum_moonshot.solvers import ranked
from optimum_moonshot.solvers.ranked import CAP, Elimination, Inverses, Ranking, damped_rows, removals, take_square


def inverses(rows, size, seed=0, ridge=0.05):
    generator = torch.Generator().manual_seed(seed)
    root = torch.randn(rows, size, 2 * size, generator=generator, dtype=torch.float64)
    matrices = root @ root.mT / size + ridge * torch.eye(size)
    return torch.cholesky_inverse(torch.linalg.cholesky(matrices)), torch.randn(
        rows, size, generator=generator
    ).double()


def prune(solver, pattern, lam, tensors, **more):
    choice = {"pattern": pattern} if isinstance(pattern, str) else {"sparsity": pattern}
    return prune_weight(*tensors, config=MoonshotConfig(solver=solver, lam=lam, **choice, **more))


@pytest.mark.parametrize(("rows", "size"), [(1, 1), (3, 2), (4, 40), (2, 150)])
@pytest.mark.parametrize("steps", [1, 3, 64])
@pytest.mark.parametrize("pattern", [Unstructured(0.5), NM(1, 2), NM(2, 2)])
def test_the_elimination_equals_the_textbook(rows, size, steps, pattern, monkeypatch):
    if size % pattern.width:
        pytest.skip("no groups of two")
    monkeypatch.setattr(ranked, "STEPS", steps)
    inverse, weight = inverses(rows, size)
    nm = (pattern.n, pattern.m) if isinstance(pattern, NM) else None
    if removals(size, pattern):
        order, losses, _ = reference.greedy(weight, inverse.clone(), nm)
    else:
        order, losses = torch.empty(rows, 0), torch.empty(rows, 0)
    before = weight.clone()
    result = Elimination(inverse, weight, pattern).run()
    assert torch.equal(result[0].long(), order.long()) and torch.equal(weight, before)
    torch.testing.assert_close(result[1], losses, rtol=1e-9, atol=1e-12, check_dtype=False)


def test_float32_keeps_the_order_of_a_well_conditioned_row():
    inverse, weight = inverses(4, 300, ridge=0.5)
    exact = Elimination(inverse.clone(), weight, Unstructured(0.5)).run()
    single = Elimination(inverse.float(), weight.float(), Unstructured(0.5)).run()
    assert (exact[0] == single[0]).float().mean() > 0.999
    torch.testing.assert_close(single[1].cumsum(1), exact[1].cumsum(1), rtol=1e-4, atol=1e-6)


def test_of_equal_weights_the_first_is_removed():
    order, losses = Elimination(torch.eye(5).repeat(2, 1, 1), torch.ones(2, 5), Unstructured(1.0)).run()
    assert order.tolist() == [[0, 1, 2, 3, 4]] * 2 and (losses == 0.5).all()


@pytest.mark.parametrize("count", [0, 1, 3, 7])
def test_take_square_selects_rows_and_columns_of_every_matrix(count):
    matrices = torch.randn(3, 7, 7)
    chosen = torch.stack([torch.randperm(7)[:count] for _ in range(3)])
    expected = torch.stack([m[c][:, c] for m, c in zip(matrices, chosen, strict=True)])
    assert torch.equal(take_square(matrices, chosen), expected)


@pytest.mark.parametrize("solver", ["obc", "cap"])
@pytest.mark.parametrize("pattern", [0.5, 0.9, "2:4"])
@pytest.mark.parametrize("lam", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("seed", [0, 1])
def test_solvers_equal_the_literal_versions(solver, pattern, lam, seed):
    tensors = layer(8, 36, 7, seed=20 + seed, dead=(5,))
    exact = [tensor.double() for tensor in tensors]
    choice = {"nm": (2, 4)} if pattern == "2:4" else {"sparsity": pattern}
    choice |= {"block_size": 12} if solver == "cap" else {}
    weight, keep = getattr(reference, solver)(*exact, lam, **choice)
    result = prune(solver, pattern, lam, tensors, **({"block_size": 12} if solver == "cap" else {}))
    assert torch.equal(result.keep, keep)
    assert (result.weight - weight).norm() < 1e-5 * weight.norm()


def loss(weight, tensors, lam, damping=0.01):
    """The damped objective of a single row."""
    dense, gram, gradients = (tensor.double() for tensor in tensors)
    matrix = reference.hessians(dense, gram, gradients, lam)[0]
    matrix = matrix + damping * matrix.diagonal().mean() * torch.eye(len(matrix))
    delta = weight.double()[0] - dense[0]
    return float(delta @ matrix @ delta), matrix


@pytest.mark.parametrize("solver", ["obc", "cap"])
@pytest.mark.parametrize("lam", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("seed", range(4))
def test_the_first_removal_and_the_surviving_weights_are_optimal(solver, lam, seed):
    tensors = layer(1, 8, 5, seed=seed)
    result = prune(solver, 1 / 8, lam, tensors)

    def best(gone):
        _, matrix = loss(tensors[0], tensors, lam)
        kept = [j for j in range(8) if j not in gone]
        weight = tensors[0].double().clone()
        pull = matrix[kept][:, list(gone)] @ weight[0, list(gone)]
        weight[0, kept] += torch.linalg.solve(matrix[kept][:, kept], pull)
        weight[0, list(gone)] = 0
        return weight

    losses = [loss(best([j]), tensors, lam)[0] for j in range(8)]
    assert result.keep[0].tolist() == [j != losses.index(min(losses)) for j in range(8)]
    for sparsity in (1 / 8, 0.5, 7 / 8):
        result = prune(solver, sparsity, lam, tensors)
        gone = (~result.keep[0]).nonzero()[:, 0].tolist()
        torch.testing.assert_close(result.weight.double(), best(gone), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("lam", [0.0, 0.5])
def test_two_of_four_is_usually_the_best_pair(lam):
    ratios = []
    for seed in range(10):
        tensors = layer(1, 4, 5, seed=seed)
        result = prune("obc", "2:4", lam, tensors)
        pairs = []
        for pair in itertools.combinations(range(4), 2):
            fixed = MoonshotConfig(solver="obc", sparsity=0.5, lam=lam).make_solver()
            objective = full(*tensors, lam)
            keep = torch.tensor([[j not in pair for j in range(4)]])
            (weight,) = fixed.minimise(objective, [keep], 0.01)
            pairs.append(loss(weight, tensors, lam)[0])
        ratios.append(loss(result.weight, tensors, lam)[0] / min(pairs))
    assert min(ratios) >= 1 - 1e-6 and sorted(ratios)[5] == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("solver", ["obc", "cap"])
@pytest.mark.parametrize("pattern", [0.6, "2:4"])
@pytest.mark.parametrize("lam", [0.5, 1.0])
def test_the_number_of_rows_per_slice_does_not_change_the_result(solver, pattern, lam, monkeypatch):
    tensors = layer(13, 48, 6, seed=5)
    whole = prune(solver, pattern, lam, tensors, block_size=16)
    for inputs, size in ((1, 1), (5 * 16, 1), (10**9, 10**12), (7 * 48, 24 * 48 * 48 * 3)):
        monkeypatch.setattr(ranked, "CPU_INPUTS", inputs)
        monkeypatch.setattr(slices_module, "CPU_BYTES", size)
        result = prune(solver, pattern, lam, tensors, block_size=16)
        assert torch.equal(result.keep, whole.keep)
        torch.testing.assert_close(result.weight, whole.weight, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("lam", [0.1, 1.0])
def test_an_ill_conditioned_row_is_eliminated_in_float64(lam, monkeypatch):
    weight, gram, gradients = layer(6, 40, 5, seed=6)
    tensors = (weight, gram @ gram, gradients)
    objective = full(*tensors, lam)
    _, fits = Inverses(objective, 1e-4).of(slice(0, 6))
    assert not fits.any()
    result = prune("obc", 0.5, lam, tensors, damping=1e-4)
    exact, keep = reference.obc(*(tensor.double() for tensor in tensors), lam, 0.5, damping=1e-4)
    assert torch.equal(result.keep, keep) and (result.weight - exact).norm() < 1e-4 * exact.norm()
    monkeypatch.setattr(ranked, "SINGLE_INFLATION", 1e12)
    assert Inverses(objective, 1e-4).of(slice(0, 6))[1].all()


def test_damping_is_per_row_and_a_dead_filter_has_the_mean_of_the_layer():
    weight, gram, gradients = layer(5, 12, 4)
    gradients[:, 2] = 0
    objective = full(weight, gram, gradients, 0.0)
    plain = objective.row_hessians(slice(None))
    extra = (damped_rows(objective, slice(None), 0.01) - plain).diagonal(dim1=1, dim2=2)
    means = plain.diagonal(dim1=1, dim2=2).mean(1)
    means[2] = means.mean()
    torch.testing.assert_close(extra, (0.01 * means)[:, None].expand(-1, 12), rtol=1e-4, atol=0)
    result = prune("obc", 0.2, 0.0, (weight, gram, gradients))
    exact, keep = reference.obc(*(tensor.double() for tensor in (weight, gram, gradients)), 0.0, 0.2)
    assert torch.equal(result.keep, keep) and (result.weight - exact).norm() < 1e-5 * exact.norm()


@pytest.mark.parametrize(
    ("d_in", "block_size", "pattern", "size"),
    [
        (768, 192, Unstructured(0.5), 192),
        (3072, 192, Unstructured(0.5), 192),
        (100, 192, Unstructured(0.5), 100),
        (100, 40, Unstructured(0.5), 25),
        (100, 40, NM(2, 4), 20),
        (64, 3, NM(4, 8), 8),
        (13, 5, Unstructured(0.5), 1),
    ],
)
def test_the_column_block_is_the_largest_divisor(d_in, block_size, pattern, size):
    assert CAP(block_size=block_size).column_block(d_in, pattern) == size


def test_cap_on_whole_rows_differs_from_obc_in_its_ranking_alone():
    tensors = layer(6, 24, 5, seed=8)
    cap, obc = (prune(solver, "2:4", 0.5, tensors) for solver in ("cap", "obc"))
    assert torch.equal(cap.keep, obc.keep) and torch.equal(cap.weight, obc.weight)
    cap, obc = (prune(solver, 0.5, 0.5, tensors) for solver in ("cap", "obc"))
    assert not torch.equal(cap.keep, obc.keep)


def test_a_ranking_removes_the_first_of_each_row():
    order = torch.tensor([[2, 0, 1], [1, 2, 0]])
    losses = torch.tensor([[1.0, 5.0, 2.0], [3.0, 4.0, 9.0]], dtype=torch.float64)
    keep = Ranking(order, losses, 3).keep(Unstructured(0.5))
    assert keep.tolist() == [[False, True, False], [True, False, True]]  # losses 1, 2 and 3: two of the first row
    assert Ranking(order[:, :1], losses[:, :1], 3).keep(NM(2, 3)).tolist() == [[True, True, False], [True, False, True]]


@pytest.mark.parametrize("solver", ["obc", "cap"])
@pytest.mark.parametrize(("share", "taken"), [(2e-2, 0.1), (0.2, 1.0)])
@pytest.mark.parametrize("lam", [0.5, 1.0])
def test_damping_grows_until_every_row_is_definite(solver, share, taken, lam):
    weight, gram, gradients = layer(6, 40, 5, seed=11)
    gram = indefinite(gram, share)
    result = prune(solver, 0.5, lam, (weight, gram, 0.01 * gradients))
    assert result.damping in (0.1, 1.0) if lam < 1 else result.damping == pytest.approx(taken)
    assert result.notes == (f"damping raised from 0.01 to {result.damping:g}",)
    with pytest.raises(FactorizationError, match=r"not positive definite at any damping of \[0.01, 0.1, 1.0\]"):
        prune(solver, 0.5, lam, (weight, indefinite(gram, 3.0), 0.01 * gradients))


@pytest.mark.parametrize("solver", ["obc", "cap", "sparsegpt"])
def test_a_gram_with_a_negative_loss_is_refused(solver):
    weight, gram, gradients = layer(6, 40, 5, seed=11)
    with pytest.raises(FactorizationError, match="gram is not positive semidefinite"):
        prune(solver, 0.5, 0.5, (weight, -gram, gradients))
