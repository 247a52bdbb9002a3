"""Rotation, allocation and recovery in one run: each step receives the result of the previous one."""

import pytest
import torch
from models import make, token_batches

from optimum_moonshot import MoonshotConfig, MoonshotPruner

DATA = {"num_samples": 8, "batch_size": 4, "seed": 0}
STEPS = {"rotation": "learned", "rotation_steps": 5, "allocation": "fisher", "recover": "gradual", "recover_steps": 6}


def prune(path=None, **changes):
    model = make("llama")
    pruner = MoonshotPruner(model, MoonshotConfig(**{"lam": 0.5, **DATA, **STEPS, **changes}))
    return model, pruner.prune(token_batches(8), progress=False, resume_dir=path)


@pytest.mark.parametrize("lam", [0.5, 1.0])
def test_all_steps_together_reach_the_total_sparsity(lam):
    _, report = prune(sparsity=0.6, lam=lam)
    total = sum(layer.shape[0] * layer.shape[1] for layer in report.layers)
    assert sum(round(layer.target_sparsity * layer.shape[0] * layer.shape[1]) for layer in report.layers) == round(
        0.6 * total
    )
    assert len({layer.target_sparsity for layer in report.layers}) > 1
    assert report.rotation.rotated and report.recovery
    assert set(report.seconds) == {"rotation", "allocation", "calibration", "solver", "recovery", "total"}


def test_all_steps_together_with_n_m_mixtures():
    model, report = prune(pattern="n:4", sparsity=0.5)
    counts = {}
    for layer in report.layers:
        weight = model.get_submodule(layer.name).weight.detach()
        counts[layer.name] = int((weight.unflatten(1, (-1, 4)) != 0).sum(-1).max())
        assert counts[layer.name] == round(4 * (1 - layer.target_sparsity))
    assert 0.4 < report.sparsity <= 0.5


def test_two_runs_are_bit_identical():
    first, second = (prune(sparsity=0.6)[0].state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
