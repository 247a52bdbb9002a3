"""Every kind of run keeps the zeros of the model that it is given."""

import pytest
import torch
from llama_runs import config, prune
from marks import slow
from models import make, token_batches
from tiny_mixtures import mixtral

from optimum_moonshot import MoonshotPruner, load_pruned
from optimum_moonshot.__main__ import main
from optimum_moonshot.checkpoint.verification import verify
from optimum_moonshot.masks import follows
from optimum_moonshot.model.layers import find_structure
from optimum_moonshot.objective.grid import Grid
from optimum_moonshot.objective.linalg import split_range
from optimum_moonshot.objective.patterns import NM
from optimum_moonshot.pipeline import partition

BITS = dict(pattern=None, bits=4, quant_group=64)
HALF = dict(pattern="unstructured", sparsity=0.5)
TUNED = dict(recover_steps=8, recover_lr=0.05)


def zeros(model):
    return {layer.name: layer.matrix == 0 for layer in find_structure(model).layers()}


def given(model, pattern="2:4", **changes):
    """The model after a first run."""
    prune(model, solver="magnitude", lam=1, pattern=pattern, **changes)
    return model


def assert_remain(model, before, report=None):
    for layer in find_structure(model).layers():
        assert not layer.matrix[before[layer.name]].any(), layer.name
        assert layer.matrix.any(), layer.name
    if report is not None:
        total = sum(int(mask.sum()) for mask in before.values())
        assert f"{total:,} zeros that {len(before)} layers had before the run remain" in report.notes


def assert_keeps(model, **changes):
    before = zeros(model)
    pruner = prune(model, **changes)
    assert_remain(model, before, pruner.report)
    return pruner


@pytest.mark.parametrize(
    "changes",
    [
        {**BITS},
        {**BITS, "lam": 1},
        {**BITS, "recompute": True},
        {"pattern": "unstructured", "sparsity": 0.6, "allocation": "owl"},
        {"pattern": "unstructured", "sparsity": 0.6, "allocation": "fisher"},
        {"pattern": "unstructured", "sparsity": 0.3, "allocation": "fisher", "solver": "obc"},
        {"pattern": "n:4", "sparsity": 0.3, "allocation": "fisher"},
        {"pattern": "1:4", "solver": "alps"},
        {**BITS, "recover": "blockwise", **TUNED},
        {**BITS, "recover": "gradual", **TUNED},
        {**BITS, "recover": "distill", **TUNED},
        {"pattern": "unstructured", "sparsity": 0.6, "recover": "gradual", **TUNED},
        slow({"pattern": "2:4", "bits": 3, "quant_group": 64, "recover": "distill", **TUNED}),
    ],
    ids=str,
)
def test_second_runs_keep_zeros(changes):
    model = given(make("llama"))
    report = assert_keeps(model, **changes).report
    if report.config["allocation"] == "fisher" and report.config["pattern"] == "unstructured":
        assert report.sparsity == pytest.approx(max(0.5, report.config["sparsity"]), abs=2e-3)
    if "bits" in changes:
        assert all(follows(layer.matrix, NM(2, 4)) for layer in find_structure(model).layers())


@pytest.mark.parametrize("first", ["2:4", HALF], ids=str)
def test_structured_pruning_keeps_zeros(first):
    model = given(make("llama"), **(first if isinstance(first, dict) else {"pattern": first}))
    before = zeros(model)
    report = prune(model, solver="osscar", pattern="structured", sparsity=0.25, recover="blockwise", **TUNED).report
    assert_remain(model, before)
    assert any("had before the run remain" in note for note in report.notes)


@pytest.mark.slow
@pytest.mark.parametrize("solver", ["sparsegpt", "wanda"])
@pytest.mark.parametrize("bits_per_weight", [3.0, 4.5])
def test_a_budget_counts_the_zeros_of_a_model(solver, bits_per_weight):
    budget = dict(pattern="unstructured", allocation="fisher", quant_group=64, lam=1, bits_per_weight=bits_per_weight)
    report = assert_keeps(given(make("llama")), solver=solver, **budget).report
    assert 0.8 * bits_per_weight <= report.bits_per_weight <= bits_per_weight
    assert all(layer.target_sparsity >= 0.5 for layer in report.layers)


def test_a_recovery_keeps_zeros_of_layers_that_the_run_does_not_choose():
    model = given(make("llama"))
    before = zeros(model)
    prune(model, targets=[r"mlp"], **HALF, recover="distill", **TUNED)
    assert_remain(model, before)


def test_gradual_recovery_of_a_dense_model_lets_removed_weights_return():
    """Its stages are one run: the zeros of a stage are not given to it."""
    model = make("llama")
    report = prune(model, **HALF, lam=1, recover="gradual", **TUNED).report
    assert not any("remain" in note for note in report.notes)
    assert report.sparsity == pytest.approx(0.5, abs=1e-3)


@pytest.mark.parametrize(
    "changes", [{"solver": "obc", **HALF}, {"pattern": "unstructured", "sparsity": 0.7}, BITS], ids=str
)
def test_experts_keep_zeros(changes):
    assert_keeps(given(mixtral(), pattern="unstructured", sparsity=0.4), **changes)


def test_experts_with_their_own_sparsities_keep_zeros():
    assert_keeps(given(mixtral()), pattern="unstructured", sparsity=0.6, allocation="fisher")


@pytest.mark.parametrize("changes", [{"pattern": "2:4"}, {**BITS}], ids=str)
def test_rows_that_are_solved_in_chunks_keep_zeros(changes, monkeypatch):
    model = given(make("llama"), **HALF)
    one = given(make("llama"), **HALF)
    changes |= {"solver": "obc", "lam": 0.5, "fisher": "rows", "targets": [r"\.1\..*up_proj"]}
    prune(one, **changes)
    monkeypatch.setattr(partition.StatisticsSpec, "bytes_of", lambda self, layer: 2**60)
    monkeypatch.setattr(partition, "row_slices_within", lambda layer, *args: split_range(0, layer.shape[0], 5))
    before = zeros(model)
    report = prune(model, **changes).report
    assert_remain(model, before)
    assert any("row chunks" in note for note in report.notes)
    for layer, other in zip(find_structure(model).layers(), find_structure(one).layers(), strict=True):
        torch.testing.assert_close(layer.matrix, other.matrix, rtol=1e-4, atol=1e-6)


def test_sweeps_and_paths_keep_zeros():
    model = given(make("llama"))
    before = zeros(model)
    pruner = MoonshotPruner(model, config(**HALF))
    report = pruner.sweep(token_batches(), lambdas=[0.5, 1.0], patterns=["unstructured", "1:4"], progress=False)
    pruner.choose(report.best(pattern="1:4"))
    assert_remain(model, before)
    model = given(make("llama"))
    pruner = MoonshotPruner(model, config(solver="cap", **HALF))
    pruner.prune_path(token_batches(), [0.3, 0.7], progress=False).apply(0.3)
    assert all(torch.equal(mask, before[name]) for name, mask in zeros(model).items())


def test_two_commands_pack_as_well_as_one(tmp_path, capsys):
    """2:4 and 4 bits, in one run or in two."""
    torch.manual_seed(0)
    make("llama").to(torch.bfloat16).save_pretrained(tmp_path / "dense")
    sizes = {}
    data = ["--solver", "magnitude", "--device", "cpu"]
    main(["prune", str(tmp_path / "dense"), "--pattern", "2:4", "--output", str(tmp_path / "first"), *data])
    bits = ["--bits", "4", "--quant-group", "64", "--format", "packed"]
    main(["prune", str(tmp_path / "first"), *bits, "--output", str(tmp_path / "two"), *data])
    main(["prune", str(tmp_path / "dense"), "--pattern", "2:4", *bits, "--output", str(tmp_path / "one"), *data])
    assert "zeros that" in capsys.readouterr().out
    for name in ("one", "two"):
        checked = verify(tmp_path / name)
        assert checked, checked.table()
        sizes[name] = checked.bits_per_weight
        model = load_pruned(tmp_path / name)
        for layer in find_structure(model).layers():
            assert follows(layer.matrix, NM(2, 4))
            Grid(4, 64, torch.bfloat16).scales_of(layer.matrix)
    assert sizes["two"] <= sizes["one"]
