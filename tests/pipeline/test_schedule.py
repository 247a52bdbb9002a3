"""Compressed statistics and layers solved in chunks of rows give the same result."""

import pytest
import torch
from golden.make import grouped_layer, layer
from marks import slow
from models import image_batches, make, token_batches
from objectives import full, matrices
from torch import nn

from optimum_moonshot import MoonshotConfig, MoonshotPruner
from optimum_moonshot.calibration.accumulators import STAGED, GradientPlan, LayerTotals, RowMatrices, Samples
from optimum_moonshot.calibration.storage import Storage
from optimum_moonshot.errors import FactorizationError
from optimum_moonshot.model.layer_kinds import Conv2dLayer, LinearLayer
from optimum_moonshot.objective.fisher import FisherMatrices, SampleGradients
from optimum_moonshot.objective.linalg import split_range
from optimum_moonshot.objective.patterns import NM, Unstructured
from optimum_moonshot.objective.quadratic import Quadratic, Totals
from optimum_moonshot.pipeline import partition as gathering
from optimum_moonshot.prune import layers as solving
from optimum_moonshot.solvers import solver_class, solver_names

SOLVERS = [name for name in solver_names() if solver_class(name).calibrated and name != "wanda"]


def storage():
    return Storage(torch.device("cpu"))


def linear(d_out, d_in):
    return LinearLayer("layer", (nn.Linear(d_in, d_out),), False)


def feed(accumulators, layer, batches, seed=0):
    """Feeds batches of two pieces each; returns the gradients of all samples, [N, d_out, d_in]."""
    generator = torch.Generator().manual_seed(seed)
    gradients, first = [], 0
    for count in batches:
        for accumulator in accumulators:
            accumulator.begin(first, count)
        whole = torch.zeros(count, *layer.shape)
        for piece in range(2):
            inputs = torch.randn(count, 1, 5, layer.shape[1], generator=generator)
            delta = torch.randn(count, 1, 5, layer.shape[0], generator=generator)
            whole += (delta.mT @ inputs)[:, 0]
            for accumulator in accumulators:
                accumulator.add(inputs, delta, piece == 1, slice(None))
        for accumulator in accumulators:
            accumulator.end()
        gradients.append(whole)
        first += count
    return torch.cat(gradients)


@pytest.mark.parametrize("block", [12, 4, 1])
@pytest.mark.parametrize("rows", [None, slice(0, 3), slice(2, 7)])
@pytest.mark.parametrize("batches", [[4, 4, 3], [STAGED, 7, STAGED - 3, 9], [STAGED + 5, 2], [1] * 11])
def test_every_form_accumulates_the_same_gradients(block, rows, batches):
    layer = linear(7, 12)
    samples = sum(batches)
    plan = GradientPlan(block, rows)
    kept, compressed = Samples(layer, samples, storage(), plan), RowMatrices(layer, samples, storage(), plan)
    totals = LayerTotals(layer, samples, block)
    gradients = feed([kept, compressed, totals], layer, batches)
    row_gradients = gradients[:, rows or slice(None)]
    torch.testing.assert_close(kept.result().gradients, row_gradients)
    fisher = compressed.result()
    assert fisher.samples == samples
    torch.testing.assert_close(fisher.values, matrices(row_gradients, block).values, rtol=1e-4, atol=1e-3)
    products = (gradients * layer.matrix).unflatten(2, (-1, block)).sum(3)
    expected = float(products.square().sum()) / samples, float(gradients.square().sum(0).mean())
    assert totals.result() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("rows", [None, slice(0, 2), slice(2, 3), slice(2, 6), slice(4, 5)])
def test_rows_of_a_grouped_layer_use_the_inputs_of_their_group(rows):
    layer = Conv2dLayer("layer", (nn.Conv2d(6, 6, 2, groups=3),), False)
    inputs, delta = torch.randn(4, 3, 5, 8), torch.randn(4, 3, 5, 2)
    samples = Samples(layer, 4, storage(), GradientPlan(rows=rows))
    samples.add(inputs, delta, True, slice(None))
    whole = (delta.mT @ inputs).flatten(1, 2)
    torch.testing.assert_close(samples.result().gradients, whole[:, rows or slice(None)])


@pytest.mark.parametrize("lam", [0.0, 0.3, 0.9])
@pytest.mark.parametrize("size", [None, 4])
def test_the_compressed_quadratic_equals_the_full_one(lam, size):
    weight, gram, gradients = layer(6, 12, 30, seed=3)
    whole = full(weight, gram, gradients, lam, column_block=size)
    small = Quadratic.build(weight, gram, matrices(gradients, size), lam, column_block=size)
    assert small.losses_at_zero == pytest.approx(whole.losses_at_zero, rel=1e-4)
    assert small.damping_unit == pytest.approx(whole.damping_unit, rel=1e-5)
    assert small.mean_diagonal() == pytest.approx(whole.mean_diagonal(), rel=1e-4)
    rows = slice(1, 5)
    torch.testing.assert_close(small.row_hessians(rows), whole.row_hessians(rows), rtol=1e-3, atol=1e-7)
    pruned = weight * (weight > 0)
    assert small.losses(pruned)[0] == pytest.approx(whole.losses(pruned)[0], rel=1e-4)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("lam", [0.0, 0.5])
def test_solvers_take_the_compressed_form(solver, lam):
    weight, gram, gradients = layer(6, 24, 40, seed=4, dead=(5,))
    settings = MoonshotConfig(
        solver=solver, pattern="structured" if solver == "osscar" else "unstructured", sparsity=0.5, block_size=8
    )
    instance, pattern = settings.make_solver(), settings.parsed_pattern
    size = instance.column_block(24, pattern)
    compressed, expected = (
        instance.solve(Quadratic.build(weight, gram, form, lam, column_block=size), pattern)
        for form in (matrices(gradients, size), SampleGradients(gradients))
    )
    assert torch.equal(compressed.keep, expected.keep)
    torch.testing.assert_close(compressed.weight, expected.weight, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("size", [None, 5])
def test_parts_of_a_quadratic_are_its_rows(size):
    weight, gram, gradients = grouped_layer(3, 4, 20, 10)
    whole = full(weight, gram, gradients, 0.5, column_block=size)
    squares = float(gradients.square().sum(0).mean())
    totals = Totals(*whole.losses_at_zero, squares, len(gradients))
    bare = Quadratic.build(weight, gram, None, 0.5, totals, size)
    assert bare.scales == whole.scales and bare.mean_diagonal() == pytest.approx(whole.mean_diagonal())
    blocks = 20 // whole.size
    pruned = weight * (weight > 0)
    lost = 0.0
    for rows in (slice(0, 4), slice(4, 6), slice(6, 7), slice(7, 8), slice(8, 12)):
        part = bare.part(rows, SampleGradients(gradients[:, rows]))
        here = slice(rows.start * blocks, rows.stop * blocks)
        torch.testing.assert_close(part.row_hessians(slice(None)), whole.row_hessians(here))
        lost += part.losses(pruned[rows])[0].total
    assert lost == pytest.approx(whole.losses(pruned)[0].total)


@pytest.mark.parametrize(("groups", "room"), [(1, 1), (1, 5), (1, 1000), (4, 1), (4, 2), (4, 3), (4, 7), (4, 1000)])
def test_chunks_are_whole_groups_or_parts_of_one(groups, room):
    layer = Conv2dLayer("layer", (nn.Conv2d(8, 12, 1, groups=groups),), False)
    size = 12 // groups
    d_in = layer.shape[1]
    rows = gathering.row_slices_within(layer, GradientPlan(), 10, 4 * 10 * d_in * room)
    assert [k for part in rows for k in range(12)[part]] == list(range(12))
    for part in rows:
        count = part.stop - part.start
        assert count <= max(1, room)
        assert (count % size == 0 and part.start % size == 0) or part.start // size == (part.stop - 1) // size


def prune(name, solver, lam, pattern, **changes):
    model = make(name)
    batches = image_batches(samples=20) if name in ("vit", "resnet") else token_batches()
    pattern = {"pattern": pattern} if isinstance(pattern, str) else {"sparsity": pattern}
    settings = dict(num_samples=20 if name in ("vit", "resnet") else 6, sequence_length=12, batch_size=2, block_size=8)
    pruner = MoonshotPruner(
        model, MoonshotConfig(solver=solver, lam=lam, fisher="rows", **pattern, **settings, **changes)
    )
    return model, pruner.prune(batches, progress=False)


def assert_same(actual, expected):
    for name, tensor in expected[0].state_dict().items():
        torch.testing.assert_close(actual[0].state_dict()[name], tensor, rtol=1e-4, atol=1e-5, msg=name)
    for one, other in zip(actual[1].layers, expected[1].layers, strict=True):
        for field in ("loss", "loss_masked", "fisher", "reconstruction", "lam", "damping", "sparsity"):
            assert getattr(one, field) == pytest.approx(getattr(other, field), rel=1e-3, abs=1e-5), field
        assert one.notes == other.notes


@pytest.mark.parametrize("name", ["vit", "llama"])
@pytest.mark.parametrize("solver", ["obc", "cap"])
@pytest.mark.parametrize(("lam", "pattern"), [(0.0, 0.6), (0.5, 0.6), (0.5, "2:4")])
@pytest.mark.parametrize("rows", [1, slow(5)])
def test_chunks_of_rows_do_not_change_the_result(name, solver, lam, pattern, rows, monkeypatch):
    # Chunks of one row need one pass each, which is slow: one layer must suffice.
    targets = {"targets": (r"\.1\..*(up_proj|intermediate|fc1)",)} if rows == 1 else {}
    expected = prune(name, solver, lam, pattern, **targets)
    monkeypatch.setattr(gathering.StatisticsSpec, "bytes_of", lambda self, layer: 2**60)
    monkeypatch.setattr(gathering, "row_slices_within", lambda layer, *args: split_range(0, layer.shape[0], rows))
    pruned = prune(name, solver, lam, pattern, **targets)
    assert_same(pruned, expected)
    assert any("row chunks" in note for note in pruned[1].notes)


def test_a_layer_that_exceeds_the_memory_is_solved_in_chunks(tmp_path):
    expected = prune("vit", "obc", 0.5, 0.6)
    pruned = prune("vit", "obc", 0.5, 0.6, max_memory=100_000, offload_dir=str(tmp_path))
    assert any("row chunks" in note for note in pruned[1].notes)
    assert_same(pruned, expected)


def test_damping_raised_in_a_late_chunk_applies_to_all(monkeypatch):
    solver = solver_class("obc")
    original, failed = solver.rank_removals, []

    def fail_once(self, objective, pattern, damping):
        if damping == 0.01 and len(failed) < 2:
            failed.append(damping)
            if len(failed) == 2:
                raise FactorizationError("a row's Hessian is not positive definite")
        return original(self, objective, pattern, damping)

    monkeypatch.setattr(gathering.StatisticsSpec, "bytes_of", lambda self, layer: 2**60)
    monkeypatch.setattr(gathering, "row_slices_within", lambda layer, *args: split_range(0, layer.shape[0], 7))
    monkeypatch.setattr(solver, "rank_removals", fail_once)
    pruned, report = prune("llama", "obc", 0.5, 0.6, targets=(r"layers\.1\.mlp\.up_proj",))
    monkeypatch.undo()
    expected, _ = prune("llama", "obc", 0.5, 0.6, targets=(r"layers\.1\.mlp\.up_proj",), damping=0.1)
    assert report.layers[0].damping == 0.1 and report.layers[0].notes == ("damping raised from 0.01 to 0.1",)
    torch.testing.assert_close(pruned.model.layers[1].mlp.up_proj.weight, expected.model.layers[1].mlp.up_proj.weight)


@pytest.mark.parametrize("pattern", [Unstructured(0.5), NM(2, 4)])
def test_many_samples_are_compressed(pattern, monkeypatch):
    seen = []
    original = solving.solve_layer
    monkeypatch.setattr(solving, "solve_layer", lambda *args: seen.append(args[3].gradients) or original(*args))
    prune("vit", "obc", 0.5, "2:4" if isinstance(pattern, NM) else 0.5)
    assert {type(form) for form in seen} == {SampleGradients, FisherMatrices}  # 16 and 24 inputs, 20 samples
    assert all(form.samples == 20 for form in seen)
