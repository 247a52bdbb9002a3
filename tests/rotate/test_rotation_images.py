"""Rotation of vision–language models with images: the same function on pictures with text, then pruned and reloaded."""

import pytest
import torch
from image_text import MORE, made, processor, rows
from marks import slow_but

from optimum_moonshot import MoonshotConfig, MoonshotPruner, load_pruned, verify

ERRORS = {torch.float32: 1e-5, torch.bfloat16: 0.03}


def model_of(name, dtype):
    """A model whose logits depend on its layers, with distinct gains, and buffers as `from_pretrained` creates them."""
    model, generator = made(name), torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
        else:
            parameter.data *= 8
        parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype
    return model


def items(name, dtype):
    """Pictures with text that calibrated nothing."""
    prepare = processor(name)
    prepared = [prepare([row["image"]], [f"<image>another text {index}"], "pt") for index, row in enumerate(rows(3))]
    return [
        {key: value.to(dtype) if value.is_floating_point() else value for key, value in x.items()} for x in prepared
    ]


@torch.no_grad()
def logits(model, inputs):
    return torch.cat([model(**item).logits.float().flatten() for item in inputs])


def error(actual, expected):
    return float((actual - expected).norm() / expected.norm())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ERRORS, ids=str)
@pytest.mark.parametrize("name", slow_but(["qwen2_vl"], MORE))
def test_a_rotated_model_reads_pictures_as_before_and_is_pruned_and_reloaded(name, dtype, tmp_path):
    model, inputs = model_of(name, dtype), items(name, dtype)
    before = logits(model, inputs)
    mirrored = [{**item, "pixel_values": item["pixel_values"].flip(-1)} for item in inputs]
    assert error(logits(model, mirrored), before) > 0.1
    config = MoonshotConfig(pattern="2:4", num_samples=4, batch_size=2, rotation_steps=3, rotation_lr=0.05)
    pruner = MoonshotPruner(model, config, processor=processor(name))
    rotation = pruner.rotate(rows(), progress=False)
    assert rotation.rotated and any("vis" in space for space in rotation.spaces)
    assert any("language_model" in space for space in rotation.spaces)
    assert error(logits(pruner.model, inputs), before) < ERRORS[dtype]
    report = pruner.prune(rows(), progress=False)
    assert report.sparsity == 0.5
    expected = logits(pruner.model, inputs)
    pruner.processor = None  # it is not one of transformers
    for format in ("dense", "packed"):
        pruner.save_pretrained(tmp_path / format, format=format)
        assert verify(tmp_path / format)
        for reloaded in (type(model).from_pretrained(tmp_path / format, dtype=dtype), load_pruned(tmp_path / format)):
            state = reloaded.eval().state_dict()
            assert all(torch.equal(state[key], value) for key, value in pruner.model.state_dict().items())
            assert error(logits(reloaded, inputs), expected) < 1e-6  # alignment in memory may change the last bit
