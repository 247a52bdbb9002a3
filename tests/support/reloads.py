"""Whether models of all families compute the same after they are saved and loaded by plain transformers."""

import architectures
import torch
import transformers as hf
from tiny_configs import tiny_config
from torch.utils._pytree import tree_leaves

from optimum_moonshot import MoonshotConfig, MoonshotError, MoonshotPruner
from optimum_moonshot.model.calls import run_model

EVERY = {name: (kind, family) for kind, family, name in architectures.families(list(architectures.KINDS))}


def made(name, dtype=torch.float32):
    """A tiny model of a class with distinct gains and biases, and batches of its inputs; None if it cannot be built."""
    kind, family = EVERY[name]
    torch.manual_seed(0)
    try:
        model = getattr(hf, name)(tiny_config(family, name)).eval()
    except (ImportError, AssertionError, ValueError):  # a package that is not installed, or another kind of decoder
        return None
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data += 0.3 * torch.randn(parameter.shape)
    data = architectures.batches(kind, model)
    try:
        results(model, data[0])
    except MoonshotError:
        if kind != "multimodal":
            return None
        data = [architectures.with_images(batch, model) for batch in data]
    return model.to(dtype), data


@torch.no_grad()
def results(model, batch):
    """The floating-point outputs of a model."""
    return [leaf for leaf in tree_leaves(run_model(model, batch)) if torch.is_tensor(leaf) and leaf.is_floating_point()]


def pruned(name, dtype, rotated):
    """A pruner of a family at 2:4, and a batch; None if it cannot be built, pruned, or rotated."""
    built = made(name, dtype)
    if built is None:
        return None
    rotation = dict(rotation="learned", rotation_steps=1, rotation_weights="equal") if rotated else {}
    config = MoonshotConfig(solver="magnitude", pattern="2:4", lam=1.0, num_samples=4, batch_size=2, **rotation)
    pruner = MoonshotPruner(built[0], config)
    try:
        pruner.prune(built[1], progress=False)
    except MoonshotError:
        return None
    return pruner, built[1][0]


def assert_reloads(pruner, batch, folder, formats=("dense", "packed")):
    """Plain `from_pretrained` loads every format without missing weights, and computes the same."""
    expected = results(pruner.model, batch)
    for format in formats:
        pruner.save_pretrained(folder / format, format=format)
        load = hf.PreTrainedModel.from_pretrained.__func__  # some classes read other files too
        loaded, info = load(type(pruner.model), folder / format, dtype="auto", output_loading_info=True)
        assert not any(info.values()), (format, info)
        for actual, reference in zip(results(loaded.eval(), batch), expected, strict=True):
            assert torch.equal(actual, reference) or torch.allclose(actual, reference, equal_nan=True), format
