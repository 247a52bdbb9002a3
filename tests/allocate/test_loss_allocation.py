"""Sparsity divided by loss curves: minimal sum of losses, exact totals, budget never exceeded."""

import itertools
import random
from dataclasses import replace

import pytest

from optimum_moonshot.errors import MoonshotError
from optimum_moonshot.objective.loss_allocation import LossCurve, bounds, divide_bytes, divide_sparsity, divide_steps

KNOTS = (0.2, 0.4, 0.6, 0.7, 0.8, 0.9, 0.95, 0.985, 1.0)


def curve(scale=1.0, power=3.0, size=1000):
    """scale · s^power, sampled at the knots."""
    return LossCurve(size, KNOTS, tuple(scale * knot**power for knot in KNOTS))


def mean(sparsities, curves):
    return sum(sparsities[name] * curves[name].size for name in curves) / sum(each.size for each in curves.values())


def total(sparsities, curves):
    return sum(curves[name].values([sparsity])[0] for name, sparsity in sparsities.items())


def test_a_curve_interpolates_its_points_exponentially():
    cubic = curve()
    assert cubic.values(KNOTS) == pytest.approx(cubic.losses, rel=1e-12)
    low, middle, high = cubic.values([0.4, 0.5, 0.6])
    assert middle == pytest.approx((low * high) ** 0.5, rel=1e-12)
    first, second = cubic.values([0.0, 0.1])
    assert 0 < first < second < cubic.losses[0]


@pytest.mark.parametrize("sparsity", [0, 0.02, 0.3, 0.5, 0.7, 0.8, 0.97, 0.99, 1])
def test_the_mean_over_the_weights_holds_within_the_bounds(sparsity):
    choose = random.Random(0)
    for _ in range(20):
        curves = {
            str(k): curve(choose.choice([0, 1e-6, 1, choose.random()]), choose.uniform(0.5, 9), choose.randint(1, 999))
            for k in range(choose.randint(1, 9))
        }
        sparsities = divide_sparsity(curves, sparsity)
        assert mean(sparsities, curves) == pytest.approx(sparsity, abs=1e-12)
        low, high = bounds(sparsity)
        assert all(low - 1e-12 <= value <= high + 1e-12 for value in sparsities.values())
    assert bounds(sparsity)[0] <= sparsity <= bounds(sparsity)[1] <= 1


@pytest.mark.parametrize("sparsity", [0.1, 0.5, 0.8, 0.98])
def test_equal_curves_get_equal_sparsities(sparsity):
    curves = {str(k): curve() for k in range(5)}
    assert list(divide_sparsity(curves, sparsity).values()) == pytest.approx([sparsity] * 5, abs=1e-12)
    sizes = {str(k): curve(size=size, scale=size) for k, size in enumerate((10, 1000, 77))}  # equal losses per weight
    assert list(divide_sparsity(sizes, sparsity).values()) == pytest.approx([sparsity] * 3, abs=1e-9)


def test_sparsity_decreases_with_the_scale_of_the_loss():
    scales = [1e-3, 0.01, 0.3, 1, 1.5, 40]
    sparsities = divide_sparsity({str(scale): curve(scale) for scale in scales}, 0.7)
    values = [sparsities[str(scale)] for scale in scales]
    assert values == sorted(values, reverse=True) and values[0] > 0.9 and values[-1] < 0.6


def test_a_matrix_without_loss_has_the_largest_allowed_sparsity():
    curves = {"dead": curve(0), "alive": curve(size=3000)}
    sparsities = divide_sparsity(curves, 0.6)
    assert sparsities["dead"] == pytest.approx(bounds(0.6)[1])
    assert mean(sparsities, curves) == pytest.approx(0.6)
    assert divide_sparsity({"a": curve(0), "b": curve(0)}, 0.6) == pytest.approx({"a": 0.6, "b": 0.6})


def test_no_other_division_has_a_smaller_loss():
    choose = random.Random(1)
    for _ in range(5):
        curves = {str(k): curve(choose.uniform(0.1, 2), choose.uniform(2, 8), choose.randint(300, 900)) for k in "abc"}
        best = total(divide_sparsity(curves, 0.6), curves)
        low, high = bounds(0.6)
        grid = [low + (high - low) * cell / 60 for cell in range(61)]
        sizes = [each.size for each in curves.values()]
        for first, second in itertools.product(grid, grid):
            third = (0.6 * sum(sizes) - first * sizes[0] - second * sizes[1]) / sizes[2]
            if low <= third <= high:
                assert total(dict(zip(curves, (first, second, third), strict=True)), curves) >= best * (1 - 1e-3)


def test_a_division_with_dead_inputs_holds_where_possible():
    """Brute force over random cases: the mean is the target, or the dead inputs' fraction where that is higher."""
    choose, above, below = random.Random(2), 0, 0
    for _ in range(200):
        curves = {
            str(k): replace(
                curve(choose.choice([0, 1, choose.random()]), choose.uniform(0.5, 9), choose.randint(1, 999)),
                dead=choose.choice([0.0, choose.random(), choose.random() ** 4]),
            )
            for k in range(choose.randint(1, 6))
        }
        sparsity = choose.random() ** 2
        sparsities = divide_sparsity(curves, sparsity)
        least = mean({name: each.dead for name, each in curves.items()}, curves)
        assert all(sparsities[name] >= each.dead for name, each in curves.items())
        assert mean(sparsities, curves) == pytest.approx(max(sparsity, least), abs=1e-9)
        low, high = bounds(sparsity)
        assert all(sparsities[name] <= max(each.dead, high) + 1e-12 for name, each in curves.items())
        above, below = above + (least > sparsity), below + (min(sparsities.values()) < low - 1e-9)
    assert above > 9 and below > 9  # both exceptions occur


def test_no_other_division_with_dead_inputs_has_a_smaller_loss():
    choose = random.Random(3)
    for dead in (0.35, 0.5, 0.8):
        curves = {k: curve(choose.uniform(0.1, 2), choose.uniform(2, 8), choose.randint(300, 900)) for k in "abc"}
        curves["a"] = replace(curves["a"], dead=dead)
        best, high = total(divide_sparsity(curves, 0.4), curves), bounds(0.4)[1]
        sizes = [each.size for each in curves.values()]
        lowest = bounds(0.4)[0] if dead * sizes[0] + bounds(0.4)[0] * sum(sizes[1:]) <= 0.4 * sum(sizes) else 0.0
        for first, second in itertools.product([cell / 60 for cell in range(61)], repeat=2):
            third = (0.4 * sum(sizes) - first * sizes[0] - second * sizes[1]) / sizes[2]
            given = dict(zip("abc", (first, second, third), strict=True))
            limits = {name: (max(lowest, each.dead), max(high, each.dead)) for name, each in curves.items()}
            if all(limits[name][0] <= value <= limits[name][1] for name, value in given.items()):
                assert total(given, curves) >= best * (1 - 1e-3)


def brute_force(losses, sizes, removed):
    """The minimal sum of losses at which at least `removed` weights are removed."""
    choices = itertools.product(*(range(len(curve)) for curve in losses.values()))
    return min(
        sum(losses[name][count] for name, count in zip(losses, counts, strict=True))
        for counts in choices
        if sum(sizes[name] * count for name, count in zip(losses, counts, strict=True)) >= removed
    )


def convex(choose, steps):
    rising = sorted(choose.random() for _ in range(steps))
    return [0.0, *itertools.accumulate(rising)]


@pytest.mark.parametrize("m", [2, 4])
def test_steps_of_convex_losses_are_optimal(m):
    choose = random.Random(m)
    for _ in range(50):
        losses = {str(k): convex(choose, m - 1) for k in range(4)}
        sizes = dict.fromkeys(losses, 10)
        for budget in range(0, 10 * 4 * (m - 1) + 1, 5):
            taken = divide_steps(losses, sizes, budget)
            removed = 10 * sum(taken.values())
            assert budget - 10 < removed <= budget
            lost = sum(losses[name][count] for name, count in taken.items())
            assert lost == pytest.approx(brute_force(losses, sizes, removed), abs=1e-12)


@pytest.mark.parametrize("equal", [True, False])
def test_steps_of_any_losses_are_optimal_up_to_one_edge_of_the_hull(equal):
    choose = random.Random(0)
    for _ in range(100):
        losses = {str(k): [0.0, *sorted(choose.random() for _ in range(3))] for k in range(4)}
        sizes = {name: 10 if equal else choose.choice([3, 10, 25]) for name in losses}
        budget = choose.uniform(0.3, 0.9) * 3 * sum(sizes.values())
        taken = divide_steps(losses, sizes, budget)
        removed = sum(sizes[name] * count for name, count in taken.items())
        room = [sizes[name] for name, count in taken.items() if count < 3]
        assert removed <= budget and all(size > budget - removed for size in room)
        lost = sum(losses[name][count] for name, count in taken.items())
        steps = [after - before for curve in losses.values() for before, after in itertools.pairwise(curve)]
        if equal:  # two of the three steps of an edge may be replaced by steps of other layers
            assert lost <= brute_force(losses, sizes, removed) + 2 * max(steps)


def test_budgets_of_zero_and_of_all_weights():
    losses = {"a": [0.0, 1.0, 2.0], "b": [0.0, 0.1, 5.0]}
    sizes = {"a": 5, "b": 7}
    assert divide_steps(losses, sizes, 0) == {"a": 0, "b": 0}
    assert divide_steps(losses, sizes, 24) == {"a": 2, "b": 2}
    assert divide_steps(losses, sizes, 7) == {"a": 0, "b": 1}
    assert divide_steps(losses, sizes, 6.9) == {"a": 1, "b": 0}


def random_choices(seed, matrices=4, count=5):
    generator = random.Random(seed)
    return {f"m{m}": [(generator.randint(1, 40), generator.random()) for _ in range(count)] for m in range(matrices)}


def exhaustive(choices, budget):
    """The least sum of losses within a budget, by trying everything."""
    totals = (tuple(map(sum, zip(*each, strict=True))) for each in itertools.product(*choices.values()))
    return min(loss for size, loss in totals if size <= budget)


@pytest.mark.parametrize("seed", range(20))
def test_bytes_are_divided_within_one_step_of_the_minimum(seed):
    choices = random_choices(seed)
    smallest = sum(min(each)[0] for each in choices.values())
    for budget in (smallest, smallest + 20, smallest + 60, 1000):
        taken = divide_bytes(choices, budget)
        size, loss = (sum(choices[name][index][field] for name, index in taken.items()) for field in (0, 1))
        least = exhaustive(choices, budget)
        step = max(max(each)[1] for each in choices.values())
        assert size <= budget
        assert least <= loss + 1e-12 and loss <= least + step
    assert loss == pytest.approx(least)  # enough for every matrix's best choice


def test_a_larger_budget_never_loses_more():
    choices = random_choices(3, matrices=12, count=9)
    smallest = sum(min(each)[0] for each in choices.values())
    losses = []
    for budget in range(smallest, smallest + 300, 10):
        taken = divide_bytes(choices, budget)
        losses.append(sum(choices[name][index][1] for name, index in taken.items()))
    assert losses[-1] == pytest.approx(min(losses)) and losses[0] == pytest.approx(max(losses))


def test_a_budget_below_the_smallest_choices_is_refused():
    with pytest.raises(MoonshotError, match="the smallest choices take 7 bytes of 6"):
        divide_bytes({"a": [(3, 1.0), (9, 0.0)], "b": [(4, 1.0)]}, 6)
