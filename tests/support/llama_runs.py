"""Prunings of a tiny Llama, with small settings."""

import torch
from models import token_batches

from optimum_moonshot import MoonshotConfig, MoonshotPruner

SAMPLES = 6


def config(**changes):
    defaults = dict(pattern="2:4", lam=0.9, num_samples=SAMPLES, sequence_length=12, batch_size=2)
    return MoonshotConfig(**{**defaults, **changes})


def prune(model, batches=None, tokenizer=None, **changes):
    pruner = MoonshotPruner(model, config(**changes), tokenizer)
    pruner.prune(batches if batches is not None else token_batches(), progress=False)
    return pruner


def weights(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_same(model, before):
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
