"""Families that the survey of all architectures has (benchmarks/architectures.py), each by its tiny random model.

What the survey found must stay so: the pattern is exact, blocks are chains, and what stays dense says why.
"""

import pytest
import torch
import transformers as hf
from models import make, token_batches
from tiny_architectures import FAMILIES, IMAGES, READ, made
from tiny_configs import tiny_config
from torch import nn

from optimum_moonshot import MoonshotConfig, MoonshotError, MoonshotPruner
from optimum_moonshot.calibration import samples
from optimum_moonshot.calibration.samples import unshown_samples
from optimum_moonshot.data.batches import shorten
from optimum_moonshot.model.calls import frozen
from optimum_moonshot.model.layers import find_blocks, find_structure
from optimum_moonshot.pipeline.block_sequences import find_block_sequences


def batches(family, model):
    if family in IMAGES:
        generator = torch.Generator().manual_seed(0)
        side = getattr(model.config, "image_size", 32)
        shape = (2, 3, side, side)
        return [
            {"pixel_values": torch.randn(shape, generator=generator), "labels": torch.tensor([0, 1])} for _ in range(2)
        ]
    found = [{"input_ids": batch["input_ids"] % 70 + 3} for batch in token_batches(4)]
    return [{**batch, "labels": batch["input_ids"]} for batch in found] if model.config.is_encoder_decoder else found


def uncalled(model, batch):
    """The Linears of a model's blocks whose forward a call of the model does not call."""
    linears = {name for name, module in model.named_modules() if type(module) is nn.Linear}
    called = set()
    for name in linears:
        model.get_submodule(name).register_forward_hook(lambda *_, name=name: called.add(name))
    with torch.no_grad():
        model(**batch, use_cache=False)
    return linears - called


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_prunes_or_says_why_not(family):
    model = made(family)
    data, (_, chains, loose, reasons) = batches(family, model), FAMILIES[family]
    blocks = find_structure(model).blocks
    with frozen(model):
        found = find_block_sequences(model, blocks, shorten(data[0]), True, None)
    assert chains is None or [len(chain) for chain in found.sequential] == chains
    assert loose is None or len(found.non_sequential) == loose
    report = MoonshotPruner(model, MoonshotConfig(pattern="2:4", num_samples=4, batch_size=2)).prune(
        data, progress=False
    )
    assert report.layers and 0.5 <= report.sparsity < 0.56  # dead inputs beyond the pattern
    matrices = {layer.name: layer.matrix for layer in find_structure(model).layers()}
    for layer in report.layers:
        weight = matrices[layer.name]
        assert (weight.unflatten(1, (-1, 4)) != 0).sum(-1).max() <= 2, layer.name
    if READ in reasons:
        read = {name for name, reason in report.skipped.items() if READ in reason}
        assert read == uncalled(made(family), data[0])
    reasons = [each if isinstance(each, tuple) else (each,) for each in reasons]
    for each in reasons:
        assert each == (READ,) or any(reason in found for reason in each for found in report.skipped.values()), each
    for name, found in report.skipped.items():
        assert any(reason in found for each in reasons for reason in each), (name, found)


def test_blocks_in_a_list_of_lists_are_blocks():
    """Nobody calls a list: as a block it would never be reached."""
    names = [name for name, _ in find_blocks(made("poolformer"))]
    assert "poolformer.encoder.block.0.0" in names and "poolformer.encoder.block.0" not in names
    pair = nn.ModuleList([nn.ModuleList([nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4))])])
    assert [name for name, _ in find_blocks(nn.ModuleDict({"layers": pair}))] == ["layers.0.0", "layers.0.1"]


@pytest.mark.parametrize(
    "family, part",
    [("xlnet", "ff"), ("switch_transformers", "expert"), ("swinv2", "continuous_position_bias_mlp")],
)
def test_layers_that_do_not_show_the_samples_are_found(family, part):
    model = made(family)
    probe = shorten(batches(family, model)[0], samples=2)
    with frozen(model):
        unshown = unshown_samples(model, list(find_structure(model).layers()), probe)
    assert unshown and any(part in name for name in unshown)


def test_layers_that_show_the_samples_are_left_in_peace():
    for name in ("llama", "bert", "gpt2"):
        model = make(name)
        probe = shorten(token_batches(padded=True)[0], samples=2)
        with frozen(model):
            assert unshown_samples(model, list(find_structure(model).layers()), probe) == []


@pytest.mark.parametrize("family", ["xlnet", "switch_transformers"])
def test_a_batch_gives_what_its_samples_give_alone(family):
    reports = []
    for size in (2, 1):
        model = made(family)
        config = MoonshotConfig(solver="wanda", pattern="2:4", lam=0.5, num_samples=4, batch_size=size)
        reports.append(MoonshotPruner(model, config).prune(batches(family, model), progress=False))
    together, alone = reports
    assert any("one sample at a time: the inputs of" in note for note in together.notes)
    assert not any("one sample at a time" in note for note in alone.notes)
    assert [layer.loss for layer in together.layers] == [layer.loss for layer in alone.layers]


def test_padding_is_told_apart_without_gradients_too():
    """Tokens come before samples in XLNet: a mask [samples, tokens] laid over them would hide others."""
    found = []
    for size in (2, 1):
        model = made("xlnet")
        data = [{**batch, "input_ids": batch["input_ids"] % 70 + 3} for batch in token_batches(4, padded=True)]
        config = MoonshotConfig(solver="wanda", pattern="2:4", lam=1.0, num_samples=4, batch_size=size)
        found.append(MoonshotPruner(model, config).prune(data, progress=False))
    for layer, other in zip(found[0].layers, found[1].layers, strict=True):
        assert layer.loss == pytest.approx(other.loss, rel=1e-4)


def test_nothing_is_asked_where_it_does_not_matter(monkeypatch):
    monkeypatch.delattr(samples, "run_model")  # which a probe would call
    config = MoonshotConfig(pattern="2:4", num_samples=4, batch_size=2, lam=1.0)
    model = made("llama")
    MoonshotPruner(model, config).prune(batches("llama", model), progress=False)


def test_a_model_that_cannot_read_the_data_says_so():
    torch.manual_seed(0)
    model = hf.BlipForConditionalGeneration(tiny_config("blip", "BlipForConditionalGeneration"))
    config = MoonshotConfig(pattern="2:4", num_samples=4)
    with pytest.raises(MoonshotError, match=r"cannot be called with .*input_ids \[2, 12\].*pixel_values") as error:
        MoonshotPruner(model, config).prune(token_batches(4), progress=False)
    assert "\n" not in str(error.value)


class Chooser(nn.Module):
    """A part whose outputs the loss follows by a choice alone, and a part behind it."""

    def __init__(self):
        super().__init__()
        self.chooser = nn.ModuleList([nn.Sequential(nn.Linear(8, 8)) for _ in range(2)])
        self.inner = nn.ModuleList([nn.Sequential(nn.Linear(8, 8)) for _ in range(2)])

    def forward(self, inputs):
        chosen = inputs
        for block in self.chooser:
            chosen = block(chosen)
        hidden = inputs.roll(int(chosen.argmax()) % 2, -1)
        for block in self.inner:
            hidden = block(hidden)
        return hidden


def test_a_part_without_a_gradient_is_pruned_by_its_reconstruction():
    generator = torch.Generator().manual_seed(0)
    data = [{"inputs": torch.randn(2, 8, generator=generator), "labels": torch.tensor([1, 2])} for _ in range(2)]
    torch.manual_seed(0)
    config = MoonshotConfig(pattern="2:4", num_samples=4, batch_size=2, lam=0.5)
    report = MoonshotPruner(Chooser(), config).prune(data, progress=False)
    assert [layer.lam for layer in report.layers] == [1.0, 1.0, 0.5, 0.5]
