"""Runs with bits: all kinds of runs give weights on the grid, and those that equal each other without bits still do."""

import itertools

import pytest
import torch
from llama_runs import config, prune
from models import make, token_batches
from offloaded_models import assert_equal, settings
from tiny_mixtures import mixtral

from optimum_moonshot import MoonshotError, MoonshotPruner, load_pruned
from optimum_moonshot.checkpoint.verification import verify
from optimum_moonshot.model.layers import find_structure
from optimum_moonshot.objective.grid import Grid

QUANTIZED = dict(bits=4, quant_group=64)


def assert_on_grid(model, bits=4, group=64):
    for layer in find_structure(model).layers():
        Grid(bits, group, layer.parameter.dtype).scales_of(layer.matrix.detach())


BUDGET = dict(pattern="unstructured", allocation="fisher", bits_per_weight=3.0)


@pytest.mark.parametrize("settings", [QUANTIZED, BUDGET], ids=str)
def test_float64_is_refused_before_the_calibration(settings):
    def data():
        raise AssertionError("the data were read")
        yield

    model = make("llama").double()
    with pytest.raises(MoonshotError, match=r"q_proj: dtype=torch\.float64: its weights cannot be quantized; use a dt"):
        MoonshotPruner(model, config(**settings)).prune(data(), progress=False)
    assert not hasattr(model.config, "moonshot")


@pytest.mark.parametrize("solver", ["sparsegpt", "alps", "wanda", "obc"])
@pytest.mark.parametrize("lam", [1, 0.5])
def test_every_layer_is_on_the_grid(solver, lam):
    pruner = prune(make("llama"), solver=solver, lam=lam, **QUANTIZED)
    assert_on_grid(pruner.model)
    assert {layer.bits for layer in pruner.report.layers} == {4}
    assert "bits per weight" in pruner.report.table()


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"recompute": True},
        {"rotation": "learned", "rotation_steps": 2},
        {"pattern": "n:4", "sparsity": 0.4, "allocation": "fisher"},
        {"pattern": "unstructured", "sparsity": 0.5, "allocation": "fisher"},
        {"pattern": "unstructured", "sparsity": 0.5, "allocation": "owl"},
        {"pattern": None, "lam": 1},
        {"pattern": None, "lam": 0.5, "bits": 3},
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_ways_to_prune(changes, dtype):
    pruner = prune(make("llama").to(dtype), **{**QUANTIZED, **changes})
    assert_on_grid(pruner.model, changes.get("bits", 4))


def test_a_dense_quantized_model_is_saved_and_verified(tmp_path):
    pruner = prune(make("llama").bfloat16(), pattern=None, **QUANTIZED)
    assert pruner.report.sparsity < 0.2  # small weights are rounded to 0
    pruner.save_pretrained(tmp_path / "packed", format="packed")
    checked = verify(tmp_path / "packed")
    assert checked, checked.table()
    loaded = load_pruned(tmp_path / "packed")
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), pruner.model.parameters(), strict=True))


@pytest.mark.parametrize("pattern", ["2:4", "unstructured"])
def test_each_expert_is_on_the_grid(pattern):
    fields = {} if pattern == "2:4" else {"sparsity": 0.5, "allocation": "fisher"}
    pruner = prune(mixtral(), pattern=pattern, **fields, **QUANTIZED)
    assert_on_grid(pruner.model)


@pytest.mark.parametrize("solver", ["sparsegpt", "obc"])
def test_slices_of_rows_give_the_same_model(solver):
    whole = prune(make("llama"), solver=solver, **QUANTIZED)
    sliced = prune(make("llama"), solver=solver, max_memory=60_000, **QUANTIZED)
    assert_on_grid(sliced.model)
    weights = zip(whole.model.parameters(), sliced.model.parameters(), strict=True)
    differing = sum(int((a != b).sum()) for a, b in weights)
    total = sum(parameter.numel() for parameter in whole.model.parameters())
    assert differing <= 0.01 * total  # codes near a tie, by other sums


def test_an_offloaded_model_equals_one_in_memory(tmp_path):
    make("llama").save_pretrained(tmp_path / "dense")
    for name, offload in (("memory", None), ("disk", "disk")):
        pruner = MoonshotPruner.from_pretrained(tmp_path / "dense", settings(**QUANTIZED), offload=offload)
        pruner.prune(token_batches(), progress=False)
        pruner.save_pretrained(tmp_path / name, format="packed")
    assert_equal(tmp_path / "disk", tmp_path / "memory")


def test_a_sweep_applies_a_quantized_variant():
    pruner = MoonshotPruner(make("llama"), config(**QUANTIZED))
    report = pruner.sweep(token_batches(), lambdas=(0.5, 1.0), progress=False)
    entry = report.entries[0]
    pruner.choose(entry)
    assert_on_grid(pruner.model)
    alone = prune(make("llama"), lam=entry.lam, recompute=False, **QUANTIZED)
    for ours, other in itertools.zip_longest(pruner.model.parameters(), alone.model.parameters()):
        torch.testing.assert_close(ours, other, rtol=0, atol=1e-6)


def test_a_resumed_run_has_the_same_weights(tmp_path, monkeypatch):
    whole = prune(make("llama"), **QUANTIZED)
    stopped = MoonshotPruner(make("llama"), config(**QUANTIZED))
    from optimum_moonshot.prune import layers as runs

    calls, original = itertools.count(), runs.prune_layer

    def stopping(*args):
        if next(calls) == 5:
            raise KeyboardInterrupt
        return original(*args)

    monkeypatch.setattr(runs, "prune_layer", stopping)
    with pytest.raises(KeyboardInterrupt):
        stopped.prune(token_batches(), resume_dir=tmp_path / "run", progress=False)
    monkeypatch.setattr(runs, "prune_layer", original)
    resumed = MoonshotPruner(make("llama"), config(**QUANTIZED))
    report = resumed.prune(token_batches(), resume_dir=tmp_path / "run", progress=False)
    assert any("reused" in note for note in report.notes)
    assert all(torch.equal(a, b) for a, b in zip(resumed.model.parameters(), whole.model.parameters(), strict=True))
