"""Prunings with a rotation."""

import torch
from models import make, token_batches

from optimum_moonshot import MoonshotConfig, MoonshotPruner

SETTINGS = dict(sparsity=0.5, num_samples=6, rotation="learned", rotation_steps=4, rotation_lr=0.05)


def pruner(name="llama", **changes):
    model = make(name)
    for parameter in model.parameters():  # distinct gains
        if parameter.ndim == 1:
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    return MoonshotPruner(model, MoonshotConfig(**{**SETTINGS, **changes}))


def prune(name="llama", data=None, **changes):
    done = pruner(name, **changes)
    done.prune(data or token_batches(), progress=False)
    return done


def weights(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(actual, expected):
    return actual.keys() == expected.keys() and all(torch.equal(actual[name], expected[name]) for name in expected)
