"""Hashes of the weights that runs give on tiny models, to show that a change of the code leaves them bit for bit.

Usage: PYTHONPATH=tests/support:benchmarks python tests/support/run_hashes.py FILE.json

Without the file, it is written; with it, the runs whose hashes differ are printed, and the exit status is 1. Compare
on one machine: the sums of matrix products depend on its instruction set.
"""

import hashlib
import json
import sys
import tempfile
from pathlib import Path

import torch
from models import make, token_batches
from tiny_mixtures import mixtral

from optimum_moonshot import MoonshotConfig, MoonshotPruner, load_pruned

SOLVERS = ("magnitude", "wanda", "sparsegpt", "alps", "obc", "cap")
PATTERNS = {"2:4": dict(pattern="2:4"), "4:8": dict(pattern="4:8"), "0.6": dict(sparsity=0.6)}
OPTIONS = {
    "bits": dict(pattern="2:4", bits=4),
    "dense bits": dict(bits=3, solver="alps"),
    "bits per weight": dict(bits_per_weight=3.0, allocation="fisher"),
    "owl": dict(sparsity=0.6, allocation="owl"),
    "alpha": dict(sparsity=0.6, allocation="alpha"),
    "fisher": dict(sparsity=0.6, allocation="fisher"),
    "recompute": dict(pattern="2:4", recompute=True),
    "shared": dict(pattern="2:4", fisher="shared"),
    "attention": dict(pattern="2:4", fisher_layers="attention"),
    "learned": dict(pattern="2:4", rotation="learned", rotation_steps=3),
    "heads": dict(sparsity=0.6, rotation="heads", rotation_steps=3),
    "blockwise": dict(pattern="2:4", recover="blockwise", recover_steps=3),
    "gradual": dict(sparsity=0.6, recover="gradual", recover_steps=10),
    "distill": dict(pattern="2:4", recover="distill", recover_steps=2),
    "little memory": dict(pattern="2:4", max_memory=60_000),
    "structured": dict(solver="osscar", pattern="structured", sparsity=0.25),
    "structured, distilled": dict(
        solver="osscar", pattern="structured", sparsity=0.25, recover="blockwise", recover_steps=2
    ),
}


def runs():
    """Name → function without arguments that returns a model."""
    for solver in SOLVERS:
        for pattern, fields in PATTERNS.items():
            for lam in (1, 0.9, 0):
                yield f"llama {solver} {pattern} {lam}", lambda f={**fields, "solver": solver, "lam": lam}: prune(**f)
    for name, fields in OPTIONS.items():
        for lam in (1, 0.9):
            yield f"llama {name} {lam}", lambda f={**fields, "lam": lam}: prune(**f)
    for name in ("opt", "gpt2", "gemma3", "llama-tied-biased"):
        yield name, lambda name=name: prune(name, pattern="2:4")
    yield "bert", lambda: prune("bert", pattern="2:4", lam=1)
    for name in ("vit", "resnet"):
        yield name, lambda name=name: prune(name, inputs="images", pattern="2:4")
    for name, fields in {
        "2:4": dict(pattern="2:4"),
        "experts": dict(pattern="experts", solver="osscar", sparsity=0.25),
    }.items():
        yield f"mixtral {name}", lambda f=fields: prune(mixtral(), **f)
    yield "float64", lambda: prune(make("llama").double(), pattern="2:4")
    yield "bfloat16", lambda: prune(make("llama").bfloat16(), pattern="2:4")
    for lam in (1, 0.9):
        yield f"shrunk {lam}", lambda lam=lam: shrunk(lam)
    for bits in (None, 4):
        yield f"packed {bits}", lambda bits=bits: reloaded(bits)
    yield "offloaded", offloaded


def data(inputs="text"):
    if inputs == "text":
        return token_batches()
    generator = torch.Generator().manual_seed(0)
    return [{"pixel_values": torch.randn(2, 3, 16, 16, generator=generator), "labels": torch.tensor([0, 1])}] * 3


def prune(model="llama", inputs="text", **fields):
    model = make(model) if isinstance(model, str) else model
    batches = data(inputs)
    samples = sum(len(next(iter(batch.values()))) for batch in batches)
    pruner = MoonshotPruner(model, MoonshotConfig(**{"num_samples": samples, "batch_size": 2, **fields}))
    pruner.prune(batches, progress=False)
    return pruner.model


def shrunk(lam):
    batches = data()
    samples = sum(len(batch["input_ids"]) for batch in batches)
    settings = dict(solver="osscar", pattern="structured", sparsity=0, lam=lam, num_samples=samples)
    pruner = MoonshotPruner(make("llama"), MoonshotConfig(**settings))
    pruner.shrink(batches, parameters=0.8, progress=False)
    return pruner.model


def reloaded(bits):
    pruner = MoonshotPruner(make("llama").bfloat16(), MoonshotConfig(solver="magnitude", pattern="2:4", bits=bits))
    pruner.prune(progress=False)
    with tempfile.TemporaryDirectory() as folder:
        pruner.save_pretrained(folder, format="packed")
        return load_pruned(folder)


def offloaded():
    with tempfile.TemporaryDirectory() as folder:
        make("llama").save_pretrained(f"{folder}/dense")
        config = MoonshotConfig(pattern="2:4", num_samples=6, sequence_length=12, batch_size=2)
        pruner = MoonshotPruner.from_pretrained(f"{folder}/dense", config, offload="disk")
        pruner.prune(data(), progress=False)
        pruner.save_pretrained(f"{folder}/saved")
        return load_pruned(f"{folder}/saved")


def digest(model):
    result = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        result.update(name.encode())
        result.update(tensor.detach().contiguous().cpu().flatten().view(torch.uint8).numpy().tobytes())
    return result.hexdigest()


def hashed(run):
    try:
        return digest(run())
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def main(path):
    torch.set_num_threads(1)
    hashes = {name: hashed(run) for name, run in runs()}
    path = Path(path)
    if not path.exists():
        path.write_text(json.dumps(hashes, indent=1) + "\n")
    before = json.loads(path.read_text())
    changed = [name for name in hashes.keys() | before.keys() if hashes.get(name) != before.get(name)]
    for name in sorted(changed):
        print(f"{name}: {before.get(name)} → {hashes.get(name)}")
    print(f"{len(hashes)} runs, {len(changed)} differ")
    return bool(changed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
