"""Families of the survey of all architectures (benchmarks/architectures.py), each as a tiny random model.

They hold the survey's results: the pattern is exact, blocks are sequential, and skipped layers have a reason.
"""

import pytest
import torch
import transformers as hf
from models import make, token_batches
from tiny_architectures import FAMILIES, IMAGES, READ, made
from tiny_configs import tiny_config
from torch import nn

from optimum_moonshot import MoonshotConfig, MoonshotError, MoonshotPruner
from optimum_moonshot.data.batches import shorten
from optimum_moonshot.model.calls import frozen
from optimum_moonshot.model.layers import find_blocks, find_structure
from optimum_moonshot.pipeline import calibration_data
from optimum_moonshot.pipeline.block_sequences import find_block_sequences
from optimum_moonshot.pipeline.calibration_data import unshown_samples


def batches(family, model):
    if family in IMAGES:
        generator = torch.Generator().manual_seed(0)
        side = getattr(model.config, "image_size", 32)
        shape = (2, 3, side, side)
        return [
            {"pixel_values": torch.randn(shape, generator=generator), "labels": torch.tensor([0, 1])} for _ in range(2)
        ]
    data = [{"input_ids": batch["input_ids"] % 70 + 3} for batch in token_batches(4)]
    return [{**batch, "labels": batch["input_ids"]} for batch in data] if model.config.is_encoder_decoder else data


def uncalled(model, batch):
    """The Linears of a model whose forward the model's forward does not call."""
    linears = {name for name, module in model.named_modules() if type(module) is nn.Linear}
    called = set()
    for name in linears:
        model.get_submodule(name).register_forward_hook(lambda *_, name=name: called.add(name))
    with torch.no_grad():
        model(**batch, use_cache=False)
    return linears - called


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_pruned_with_a_reason_for_skipped_layers(family):
    model = made(family)
    data, (_, chains, loose, reasons) = batches(family, model), FAMILIES[family]
    blocks = find_structure(model).blocks
    with frozen(model):
        sequences = find_block_sequences(model, blocks, shorten(data[0]), True, None)
    assert chains is None or [len(chain) for chain in sequences.sequential] == chains
    assert loose is None or len(sequences.non_sequential) == loose
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
        assert each == (READ,) or any(reason in text for reason in each for text in report.skipped.values()), each
    for name, text in report.skipped.items():
        assert any(reason in text for each in reasons for reason in each), (name, text)


def test_blocks_are_found_in_a_list_of_lists():
    """A list has no forward: as a block it would never be reached."""
    names = [name for name, _ in find_blocks(made("poolformer"))]
    assert "poolformer.encoder.block.0.0" in names and "poolformer.encoder.block.0" not in names
    pair = nn.ModuleList([nn.ModuleList([nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4))])])
    assert [name for name, _ in find_blocks(nn.ModuleDict({"layers": pair}))] == ["layers.0.0", "layers.0.1"]


@pytest.mark.parametrize(
    "family, part",
    [("xlnet", "ff"), ("switch_transformers", "expert"), ("swinv2", "continuous_position_bias_mlp")],
)
def test_layers_without_identifiable_samples_are_detected(family, part):
    model = made(family)
    probe = shorten(batches(family, model)[0], samples=2)
    with frozen(model):
        unshown = unshown_samples(model, list(find_structure(model).layers()), probe)
    assert unshown and any(part in name for name in unshown)


def test_layers_with_identifiable_samples_are_not_reported():
    for name in ("llama", "bert", "gpt2"):
        model = make(name)
        probe = shorten(token_batches(padded=True)[0], samples=2)
        with frozen(model):
            assert unshown_samples(model, list(find_structure(model).layers()), probe) == []


@pytest.mark.parametrize("family", ["xlnet", "switch_transformers"])
def test_a_batch_gives_the_losses_of_single_samples(family):
    reports = []
    for size in (2, 1):
        model = made(family)
        config = MoonshotConfig(solver="wanda", pattern="2:4", lam=0.5, num_samples=4, batch_size=size)
        reports.append(MoonshotPruner(model, config).prune(batches(family, model), progress=False))
    together, alone = reports
    assert any("one sample at a time: the inputs of" in note for note in together.notes)
    assert not any("one sample at a time" in note for note in alone.notes)
    assert [layer.loss for layer in together.layers] == [layer.loss for layer in alone.layers]


def test_padding_is_separated_without_gradients():
    """XLNet has tokens before samples: a mask [samples, tokens] on its inputs would hide other tokens."""
    reports = []
    for size in (2, 1):
        model = made("xlnet")
        data = [{**batch, "input_ids": batch["input_ids"] % 70 + 3} for batch in token_batches(4, padded=True)]
        config = MoonshotConfig(solver="wanda", pattern="2:4", lam=1.0, num_samples=4, batch_size=size)
        reports.append(MoonshotPruner(model, config).prune(data, progress=False))
    for layer, other in zip(reports[0].layers, reports[1].layers, strict=True):
        assert layer.loss == pytest.approx(other.loss, rel=1e-4)


def test_lambda_1_runs_no_probe_of_the_samples(monkeypatch):
    monkeypatch.delattr(calibration_data, "run_model")  # a probe would call it
    config = MoonshotConfig(pattern="2:4", num_samples=4, batch_size=2, lam=1.0)
    model = made("llama")
    MoonshotPruner(model, config).prune(batches("llama", model), progress=False)


def test_a_model_that_cannot_read_the_data_is_refused():
    torch.manual_seed(0)
    model = hf.BlipForConditionalGeneration(tiny_config("blip", "BlipForConditionalGeneration"))
    config = MoonshotConfig(pattern="2:4", num_samples=4)
    with pytest.raises(MoonshotError, match=r"cannot be called with .*input_ids \[2, 12\].*pixel_values") as error:
        MoonshotPruner(model, config).prune(token_batches(4), progress=False)
    assert "\n" not in str(error.value)


class Chooser(nn.Module):
    """A part whose outputs affect the loss through an argmax alone, and a part after it."""

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


def test_a_part_without_a_gradient_is_pruned_with_lambda_1():
    generator = torch.Generator().manual_seed(0)
    data = [{"inputs": torch.randn(2, 8, generator=generator), "labels": torch.tensor([1, 2])} for _ in range(2)]
    torch.manual_seed(0)
    config = MoonshotConfig(pattern="2:4", num_samples=4, batch_size=2, lam=0.5)
    report = MoonshotPruner(Chooser(), config).prune(data, progress=False)
    assert [layer.lam for layer in report.layers] == [1.0, 1.0, 0.5, 0.5]
