"""Several sparsities from one elimination: each result equals a separate pruning."""

import pytest
import torch
from golden.make import layer
from llama_runs import assert_same, weights
from models import make, token_batches

from optimum_moonshot import MoonshotConfig, MoonshotError, MoonshotPruner, prune_weight, prune_weight_path
from optimum_moonshot.solvers.ranked import Ranked

SPARSITIES = [0.9, 0.0, 0.3, 1.0, 0.55]


def settings(solver="obc", **changes):
    values = dict(solver=solver, sparsity=0.5, lam=0.5, num_samples=6, sequence_length=12, batch_size=2, block_size=8)
    return MoonshotConfig(**{**values, **changes})


def count_eliminations(monkeypatch):
    calls, original = [], Ranked.rank_removals
    monkeypatch.setattr(Ranked, "rank_removals", lambda self, *args: calls.append(None) or original(self, *args))
    return calls


@pytest.mark.parametrize("solver", ["obc", "cap"])
@pytest.mark.parametrize("lam", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_path_equals_separate_prunings(solver, lam, dtype, monkeypatch):
    weight, gram, gradients = layer(10, 32, 6, dead=(4,))
    weight = weight.to(dtype)
    calls = count_eliminations(monkeypatch)
    path = prune_weight_path(weight, gram, gradients, config=settings(solver, lam=lam), sparsities=SPARSITIES)
    assert list(path) == SPARSITIES and len(calls) == 1
    for sparsity, result in path.items():
        alone = prune_weight(weight, gram, gradients, config=settings(solver, lam=lam, sparsity=sparsity))
        assert torch.equal(result.keep, alone.keep) and torch.equal(result.weight, alone.weight)
        assert result.weight.dtype == dtype and result.notes == alone.notes and result.damping == alone.damping
        assert (~result.keep).sum() == round(sparsity * 320)


@pytest.mark.parametrize(
    ("changes", "sparsities", "message"),
    [
        (
            dict(solver="wanda"),
            [0.5],
            "solver='wanda': it does not support several sparsities; use one of cap, obc, or prune for each",
        ),
        (dict(solver="sparsegpt"), [0.5], "solver='sparsegpt': it does not support several"),
        (dict(pattern="2:4"), [0.5], "pattern='2:4': it implies a single sparsity.*unstructured"),
        ({}, [], r"sparsities=\[\]: give a list"),
        ({}, 0.5, "sparsities=0.5: give a list"),
        ({}, "0.5", "sparsities='0.5': give a list"),
        ({}, [0.5, 0.5], "a value is given twice"),
        ({}, [0.5, 1.5], "sparsity=1.5.*between 0 and 1"),
        ({}, [None], "sparsities=None"),
    ],
)
def test_unsupported_paths_are_refused(changes, sparsities, message):
    weight, gram, gradients = layer(4, 8, 3)
    with pytest.raises(MoonshotError, match=message):
        prune_weight_path(weight, gram, gradients, config=settings(**changes), sparsities=sparsities)
    model = make("llama")
    with pytest.raises(MoonshotError, match=message):
        MoonshotPruner(model, settings(**changes)).prune_path(token_batches(), sparsities, progress=False)


@pytest.mark.parametrize("solver", ["obc", "cap"])
@pytest.mark.parametrize("on_disk", [False, True])
def test_the_path_of_a_model_equals_separate_runs(solver, on_disk, tmp_path, monkeypatch):
    model = make("llama")
    dense = weights(model)
    pruner = MoonshotPruner(model, settings(solver, lam=None))
    calls = count_eliminations(monkeypatch)
    folder = tmp_path / "path" if on_disk else None
    path = pruner.prune_path(token_batches(), [0.5, 0.8], progress=False, work_dir=folder)
    assert path.sparsities == [0.5, 0.8] and len(calls) == 21 and pruner.report is None
    assert_same(model, dense)
    for sparsity in (0.8, 0.5):
        other = make("llama")
        alone = MoonshotPruner(other, settings(solver, lam=None, sparsity=sparsity, recompute=False))
        expected = alone.prune(token_batches(), progress=False)
        with path.applied(sparsity):
            assert_same(model, other.state_dict())
        report = path.apply(sparsity)
        assert_same(model, other.state_dict())
        assert report is pruner.report and report.config == expected.config and report.notes == expected.notes
        assert [(a.loss, a.sparsity, a.damping) for a in report.layers] == [
            (b.loss, b.sparsity, b.damping) for b in expected.layers
        ]
        pruner.save_pretrained(tmp_path / str(sparsity))
        assert model.config.moonshot["sparsity"] == report.sparsity
    with pytest.raises(MoonshotError, match="sparsity=0.7: the path has 0.5, 0.8"):
        path.apply(0.7)
    path.discard()
    assert folder is None or not any(folder.iterdir())


def test_a_failure_while_applying_restores_the_model(monkeypatch):
    model = make("llama")
    path = MoonshotPruner(model, settings()).prune_path(token_batches(), [0.5], progress=False)
    dense = weights(model)
    results = path._solved.variants[0].store
    original, seen = results.weight, []

    def fail(layer):
        seen.append(layer)
        if len(seen) == 5:
            raise KeyboardInterrupt
        return original(layer)

    monkeypatch.setattr(results, "weight", fail)
    with pytest.raises(KeyboardInterrupt):
        path.apply(0.5)
    assert_same(model, dense)


@pytest.mark.parametrize("changes", [dict(recompute=True), dict(recover="blockwise")])
def test_options_that_depend_on_the_pruned_model_have_no_path(changes):
    with pytest.raises(MoonshotError, match=next(iter(changes))):
        MoonshotPruner(make("llama"), settings(**changes)).prune_path(token_batches(), [0.5], progress=False)
