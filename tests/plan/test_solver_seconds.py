"""The seconds of a solver follow from trials with some rows of a matrix, which converge as those of a trained model."""

from functools import partial
from pathlib import Path

import pytest

from optimum_moonshot import MoonshotConfig, MoonshotPruner
from optimum_moonshot.objective.patterns import Unstructured
from optimum_moonshot.objective.quadratic import ProblemSize
from optimum_moonshot.pipeline.solve import solve_layer
from optimum_moonshot.plan.solver import (
    FIRST_ROWS,
    GROWTH,
    MATRIX_SECONDS,
    TRIAL_BYTES,
    matrix_seconds,
    random_problem,
)
from optimum_moonshot.prune import layers as solving
from optimum_moonshot.solvers import make_solver
from optimum_moonshot.solvers.alps import System

DEMO = Path(__file__).parents[2] / "examples" / "demo_model"


def cost(size, fixed, power, speed):
    """Seconds: a factorization, a row's part, and the overhead of every step."""
    return (fixed * size.inputs**3 + size.rows * (size.inputs**power + 2000 * size.inputs)) / speed


def planned(size, seconds):
    """The planned seconds of a matrix, and those of the trials, where time costs nothing."""
    taken = []

    def solve(tried):
        taken.append(seconds(tried))
        return taken[-1]

    return matrix_seconds(solve, size), taken


@pytest.mark.parametrize("power", [2, 2.5, 3])
@pytest.mark.parametrize("fixed", [0, 1, 20])
@pytest.mark.parametrize(("rows", "inputs"), [(512, 512), (4096, 1024), (1024, 2048)])
def test_a_time_affine_in_the_rows_is_exact(rows, inputs, fixed, power):
    size, seconds = ProblemSize(rows, inputs), partial(cost, fixed=fixed, power=power, speed=1e10)
    estimate, taken = planned(size, seconds)
    assert estimate == pytest.approx(seconds(size), rel=1e-9)
    first = seconds(ProblemSize(FIRST_ROWS, inputs))
    assert sum(taken) < 3 * GROWTH * max(MATRIX_SECONDS, first)


def test_a_matrix_whose_first_rows_take_long_has_two_trials():
    size, seconds = ProblemSize(1024, 8192), partial(cost, fixed=0, power=3, speed=2e9)
    estimate, taken = planned(size, seconds)
    assert estimate == pytest.approx(seconds(size)) and len(taken) == 2


def test_trials_have_few_gradients_and_whole_groups():
    tried = []

    def solve(size):
        tried.append(size.rows)
        return 1e-6 * size.rows

    size = ProblemSize(960, 64, TRIAL_BYTES // (400 * 64), groups=3)
    assert matrix_seconds(solve, size) == pytest.approx(960e-6)
    assert max(tried) <= 100 and all(rows % 3 == 0 for rows in tried)


@pytest.mark.slow
@pytest.mark.parametrize(("lam", "samples"), [(1.0, 0), pytest.param(0.5, 16, marks=pytest.mark.release)])
def test_random_problems_of_alps_take_as_many_products_as_a_trained_model(monkeypatch, lam, samples):
    products, real, times = [], {}, System.times

    def counted(system, vectors):
        products.append(vectors)
        return times(system, vectors)

    def solved(solver, layer, *rest):
        products.clear()
        result = solve_layer(solver, layer, *rest)
        real.setdefault(layer.shape, []).append(len(products))
        return result

    monkeypatch.setattr(System, "times", counted)
    monkeypatch.setattr(solving, "solve_layer", solved)
    config = MoonshotConfig(
        solver="alps",
        sparsity=0.6,
        lam=lam,
        fisher="rows",
        num_samples=16,
        sequence_length=128,
        targets=(r"layers\.(0|3)\.",),
    )
    MoonshotPruner.from_pretrained(DEMO, config).prune(str(DEMO / "calibration.txt"), progress=False)
    for (rows, inputs), counts in real.items():
        products.clear()
        size = ProblemSize(rows, inputs, samples, lam=lam, sparsity=0.6)
        weight, statistics = random_problem(size)
        make_solver("alps", {}).solve(statistics.objective(weight, lam, None), Unstructured(0.6))
        mean = sum(counts) / len(counts)
        assert 0.5 < len(products) / mean < 1.5, (rows, inputs, len(products), counts)
