"""Inside of `applied` a model has the weights of a variant: calls that change or save weights are refused."""

import pytest
from llama_runs import assert_same, weights
from models import make, token_batches

from optimum_moonshot import MoonshotConfig, MoonshotError, MoonshotPruner

CALLS = {
    "prune": lambda pruner, _: pruner.prune(token_batches(), progress=False),
    "rotate": lambda pruner, _: pruner.rotate(token_batches(), progress=False),
    "sweep": lambda pruner, _: pruner.sweep(token_batches(), lambdas=[1.0], progress=False),
    "prune_path": lambda pruner, _: pruner.prune_path(token_batches(), [0.5], progress=False),
    "reduce_width": lambda pruner, _: pruner.reduce_width(8, token_batches()),
    "shrink": lambda pruner, _: pruner.shrink(token_batches(), parameters=0.75, progress=False),
    "to_runtime": lambda pruner, _: pruner.to_runtime("dense"),
    "save_pretrained": lambda pruner, folder: pruner.save_pretrained(folder),
    "push_to_hub": lambda pruner, _: pruner.push_to_hub("user/name"),
}


def pruner_of(model, **changes):
    settings = {"sparsity": 0.5, "lam": 1.0, "num_samples": 6, "sequence_length": 12, "batch_size": 2, **changes}
    return MoonshotPruner(model, MoonshotConfig(**settings))


@pytest.mark.parametrize("name", CALLS)
def test_calls_are_refused_while_a_variant_of_a_sweep_is_applied(name, tmp_path):
    pruner = pruner_of(make("llama"))
    report, dense = pruner.sweep(token_batches(), lambdas=[1.0], progress=False), weights(pruner.model)
    with pruner.applied(report.entries[0]):
        applied = weights(pruner.model)
        with pytest.raises(MoonshotError, match=rf"{name}: inside of applied\(\).*call {name} after the block"):
            CALLS[name](pruner, tmp_path / "saved")
        assert_same(pruner.model, applied)
    assert_same(pruner.model, dense)
    assert pruner.report is None and pruner.rotation is None and not (tmp_path / "saved").exists()
    pruner.choose(report.entries[0])
    assert_same(pruner.model, applied)


def test_calls_are_refused_while_a_sparsity_is_applied(tmp_path):
    model = make("llama")
    pruner = pruner_of(model, solver="obc", block_size=8)
    path = pruner.prune_path(token_batches(), [0.5, 0.8], progress=False)
    path.apply(0.8)
    pruned = weights(model)
    with path.applied(0.5), path.applied(0.8):
        pass
    calls = {
        **{name: CALLS[name] for name in ("prune", "rotate", "save_pretrained")},
        "apply": lambda *_: path.apply(0.8),
        "compact": lambda pruner, _: pruner.compact(),
    }
    with path.applied(0.5):
        for name, call in calls.items():
            for each in (pruner, pruner_of(model)) if name in ("prune", "rotate") else (pruner,):
                with pytest.raises(MoonshotError, match=rf"{name}: inside of applied\(\)"):
                    call(each, tmp_path / "saved")
    assert_same(model, pruned)
    path.apply(0.5)
