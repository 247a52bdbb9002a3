"""Recovery runs of tiny models, and the inputs of their comparison with the literal versions."""

import dataclasses

import torch
from models import make, token_batches

from optimum_moonshot import MoonshotConfig, MoonshotPruner
from optimum_moonshot.model.layers import find_structure

SAMPLES = 16
LITERAL_SAMPLES = 18


def config(**changes):
    return MoonshotConfig(**{"pattern": "2:4", "lam": 1.0, "num_samples": SAMPLES, **changes})


def prune(model, batches=None, resume_dir=None, **changes):
    batches = token_batches(SAMPLES) if batches is None else batches
    return MoonshotPruner(model, config(**changes)).prune(batches, progress=False, resume_dir=resume_dir)


def state(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(model, expected):
    return all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())


def assert_repeatable(prune):
    """Two runs of `prune(model, **changes)` are bit-identical for any random state, which they leave as it was."""
    first, second, other = make("llama"), make("llama"), make("llama")
    torch.manual_seed(5)
    before = torch.get_rng_state()
    prune(first)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    prune(second)
    assert same(second, state(first))
    prune(other, seed=1)
    assert not same(other, state(first))


def without_seconds(report):
    return [dataclasses.replace(block, seconds=0) for block in report.recovery]


def assert_recovered(report):
    """The total loss decreases."""
    assert sum(block.loss_after for block in report.recovery) < sum(block.loss_before for block in report.recovery)


def assert_no_hooks(model):
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def interrupt(monkeypatch, cls, method, call, error=KeyboardInterrupt):
    """Let one call of the method, counted from 1, raise the error; the list gets an entry per call."""
    original, calls = getattr(cls, method), []

    def patched(self, *args, **options):
        calls.append(None)
        if len(calls) == call:
            raise error
        return original(self, *args, **options)

    monkeypatch.setattr(cls, method, patched)
    return calls


def tie_up_projections(*models):
    """Share the weight of `up_proj` between blocks 0 and 2."""
    for model in models:
        model.model.layers[2].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight


def assert_shared_as_pruned(model, plain):
    """`up_proj` of blocks 0 and 2 is still shared and equals the weight of the unrecovered model."""
    shared = model.model.layers[0].mlp.up_proj.weight
    assert model.model.layers[2].mlp.up_proj.weight is shared
    assert torch.equal(shared, plain.model.layers[0].mlp.up_proj.weight)


def blocks_of(model):
    """(module, pruned parameters) of every block."""
    return [(block.module, [layer.parameter for layer in block.layers]) for block in find_structure(model).blocks]


def literal_batches(padded):
    """`LITERAL_SAMPLES` batches of one sample."""
    return [
        {key: value[row : row + 1] for key, value in batch.items()}
        for batch in token_batches(LITERAL_SAMPLES, padded=padded)
        for row in range(2)
    ]


def shuffled(count):
    """Block index → endless iterator over indices below `count`, in the order of the optimizer steps."""

    def order(block):
        generator = torch.Generator().manual_seed(block)
        while True:
            yield from torch.randperm(count, generator=generator).tolist()

    return order
