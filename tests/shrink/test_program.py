"""The integer program equals brute force over all options, and never exceeds its budget."""

import dataclasses
import itertools

import numpy as np
import pytest

from optimum_moonshot.shrink.program import Dimension, Product, Program


def random_program(seed, most=5):
    """A program whose second and third dimensions save some costs twice, for every odd seed."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(2, most + 1, 3)
    dimensions = tuple(
        Dimension(
            str(index),
            tuple(range(size)),
            (0.0, *np.sort(rng.random(size - 1))),
            (0.0, *-np.sort(rng.integers(1, 100, size - 1)).astype(float)),
        )
        for index, size in enumerate(sizes)
    )
    loss_pairs = {(0, other): -0.1 * rng.random((sizes[0], sizes[other])) for other in (1, 2)}
    cost_pairs = {(0, 1): rng.integers(0, 10, (sizes[0], sizes[1])).astype(float)}
    products = (Product(1, 2, tuple(rng.integers(1, 100, sizes[0]).tolist())),) if seed % 2 else ()
    return Program(dimensions, 400.0, loss_pairs, cost_pairs, products)


def all_choices(program):
    return [program.choice(each) for each in itertools.product(*(range(len(d.removed)) for d in program.dimensions))]


@pytest.mark.parametrize("seed", range(20))
def test_the_best_choice_is_that_of_brute_force_at_every_reachable_budget(seed):
    program = random_program(seed)
    choices = all_choices(program)
    for budget in sorted({choice.cost for choice in choices})[::7]:
        best = program.best(budget)
        assert best.cost <= budget
        assert best.loss == pytest.approx(min(each.loss for each in choices if each.cost <= budget), abs=1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_the_least_cost_is_that_of_brute_force_and_below_it_nothing_is_chosen(seed):
    program = random_program(seed)
    least = min(each.cost for each in all_choices(program))
    assert program.least_cost().cost == pytest.approx(least)
    assert program.best(least - 1) is None
    assert program.best(least).cost == pytest.approx(least)


def test_only_the_allowed_dimensions_change():
    program = random_program(3)
    for name in "012":
        budget = program.dense - 1
        options = program.best(budget, frozenset({name})).options
        assert [index for index, option in enumerate(options) if option] == [int(name)]


def test_the_budget_holds_where_costs_are_far_larger_than_the_tolerance_of_the_solver():
    levels = np.arange(65)
    rng = np.random.default_rng(0)
    dimensions = [Dimension(str(i), tuple(levels), tuple(levels**2.0), tuple(-1234567.0 * levels)) for i in range(2)]
    program = Program(tuple(dimensions), 8e9, {}, {})
    for budget in (8e9 - 1234567.0 * rng.integers(1, 128, 5)).tolist():
        assert program.best(budget).cost <= budget
        assert program.best(budget - 1).cost <= budget - 1
        assert program.best(budget).loss <= program.best(budget - 1).loss


def test_nothing_leaves_for_free():
    neurons = Dimension("neurons", (0, 1, 2, 3), (0.0,) * 4, (0.0, -12.0, -30.0, -60.0))
    program = Program((neurons, Dimension("blocks", (0, 1), (0.0,) * 2, (0.0, -25.0))), 100.0, {}, {})
    assert [program.best(budget).cost for budget in (95, 87, 74, 15)] == [88, 75, 70, 15]


@pytest.mark.parametrize("seed", range(20))
def test_of_equal_losses_the_largest_cost_is_that_of_brute_force(seed):
    """Losses of a few values, so that most choices share theirs with others."""
    rng = np.random.default_rng(seed)
    dimensions = []
    for dimension in random_program(seed).dimensions:
        losses = np.sort(rng.integers(0, 3, len(dimension.removed) - 1)) * 0.25
        dimensions.append(dataclasses.replace(dimension, losses=(0.0, *losses.tolist())))
    loss_pairs = {(0, 1): -0.25 * rng.integers(0, 2, [len(each.removed) for each in dimensions[:2]])}
    program = dataclasses.replace(random_program(seed), dimensions=tuple(dimensions), loss_pairs=loss_pairs)
    choices = all_choices(program)
    for budget in sorted({choice.cost for choice in choices})[::7]:
        expected = min((each for each in choices if each.cost <= budget), key=lambda each: (each.loss, -each.cost))
        best = program.best(budget)
        assert (best.loss, best.cost) == (expected.loss, expected.cost)
