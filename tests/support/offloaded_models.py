"""Models whose weights are offloaded."""

from pathlib import Path

import torch
from safetensors.torch import load_file

from optimum_moonshot import MoonshotConfig, MoonshotPruner

OPTIONS = {"pattern": "2:4", "num_samples": 6, "sequence_length": 12, "batch_size": 2}


def settings(**changes):
    return MoonshotConfig(**{**OPTIONS, **changes})


def offloaded(folder, **changes):
    return MoonshotPruner.from_pretrained(folder, settings(**changes), offload="disk")


def tensors(folder):
    return {
        name: tensor for path in sorted(Path(folder).glob("*.safetensors")) for name, tensor in load_file(path).items()
    }


def assert_equal(folder, expected):
    actual, expected = tensors(folder), tensors(expected)
    assert actual.keys() == expected.keys()
    assert [name for name in actual if not torch.equal(actual[name], expected[name])] == []
