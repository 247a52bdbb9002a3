"""Sparsity and bits of each matrix by a budget of bytes."""

import pytest
from llama_runs import prune
from marks import slow
from models import make

from optimum_moonshot import MoonshotConfig
from optimum_moonshot.allocation.byte_budget import Choice
from optimum_moonshot.checkpoint.verification import verify
from optimum_moonshot.errors import MoonshotError
from optimum_moonshot.model.layers import find_structure
from optimum_moonshot.objective.loss_allocation import LossCurve
from optimum_moonshot.reports.record import PruningRecord
from optimum_moonshot.results.store import ResultStore

BUDGET = dict(pattern="unstructured", sparsity=None, allocation="fisher", quant_group=64, lam=1)


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
    assert spent <= bits_per_weight * 1.01
    assert spent >= 0.8 * min(bits_per_weight, 32)
    assert any("bits a weight" in note for note in report.notes)
    assert bits_per_weight < 40 or set(bits.values()) == {None}


def test_given_bits_leave_the_sparsities_to_the_allocation():
    model = make("llama")
    report = prune(model, **BUDGET, bits_per_weight=3.5, bits=4).report
    _, bits = chosen_bits(model, report)
    assert set(bits.values()) == {4}


def test_a_target_of_bytes_is_that_of_the_packed_files(tmp_path):
    model = make("llama")
    total = sum(parameter.nbytes for parameter in model.parameters())
    target = round(0.6 * total) + 40_000  # headers are large in a tiny model
    pruner = prune(model, **BUDGET, target_bytes=target)
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


def test_a_budget_that_no_choice_meets_is_refused():
    with pytest.raises(MoonshotError, match="the smallest choices take"):
        prune(make("llama"), **BUDGET, target_bytes=10)
