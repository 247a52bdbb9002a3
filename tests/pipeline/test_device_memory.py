"""The error of a device that is out of memory names the options to lower; the model is unchanged."""

import pytest
import torch
from llama_runs import weights
from memory_failures import MESSAGE
from models import make, token_batches
from tiny_mixtures import mixtral

from optimum_moonshot import MoonshotConfig, MoonshotError, MoonshotPruner
from optimum_moonshot.runs import expert_choice as choosing
from optimum_moonshot.runs import prune as run
from optimum_moonshot.runs import variants

SWEEP_MESSAGE = "out of device memory: lower max_memory or num_samples (CUDA out of memory)"


def full(*_, **__):
    raise torch.OutOfMemoryError("CUDA out of memory")


def prune(pruner):
    pruner.prune(token_batches(), progress=False)


def sweep(pruner):
    pruner.sweep(token_batches(), lambdas=[0.5, 1.0])


@pytest.mark.parametrize(
    ("place", "pattern", "work", "message"),
    [
        ((run, "prune_layers"), "unstructured", prune, MESSAGE),
        ((choosing.ExpertSelection, "run"), "experts", prune, MESSAGE),
        ((variants, "prune_layers"), "unstructured", sweep, SWEEP_MESSAGE),
    ],
    ids=["prune", "experts", "sweep"],
)
def test_the_error_names_the_options_to_lower(monkeypatch, place, pattern, work, message):
    monkeypatch.setattr(*place, full)
    experts = pattern == "experts"
    model = mixtral() if experts else make("llama")
    before = weights(model)
    solver = "osscar" if experts else "sparsegpt"
    pruner = MoonshotPruner(model, MoonshotConfig(pattern=pattern, sparsity=0.25, solver=solver, num_samples=6))
    with pytest.raises(MoonshotError) as error:
        work(pruner)
    assert str(error.value) == message and error.value.__suppress_context__
    after = model.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(after[name], before[name]) for name in before)
