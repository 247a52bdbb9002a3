"""Sparsity and bits of each matrix by a budget of bytes."""

from dataclasses import dataclass, field

import pytest
import torch
from llama_runs import prune
from marks import slow
from models import image_batches, make

from optimum_moonshot import MoonshotConfig, MoonshotPruner
from optimum_moonshot.allocate.run import Choice
from optimum_moonshot.checkpoint.verification import verify
from optimum_moonshot.errors import MoonshotError
from optimum_moonshot.model.layers import find_structure
from optimum_moonshot.objective.loss_allocation import LossCurve
from optimum_moonshot.packing import Quantized, find_codec
from optimum_moonshot.pipeline.store import ResultStore
from optimum_moonshot.reports.record import PruningRecord

BUDGET = dict(pattern="unstructured", sparsity=None, allocation="fisher", quant_group=64, lam=1)


@dataclass
class PrunedLayer:
    """The fields of a layer that its bytes depend on."""

    shape: tuple[int, int]
    parameter: torch.Tensor = field(default_factory=lambda: torch.zeros(1))


def chosen_bits(model, report):
    """Bits per weight of the layers by their targets, and the layers' bits; survivors may be rounded to 0."""
    record, layers = PruningRecord.require_of(model), list(find_structure(model).layers())
    grids = record.layer_grids([layer.name for layer in layers])
    size = spent = 0.0
    for layer in layers:
        weight, grid = layer.matrix, grids[layer.name]
        if grid is not None:
            grid.scales_of(weight)
        target = next(each.target_sparsity for each in report.layers if each.name == layer.name)
        choice = Choice(target, None if grid is None else grid.bits)
        spent += 8 * choice.bytes(layer, 64)
        size += weight.numel()
    return spent / size, {name: None if grid is None else grid.bits for name, grid in grids.items()}


@pytest.mark.parametrize("bits_per_weight", [3.0, slow(4.0), slow(6.0), 40.0])
def test_the_budget_is_used_and_not_exceeded(bits_per_weight):
    model = make("llama")
    report = prune(model, **BUDGET, bits_per_weight=bits_per_weight).report
    spent, bits = chosen_bits(model, report)
    assert report.bits_per_weight <= spent <= bits_per_weight
    assert spent >= 0.8 * min(bits_per_weight, 32)
    assert any("bits a weight" in note for note in report.notes)
    assert bits_per_weight < 40 or set(bits.values()) == {None}


@pytest.mark.slow
@pytest.mark.parametrize("solver", ["wanda", "magnitude", "obc"])
@pytest.mark.parametrize("bits_per_weight", [3.1, 4.05, 7.0])
def test_no_solver_exceeds_a_budget(solver, bits_per_weight):
    report = prune(make("llama").bfloat16(), **BUDGET, solver=solver, bits_per_weight=bits_per_weight).report
    assert 0.8 * bits_per_weight <= report.bits_per_weight <= bits_per_weight


def test_convolutions_of_groups_have_a_budget():
    settings = MoonshotConfig(**BUDGET, bits_per_weight=9.0, num_samples=6)
    report = MoonshotPruner(make("convnet"), settings).prune(image_batches(), progress=False)
    assert report.bits_per_weight <= 9


@pytest.mark.parametrize("bits", [8, 4, 3, None])
@pytest.mark.parametrize("d_in", [64, 100, 72, 192])
def test_no_mask_takes_more_bytes_than_its_choice(bits, d_in):
    """Whatever the number of survivors in each block, all of which may waste bits at their end."""
    layer, generator = PrunedLayer((16, d_in)), torch.Generator().manual_seed(0)
    for removed in (0, 1, 5, 16, 33, 16 * d_in // 3, 16 * d_in // 2, 16 * d_in - 40):
        weight = torch.randint(1, 3, (16, d_in), generator=generator).float()
        for order in (torch.arange(16 * d_in), torch.randperm(16 * d_in, generator=generator), columns_first(16, d_in)):
            pruned = weight.flatten().index_fill(0, order[:removed], 0).view_as(weight)
            codec = find_codec("bitmask") if bits is None else Quantized(bits, 64)
            most = Choice(removed / pruned.numel(), bits).bytes(layer, 64)
            assert min(pruned.nbytes, codec.packed_bytes(pruned, None)) <= most


def columns_first(rows, columns):
    """Indices by which every row loses as many weights as the others, and every block of it."""
    return torch.arange(rows * columns).view(rows, columns).T.flatten()


def test_given_bits_leave_the_sparsities_to_the_allocation():
    model = make("llama")
    report = prune(model, **BUDGET, bits_per_weight=3.5, bits=4).report
    _, bits = chosen_bits(model, report)
    assert set(bits.values()) == {4}


@pytest.mark.parametrize("embedding_bits, fraction", [(16, 0.6), (8, 0.4), (4, 0.4)])
def test_a_target_of_bytes_is_that_of_the_packed_files(embedding_bits, fraction, tmp_path):
    model = make("llama")
    total = sum(parameter.nbytes for parameter in model.parameters())
    target = round(fraction * total) + 42_000  # headers are large in a tiny model
    pruner = prune(model, **BUDGET, target_bytes=target, embedding_bits=embedding_bits)
    pruner.save_pretrained(tmp_path / "packed", format="packed")
    size = sum(path.stat().st_size for path in (tmp_path / "packed").glob("*.safetensors"))
    assert 0.6 * target < size <= target
    assert pruner.report.model_bits_per_weight * pruner.report.parameters / 8 <= target
    assert verify(tmp_path / "packed").bits_per_weight == pytest.approx(pruner.report.bits_per_weight, rel=0.02)


def test_curves_of_quantized_weights_are_stored_in_the_run_folder(tmp_path):
    curve = LossCurve(100, (0.2, 0.4), (1.0, 2.0), (), {4: (0.1, 1.1, 2.1), 3: (0.2, 1.2, 2.2)})
    store = ResultStore(tmp_path / "run", {}, "resume_dir")
    store.put_curve("layer", curve)
    store.release()
    assert ResultStore(tmp_path / "run", {}, "resume_dir").curves["layer"] == curve


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"allocation": "uniform"}, "allocation"),
        ({"sparsity": 0.5}, "sparsity=0.5"),
        ({"pattern": "2:4"}, "pattern"),
        ({"target_bytes": "1MB"}, "bits_per_weight=4.0"),
        ({"bits_per_weight": 0}, "bits_per_weight=0"),
        ({"bits_per_weight": None, "target_bytes": "many"}, "target_bytes"),
    ],
)
def test_contradictory_budgets_are_refused(fields, message):
    with pytest.raises(MoonshotError, match=message):
        MoonshotConfig(**{"allocation": "fisher", "bits_per_weight": 4.0, **fields})


@pytest.mark.slow
@pytest.mark.parametrize("field", ["target_bytes", "bits_per_weight"])
def test_a_budget_that_no_choice_meets_is_refused_with_the_least_that_one_does(field):
    little = {"target_bytes": 10, "bits_per_weight": 0.1}[field]
    with pytest.raises(
        MoonshotError, match=rf"{field}={little}: the smallest choices need .*; give at least"
    ) as caught:
        prune(make("llama"), **BUDGET, **{field: little})
    least = str(caught.value).partition("give at least ")[2].partition(",")[0]
    assert "-" not in str(caught.value) and "−" not in str(caught.value)
    prune(make("llama"), **BUDGET, **{field: int(least) if field == "target_bytes" else float(least)})
