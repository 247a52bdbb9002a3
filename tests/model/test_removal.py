"""Choice of the removed experts: both objectives as quadratics, the search, and the baselines."""

import math
from dataclasses import dataclass
from typing import ClassVar

import pytest
import reference
import torch

from optimum_moonshot.config import MoonshotConfig
from optimum_moonshot.errors import MoonshotError
from optimum_moonshot.functional import prune_weight
from optimum_moonshot.objective.patterns import Experts
from optimum_moonshot.objective.removal import Removal
from optimum_moonshot.solvers import base, solver_names
from optimum_moonshot.solvers.experts import best_subset, exchange, expert_mask

LAMS = pytest.mark.parametrize("lam", [0.0, 0.5, 0.9, 1.0])


def mixture(experts=6, tokens=40, width=5, samples=4, seed=0, dead=()):
    """Contributions [T, E, H], two of them to every token, ∂ℓ/∂y [T, H], and the tokens' samples."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.rand(experts, 1, generator=generator, dtype=torch.float64) + 0.2
    parts = torch.randn(tokens, experts, width, generator=generator, dtype=torch.float64) * scale
    common = torch.randn(tokens, 1, width, generator=generator, dtype=torch.float64)
    logits = torch.randn(tokens, experts, generator=generator)
    logits[:, list(dead)] = -torch.inf
    chosen = torch.zeros(tokens, experts, dtype=torch.bool).scatter_(1, logits.topk(2).indices, True)
    gradients = torch.randn(tokens, width, generator=generator, dtype=torch.float64)
    return (parts + common) * chosen[..., None], gradients, torch.arange(tokens) % samples


def removal(contributions, gradients, samples, lam):
    gram = torch.einsum("teh,tfh->ef", contributions, contributions)
    slopes = torch.einsum("teh,th->te", contributions, gradients)
    per_sample = torch.stack([slopes[samples == n].sum(0) for n in range(int(samples.max()) + 1)])
    norms = contributions.norm(dim=2)
    return Removal.build(gram, per_sample, norms.sum(0), (norms > 0).sum(0), lam)


def random_removal(experts, lam, seed=0, samples=8):
    generator = torch.Generator().manual_seed(seed)
    parts = torch.randn(3 * experts, experts, generator=generator, dtype=torch.float64)
    gradients = torch.randn(samples, experts, generator=generator, dtype=torch.float64) + 0.5
    norms, tokens = (torch.rand(experts, generator=generator) for _ in range(2))
    return Removal.build(parts.T @ parts, gradients, norms, (tokens * 100).round(), lam)


def solve(name, problem, pattern, **options):
    config = MoonshotConfig(pattern="experts", sparsity=pattern.sparsity, solver=name, solver_options=options)
    return config.make_solver().solve(problem, pattern).keep[0]


@LAMS
@pytest.mark.parametrize("gone", [[0], [1, 4], [0, 2, 3, 5]])
def test_the_quadratic_is_the_loss(lam, gone):
    case = mixture()
    keep = torch.ones(6, dtype=torch.bool)
    keep[gone] = False
    (losses,) = removal(*case, lam).losses(keep)
    expected = reference.expert_losses(*case, ~keep, lam)
    torch.testing.assert_close(losses.total, float(expected), rtol=1e-9, atol=0)
    assert (losses.fisher is None) == (lam == 1)


@LAMS
def test_the_loss_of_no_expert_is_0_and_of_all_is_1(lam):
    every = torch.ones(6, dtype=torch.bool)
    nothing, all_gone = removal(*mixture(), lam).losses(every, ~every)
    assert nothing.total == 0 and all_gone.total == pytest.approx(1)


def test_the_ends_of_lambda_are_the_single_objectives():
    case, keep = mixture(), torch.tensor([True, False, True, True, False, True])
    ends = [removal(*case, lam).losses(keep)[0] for lam in (0.0, 1.0)]
    (between,) = removal(*case, 0.3).losses(keep)
    assert ends[0].total == pytest.approx(ends[0].fisher) == pytest.approx(between.fisher)
    assert ends[1].total == pytest.approx(ends[1].reconstruction) == pytest.approx(between.reconstruction)
    assert between.total == pytest.approx(0.3 * between.reconstruction + 0.7 * between.fisher)


@LAMS
@pytest.mark.parametrize(("count", "groups"), [(1, 1), (3, 1), (1, 2), (2, 2)])
def test_osscar_equals_exhaustive_search(lam, count, groups):
    case = mixture(seed=1)
    expected = reference.fewest_lost(*case, lam, count, groups)
    pattern = Experts(count * groups / 6, groups)
    assert torch.equal(solve("osscar", removal(*case, lam), pattern), ~expected)


@LAMS
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_local_search_ends_in_a_local_optimum(lam, groups):
    problem, pattern = random_removal(16, lam), Experts(0.5, groups)
    keep = best_subset(problem, pattern, exact=0)
    assert keep.view(groups, -1).sum(1).tolist() == [8 // groups] * groups
    (best,) = problem.losses(keep)
    size = 16 // groups
    for out in (~keep).nonzero().flatten().tolist():
        for into in keep.nonzero().flatten().tolist():
            other = keep.clone()
            other[out], other[into] = True, False
            assert out // size != into // size or problem.losses(other)[0].total >= best.total - 1e-12


def test_local_search_is_close_to_exact_search():
    pattern, ratios = Experts(0.25), []
    for seed in range(10):
        problem = random_removal(12, 0.5, seed)
        keeps = (best_subset(problem, pattern, exact) for exact in (0, math.comb(12, 3)))
        searched, exact = (each.total for each in problem.losses(*keeps))
        ratios.append(searched / exact)
    assert min(ratios) >= 1 - 1e-12 and max(ratios) < 1.2 and sum(ratios) / 10 < 1.05


def test_an_exchange_improves_on_the_greedy_choice():
    """Each alone is cheaper than the pair that cancels."""
    matrix = torch.diag(torch.tensor([1.0, 1.0, 0.5, 0.5], dtype=torch.float64))
    matrix[0, 1] = matrix[1, 0] = -0.99
    start = torch.tensor([False, True, True, False])
    assert exchange(matrix, start, 1).tolist() == [True, True, False, False]


@LAMS
@pytest.mark.parametrize("exact", [0, 5000])
def test_no_baseline_is_better(lam, exact):
    for seed in range(10):
        problem, pattern = random_removal(16, lam, seed), Experts(0.25, 2)
        options = {} if exact else {"exact": exact}
        baselines = [solve(name, problem, pattern) for name in ("reap", "frequency")]
        osscar, *others = problem.losses(solve("osscar", problem, pattern, **options), *baselines)
        assert osscar.total <= min(each.total for each in others) + 1e-12


@pytest.mark.parametrize("solver", solver_names(Experts))
@pytest.mark.parametrize("exact", [0, 5000])
def test_the_order_of_the_experts_does_not_matter(solver, exact):
    options = {"exact": exact} if solver == "osscar" else {}
    contributions, gradients, samples = mixture(8, seed=2)
    order = torch.randperm(8, generator=torch.Generator().manual_seed(0))
    pattern = Experts(3 / 8)
    keep = solve(solver, removal(contributions, gradients, samples, 0.5), pattern, **options)
    turned = solve(solver, removal(contributions[:, order], gradients, samples, 0.5), pattern, **options)
    assert torch.equal(turned, keep[order])


@pytest.mark.parametrize("solver", solver_names(Experts))
@pytest.mark.parametrize("exact", [0, 5000])
def test_experts_without_tokens_are_removed_first(solver, exact):
    options = {"exact": exact} if solver == "osscar" else {}
    case = mixture(8, dead=(2, 5))
    for count, gone in ((1, {2}), (2, {2, 5})):
        keep = solve(solver, removal(*case, 0.5), Experts(count / 8), **options)
        assert {*(~keep).nonzero().flatten().tolist()} == gone


def test_baselines_are_their_formulas():
    contributions, gradients, samples = mixture(8, seed=3)
    chosen = contributions.norm(dim=2) > 0
    problem, pattern = removal(contributions, gradients, samples, 0.5), Experts(0.5)
    for solver, scores in (("reap", reference.reap(contributions, chosen)), ("frequency", chosen.sum(0).double())):
        expected = torch.argsort(scores, stable=True)[:4]
        assert {*(~solve(solver, problem, pattern)).nonzero().flatten().tolist()} == {*expected.tolist()}


def test_a_vanishing_objective_is_dropped_with_a_note():
    contributions, gradients, samples = mixture()
    keep = torch.tensor([True, False, True, True, False, True])
    problem = removal(contributions, 0 * gradients, samples, 0.5)
    assert problem.scales.lam == 1 and "reconstruction alone" in problem.scales.notes[0]
    assert problem.losses(keep)[0].total == pytest.approx(problem.losses(keep)[0].reconstruction)
    nothing = removal(0 * contributions, gradients, samples, 0.5)
    assert nothing.scales.notes == ("its experts contribute nothing: the first ones are removed",)
    assert solve("osscar", nothing, Experts(1 / 3)).tolist() == [False, False, True, True, True, True]


@pytest.mark.parametrize(
    ("experts", "share", "groups", "gone"), [(8, 0.25, 1, 2), (8, 0.3, 1, 2), (8, 0.25, 4, 0), (64, 0.3, 8, 16)]
)
def test_the_number_of_removed_experts(experts, share, groups, gone):
    pattern = Experts(share, groups)
    keep = pattern.keep(torch.rand(experts, generator=torch.Generator().manual_seed(0)))
    assert pattern.removed(experts) == gone == int((~keep).sum())
    assert len({*keep.view(groups, -1).sum(1).tolist()}) == 1


def test_a_registered_solver_removes_experts(monkeypatch):
    monkeypatch.setattr(base, "_SOLVERS", dict(base._SOLVERS))

    @base.register_solver("last")
    @dataclass(frozen=True)
    class Last(base.Solver):
        patterns: ClassVar = (Experts,)

        def solve(self, objective, pattern):
            keep = pattern.keep(-torch.arange(len(objective.gram)).double())
            return expert_mask(objective, keep)

    assert "last" in solver_names(Experts) and "last" not in solver_names()
    keep = solve("last", random_removal(8, 0.5), Experts(0.25))
    assert keep.tolist() == [True] * 6 + [False] * 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"solver": "sparsegpt"}, 'solver="frequency" or "osscar" or "reap"'),
        ({"sparsity": None}, "sparsity=None: pattern='experts' needs one"),
        ({"targets": ["experts"]}, "targets=.*equally many experts of every layer"),
        ({"ignore": ["layers.0"]}, "ignore="),
        ({"allocation": "fisher"}, "allocation='fisher'"),
        ({"allocation": "owl"}, "allocation='owl'"),
        ({"group_size": 2}, "group_size=2"),
        ({"recompute": True}, "recompute=True: pattern='experts' computes all statistics on the dense model"),
        ({"recover": "gradual"}, "recover='gradual': pattern='experts' removes experts at once"),
        ({"rotation": "learned"}, "rotation='learned'"),
        (
            {"under_calibrated_experts": "magnitude"},
            "under_calibrated_experts='magnitude': pattern='experts' uses the tokens",
        ),
        ({"fisher_layers": "attention"}, "fisher_layers='attention'"),
        ({"solver": "reap", "pattern": "unstructured"}, "solver='reap' takes experts"),
    ],
    ids=str,
)
def test_incompatible_options_are_refused(options, message):
    with pytest.raises(MoonshotError, match=message):
        MoonshotConfig(**{"solver": "osscar", "pattern": "experts", "sparsity": 0.25, **options})


def test_a_matrix_has_no_experts():
    config = MoonshotConfig(solver="osscar", pattern="experts", sparsity=0.25, lam=1.0)
    with pytest.raises(MoonshotError, match="experts are removed from a model, not from a matrix"):
        prune_weight(torch.ones(2, 4), torch.eye(4), config=config)
