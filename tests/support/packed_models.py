"""Models with packed layers, and their state."""

import torch

from optimum_moonshot.runtime.packed_layers import PackedEmbedding, PackedLinear
from optimum_moonshot.runtime.packed_module import PackedModule

MIXED = dict(pattern="unstructured", allocation={"q_proj": "1:4", "k_proj": 0.05, "mlp": "2:4", "[vo]_proj": 0.6})


def held(model):
    """The names of the packed layers, which for experts are those of their weights."""
    packed = {name: module for name, module in model.named_modules() if isinstance(module, PackedModule)}
    return {
        name if isinstance(module, PackedLinear | PackedEmbedding) else f"{name}.{weight}"
        for name, module in packed.items()
        for weight in module.packed
    }


def state(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_state(model, expected):
    actual = model.state_dict()
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype and torch.equal(actual[name], tensor), name
