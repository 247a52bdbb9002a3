"""A device that is out of memory is said in one line, with what to lower; the model is as it was."""

import pytest
import torch
from models import make, token_batches
from tiny_mixtures import mixtral

from optimum_moonshot import MoonshotConfig, MoonshotError, MoonshotPruner
from optimum_moonshot.runs import expert_choice as choosing
from optimum_moonshot.runs import prune as run
from optimum_moonshot.runs import variants

ALL = "out of device memory: lower max_memory, batch_size or num_samples (CUDA out of memory)"
SWEPT = "out of device memory: lower max_memory or num_samples (CUDA out of memory)"


def full(*_, **__):
    raise torch.OutOfMemoryError("CUDA out of memory")


def prune(pruner):
    pruner.prune(token_batches(), progress=False)


def swept(pruner):
    pruner.sweep(token_batches(), lambdas=[0.5, 1.0])


@pytest.mark.parametrize(
    ("place", "pattern", "work", "told"),
    [
        ((run, "prune_layers"), "unstructured", prune, ALL),
        ((choosing.ExpertSelection, "run"), "experts", prune, ALL),
        ((variants, "prune_layers"), "unstructured", swept, SWEPT),
    ],
    ids=["prune", "experts", "sweep"],
)
def test_too_little_is_said(monkeypatch, place, pattern, work, told):
    monkeypatch.setattr(*place, full)
    experts = pattern == "experts"
    model = mixtral() if experts else make("llama")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    solver = "osscar" if experts else "sparsegpt"
    pruner = MoonshotPruner(model, MoonshotConfig(pattern=pattern, sparsity=0.25, solver=solver, num_samples=6))
    with pytest.raises(MoonshotError) as error:
        work(pruner)
    assert str(error.value) == told and error.value.__suppress_context__
    after = model.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(after[name], before[name]) for name in before)
