"""Recovery of quantized layers: weights on the grid, fixed zeros, straight-through gradients, resumed runs."""

import math
from functools import partial

import pytest
import torch
from marks import slow
from models import make, token_batches
from recovery_runs import assert_recovered, interrupt, same, state, without_seconds
from recovery_runs import prune as prune_and_recover

from optimum_moonshot import MoonshotError
from optimum_moonshot.model.layers import find_structure
from optimum_moonshot.objective.grid import Grid
from optimum_moonshot.objective.patterns import Unstructured
from optimum_moonshot.recover.blockwise import stage_patterns
from optimum_moonshot.recover.student import Master, StudentBlock, on_grid
from optimum_moonshot.recover.tuning import Tuner

prune = partial(prune_and_recover, recover_steps=10, recover_lr=0.02, quant_group=64)
KINDS = ["blockwise", "gradual"]


def layers(model):
    return list(find_structure(model).layers())


def matrices(model):
    return {layer.name: layer.matrix for layer in layers(model)}


def assert_on_grid(model, bits):
    for name, matrix in matrices(model).items():
        grid = Grid(bits, 64, matrix.dtype)
        step = grid.per_weight(grid.scales_of(matrix), matrix.shape[1])
        assert torch.equal(grid.values(grid.codes(matrix, step), step), matrix), name


@pytest.mark.parametrize("recover", KINDS)
@pytest.mark.parametrize(
    ("bits", "dtype"),
    [
        (4, torch.bfloat16),
        slow(4, torch.float32),
        *(slow(bits, dtype) for bits in (8, 3) for dtype in (torch.float32, torch.bfloat16)),
    ],
)
def test_the_result_is_on_the_grid(bits, dtype, recover):
    plain, model = make("llama").to(dtype), make("llama").to(dtype)
    prune(plain, bits=bits)
    report = prune(model, bits=bits, recover=recover)
    assert_on_grid(model, bits)
    assert all(block.loss_after <= block.loss_before for block in report.recovery)
    assert_recovered(report)
    before = matrices(plain)
    for name, matrix in matrices(model).items():
        assert ((matrix != 0).view(-1, 4).sum(1) <= 2).all(), name
        assert recover == "gradual" or not matrix[before[name] == 0].any(), name


@pytest.mark.parametrize("name", ["gpt2", "mixtral"])
def test_transposed_and_stacked_weights(name):
    model = make(name)
    assert_recovered(prune(model, bits=4, recover="blockwise"))
    assert_on_grid(model, 4)


@pytest.mark.parametrize("recover", KINDS)
def test_recovery_lowers_the_error_of_3_bits_clearly(recover):
    options = dict(bits=3, recover=recover, num_samples=64, recover_steps=30, recover_lr=0.05)
    report = prune(make("llama"), token_batches(64, length=24, size=8), **options)
    before, after = (sum(getattr(block, name) for block in report.recovery) for name in ("loss_before", "loss_after"))
    assert after < 0.9 * before


def test_zeros_of_a_dense_layer_train():
    """They are codes, not removed weights."""
    plain, model = make("llama"), make("llama")
    options = dict(pattern=None, bits=3, num_samples=64)
    prune(plain, token_batches(64), **options)
    assert_recovered(prune(model, token_batches(64), recover="blockwise", recover_lr=0.05, **options))
    before, after = matrices(plain), matrices(model)
    assert any(bool(after[name][before[name] == 0].any()) for name in after)
    assert_on_grid(model, 3)


@pytest.mark.slow
@pytest.mark.parametrize("recover", KINDS)
def test_without_a_gain_the_quantized_weights_are_kept(recover):
    plain, model = make("llama").bfloat16(), make("llama").bfloat16()
    prune(plain, bits=4)
    report = prune(model, bits=4, recover=recover, recover_lr=0.9)
    kept = [block for block in report.recovery if block.loss_after == block.loss_before]
    assert kept and all("no gain: the pruned weights were kept" in block.notes for block in kept)
    first = report.recovery[0]
    if first in kept:
        assert all(torch.equal(*pair) for pair in zip(block_weights(plain, 0), block_weights(model, 0), strict=True))


def block_weights(model, index):
    return [layer.matrix for layer in find_structure(model).blocks[index].layers]


@pytest.mark.slow
@pytest.mark.parametrize("recover", ["gradual", slow("blockwise")])
def test_an_interrupted_run_resumes_at_its_block(recover, tmp_path, monkeypatch):
    whole, resumed = make("llama").bfloat16(), make("llama").bfloat16()
    full = prune(whole, bits=4, recover=recover)
    interrupt(monkeypatch, Tuner, "finish", 2)
    folder = tmp_path / "partial"
    with pytest.raises(KeyboardInterrupt):
        prune(resumed, bits=4, recover=recover, resume_dir=folder)
    assert len(list(folder.glob("recovered/*.safetensors"))) == 1
    report = prune(resumed, bits=4, recover=recover, resume_dir=folder)
    assert same(resumed, state(whole)) and without_seconds(report) == without_seconds(full)


def literal(latent, scale, grid, gradient):
    """Weights and gradients one by one, in float64; halves round to even."""
    weight, by_latent, by_scale = torch.empty_like(latent), torch.empty_like(latent), torch.zeros_like(scale)
    for row in range(len(latent)):
        for j in range(latent.shape[1]):
            v, s, g = float(latent[row, j]), float(scale[row, j // grid.group]), float(gradient[row, j])
            ratio = v / s if s else 0.0
            if abs(ratio) <= grid.top:
                code, slope = round(ratio), round(ratio) - ratio
            else:
                code = slope = math.copysign(grid.top, ratio)
            weight[row, j] = code * s
            by_latent[row, j] = g
            by_scale[row, j // grid.group] += g * slope
    return weight, by_latent, by_scale


@pytest.mark.parametrize("bits", [8, 4, 3])
def test_gradients_equal_the_literal_ones(bits):
    """The last group is shorter, one has no weights, and some weights are outside of the grid."""
    generator, grid = torch.Generator().manual_seed(bits), Grid(bits, 64)
    latent = torch.randn(3, 150, generator=generator)
    scale = latent.abs().max() / grid.top * (0.4 + 0.4 * torch.rand(3, 3, generator=generator))
    latent[1, 64:128] = scale[1, 1] = 0
    gradient = torch.randn(3, 150, generator=generator)
    latent.requires_grad_(), scale.requires_grad_()
    weight = on_grid(latent, scale, grid)
    weight.backward(gradient)
    expected = literal(*(tensor.detach().double() for tensor in (latent, scale)), grid, gradient.double())
    assert (latent.abs() > grid.top * grid.per_weight(scale, 150)).any()
    for tensor, reference in zip((weight, latent.grad, scale.grad), expected, strict=True):
        assert torch.allclose(tensor.double(), reference, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_restored_grid_reproduces_the_weights(dtype):
    layer, grid = layers(make("llama").to(dtype))[0], Grid(4, 64, dtype)
    step = grid.per_weight(grid.search(layer.matrix, torch.ones(1, layer.shape[1])), layer.shape[1])
    weight = grid.values(grid.codes(layer.matrix, step), step)
    master = Master(torch.nn.Parameter(weight.float()), dtype, layer)
    master.put_on_grid(Unstructured(0.5, grid=grid), layer.matrix)
    assert torch.equal(master.weight(), weight.float())


def test_weights_that_left_the_grid_are_refused():
    (block, *_) = find_structure(make("llama")).blocks
    patterns = {layer.name: Unstructured(0.0, grid=Grid(4, 64)) for layer in block.layers}
    with pytest.raises(MoonshotError, match="not on a grid of 4 bits"):
        StudentBlock(block, [(layer, layer.matrix) for layer in block.layers], set(patterns), patterns)


def test_only_the_last_stage_has_the_grid():
    *stages, last = stage_patterns(Unstructured(0.5, grid=Grid(4, 64)))
    assert last.grid == Grid(4, 64) and not any(stage.grid for stage in stages)
