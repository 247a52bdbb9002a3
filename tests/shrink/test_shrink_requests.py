"""Requests to shrink a model that are refused, before anything is measured."""

import dataclasses

import pytest
import torch
from models import image_batches, make, token_batches

from optimum_moonshot import MoonshotConfig, MoonshotError, MoonshotPruner
from optimum_moonshot.distributed.ranks import SINGLE_PROCESS
from optimum_moonshot.pipeline.selection import Subject
from optimum_moonshot.shrink import trials
from optimum_moonshot.shrink.report import Target
from optimum_moonshot.shrink.request import check_request

CONFIG = MoonshotConfig(solver="osscar", pattern="structured", sparsity=0, num_samples=8, batch_size=4)
BATCHES = token_batches(8)


@pytest.fixture
def not_measured(monkeypatch):
    """A test that fails where a loss is measured."""

    def fail(*args):
        raise AssertionError("measured")

    monkeypatch.setattr(trials, "mean_loss", fail)


@pytest.mark.parametrize("batch_shape", [(0, 1), (1, 0), (1,), None, "ab", (1.5, 2), (-1, 4), (True, 1)])
def test_batch_shapes(not_measured, batch_shape):
    with pytest.raises(MoonshotError, match="^batch_shape="):
        MoonshotPruner(make("llama"), CONFIG).shrink(BATCHES, latency=0.9, batch_shape=batch_shape, progress=False)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ({"parameters": 1}, "parameters=1: the model is small enough; the dense model has 8,944 parameters"),
        ({"parameters": 9000}, "the model is small enough"),
        ({"bytes": "2GB"}, "bytes=2000000000: the model is small enough; the dense model has 35,776 bytes"),
        ({"parameters": 0.01}, "parameters=0.01: the smallest configuration has"),
        ({"bytes": "1KB"}, "bytes=1000: the smallest configuration has"),
        ({"latency": 0.5, "batch_shape": (1, 65)}, "the model has 64 positions"),
    ],
)
def test_targets_out_of_reach(not_measured, target, message):
    with pytest.raises(MoonshotError, match=message):
        MoonshotPruner(make("llama"), CONFIG).shrink(BATCHES, progress=False, **target)


def test_a_latency_out_of_reach_is_refused_before_losses_are_measured(not_measured, monkeypatch):
    monkeypatch.setattr("optimum_moonshot.shrink.costs.SECONDS", 0.0)
    with pytest.raises(MoonshotError, match="latency=10000.0: the model is small enough; the dense model has .* ms"):
        MoonshotPruner(make("llama"), CONFIG).shrink(BATCHES, latency=1e4, progress=False)


@pytest.mark.parametrize("name", ["vit", "deit"])
def test_an_image_model_loses_neurons_and_its_latency_is_refused(name):
    pruner = MoonshotPruner(make(name), CONFIG)
    with pytest.raises(MoonshotError, match="latency: it is measured on token ids, and .* needs other inputs"):
        pruner.shrink(image_batches(8), latency=0.8, progress=False)
    report = pruner.shrink(image_batches(8), parameters=0.8, progress=False)
    assert report.parameters[1] == pruner.model.num_parameters() <= 0.8 * report.parameters[0]
    assert "layer norms" in report.refused["hidden size"]


def test_a_sparse_model_is_refused_and_a_smaller_one_is_not():
    model = make("llama")
    MoonshotPruner(model, MoonshotConfig(solver="magnitude", pattern="2:4", lam=1)).prune(progress=False)
    zeros = sum(int((each == 0).sum()) for each in model.parameters())
    pruner = MoonshotPruner(model, CONFIG)
    with pytest.raises(MoonshotError, match=r"pruned already \(2:4\), and a smaller model would not keep its zeros"):
        pruner.shrink(BATCHES, parameters=0.5, progress=False)
    with pytest.raises(MoonshotError, match=r"pruned already \(2:4\), and a smaller hidden size would not keep"):
        pruner.reduce_width(8, BATCHES)
    assert pruner.model is model and zeros == sum(int((each == 0).sum()) for each in model.parameters())
    pruner = MoonshotPruner(make("llama"), CONFIG)
    sizes = [pruner.shrink(BATCHES, parameters=share, progress=False).parameters for share in (0.9, 0.8)]
    assert sizes[1][0] == sizes[0][1] > sizes[1][1]


def test_several_processes():
    ranks = dataclasses.replace(SINGLE_PROCESS, size=2)
    with pytest.raises(MoonshotError, match="shrink runs in one process; start it without a launcher"):
        check_request(Subject(make("llama"), ranks=ranks), CONFIG, BATCHES, Target.of(parameters=0.5), (1, 1), None)


def test_an_offloaded_model(not_measured, tmp_path):
    make("llama").save_pretrained(tmp_path)
    pruner = MoonshotPruner.from_pretrained(tmp_path, CONFIG, offload="disk")
    with pytest.raises(MoonshotError, match="model: its blocks are offloaded; load it without `offload`"):
        pruner.shrink(BATCHES, parameters=0.5, progress=False)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e38])
def test_a_loss_that_is_not_finite(value):
    """Of a model that returns NaN or infinity, or with gradients whose squares overflow."""
    model = make("llama")
    model.lm_head.weight.data[3] = value
    with pytest.raises(MoonshotError, match="NaN or infinite values"):
        MoonshotPruner(model, CONFIG).shrink(BATCHES, parameters=0.7, progress=False)


def test_a_loss_that_is_not_finite_without_some_parts(monkeypatch):
    """The dense model works, but not the one without a number of neurons, as where float16 overflows."""
    monkeypatch.setattr(trials, "mean_loss", lambda prepared: float("nan"))
    with pytest.raises(
        MoonshotError, match="the calibration loss of the model, heads without 1, is nan; check the mod"
    ):
        MoonshotPruner(make("llama"), CONFIG).shrink(BATCHES, parameters=0.7, progress=False)


def test_a_target_is_all_that_a_pruner_needs():
    pruner, other = (
        MoonshotPruner(make("llama")),
        MoonshotPruner(make("llama"), dataclasses.replace(CONFIG, num_samples=128)),
    )
    reports = [each.shrink(token_batches(128), parameters=0.9, progress=False) for each in (pruner, other)]
    assert reports[0].chosen == reports[1].chosen
    state, expected = pruner.model.state_dict(), other.model.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in state.items())
    with pytest.raises(MoonshotError, match="config: no configuration says what to remove"):
        pruner.prune(BATCHES)


def test_options_replace_those_of_the_configuration():
    pruner, other = MoonshotPruner(make("llama")), MoonshotPruner(make("llama"), CONFIG)
    chosen = pruner.shrink(BATCHES, parameters=0.9, num_samples=CONFIG.num_samples, progress=False).chosen
    assert chosen == other.shrink(BATCHES, parameters=0.9, progress=False).chosen
    assert pruner.config.num_samples == CONFIG.num_samples and pruner.report.config["num_samples"] == CONFIG.num_samples
    with pytest.raises(MoonshotError, match="unknown field sampels: a MoonshotConfig has"):
        pruner.shrink(BATCHES, parameters=0.9, sampels=4)
    with pytest.raises(MoonshotError, match="num_samples=0"):
        pruner.shrink(BATCHES, parameters=0.9, num_samples=0)
    with pytest.raises(MoonshotError, match="config: no configuration says what to remove"):
        pruner.prune(BATCHES)


def test_fewer_tokens_than_the_hidden_size_are_refused():
    """On 12 tokens, 12 of the 16 directions of the residual stream reproduce all hidden states."""
    pruner = MoonshotPruner(make("llama"), dataclasses.replace(CONFIG, num_samples=1))
    message = "12 calibration tokens are fewer than the hidden size, 16: .* give longer samples, or at least 2 of them"
    with pytest.raises(MoonshotError, match=message):
        pruner.shrink(token_batches(1, 12), parameters=0.8, progress=False)
