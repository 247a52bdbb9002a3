"""A program of every kind of run on a second device, one line of output for each: see test_other_device.py.

The device is simulated, or with --cuda a GPU.
"""

import json
import sys
import tempfile
from contextlib import nullcontext

import other_device as simulated
import torch
from grid_matrices import on_grid
from models import image_batches, make, token_batches

from optimum_moonshot import MoonshotConfig, MoonshotPruner, prune_weight
from optimum_moonshot.objective.grid import Grid
from optimum_moonshot.packing import Quantized

CUDA = "--cuda" in sys.argv
DEVICE = torch.device("cuda", 0) if CUDA else simulated.DEVICE
OPTIONS = {"pattern": "2:4", "num_samples": 6, "sequence_length": 12, "batch_size": 2}
FREE = {"pattern": "unstructured", "sparsity": 0.5}
# Tensors of the simulated device cannot stand in for experts.
EXPERTS = {"experts": ("mixtral", {"lam": 0.9}), "experts, tight": ("mixtral", {"lam": 0.9, "max_memory": 60_000})}
# Caches move to the host, and statistics are gathered in several rounds.
TIGHT = {"max_memory": 20_000}
RUNS = {
    "sparsegpt": ("llama", {"lam": 0.9}),
    "sparsegpt, λ = 1": ("llama", {"lam": 1.0}),
    "sparsegpt, tight": ("llama", {"lam": 0.9, **TIGHT}),
    "unstructured": ("opt", {"lam": 0.5, **FREE}),
    "wanda": ("gpt2", {"lam": 0.5, "solver": "wanda"}),
    "wanda, tight": ("llama", {"lam": 0.5, "solver": "wanda", **TIGHT}),
    "obc": ("llama", {"lam": 0.5, "solver": "obc", **FREE}),
    "obc, tight": ("llama", {"lam": 0.5, "solver": "obc", **FREE, **TIGHT}),
    "cap": ("llama", {"lam": 0.0, "solver": "cap", **FREE}),
    "alps": ("llama", {"lam": 0.5, "solver": "alps"}),
    "alps, λ = 1": ("llama", {"lam": 1.0, "solver": "alps", **FREE}),
    "magnitude": ("llama", {"solver": "magnitude"}),
    "osscar": ("llama", {"lam": 0.9, "solver": "osscar", "pattern": "structured", "sparsity": 0.25}),
    "fisher allocation": ("llama", {"lam": 0.9, "allocation": "fisher", **FREE}),
    "owl": ("llama", {"lam": 1.0, "allocation": "owl", **FREE}),
    "recompute": ("llama", {"lam": 0.9, "recompute": True}),
    "recompute, tight": ("llama", {"lam": 0.9, "recompute": True, **TIGHT}),
    "recovery": ("llama", {"lam": 0.9, "recover": "blockwise", "recover_steps": 3, "max_memory": 60_000}),
    "gradual recovery": ("llama", {"lam": 0.9, "recover": "gradual", "recover_steps": 3}),
    "distillation": ("llama", {"lam": 0.9, "recover": "distill", "recover_steps": 3}),
    "a rotation": ("llama", {"lam": 0.9, "rotation": "learned", "rotation_steps": 3}),
    "a scaled rotation": ("llama", {"lam": 0.9, "rotation": "learned", "rotation_steps": 3, **FREE}),
    "4 bits": ("llama", {"lam": 0.9, "bits": 4}),
    "convolutions": ("resnet", {"lam": 0.5}),
    "a vision transformer": ("vit", {"lam": 0.5, "solver": "obc", **FREE}),
}


def other_device():
    """Context in which the device exists."""
    return nullcontext() if CUDA else simulated.other_device()


def moved(model):
    """The model on the device."""
    return model.to(DEVICE) if CUDA else simulated.moved(model)


def on_host(tensor):
    return tensor.inner if isinstance(tensor, simulated.Elsewhere) else tensor.cpu()


def batches_of(name, **options):
    return image_batches(**options) if name in ("resnet", "vit") else token_batches(**options)


def weights(model):
    """All parameters on the host."""
    return [on_host(parameter.detach()) for parameter in model.parameters()]


def difference(model, other):
    """The largest difference relative to the largest weight of its matrix, and the number of differing zeros."""
    worst, zeros = 0.0, 0
    for a, b in zip(weights(model), weights(other), strict=True):
        worst = max(worst, float((a - b).abs().max() / b.abs().max().clamp_min(1e-12)))
        zeros += int(((a == 0) != (b == 0)).sum())
    return worst, zeros


def prune(model, name, changes, **options):
    changes = {key: value for key, value in changes.items() if key != "max_memory" or options.get("tight", True)}
    config = MoonshotConfig(**{**OPTIONS, **changes})
    with tempfile.TemporaryDirectory() as folder:
        pruner = MoonshotPruner(model, config)
        data = None if config.solver == "magnitude" else batches_of(name)
        pruner.prune(data, progress=False, resume_dir=f"{folder}/run")
        return pruner.model


def case_of(name, changes):
    expected = prune(make(name), name, {**changes, "max_memory": None})
    with other_device():
        pruned = prune(moved(make(name)), name, changes)
        assert all(parameter.device == DEVICE for parameter in pruned.parameters())
    return difference(pruned, expected)


def sweep():
    results = []
    for move in (False, True):
        model = make("llama")
        if move:
            with other_device():
                pruner = MoonshotPruner(moved(model), MoonshotConfig(**OPTIONS))
                pruner.choose(pruner.sweep(token_batches(), lambdas=[0.5, 1.0], progress=False).best())
        else:
            pruner = MoonshotPruner(model, MoonshotConfig(**OPTIONS))
            pruner.choose(pruner.sweep(token_batches(), lambdas=[0.5, 1.0], progress=False).best())
        results.append(pruner.model)
    return difference(results[1], results[0])


def one_matrix():
    torch.manual_seed(0)
    weight, inputs, gradients = torch.randn(24, 32), torch.randn(100, 32), torch.randn(5, 24, 32)
    config = MoonshotConfig(pattern="2:4", lam=0.5)
    expected = prune_weight(weight, inputs.T @ inputs, gradients, config=config)
    with other_device():
        pruned = prune_weight(*(t.to(DEVICE) for t in (weight, inputs.T @ inputs, gradients)), config=config)
        assert pruned.weight.device == DEVICE
    weight, keep = on_host(pruned.weight), on_host(pruned.keep)
    return float((weight - expected.weight).abs().max()), int((keep != expected.keep).sum())


def lookup():
    """Rows of packed word embeddings."""
    torch.manual_seed(0)
    grid, rows = Grid(8, 64, torch.bfloat16), torch.tensor([[3, 0, 8]])
    codec, matrix = Quantized.of(grid), on_grid(grid, torch.randn(9, 132)) + 0.0
    with other_device():
        parts = {suffix: part.to(DEVICE) for suffix, part in codec.pack(matrix, None).items()}
        dense = codec.lookup(rows.to(DEVICE), parts, (9, 132))
        assert dense.device == DEVICE
    return float((on_host(dense) - matrix[rows]).abs().max()), 0


def mixed():
    """An operation with tensors of both devices must raise."""
    with other_device():
        try:
            torch.randn(3, 4, device=DEVICE) @ torch.ones(4, 3)
        except RuntimeError as error:
            assert "same device" in str(error)
            return 0.0, 0
    raise AssertionError("tensors of two devices were multiplied")


def main():
    torch.set_num_threads(1)
    cases = {"mixed": mixed, "one matrix": one_matrix, "lookup": lookup, "sweep": sweep}
    cases |= {key: lambda run=run: case_of(*run) for key, run in (RUNS | (EXPERTS if CUDA else {})).items()}
    chosen = [argument for argument in sys.argv[1:] if argument != "--cuda"]
    for key in chosen or cases:
        try:
            worst, zeros = cases[key]()
            row = {"worst": worst, "zeros": zeros}
        except Exception as error:
            row = {"error": f"{type(error).__name__}: {error}"[:600]}
            if chosen:
                raise
        print(json.dumps({"case": key, **row}), flush=True)


if __name__ == "__main__":
    main()
