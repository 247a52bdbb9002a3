"""Runs on a device that is out of memory at chosen calls: their settings, places, and comparison."""

import pytest
import torch
import transformers as hf
from failing_calls import FailingCalls
from llama_runs import weights
from models import GROUPED, make, spread, token_batches

from optimum_moonshot import MoonshotConfig, MoonshotPruner, devices
from optimum_moonshot.allocate import run as fisher_allocation
from optimum_moonshot.calibration.accumulators import Gram, InputSquares
from optimum_moonshot.calibration.mixture_sums import MixtureSums
from optimum_moonshot.calibration.observer import GradientSums
from optimum_moonshot.calibration.storage import Storage
from optimum_moonshot.pipeline import calibration_loss, walk
from optimum_moonshot.pipeline import solve as layer_solving
from optimum_moonshot.prune import layers
from optimum_moonshot.recover.tuning import BlockTask
from optimum_moonshot.rotate import learning, objective, permutation_search
from optimum_moonshot.solvers.ranked import Ranked

MESSAGE = "out of device memory: lower max_memory, batch_size or num_samples (CUDA out of memory)"
ERROR = torch.OutOfMemoryError("CUDA out of memory")


def two_layer_model(name):
    torch.manual_seed(0)
    sizes = {**GROUPED, "num_hidden_layers": 2}
    if name == "mixtral":
        return spread(hf.MixtralForCausalLM(hf.MixtralConfig(**sizes, num_local_experts=4)))
    return spread(hf.LlamaForCausalLM(hf.LlamaConfig(**sizes))) if name == "llama" else make(name)


@pytest.fixture(autouse=True)
def skip_garbage_collection(monkeypatch):
    """Saves the time of collections, on which no result depends."""
    monkeypatch.setattr(devices.gc, "collect", lambda: 0)


def out_of_memory_at(monkeypatch, place, at, error=ERROR):
    """Make calls number `at` (None: all) of the function at `place` run out of memory."""
    return FailingCalls(monkeypatch, place, at, error)


def pruner(model=None, **changes):
    fisher = None if changes.get("pattern") == "experts" else "rows"
    defaults = dict(sparsity=0.5, lam=0.5, fisher=fisher, num_samples=6, batch_size=2)
    config = {**defaults, **changes}
    if ":" in config.get("pattern", ""):
        del config["sparsity"]
    return MoonshotPruner(two_layer_model("llama") if model is None else model, MoonshotConfig(**config))


def prune(model=None, data=None, resume_dir=None, **changes):
    """The weights of the pruned model, and the report."""
    instance = pruner(model, **changes)
    data = token_batches(instance.config.num_samples) if data is None else data
    report = instance.prune(data, progress=False, resume_dir=resume_dir)
    assert_clean(instance.model)
    return weights(instance.model), report


def assert_clean(model):
    """No gradients, frozen parameters or hooks are left."""
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def assert_same_masks(actual, expected):
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(actual[name] == 0, tensor == 0), name
        torch.testing.assert_close(actual[name], tensor, rtol=1e-3, atol=1e-4)


def assert_same_bits(actual, expected):
    assert all(torch.equal(actual[name], tensor) for name, tensor in expected.items())


def memory_notes(report):
    return [note for note in report.notes if note.startswith("out of memory on cpu ")]


PLACES = {
    "forward": (walk, "join_hidden"),
    "backward": (torch.autograd, "backward"),
    "head": (walk, "loss_gradient"),
    "Gram": (Gram, "add"),
    "squares": (InputSquares, "add"),
    "gradients": (GradientSums, "add"),
    "allocation": (Storage, "empty"),
    "solver": (layers, "solve_layer"),
    "slices": (layer_solving, "weight_losses"),
    "ranking": (Ranked, "rank_removals"),
    "curve": (fisher_allocation, "loss_curve"),
    "tuning": (BlockTask, "error"),
    "mixture": (MixtureSums, "add"),
    "rotation": (objective, "coordinates"),
    "totals": (objective, "scores"),
    "learning": (objective, "removed"),
    "Cayley": (learning, "_orthogonal"),
    "Adam": (learning, "_adam"),
    "order": (permutation_search, "best_permutation"),
    "loss": (calibration_loss, "sample_losses"),
}
SETTINGS = {
    "sparsegpt": {},
    "λ = 1": {"lam": 1.0},
    "n:m": {"pattern": "2:4", "lam": 0.9, "targets": ["layers.1.mlp"]},
    "wanda": {"solver": "wanda"},
    "wanda, λ = 1": {"solver": "wanda", "lam": 1.0},
    "obc": {"solver": "obc", "targets": ["layers.1"]},
    "obc, λ = 1": {"solver": "obc", "lam": 1.0, "targets": ["layers.1"]},
    "cap": {"solver": "cap", "targets": ["layers.1.mlp.up_proj"]},
    "osscar": {"model": "opt", "solver": "osscar", "pattern": "structured", "sparsity": 0.25},
    "alps": {"solver": "alps", "targets": ["layers.1.mlp"]},
    "recompute": {"recompute": True},
    "recompute, λ = 1": {"recompute": True, "lam": 1.0},
    "fisher": {"allocation": "fisher", "targets": ["layers.1.mlp"]},
    "owl": {"allocation": "owl"},
    "recovery": {"recover": "blockwise", "recover_steps": 4, "num_samples": 16},
    "gradual": {"recover": "gradual", "recover_steps": 10, "num_samples": 16, "lam": 1.0},
    "rotation": {"rotation": "learned", "rotation_steps": 2},
    "orders": {"rotation": "learned", "rotation_steps": 2, "pattern": "2:4"},
    "experts": {"model": "mixtral"},
    "whole experts": {"model": "mixtral", "solver": "osscar", "pattern": "experts", "sparsity": 0.25},
}


def settings(name):
    """Arguments of `prune`, with a new model."""
    options = dict(SETTINGS[name])
    model = options.pop("model", "llama")
    data = token_batches(6, size=1) if model == "mixtral" else None
    return {"model": two_layer_model(model), "data": data, **options}


_UNDISTURBED = {}


def undisturbed(name):
    """Weights of a run with enough memory, which is done once."""
    if name not in _UNDISTURBED:
        pruned, report = prune(**settings(name))
        assert not memory_notes(report)
        _UNDISTURBED[name] = pruned
    return _UNDISTURBED[name]
