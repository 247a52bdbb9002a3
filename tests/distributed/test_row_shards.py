"""Processes that shard matrices by rows give the results of one process, and stop together."""

import dataclasses
import re
from math import inf

import pytest
import torch
from memory_failures import MESSAGE
from objectives import full
from process_reports import assert_as_one_process
from process_runs import DIED, assert_alike, assert_same, found_by
from row_shards import CASES, FEW, SIZES
from torch import nn

from optimum_moonshot.calibration.storage import Storage
from optimum_moonshot.distributed.sharing import assign, divide, rows_of_processes
from optimum_moonshot.model.layer_kinds import Conv2dLayer, LinearLayer
from optimum_moonshot.objective.linalg import row_slices
from optimum_moonshot.objective.patterns import NM, Structured, Unstructured
from optimum_moonshot.objective.quadratic import RelativeLoss, Totals
from optimum_moonshot.pipeline.backoff import Backoff
from optimum_moonshot.pipeline.partition import (
    StatisticsSpec,
    layer_owners,
    partition,
    shards_rows,
    solving_cost,
)
from optimum_moonshot.pipeline.solve import total_losses
from optimum_moonshot.solvers import make_solver

SEVERAL = [(2, name) for name in CASES] + [(size, name) for size in SIZES[2:] for name in FEW]
MEMORY = "row chunks to save memory"
# Expressions that match the layers without row shards.
WHOLE = {
    "convolutions": "grouped|depthwise",
    "experts beside it": "experts",
    "fewer rows than processes": "[kv]_proj",
    (2, "fewer rows than processes"): "^$",
}


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """The results of `found_by`; ("dying", rank) → the error of a process after another one died."""
    results, stderr = found_by("row_shards.py", tmp_path_factory.mktemp("rows"))
    expected = {(size, rank) for size in SIZES for rank in range(size)} | {("dying", 0), ("dying", 2)}
    assert results.keys() == expected, stderr
    return results


@pytest.mark.slow
@pytest.mark.parametrize(("size", "name"), SEVERAL)
def test_several_processes_give_the_results_of_one(done, size, name):
    shared, _ = assert_as_one_process(done[size, 0][name], done[1, 0][name], name != "too large for one")
    assert shared.startswith(f"{size} processes shared the samples and the layers")


@pytest.mark.slow
@pytest.mark.parametrize(("size", "name"), SEVERAL)
def test_all_processes_have_the_same_model(done, size, name):
    for rank in range(1, size):
        assert_same(done[size, rank][name], done[size, 0][name])
        assert done[size, rank][name]["divided"] == done[size, 0][name]["divided"]


@pytest.mark.slow
@pytest.mark.parametrize(("size", "name"), SEVERAL)
def test_layers_are_sharded_by_rows(done, size, name):
    layers, divided = done[size, 0][name]["said"]["layers"], done[size, 0][name]["divided"]
    whole = {layer for layer in layers if layer not in divided}
    if name == "too large for one":
        assert len(whole) == sum(MEMORY in note for note in done[size, 0][name]["said"]["notes"]) < len(layers)
    else:
        assert whole == {layer for layer in layers if re.search(WHOLE.get((size, name), WHOLE.get(name, "^$")), layer)}


@pytest.mark.slow
def test_a_run_is_reproducible(done):
    assert_same(done[2, 0]["again"], done[2, 0]["sparsegpt"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["damping that rises early, fewer samples than processes", "damping that rises late"])
def test_all_processes_use_the_largest_damping(done, name):
    for *_, damping, _, _, _, _, _, _, _, notes in done[2, 0][name]["said"]["layers"].values():
        assert damping == 0.1 and notes == ("damping raised from 0.01 to 0.1",)


@pytest.mark.slow
def test_more_processes_need_fewer_chunks_of_rows(done):
    chunks = [sum(MEMORY in note for note in done[size, 0]["too large for one"]["said"]["notes"]) for size in (1, 2, 4)]
    assert chunks[0] > chunks[2]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rank", "minimise"])
def test_a_process_out_of_memory_between_collectives_retries(done, name):
    result, other = (done[2, rank][name] for rank in range(2))
    assert_same(result, other)
    assert any(note.startswith("rank 1: out of memory on cpu") for note in result["said"]["notes"])
    assert {key: tensor.tolist() for key, tensor in result["weights"].items()} == {
        key: tensor.tolist() for key, tensor in done[2, 0]["cap"]["weights"].items()
    }


@pytest.mark.slow
def test_a_failure_ends_all_processes_with_one_message(done):
    assert [done[2, rank]["in the middle"] for rank in range(2)] == [
        f"RankFailed: rank 1 failed: {MESSAGE}",
        f"MoonshotError: {MESSAGE}",
    ]
    for rank in range(2):
        error = done[2, rank]["singular"]
        assert error.startswith("FactorizationError: model.layers.2.")
        assert "at any damping of [0.01, 0.1, 1.0]" in error
    assert done[2, 0]["failure"].startswith("RankFailed: rank 1 failed: no more of model.layers.1.")
    for rank in (0, 2):
        assert done["dying", rank] == {"killed": f"RankFailed: {DIED}"}


@pytest.mark.slow
def test_more_processes_resume_the_run_of_fewer(done):
    resumed = done[3, 0]["resumed"]
    assert resumed["said"]["notes"][0] == "7 layers were reused from an interrupted run"
    for rank in (1, 2):
        assert_same(done[3, rank]["resumed"], resumed)
    assert_alike(resumed, done[1, 0]["six samples"])


def linear(d_out, d_in):
    return LinearLayer("layer", (nn.Linear(d_in, d_out),), False)


def test_layers_are_sharded_where_processes_would_wait():
    assert divide([1.0, 1.0], [0.5, 0.5], 2) == [0, 1]  # no process waits
    assert divide([3.0, 1.0, 1.0], [1.5, 0.5, 0.5], 2) == [None, 0, 1]
    assert divide([3.0, 1.0, 1.0], [None, None, None], 2) == assign([3.0, 1.0, 1.0], 2) == [0, 1, 1]
    assert divide([1.0], [0.25], 4) == [None]
    assert divide([5.0, 5.0], [5 / 3, 5 / 3], 3) == [None, None]  # one shared layer alone is slower
    assert divide([1.0, 1.0], [0.9, 0.9], 4) == [0, 1]  # most of the cost is repeated in every process
    assert divide([1.05, 1.0], [0.525, 0.5], 2) == [0, 1]  # costs are estimates
    assert divide([inf, 1.0, 1.0], [5.0, 0.25, None], 4)[0] is None  # too large for one
    assert divide([], [], 2) == []


@pytest.mark.parametrize("samples", [3, 40])
@pytest.mark.parametrize("lam", [0.0, 0.5, 1.0])
def test_solving_rows_separately_equals_solving_them_together(samples, lam):
    torch.manual_seed(0)
    weight, inputs, gradients = torch.randn(9, 16), torch.randn(16, 50), torch.randn(samples, 9, 16)
    gradients, gram, sparsegpt = None if lam == 1 else gradients, inputs @ inputs.mT, make_solver("sparsegpt", {})
    whole = full(weight, gram, gradients, lam)
    squares = 0.0 if gradients is None else float(gradients.square().sum(0).mean())
    totals = Totals(*whole.losses_at_zero, squares, samples)
    expected = sparsegpt.solve(whole, NM(2, 4))
    for rows in (slice(0, 4), slice(4, 9)):
        part = full(weight[rows], gram, None if gradients is None else gradients[:, rows], lam, totals=totals)
        assert part.scales == whole.scales and part.mean_diagonal() == pytest.approx(whole.mean_diagonal())
        values, keep = sparsegpt.attempt(part, NM(2, 4), sparsegpt.damping)
        assert torch.equal(keep, expected.keep[rows])
        torch.testing.assert_close(values.masked_fill(~keep, 0), expected.weight[rows], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_row_belongs_to_one_process(size):
    for groups in (10, 5, 1):
        slices = rows_of_processes(10, groups, size)
        assert [row for rows in slices for row in range(10)[rows]] == list(range(10))
        assert all(rows.start % (10 // groups) == rows.stop % (10 // groups) == 0 for rows in slices)


def test_which_layers_are_sharded():
    layer, half = linear(256, 256), [Unstructured(0.5)]

    def is_divisible(layer, solver, patterns, processes=4):
        return shards_rows(layer, StatisticsSpec(solver, {layer.name: patterns}, {layer.name: 1.0}, 0), processes)

    divisible = {name: is_divisible(layer, make_solver(name, {}), half) for name in ("obc", "cap", "sparsegpt")}
    assert divisible == dict.fromkeys(divisible, True)
    sparsegpt = make_solver("sparsegpt", {})
    assert is_divisible(layer, sparsegpt, [NM(2, 4), Unstructured(0.5)])
    assert not is_divisible(layer, make_solver("alps", {}), half)  # scales of all rows
    assert not is_divisible(layer, make_solver("osscar", {}), [Structured(0.5)])
    assert not is_divisible(layer, sparsegpt, half, 1)
    assert not is_divisible(linear(255, 256), sparsegpt, half)  # tiny
    assert not is_divisible(linear(3, 2**16), sparsegpt, half)
    grouped = Conv2dLayer("layer", (nn.Conv2d(512, 256, 2, groups=2),), False)
    assert not is_divisible(grouped, sparsegpt, half)


@pytest.mark.parametrize(
    ("size", "room", "rounds", "divided"),
    [(4, 68, 1, False), (4, 18, 2, False), (4, 16, 4, True), (3, 16, 4, True), (2, 16, 4, False)],
)
def test_layers_too_large_for_one_process_are_sharded(size, room, rounds, divided):
    """With 16 samples each of four equal matrices needs 17 times its size; sharded between four processes, 9 times."""
    memory, layer = 2 * room * 4 * 256**2, linear(256, 256)
    layers = [dataclasses.replace(layer, name=name) for name in "abcd"]
    patterns, lams = dict.fromkeys("abcd", [Unstructured(0.5)]), dict.fromkeys("abcd", 0.5)
    spec = StatisticsSpec(make_solver("sparsegpt", {}), patterns, lams, 16)
    parts = partition(layers, spec, memory, size)
    assert len(parts) == rounds and [layer for part in parts for layer in part.layers] == layers
    owners = layer_owners(layers, spec, memory // 2, size, -(-16 // size))
    assert (owners == (rows_of_processes(256, 256, size),) * 4) == divided
    assert divided or sorted(owners) == ([0, 1, 2, 3] if size == 4 else [0, 0, 1, 1])


def test_sharding_does_not_reduce_the_cost_of_a_common_factorisation():
    """At λ = 1 most of the time of SparseGPT is the factorisation, which every process repeats."""
    layer, patterns, sparsegpt = linear(256, 256), [NM(2, 4)], make_solver("sparsegpt", {})
    whole, part = (solving_cost(sparsegpt, layer, patterns, 0, processes) for processes in (1, 4))
    assert part > whole / 2
    whole, part = (solving_cost(make_solver("obc", {}), layer, patterns, 0, processes) for processes in (1, 4))
    assert part == whole / 4


def test_a_shared_elimination_is_counted_once():
    layer, several = linear(8, 8), [Unstructured(0.5), Unstructured(0.75), NM(2, 4)]
    cost = {name: solving_cost(make_solver(name, {}), layer, several) for name in ("obc", "sparsegpt")}
    each = {name: solving_cost(make_solver(name, {}), layer, several[:1]) for name in cost}
    assert cost["obc"] == 2 * each["obc"] and cost["sparsegpt"] == 3 * each["sparsegpt"]


def test_the_losses_of_shards_are_summed():
    assert total_losses([RelativeLoss(0.25, None, 0.25), RelativeLoss(0.5, None, 0.5)]) == (0.75, None, 0.75)
    assert total_losses([RelativeLoss(0.25, 1.0, 0.5), RelativeLoss(0.5, 2.0, 0.25)]) == (0.75, 3.0, 0.75)


def test_a_retry_halves_the_slices():
    backoff, seen = Backoff(Storage(torch.device("cpu"))), []

    def work():
        seen.append(len(row_slices(slice(0, 8), 1024, torch.device("cpu"))))
        if seen[-1] < 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return "result"

    assert backoff.with_smaller_slices("layer", work) == "result" and seen == [1, 2, 4]
    seen.clear()
    with pytest.raises(torch.OutOfMemoryError):
        backoff.with_smaller_slices("layer", lambda: seen.append(1) or crowded())
    assert len(seen) == 2  # without slices there is one retry


def crowded():
    raise torch.OutOfMemoryError("CUDA out of memory")
