"""Pruned models, and the contents of their folders."""

import torch
from models import make, token_batches
from safetensors.torch import load_file

from optimum_moonshot import MoonshotConfig, MoonshotPruner

INPUTS = token_batches()[0]["input_ids"]


def pruned(name="llama", dtype=torch.float32, **settings):
    """A pruner that has pruned a tiny model by magnitude."""
    settings = settings or dict(pattern="2:4")
    pruner = MoonshotPruner(make(name).to(dtype), MoonshotConfig(solver="magnitude", **settings))
    pruner.prune(progress=False)
    return pruner


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def tensors(folder):
    weights = {}
    for path in folder.glob("*.safetensors"):
        weights |= load_file(path)
    return weights


def assert_same(model, other):
    expected, actual = model.state_dict(), other.state_dict()
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype and torch.equal(actual[name].to("cpu"), tensor), name
