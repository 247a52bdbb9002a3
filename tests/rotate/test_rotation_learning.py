"""The objective of a rotation and its optimisation: properties on single matrices."""

import copy
import itertools
import statistics

import pytest
import torch
from rotation_problems import HALF, problem, space
from torch import nn

from optimum_moonshot import MoonshotConfig
from optimum_moonshot.model.layer_kinds import find_layer
from optimum_moonshot.objective.patterns import NM, Unstructured
from optimum_moonshot.rotate.basis import rotate_axis
from optimum_moonshot.rotate.learning import Learned, learn, learning_size, rotations
from optimum_moonshot.rotate.objective import (
    Coordinates,
    inverse,
    removed,
    rotated_diagonal,
    sampled,
    set_totals,
    widest,
)


def unrotated(objective):
    return {each: torch.eye(each.width).repeat(each.count, 1, 1) for each in objective.spaces}


@pytest.mark.parametrize("pattern", [Unstructured(0.0), Unstructured(0.3), HALF, Unstructured(1.0)])
def test_the_unstructured_sum_has_the_smallest_scores(pattern):
    values = torch.rand(7, 12)
    count = round(pattern.sparsity * 84)
    torch.testing.assert_close(removed(values, [pattern]), values.flatten().sort().values[:count].sum())


@pytest.mark.parametrize("n, m", [(n, m) for m in (2, 4, 8) for n in range(1, m + 1)])
def test_the_n_m_sum_has_the_smallest_scores_of_every_m(n, m):
    values = torch.rand(5, 16, requires_grad=True)
    total = removed(values, [NM(n, m)])
    keep = NM(n, m).keep(values.detach())
    torch.testing.assert_close(total, values[~keep].sum())
    if n < m:
        (gradient,) = torch.autograd.grad(total, values)
        assert torch.equal(gradient, (~keep).float())


def test_several_patterns_have_equal_weight():
    values = torch.rand(4, 8)
    both = removed(values, [HALF, NM(2, 4)])
    torch.testing.assert_close(both, (removed(values, [HALF]) + removed(values, [NM(2, 4)])) / 2)


def test_the_diagonal_of_the_inverse_is_that_of_the_rotated_inputs():
    stream, x = space(6), torch.randn(40, 6)
    rotation = torch.linalg.qr(torch.randn(6, 6))[0][None]
    whole = rotated_diagonal(inverse(x.T @ x, Coordinates(stream, None)), rotation)
    turned = x @ rotation[0]
    torch.testing.assert_close(whole, inverse(turned.T @ turned, None), rtol=1e-4, atol=1e-6)


def test_heads_rotate_their_own_columns():
    heads, x = space(3, 2), torch.randn(60, 12)
    reads = Coordinates(heads, torch.arange(12).view(2, 2, 3))
    turns = torch.linalg.qr(torch.randn(2, 3, 3))[0]
    whole = torch.block_diag(turns[0], turns[0], turns[1], turns[1])
    torch.testing.assert_close(rotate_axis(x, 1, reads.index, turns), x @ whole)
    turned = x @ whole
    diagonal = rotated_diagonal(inverse(x.T @ x, reads), turns)
    torch.testing.assert_close(diagonal, inverse(turned.T @ turned, None), rtol=1e-4, atol=1e-6)


def test_coordinates_may_be_anywhere_on_an_axis():
    index = torch.tensor([[[4, 1]], [[0, 3]]])
    turns = torch.linalg.qr(torch.randn(2, 2, 2))[0]
    weight = torch.randn(6, 3)
    rotated = rotate_axis(weight, 0, index, turns)
    torch.testing.assert_close(rotated[[4, 1]], turns[0].T @ weight[[4, 1]])
    torch.testing.assert_close(rotated[[0, 3]], turns[1].T @ weight[[0, 3]])
    assert torch.equal(rotated[[2, 5]], weight[[2, 5]])


def test_the_objective_is_the_removed_fraction_of_the_scores():
    objective = problem(space())
    value = objective.value(unrotated(objective))
    shares = []
    for _, groups in objective.blocks:
        for group in groups:
            diagonal = rotated_diagonal(group.inverse, torch.eye(8)[None] if group.reads else None)
            for matrix in group.matrices:
                scores = matrix.layer.matrix.square() / diagonal
                shares.append(removed(scores, [HALF]) / scores.sum())
    assert value == pytest.approx(float(sum(shares) / 3), rel=1e-5)


def test_fisher_losses_weight_the_matrices():
    alike, weighed = problem(space()), problem(space())
    set_totals(weighed, {"read 0": 1.0, "read 1": 1.0, "write": 1.0})
    assert weighed.value(unrotated(weighed)) == pytest.approx(alike.value(unrotated(alike)), rel=1e-6)
    parts = []
    for only in ("read 0", "read 1", "write"):
        set_totals(weighed, {name: float(name == only) for name in ("read 0", "read 1", "write")})
        parts.append(weighed.value(unrotated(weighed)))
    set_totals(weighed, {"read 0": 1.0, "read 1": 2.0, "write": 5.0})
    expected = (parts[0] + 2 * parts[1] + 5 * parts[2]) / 8
    assert weighed.value(unrotated(weighed)) == pytest.approx(expected, rel=1e-5)


def test_the_gradient_matches_finite_differences():
    torch.manual_seed(0)
    stream, heads = space(4), space(2, 2)
    objective = problem(
        stream, (Unstructured(1.0),), heads
    )  # all scores: no threshold that a finite difference could cross
    at = {each: torch.linalg.qr(torch.randn(each.count, each.width, each.width))[0] for each in (stream, heads)}
    leaves = {each: value.clone().requires_grad_(True) for each, value in at.items()}
    objective.value(leaves)
    for each in (stream, heads):
        change = torch.randn_like(at[each])
        moved = [{**at, each: at[each] + sign * 1e-3 * change} for sign in (1, -1)]
        difference = (objective.value(moved[0]) - objective.value(moved[1])) / 2e-3
        assert float((leaves[each].grad * change).sum()) == pytest.approx(difference, rel=2e-2, abs=2e-4)


@pytest.mark.parametrize("fixes_ones", [False, True])
@pytest.mark.parametrize("patterns", [(HALF,), (NM(2, 4),), (HALF, NM(2, 4))])
def test_learning_lowers_the_objective_with_orthogonal_matrices(patterns, fixes_ones):
    stream, heads = space(fixes_ones=fixes_ones), space(4, 2)
    objective = problem(stream, patterns, heads)
    state = learn(objective, [stream, heads], 40, 0.05, torch.device("cpu"))
    matrices = rotations([stream, heads], state)
    assert state.after < 0.95 * state.before and state.done
    for each, matrix in matrices.items():
        assert matrix.shape == (each.count, each.width, each.width) and matrix.dtype == torch.float64
        torch.testing.assert_close(
            matrix.mT @ matrix, torch.eye(each.width).double().expand_as(matrix), rtol=0, atol=1e-12
        )
    if fixes_ones:
        torch.testing.assert_close(matrices[stream].sum(-1), torch.ones(1, 8).double(), rtol=0, atol=1e-12)
    value = objective.value({each: matrix.float() for each, matrix in matrices.items()})
    assert value == pytest.approx(state.after, rel=1e-4)


def test_learning_never_ends_above_its_start():
    stream = space()
    state = learn(problem(stream), [stream], 12, 0.9, torch.device("cpu"))  # a learning rate that is far too large
    assert state.after <= state.before == state.history[0]


def test_zero_sparsity_gives_the_identity():
    stream = space()
    state = learn(problem(stream, (Unstructured(0.0),)), [stream], 20, 0.01, torch.device("cpu"))
    assert len(state.history) == 1 and state.after == state.before == 0
    assert torch.equal(rotations([stream], state)[stream], torch.eye(8).double()[None])


def test_learning_stops_without_improvement():
    stream = space(2)
    state = learn(problem(stream), [stream], 2000, 0.05, torch.device("cpu"))
    assert len(state.history) < 1500


def test_learning_resumes_from_a_state():
    stream, heads = space(), space(4, 2)
    arguments = ([stream, heads], 15, 0.05, torch.device("cpu"))
    whole = learn(problem(stream, heads=heads), *arguments)
    kept = []

    class Killed(Exception):
        pass

    def kill(state):
        if state.steps == 6:
            kept.append(copy.deepcopy(Learned.load(*state.saved())))
            raise Killed

    with pytest.raises(Killed):
        learn(problem(stream, heads=heads), *arguments, step_done=kill)
    again = learn(problem(stream, heads=heads), *arguments, state=kept[0])
    assert again.history == whole.history
    for name, tensor in whole.tensors.items():
        assert torch.equal(again.tensors[name], tensor), name


def test_sampled_rows_estimate_the_objective_and_its_gradient():
    stream = space()
    objective = problem(stream, (NM(2, 4),))
    whole, estimate = ({stream: torch.eye(8)[None].requires_grad_()} for _ in range(2))
    value = objective.value(whole)
    values = [objective.sampled(4, seed).value(estimate) for seed in range(400)]
    error = statistics.stdev(values) / 20
    assert error > 0 and abs(statistics.fmean(values) - value) < 4 * error
    gradient, expected = estimate[stream].grad / 400, whole[stream].grad
    assert float((gradient - expected).norm()) < 0.2 * float(expected.norm())


def test_as_many_rows_as_there_are_is_the_objective():
    stream = space()
    objective = problem(stream)
    at = unrotated(objective)
    assert objective.sampled(1000, 3).value(at) == objective.value(at)


def test_steps_on_sampled_rows_lower_the_objective_of_all_rows():
    stream, heads = space(), space(4, 2)
    objective = problem(stream, (NM(2, 4),), heads=heads)
    state = learn(objective, [stream, heads], 40, 0.05, torch.device("cpu"), rows=4)
    assert len(state.history) <= 5 and state.after < 0.97 * state.before and state.done
    changes = rotations([stream, heads], state)
    value = objective.value({each: matrix.float() for each, matrix in changes.items()})
    assert value == pytest.approx(state.after, rel=1e-4)


def test_learning_on_sampled_rows_resumes_from_a_state():
    stream, states = space(), []
    arguments = ([stream], 25, 0.05, torch.device("cpu"))
    whole = learn(problem(stream), *arguments, rows=4)
    learn(problem(stream), *arguments, rows=4, step_done=lambda state: states.append(copy.deepcopy(state)))
    again = learn(problem(stream), *arguments, state=Learned.load(*states[12].saved()), rows=4)
    assert again.history == whole.history and again.steps == whole.steps
    for name, tensor in whole.tensors.items():
        assert torch.equal(again.tensors[name], tensor), name


def test_sampled_indices_are_sorted_and_aligned():
    generator = torch.Generator().manual_seed(0)
    assert sampled(10, 10, 1, generator) is None
    rows = sampled(100, 10, 1, generator)
    assert len(set(rows.tolist())) == 10 and rows.tolist() == sorted(rows.tolist())
    columns = sampled(64, 20, 4, generator).view(-1, 4)
    assert len(columns) == 5 and bool((columns[:, 0] % 4 == 0).all())
    assert torch.equal(columns - columns[:, :1], torch.arange(4).expand(5, 4))
    assert sampled(10, 4, 4, generator) is None  # 10 does not divide into fours
    assert [widest(p) for p in ([HALF], [NM(2, 4)], [NM(2, 4), NM(1, 6)])] == [1, 4, 12]


def test_sampled_thresholds_change_the_sum_to_second_order(monkeypatch):
    values = torch.rand(64, 64).square()
    exact = removed(values, [Unstructured(0.7)])
    monkeypatch.setattr("optimum_moonshot.rotate.objective.SAMPLED_SCORES", 1024)
    torch.testing.assert_close(removed(values, [Unstructured(0.7)]), exact, rtol=1e-2, atol=0)


def test_sampled_thresholds_cover_columns_evenly(monkeypatch):
    monkeypatch.setattr("optimum_moonshot.rotate.objective.SAMPLED_SCORES", 512)
    values = torch.arange(8.0).repeat(1024, 1) + torch.rand(1024, 8)  # a stride of 16 would see the first column alone
    exact = values.flatten().sort().values[: 1024 * 4].sum()
    torch.testing.assert_close(removed(values, [HALF]), exact, rtol=1e-2, atol=0)


def test_every_order_of_a_group_of_four():
    for values in itertools.permutations([1.0, 2.0, 4.0, 8.0]):
        assert removed(torch.tensor([values]), [NM(2, 4)]) == 3


@pytest.mark.parametrize("shape, size", [((8, 1024), (100, None)), ((1025, 8), (50, 256)), ((8, 1025), (50, 256))])
def test_wide_models_learn_on_sampled_rows_in_fewer_steps(shape, size):
    layers = [find_layer(nn.Linear(*reversed(sides))) for sides in ((8, 8), shape)]
    assert learning_size(MoonshotConfig(sparsity=0.5), layers) == size
    assert learning_size(MoonshotConfig(sparsity=0.5, rotation_steps=7, rotation_rows=5), layers) == (7, 5)
