"""Zeros of the weight that a solver is given stay zero, and the others are solved for as if they did not exist."""

from itertools import combinations

import pytest
import reference
import torch
from golden.make import grouped_layer, layer

from optimum_moonshot import MoonshotConfig, prune_weight, prune_weight_path
from optimum_moonshot.functional import build_objective
from optimum_moonshot.objective.grid import Grid
from optimum_moonshot.objective.patterns import NM, Structured, Unstructured, parse_pattern
from optimum_moonshot.solvers import solver_class, solver_names
from optimum_moonshot.solvers.sparsegpt import SparseGPT

SHAPE = (12, 96, 8)
MASKS = ("2:4", "1:4", 0.3, 0.7)
SECOND = {
    Unstructured: [{"sparsity": 0.2}, {"sparsity": 0.8}, {"bits": 4}, {"bits": 3, "sparsity": 0.6}],
    NM: [{"pattern": "2:4"}, {"pattern": "1:4", "bits": 4}],
    Structured: [
        {"pattern": "structured", "sparsity": 0.25},
        {"pattern": "structured", "sparsity": 0.25, "group_size": 8},
    ],
}
CASES = [
    pytest.param(solver, fields, id=f"{solver}-{'-'.join(map(str, fields.values()))}")
    for solver in solver_names()
    for kind in solver_class(solver).patterns
    for fields in SECOND.get(kind, ())
]


def masked(weight, first, seed=0):
    """The weight, some of which is zero: by n:m, or a random fraction."""
    scores = torch.rand(weight.shape, generator=torch.Generator().manual_seed(seed))
    pattern = parse_pattern(first, None) if isinstance(first, str) else Unstructured(first)
    return weight * pattern.keep(scores)


def config(solver, lam, **fields):
    return MoonshotConfig(solver=solver, lam=lam, **({"block_size": 48} if solver == "cap" else {}), **fields)


@pytest.mark.parametrize(("solver", "fields"), CASES)
@pytest.mark.parametrize("lam", [0.0, 0.5, 1.0])
def test_no_zero_of_a_given_weight_is_filled(solver, fields, lam):
    weight, gram, gradients = layer(*SHAPE, seed=1)
    settings = config(solver, lam, **fields)
    for first in MASKS:
        given = masked(weight, first)
        result = prune_weight(given, gram, gradients, config=settings)
        assert not result.weight[given == 0].any() and not result.keep[given == 0].any(), first
        assert not result.weight[~result.keep].any() and result.weight.any()
        assert result.notes[-1] == f"{int((given == 0).sum()):,} zeros of the weight remain"
        objective = build_objective(settings.make_solver(), settings.parsed_pattern, given, gram, gradients, lam)
        pruned, mask = objective.losses(result.weight, given * result.keep)
        if settings.grid is None:
            assert pruned.total <= 1.0001 * mask.total + 1e-9, first
        else:
            settings.grid.scales_of(result.weight)
            assert pruned.total <= mask.total + 0.1


@pytest.mark.parametrize("solver", [name for name in solver_names() if name != "osscar"])
@pytest.mark.parametrize("lam", [0.5, 1.0])
def test_zeros_count_towards_the_pattern(solver, lam):
    """So where they suffice, nothing changes, and n:m keeps at most n of the others."""
    weight, gram, gradients = layer(*SHAPE, seed=2)
    for first, second in (
        ("2:4", {"sparsity": 0.5}),
        ("2:4", {"pattern": "2:4"}),
        ("1:4", {"pattern": "2:4"}),
        (0.7, {"sparsity": 0.2}),
    ):
        given = masked(weight, first)
        result = prune_weight(given, gram, gradients, config=config(solver, lam, **second))
        assert torch.equal(result.keep, given != 0)
        assert torch.equal(result.weight, given)
    given = masked(weight, 0.7)
    keep = prune_weight(given, gram, gradients, config=config(solver, lam, pattern="2:4")).keep
    assert torch.equal(keep.view(-1, 4).sum(1), (given != 0).view(-1, 4).sum(1).clamp(max=2))


def damped(solver, lam, given, gram, gradients):
    """The matrices [rows, d_in, d_in] whose quadratic a solver minimises."""
    tensors = given.double(), gram.double(), gradients.double() if lam < 1 else None
    if solver in ("obc", "cap"):
        return reference.blocks(*tensors, lam, given.shape[1])
    at_zero, _ = reference.losses_at_zero(*tensors)
    ridge = 0.01 * tensors[1].diagonal().mean() / at_zero * torch.eye(len(gram), dtype=torch.float64)
    return reference.hessians(*tensors, lam) + ridge


def minimum(matrix, row, keep):
    """The minimiser of a row's quadratic on some inputs, and its loss."""
    best = torch.zeros_like(row)
    best[keep] = row[keep] + torch.linalg.solve(matrix[keep][:, keep], matrix[keep][:, ~keep] @ row[~keep])
    return best, float((best - row) @ matrix @ (best - row))


@pytest.mark.parametrize(
    ("solver", "fields"),
    [
        ("obc", {"sparsity": 0.8}),
        ("obc", {"pattern": "1:4"}),
        ("cap", {"sparsity": 0.8}),
        ("alps", {"sparsity": 0.8, "solver_options": {"refit_steps": 100}}),  # until it converges
        ("alps", {"pattern": "1:4", "solver_options": {"refit_steps": 100}}),
        ("osscar", {"pattern": "structured", "sparsity": 0.25}),
        ("osscar", {"pattern": "structured", "sparsity": 0.25, "group_size": 8}),
    ],
)
@pytest.mark.parametrize("lam", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("first", ["2:4", 0.6])
def test_the_survivors_are_the_minimum_on_their_support(solver, fields, lam, first):
    weight, gram, gradients = layer(6, 48, 5, seed=3)
    given = masked(weight, first)
    result = prune_weight(given, gram, gradients, config=MoonshotConfig(solver=solver, lam=lam, **fields))
    for row, matrix in enumerate(damped(solver, lam, given, gram, gradients)):
        best, _ = minimum(matrix, given[row].double(), result.keep[row])
        torch.testing.assert_close(result.weight[row].double(), best, rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize(("solver", "pattern"), [("obc", 0.75), ("cap", 0.75), ("obc", "2:8")])
@pytest.mark.parametrize("lam", [0.5, 1.0])
def test_one_removal_is_the_best_of_all(solver, pattern, lam):
    """Of a row of 8 with 5 zeros, the removal of one more weight."""
    fields = {"pattern": pattern} if isinstance(pattern, str) else {"sparsity": pattern}
    for seed in range(12):
        weight, gram, gradients = layer(1, 8, 5, seed=seed)
        given = weight.clone()
        given[0, torch.randperm(8, generator=torch.Generator().manual_seed(seed))[:5]] = 0
        result = prune_weight(given, gram, gradients, config=MoonshotConfig(solver=solver, lam=lam, **fields))
        matrix, alive = damped(solver, lam, given, gram, gradients)[0], (given[0] != 0).nonzero()[:, 0].tolist()
        losses = {}
        for pair in combinations(alive, 2):
            keep = torch.zeros(8, dtype=torch.bool)
            keep[list(pair)] = True
            losses[pair] = minimum(matrix, given[0].double(), keep)[1]
        assert losses[tuple(result.keep[0].nonzero()[:, 0].tolist())] == min(losses.values())


def test_a_group_with_more_zeros_than_it_has_to_lose_does_not_compensate_with_them():
    """Else OBC ranks removals by updates of weights that cannot change."""
    for seed in range(12):
        weight, gram, gradients = layer(1, 8, 5, seed=seed)
        given = weight.clone()
        given[0, [0, 1, 3, 4]] = 0  # 2:4: the first four keep their only weight, the others lose one of three
        result = prune_weight(given, gram, config=MoonshotConfig(solver="obc", pattern="2:4", lam=1))
        matrix, losses = damped("obc", 1, given, gram, gradients)[0], {}
        for removed in (5, 6, 7):
            keep = given[0] != 0
            keep[removed] = False
            losses[removed] = minimum(matrix, given[0].double(), keep)[1]
        assert not result.keep[0, min(losses, key=losses.get)] and result.keep[0, 2]


def test_groups_of_rows_keep_their_zeros():
    weight, gram, gradients = grouped_layer(3, 4, 16, 6)
    given = masked(weight, 0.4)
    for solver in (name for name in solver_names() if solver_class(name).grouped):
        for lam in (0.5, 1.0):
            result = prune_weight(given, gram, gradients, config=config(solver, lam, pattern="2:4", bits=4))
            assert not result.weight[given == 0].any()


def test_a_path_keeps_zeros_at_every_sparsity():
    weight, gram, _ = layer(*SHAPE, seed=4)
    given = masked(weight, "2:4")
    path = prune_weight_path(
        given, gram, config=MoonshotConfig(solver="obc", sparsity=0.5, lam=1), sparsities=[0.3, 0.5, 0.7]
    )
    assert torch.equal(path[0.3].weight, given) and torch.equal(path[0.5].weight, given)
    assert int((path[0.7].weight != 0).sum()) == given.numel() - round(0.7 * given.numel())
    assert not path[0.7].weight[given == 0].any()


def test_trials_of_several_patterns_keep_zeros():
    weight, gram, _ = layer(*SHAPE, seed=5)
    given = masked(weight, 0.5)
    settings = MoonshotConfig(sparsity=0.5, lam=1)
    objective = build_objective(SparseGPT(), settings.parsed_pattern, given, gram, None, 1)
    for patterns in ([Unstructured(0.6), Unstructured(0.8)], [NM(2, 4), NM(1, 4)]):
        for trial, pattern in zip(SparseGPT().trials(objective, patterns), patterns, strict=True):
            assert not trial[given == 0].any()
            torch.testing.assert_close(trial, SparseGPT().solve(objective, pattern).weight, rtol=1e-4, atol=1e-6)


def test_quantized_zeros_do_not_move_where_a_scale_has_more_inputs_than_a_comparison_group():
    weight, gram, _ = layer(16, 256, 4, seed=6)
    given = masked(weight, "2:4")
    result = prune_weight(given, gram, config=MoonshotConfig(bits=4, quant_group=256, lam=1))
    Grid(4, 256).scales_of(result.weight)
    assert not result.weight[given == 0].any()


@pytest.mark.parametrize("solver", solver_names())
def test_a_weight_without_zeros_has_no_mask(solver):
    weight, gram, _ = layer(*SHAPE)
    fields = {"pattern": "structured"} if solver == "osscar" else {}
    settings = MoonshotConfig(solver=solver, sparsity=0.5, lam=1, **fields)
    objective = build_objective(settings.make_solver(), settings.parsed_pattern, weight, gram, None, 1)
    assert objective.alive is None and prune_weight(weight, gram, config=settings).notes == ()
