"""Memory and time of a device; the error where its memory runs out names the options to lower.

The model is unchanged by that error.
"""

from itertools import cycle
from types import SimpleNamespace

import pytest
import torch
from llama_runs import weights
from memory_failures import MESSAGE
from models import make, token_batches
from tiny_mixtures import mixtral

from optimum_moonshot import MoonshotConfig, MoonshotError, MoonshotPruner, devices
from optimum_moonshot.experts import choice as choosing
from optimum_moonshot.prune import layers
from optimum_moonshot.prune import run as run
from optimum_moonshot.sweep import variants

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


def test_cached_segments_of_a_gpu_are_free(monkeypatch):
    """Otherwise a second run in a process, and every layer after a large one, has less memory than there is."""
    for name, value in {"mem_get_info": (100, 1000), "memory_reserved": 700, "memory_allocated": 300}.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    assert devices.free_bytes(torch.device("cuda", 0)) == 500


def test_the_solver_takes_the_time_of_its_own_kernels(monkeypatch):
    """A device is still busy with the calibration pass when a solver begins."""
    now, kernels = [0.0], cycle([100.0, 1.0])  # seconds of the pass, of the solver

    def wait_for(device):
        now[0] += next(kernels)

    monkeypatch.setattr(layers, "wait_for", wait_for)
    monkeypatch.setattr(layers, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    report = MoonshotPruner(make("llama"), MoonshotConfig(pattern="2:4", num_samples=4)).prune(token_batches(4))
    assert {layer.seconds for layer in report.layers} == {1.0}
