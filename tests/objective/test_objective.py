"""The quadratic is 1 at W = 0 for every λ, equals the literal formulas and notes terms that vanish."""

import pytest
import reference
import torch
from golden.make import layer
from objectives import diagonal, full

from optimum_moonshot import MoonshotConfig, prune_weight
from optimum_moonshot.objective import fisher
from optimum_moonshot.objective.patterns import NM, Structured, Unstructured
from optimum_moonshot.objective.quadratic import scales
from optimum_moonshot.solvers import solver_class, solver_names

LAMS = [0.0, 0.1, 0.5, 0.9, 1.0]
BUILD = pytest.mark.parametrize("build", [full, diagonal], ids=["full", "diagonal"])


@BUILD
@pytest.mark.parametrize("lam", LAMS)
def test_the_loss_of_the_zero_weight_is_one(build, lam):
    weight, gram, gradients = layer(6, 20, 5)
    loss = build(weight, gram, gradients if lam < 1 else None, lam).losses(torch.zeros_like(weight))[0]
    assert loss.total == pytest.approx(1, abs=1e-6) and loss.reconstruction == pytest.approx(1, abs=1e-6)
    assert loss.fisher == (pytest.approx(1, abs=1e-6) if lam < 1 else None)


@BUILD
def test_the_loss_of_the_dense_weight_is_zero(build):
    weight, gram, gradients = layer(6, 20, 5)
    assert build(weight, gram, gradients, 0.5).losses(weight)[0] == (0, 0, 0)


@pytest.mark.parametrize("lam", LAMS)
def test_losses_equal_the_formula(lam):
    weight, gram, gradients = layer(6, 20, 5, seed=1)
    generator = torch.Generator().manual_seed(2)
    others = [torch.randn(weight.shape, generator=generator) for _ in range(3)]
    result = full(weight, gram, gradients, lam).losses(*others)
    for other, loss in zip(others, result, strict=True):
        exact = reference.objective(other.double(), weight.double(), gram.double(), gradients.double(), lam)
        assert loss.total == pytest.approx(float(exact), rel=1e-5)
        assert loss.total == pytest.approx(lam * loss.reconstruction + (1 - lam) * loss.fisher)


@pytest.mark.parametrize("lam", LAMS)
def test_diagonal_losses_equal_the_formula(lam):
    weight, gram, gradients = layer(6, 20, 5, seed=3)
    squares = gradients.double().square()
    pruned = torch.where(weight.abs() > 0.1, weight, 0.0)

    def terms(delta):
        return (delta**2 * gram.diagonal()).sum(), (delta**2 * squares).sum() / len(squares)

    (r, f), (r0, f0) = terms((pruned - weight).double()), terms(weight.double())
    loss = diagonal(weight, gram, gradients, lam).losses(pruned)[0]
    assert loss.reconstruction == pytest.approx(float(r / r0), rel=1e-5)
    assert loss.fisher == pytest.approx(float(f / f0), rel=1e-5)
    assert loss.total == pytest.approx(float(lam * r / r0 + (1 - lam) * f / f0), rel=1e-5)


@pytest.mark.parametrize("lam", LAMS)
def test_row_matrices_and_diagonals_equal_the_formula(lam):
    weight, gram, gradients = layer(6, 20, 5, seed=4)
    exact = reference.hessians(weight.double(), gram.double(), gradients.double(), lam)
    quadratic = full(weight, gram, gradients, lam)
    torch.testing.assert_close(quadratic.row_hessians(slice(2, 5)), exact[2:5], rtol=1e-5, atol=1e-8)
    squares, terms = gradients.double().square().sum(0), weight.double().square()
    a = lam / (terms * gram.diagonal()).sum()
    b = (1 - lam) / (terms * squares).sum()
    expected = (a * gram.diagonal() + b * squares).float()
    torch.testing.assert_close(diagonal(weight, gram, gradients, lam).diagonal(), expected, rtol=1e-5, atol=1e-8)


@BUILD
@pytest.mark.parametrize("lam", [0.0, 0.5, 1.0])
def test_a_zero_weight_is_pruned_by_magnitude(build, lam):
    weight, gram, gradients = layer(4, 12, 3)
    quadratic = build(torch.zeros_like(weight), gram, gradients, lam)
    assert quadratic.scales[:2] == (0, 0)
    assert quadratic.scales.notes == ("no loss at W = 0: weights are removed by magnitude",)
    assert quadratic.losses(torch.zeros_like(weight))[0].total == 0


@BUILD
@pytest.mark.parametrize("lam", [0.0, 0.5, 1.0])
def test_with_a_zero_gram_the_fisher_loss_remains(build, lam):
    weight, gram, gradients = layer(4, 12, 3)
    quadratic = build(weight, torch.zeros_like(gram), gradients if lam < 1 else None, lam)
    assert torch.equal(quadratic.weight, weight)
    notes = {0.0: (), 0.5: ("no reconstruction loss at W = 0: Fisher alone",)}
    assert quadratic.scales.notes == notes.get(lam, ("no loss at W = 0: weights are removed by magnitude",))


@BUILD
@pytest.mark.parametrize("lam", [0.0, 0.5])
def test_with_zero_gradients_the_reconstruction_loss_remains(build, lam):
    weight, gram, gradients = layer(4, 12, 3)
    quadratic, single = (build(weight, gram, a, at) for a, at in ((torch.zeros_like(gradients), lam), (None, 1.0)))
    assert quadratic.scales == single.scales._replace(notes=quadratic.scales.notes)
    assert quadratic.scales.notes == ("no Fisher loss at W = 0: reconstruction alone",)
    pruned = weight * (weight > 0)
    assert quadratic.losses(pruned)[0].total == pytest.approx(single.losses(pruned)[0].total)
    assert quadratic.losses(pruned)[0].fisher == 0


def test_without_reconstruction_loss_the_fisher_loss_remains():
    weight = torch.tensor([[1.0, -1.0, 2.0, -2.0]])
    gradients = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])
    quadratic = full(weight, torch.ones(4, 4), gradients, 0.5)
    assert quadratic.scales.a == 0 and quadratic.scales.lam == 0
    assert quadratic.scales.notes == ("no reconstruction loss at W = 0: Fisher alone",)
    assert quadratic.losses(torch.zeros_like(weight))[0].total == pytest.approx(1)
    assert quadratic.damping_unit > 0


def test_lambda_zero_and_one_ignore_the_loss_that_vanishes():
    assert scales(1.0, 2.0, 0.0, 4) == (0.5, 0.0, 1.0, ())
    assert scales(0.0, 0.0, 2.0, 4) == (0.0, 0.125, 0.0, ())


@BUILD
def test_weights_of_dead_inputs_are_removed_and_counted(build):
    weight, gram, gradients = layer(4, 12, 3, dead=(2, 7))
    quadratic = build(weight, gram, gradients, 0.5)
    live = [column for column in range(12) if column not in (2, 7)]
    assert not quadratic.weight[:, [2, 7]].any() and torch.equal(quadratic.weight[:, live], weight[:, live])
    assert quadratic.scales.notes == ("2 dead inputs",)
    assert weight[:, [2, 7]].all()


@BUILD
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_in_half_precision_and_in_slices_give_the_same_losses(build, dtype, monkeypatch):
    weight, gram, gradients = layer(7, 20, 5)
    gradients = gradients.to(dtype)
    pruned = weight * (weight > 0)
    whole = build(weight, gram, gradients.float(), 0.3)
    for size in (1, 3 * 4 * 5 * 20):
        monkeypatch.setattr(fisher, "SLICE_BYTES", size)
        sliced = build(weight, gram, gradients, 0.3)
        assert sliced.losses_at_zero == pytest.approx(whole.losses_at_zero, rel=1e-6)
        assert sliced.losses(pruned)[0] == pytest.approx(whole.losses(pruned)[0], rel=1e-6)


def test_the_damping_unit_is_the_mean_diagonal_for_every_lambda():
    weight, gram, gradients = layer(6, 20, 5)
    units = {full(weight, gram, gradients, lam).damping_unit for lam in LAMS}
    assert len(units) == 1
    expected = gram.diagonal().mean() / reference.losses_at_zero(weight, gram, None)[0]
    assert units.pop() == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("solver", solver_names())
@pytest.mark.parametrize("lam", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("pattern", ["unstructured", "2:4", "structured"])
def test_a_layer_with_dead_inputs_alone_is_pruned_by_magnitude(solver, lam, pattern):
    sparsity = None if pattern == "2:4" else 0.5
    kind = {"unstructured": Unstructured, "2:4": NM, "structured": Structured}[pattern]
    if kind not in solver_class(solver).patterns:
        pytest.skip("the solver takes no such pattern")
    weight = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    config = MoonshotConfig(solver=solver, pattern=pattern, sparsity=sparsity, lam=lam)
    result = prune_weight(weight, torch.zeros(16, 16), torch.zeros(5, 8, 16), config=config)
    assert (result.weight == 0).float().mean() == 0.5
    assert torch.equal(result.weight[result.keep], weight[result.keep])
    assert result.notes == ("no loss at W = 0: weights are removed by magnitude",)
    if pattern == "2:4":  # for every solver, the two smallest of four weights
        smaller = weight.abs().view(-1, 4).argsort(1)[:, :2]
        assert not result.keep.view(-1, 4).gather(1, smaller).any()
