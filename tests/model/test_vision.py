"""Image models and plain modules: pruned layers, exact zeros, and refusals."""

import sys
from pathlib import Path

import pytest
import reference
import torch
import transformers as hf
from convolutions import GEOMETRIES
from models import PLAIN, VISION, image_batches, make
from torch import nn

from optimum_moonshot import MoonshotConfig, MoonshotError, MoonshotPruner, accuracy
from optimum_moonshot.allocate.block_scores import outlier_share
from optimum_moonshot.model import layer_kinds
from optimum_moonshot.model.layer_kinds import find_layer, strips
from optimum_moonshot.model.layers import find_structure

ROOT = Path(__file__).parents[2]
SAMPLES = 6


def config(**changes):
    defaults = dict(sparsity=0.5, lam=0.5, num_samples=SAMPLES, batch_size=2)
    return MoonshotConfig(**{**defaults, **changes})


def prune(model, batches=None, **changes):
    options = {name: changes.pop(name) for name in ("loss", "forward") if name in changes}
    pruner = MoonshotPruner(model, config(**changes))
    pruner.prune(image_batches() if batches is None else batches, progress=False, **options)
    return pruner


@pytest.mark.parametrize("rows", [1, 2, 100])
@pytest.mark.parametrize("choice", GEOMETRIES.values(), ids=GEOMETRIES)
def test_patches_are_those_of_the_formula(choice, rows, monkeypatch):
    torch.manual_seed(0)
    conv, images = nn.Conv2d(4, 8, bias=False, **choice), torch.randn(2, 4, 9, 7)
    output = conv(images)
    exact = reference_patches(conv, images)
    row = 4 * exact[:, :, : output.shape[3]].numel()
    monkeypatch.setattr(layer_kinds, "STRIP_BYTES", rows * row)
    pieces = list(strips(conv, images))
    assert len(pieces) == -(-output.shape[2] // rows) and pieces[-1][2]
    assert sum(last for _, _, last in pieces) == 1
    patches = torch.cat([patches for _, patches, _ in pieces], 2)
    assert torch.equal(patches, exact)
    weight = conv.weight.flatten(1).unflatten(0, (conv.groups, -1))
    product = torch.einsum("bgti,goi->bgot", patches, weight).reshape(output.shape)
    torch.testing.assert_close(product, output)


def reference_patches(conv, images):
    shape = (conv.kernel_size, conv.stride, conv.padding, conv.dilation, conv.groups, conv.padding_mode)
    return reference.patches(images, *shape)


def test_convolutions_that_read_a_tensor_differently_share_nothing():
    seen = {find_layer(nn.Conv2d(4, 4, **choice)).input_key for choice in GEOMETRIES.values()}
    assert len(seen) == len(GEOMETRIES)


def assert_zeros(report, weight, count):
    """Exactly `count` zeros, or more where an input is dead: its kept weights are 0 too."""
    zeros = int((weight == 0).sum())
    assert report.sparsity == zeros / weight.numel()
    assert zeros == count if not report.notes else zeros >= count


@pytest.mark.parametrize("solver", ["sparsegpt", "wanda", "magnitude"])
@pytest.mark.parametrize("name", [*VISION, *PLAIN])
def test_every_vision_model(name, solver, tmp_path):
    model = make(name)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    targets = {layer.name: layer for layer in find_structure(model).layers()}
    pruner = prune(model, solver=solver)
    for layer in pruner.report.layers:
        weight = targets[layer.name].matrix
        rows = len(weight) if solver == "wanda" else 1
        blocks = weight.split(128, 1) if solver == "sparsegpt" else [weight]
        count = sum(rows * round(0.5 * block.numel() / rows) for block in blocks)
        assert_zeros(layer, weight, count)
        # SparseGPT updates greedily, column by column: on matrices as tiny as these it may gain nothing.
        assert layer.shape == tuple(weight.shape) and layer.loss <= 1.05 * layer.loss_masked
        assert 0 < layer.reconstruction < 1 and (layer.fisher is None) == (layer.lam == 1)
    assert {layer.name for layer in pruner.report.layers} == set(targets)
    for key, tensor in model.state_dict().items():
        assert key.removesuffix(".weight") in targets or torch.equal(tensor, before[key]), key
    if name in VISION:
        pruner.save_pretrained(tmp_path)
        loaded = type(model).from_pretrained(tmp_path)
        for key, tensor in loaded.state_dict().items():
            assert torch.equal(tensor, model.state_dict()[key])


def test_groups_of_m_follow_the_flattened_kernel():
    model = make("resnet")
    report = prune(model, pattern="2:4", sparsity=None).report
    assert sum(not layer.notes for layer in report.layers) >= 3
    for layer in report.layers:
        removed = (model.get_submodule(layer.name).weight.flatten(1).reshape(-1, 4) == 0).sum(1)
        assert (removed == 2).all() if not layer.notes else (removed >= 2).all()
    report = prune(make("convnext"), pattern="2:4", sparsity=None).report
    assert all("49 inputs do not divide" in reason and "dwconv" in name for name, reason in report.skipped.items())
    assert len(report.skipped) == 3


def test_channels_last_weights_are_pruned_in_place():
    plain, last = make("resnet"), make("resnet").to(memory_format=torch.channels_last)
    pointers = [parameter.data_ptr() for parameter in last.parameters()]
    prune(plain)
    prune(last)
    assert pointers == [parameter.data_ptr() for parameter in last.parameters()]
    for key, tensor in plain.state_dict().items():
        torch.testing.assert_close(tensor, last.state_dict()[key], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("lam", [0.5, 1.0])
def test_all_layers_are_calibrated_in_one_pass_if_memory_suffices(lam):
    for name, targets in (("resnet", ["convolution", "classifier"]), ("convnet", None)):
        calls = []
        model = make(name)
        handle = model.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        prune(model, lam=lam, targets=targets)
        handle.remove()
        probes = 2 * (name == "resnet") + 2 * (
            lam < 1
        )  # of the block sequence and the layers reached; of separable samples
        assert len(calls) == SAMPLES // 2 + probes


def test_a_memory_limit_takes_more_passes_to_the_same_weights():
    whole, parts = make("resnet"), make("resnet")
    prune(whole)
    calls = []
    handle = parts.register_forward_pre_hook(lambda *_: calls.append(1))
    prune(parts, max_memory=5 * SAMPLES * 16 * 144 * 4)
    handle.remove()
    assert len(calls) > 3 * SAMPLES // 2
    for key, tensor in whole.state_dict().items():
        torch.testing.assert_close(tensor, parts.state_dict()[key], rtol=1e-4, atol=1e-5)


def test_first_and_last_layer_of_a_plain_module_stay_dense_unless_named():
    model = make("convnet")
    report = prune(model).report
    assert {layer.name for layer in report.layers} == {"grouped", "depthwise", "dilated", "side", "inner"}
    assert "first layer" in report.skipped["stem"] and "last layer" in report.skipped["head"]
    report = prune(make("convnet"), targets=["stem", "head"]).report
    assert {layer.name for layer in report.layers} == {"stem", "head"} and not report.skipped
    short = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 14 * 14, 5))
    with pytest.raises(MoonshotError, match="nothing to prune: 0: the first layer .* 2: the last layer .* targets"):
        prune(short)
    assert prune(short, targets=["0"]).report.sparsity == 0.5
    tokens = make("convnet")  # parameters of the model itself are not a layer
    tokens.position = nn.Parameter(torch.zeros(1, 5, 4))
    assert "first layer" in find_structure(tokens).skipped["stem"]
    words = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 9))
    assert [layer.name for layer in find_structure(words).layers()] == ["1"]


def test_a_convolution_that_overrides_forward_stays_dense():
    torch.manual_seed(0)
    bit = hf.BitForImageClassification(
        hf.BitConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_groups=4, num_labels=5)
    )
    with pytest.raises(MoonshotError, match="WeightStandardizedConv2d overrides the forward"):
        prune(bit)
    model = make("convnet")
    nn.utils.parametrizations.weight_norm(model.side)
    report = prune(model).report
    assert "its weight is computed" in report.skipped["side"]


class ChangesItsInput(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1), nn.Linear(4, 5)

    def forward(self, images):
        x = self.first(images).clone()
        y = self.second(x)
        x.relu_()
        return self.last((x + y).mean((2, 3)))


def test_an_input_changed_in_place_is_an_error():
    with pytest.raises(MoonshotError, match="second: the model changes this layer's input in place"):
        prune(ChangesItsInput())
    assert prune(ChangesItsInput(), lam=1).report.sparsity == 0.5


def test_several_images_per_sample_are_calibrated_one_sample_at_a_time():
    class Frames(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = make("convnet")

        def forward(self, clips):
            return self.net(clips.flatten(0, 1)).unflatten(0, clips.shape[:2]).mean(1)

    clips = [{"clips": torch.randn(1, 4, 3, 16, 16), "labels": torch.tensor([i % 5])} for i in range(SAMPLES)]
    assert prune(Frames(), clips).report.sparsity == pytest.approx(0.5, abs=0.01)
    pairs = [
        {key: torch.cat([clip[key] for clip in clips[i : i + 2]]) for key in clips[0]} for i in range(0, SAMPLES, 2)
    ]
    together, alone = prune(Frames(), pairs).report, prune(Frames(), clips).report
    assert any("one sample at a time: the inputs of net." in note for note in together.notes)
    assert [layer.loss for layer in together.layers] == [layer.loss for layer in alone.layers]


def test_runs_repeat_bit_for_bit():
    first, second = make("resnet"), make("resnet")
    prune(first)
    prune(second)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    model = make("resnet").to(dtype)
    report = prune(model).report
    for layer in report.layers:
        assert 0 < layer.fisher < 1
        weight = model.get_submodule(layer.name).weight
        assert_zeros(layer, weight, round(0.5 * weight.numel()))


@pytest.mark.parametrize("allocation", ["owl", "alpha"])
@pytest.mark.parametrize("name", ["convnext", "convnet"])
def test_sparsity_is_allocated_between_convolutions(name, allocation):
    model = make(name)
    report = prune(model, allocation=allocation, solver="magnitude", lam=None).report
    total = sum(layer.shape[0] * layer.shape[1] for layer in report.layers)
    assert sum(round(layer.sparsity * layer.shape[0] * layer.shape[1]) for layer in report.layers) == round(total / 2)
    assert len({round(layer.sparsity, 2) for layer in report.layers}) > 1


def test_outliers_of_grouped_rows_use_the_inputs_of_their_group():
    torch.manual_seed(0)
    weight, squares = torch.randn(6, 10), torch.rand(3, 10)
    parts = list(weight.split(2))
    assert outlier_share([weight], [squares], 2.0) == outlier_share(parts, list(squares), 2.0)


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / "../shared/models").exists(), reason="no trained model beside the repository")
def test_a_trained_resnet_keeps_its_accuracy(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    from vision_models import batches, cifar10, resnet20

    model, test = resnet20(), batches(*cifar10("test"), 256)
    assert accuracy(model, test).value == 932 / 1017
    images, labels = cifar10("train")
    report = prune(model, batches(images[:24], labels[:24], 24), solver="obc", num_samples=24, lam=1.0).report
    assert len(report.layers) == 18 and set(report.skipped) == {"conv1", "linear"}
    assert accuracy(model, test).value > 0.9
