"""Statistics on the pruned prefix, against a model whose first blocks are pruned."""

import copy
import re
from types import SimpleNamespace

import pytest
import torch
import transformers as hf
from blockwise_statistics import CHAINS, CONVOLUTIONAL, batches_for, close, slow_statistics
from failing_calls import FailingCalls
from llama_runs import assert_same, config, prune, weights
from models import CAUSAL, EDGE, image_batches, make, token_batches
from report_totals import target_zeros, total_size
from torch import nn

from optimum_moonshot import MoonshotConfig, MoonshotError, MoonshotPruner
from optimum_moonshot.calibration.observer import Observer
from optimum_moonshot.data.batches import shorten
from optimum_moonshot.model.calls import frozen
from optimum_moonshot.model.layers import find_structure
from optimum_moonshot.pipeline.block_sequences import find_sequence, probe_blocks
from optimum_moonshot.pipeline.inputs import prepare
from optimum_moonshot.pipeline.model_pipeline import ModelPipeline, swapped_weights
from optimum_moonshot.pipeline.selection import Subject, select
from optimum_moonshot.solvers.sparsegpt import SparseGPT

SHARED = dict(vocab_size=96, d_model=16, d_ff=24, d_kv=4, num_layers=3, num_heads=4, **EDGE)


class Boom(Exception):
    pass


def masked(layer):
    """A deterministic pruned weight that differs clearly from the dense one."""
    generator = torch.Generator().manual_seed(layer.shape[0] + len(layer.name))
    return layer.matrix * (torch.rand(layer.shape, generator=generator) < 0.5)


def gather(model, batches, gradients=True, targets=None):
    """{layer: statistics}, the numbers of passes, and the weights that `masked` gives each layer after its stage."""
    samples = sum(len(next(iter(batch.values()))) for batch in batches)
    sizes = dict(num_samples=samples, batch_size=max(len(next(iter(batch.values()))) for batch in batches))
    options = dict(lam=0.5 if gradients else 1, fisher="rows", sparsity=0.5, targets=targets, recompute=True)
    selection = select(model, MoonshotConfig(solver="sparsegpt", **options, **sizes))
    prepared = prepare(Subject(model, progress=False), selection, batches)
    pruned = {layer.name: masked(layer) for layer in selection.layers}
    statistics, lacking = {}, SimpleNamespace(lacks=lambda layer: layer.name not in statistics)
    with frozen(model):
        pipeline = ModelPipeline(prepared, lacking, lambda layer: pruned[layer.name])
        for step in pipeline:
            differentiated = {layer.name for layer in step.layers} if gradients else set()
            with Observer(list(step.layers), False, differentiated, samples, prepared.storage) as observer:
                step.observe(observer, True)
            statistics |= {layer.name: observer.take(layer) for layer in step.layers}
            step.advance()
    (note,) = pipeline.notes
    kinds = "block passes forwards", "backwards", "passes of the whole model"
    return statistics, [sum(map(int, re.findall(rf"(\d+) {kind}", note))) for kind in kinds], pruned


def check(model, batches, gradients=True, targets=None):
    before = weights(model)
    statistics, passes, pruned = gather(model, batches, gradients, targets)
    assert_same(model, before)
    reference = copy.deepcopy(model)
    structure = find_structure(reference, targets)
    stages = [block.layers for block in structure.blocks if block.layers] + [(layer,) for layer in structure.outside]
    for layers in stages:
        grams, samples = slow_statistics(reference, list(layers), batches)
        for layer in layers:
            assert close(statistics[layer.name].inputs, grams[layer.name]), layer.name
            fisher = statistics[layer.name].gradients
            assert (fisher is not None) == gradients
            assert fisher is None or close(fisher.gradients, samples[layer.name])
        for layer in layers:
            layer.assign(pruned[layer.name])
    return passes


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("name", [*CHAINS])
def test_statistics_are_those_of_a_model_whose_prefix_is_pruned(name, gradients):
    batches = batches_for(name, padded=True) if name in CAUSAL else batches_for(name)
    targets = ("self_attn",) if name == "mixtral" else None  # experts need batches of one sample
    passes = check(make(name), batches, gradients, targets)
    # Pruned blocks give the inputs of the next one; with gradients, each of the 3 blocks and the later ones run twice.
    counts = (2 * (3 + 2 + 1) + 2, 3 + 2 + 1) if gradients else (3 + 2, 0)
    assert passes == [*counts, 0]


def test_layers_outside_of_the_blocks_come_last():
    passes = check(make("llama"), token_batches(padded=True), targets=[r"layers\.[12]\.", "lm_head"])
    assert passes == [1 + 2 * 2 + 1 + 2 * 1, 2 + 1, 1]


@pytest.mark.parametrize("name", ["bert", "albert"])
def test_masked_language_models_at_lambda_one(name):
    passes = check(make(name), token_batches(padded=True), gradients=False)
    assert (passes[2] > 0) == (name == "albert")


def test_a_block_with_more_outputs_than_its_hidden_state_is_never_skipped():
    torch.manual_seed(0)
    model = hf.T5ForTokenClassification(hf.T5Config(**SHARED, num_labels=96)).eval()
    batches = token_batches(padded=True)
    blocks = find_structure(model).blocks
    with frozen(model):
        assert find_sequence(model, blocks, shorten(batches[0]), False, None).extras is None
        with pytest.raises(MoonshotError, match="depend on what other blocks compute"):
            probe_blocks(model, blocks, shorten(batches[0]), False, None)
    passes = check(model, batches, gradients=False)
    assert passes == [0, 0, 3]


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("name", CONVOLUTIONAL)
def test_non_sequential_models_run_as_a_whole(name, gradients):
    model = make(name)
    passes = check(model, image_batches(), gradients)
    structure = find_structure(model)
    stages = sum(bool(block.layers) for block in structure.blocks) + len(structure.outside)
    assert passes == [0, 0, stages] and stages > 1


@pytest.mark.parametrize("name", list(CAUSAL))
@pytest.mark.parametrize("lam", [1.0, 0.9])
def test_every_architecture(name, lam):
    model = make(name)
    report = prune(model, token_batches(padded=True), recompute=True, lam=lam).report
    assert report.sparsity == 0.5
    assert any("recomputed on the pruned prefix" in note and "whole model" not in note for note in report.notes)
    assert all("forward" not in module.__dict__ for module in model.modules())


@pytest.mark.parametrize("solver", ["sparsegpt", "wanda"])
@pytest.mark.parametrize("lam", [1.0, 0.5])
def test_recomputation_changes_later_blocks_only(solver, lam):
    once, again = make("llama"), make("llama")
    prune(once, solver=solver, lam=lam, targets=[r"layers\.0\."], recompute=False)
    prune(again, solver=solver, lam=lam, targets=[r"layers\.0\."], recompute=True)
    for name, tensor in again.state_dict().items():
        torch.testing.assert_close(tensor, once.state_dict()[name], rtol=1e-4, atol=1e-5)
    once, again = make("llama"), make("llama")
    prune(once, solver=solver, lam=lam, recompute=False)
    prune(again, solver=solver, lam=lam, recompute=True)
    name = "model.layers.2.mlp.up_proj.weight"
    assert not torch.allclose(again.state_dict()[name], once.state_dict()[name], atol=1e-3)


def test_recomputation_equals_pruning_one_block_after_the_other():
    whole, stepwise = make("gpt2"), make("gpt2")
    prune(whole, recompute=True, lam=1)
    for k in range(3):
        prune(stepwise, targets=[rf"\.h\.{k}\."], lam=1)
    for name, tensor in whole.state_dict().items():
        torch.testing.assert_close(tensor, stepwise.state_dict()[name], rtol=1e-4, atol=1e-5)


def test_blocks_before_the_current_one_do_not_run_again():
    model = make("llama")
    calls = [0, 0, 0]
    for k, block in enumerate(model.model.layers):

        def count(_, args, output, k=k):
            calls[k] += output.shape[:2] == (2, 12)  # excludes the small samples of the probe

        block.input_layernorm.register_forward_hook(count)
    prune(model, recompute=True, lam=0.9, fisher="rows", batch_size=2)
    probe = 1  # one batch of two, to separate its samples
    assert calls == [3 * (2 + 1) + probe, 3 * (2 * 2 + 1) + probe, 3 * 3 * 2 + probe]
    calls[:] = [0, 0, 0]
    prune(model, recompute=True, lam=0.9, fisher="shared", batch_size=2)
    # Cached and differentiated when dense, then observed dense and advanced with pruned weights.
    assert calls == [3 * 4 + probe, 3 * 4 + probe, 3 * 3 + probe]
    calls[:] = [0, 0, 0]
    prune(model, recompute=True, lam=1)
    assert calls == [3 * 2, 3 * 2, 3]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models(dtype):
    model = make("llama").to(dtype)
    assert prune(model, recompute=True).report.sparsity == 0.5 and model.dtype == dtype


def test_small_memory_gives_the_same_statistics_in_more_passes():
    plenty, little = make("llama"), make("llama")
    settings = {"recompute": True, "fisher": "rows"}
    reports = [prune(plenty, **settings).report, prune(little, **settings, max_memory=60_000).report]
    assert_close(little, plenty)
    few, many = (int(report.notes[-1].split(": ")[1].split()[0]) for report in reports)
    assert few == 14 and many > 20


def assert_close(model, other):
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, other.state_dict()[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("lam", [1.0, 0.9])
def test_runs_are_reproducible_bit_for_bit(lam):
    first, second = make("llama"), make("llama")
    prune(first, recompute=True, lam=lam)
    prune(second, recompute=True, lam=lam)
    assert_same(first, weights(second))


@pytest.mark.parametrize("lam", [1.0, 0.9])
@pytest.mark.parametrize("solved", [0, 6, 7, 16])
def test_a_killed_run_resumes_at_its_first_unsolved_layer(tmp_path, monkeypatch, solved, lam):
    whole, resumed = make("llama"), make("llama")
    prune(whole, recompute=True, lam=lam)
    solve = FailingCalls(monkeypatch, (SparseGPT, "solve"), {solved}, Boom())
    folder, settings = tmp_path / "partial", config(recompute=True, lam=lam)
    with pytest.raises(Boom):
        MoonshotPruner(resumed, settings).prune(token_batches(), progress=False, resume_dir=folder)
    MoonshotPruner(resumed, settings).prune(token_batches(), progress=False, resume_dir=folder)
    assert solve.calls == 1 + 21
    assert_same(resumed, weights(whole))


def state(model):
    """The state that a run must not change: tensors, addresses, gradients, modes, hooks, replaced methods."""
    parameters = [
        (parameter.data_ptr(), parameter.detach().clone().tolist(), parameter.requires_grad, parameter.grad)
        for parameter in model.parameters()
    ]
    modules = [
        (module.training, "forward" in module.__dict__, len(module._forward_hooks), len(module._forward_pre_hooks))
        for module in model.modules()
    ]
    return parameters, modules


@pytest.mark.parametrize("error", [Boom, KeyboardInterrupt])
@pytest.mark.parametrize("name", ["llama", "albert"])
@pytest.mark.parametrize("lam", [1.0, 0.9])
def test_a_failure_anywhere_leaves_the_model_unchanged(error, name, lam, monkeypatch):
    model = make(name).train()
    batches = [{**batch, "labels": batch["input_ids"]} if name == "albert" else batch for batch in token_batches()]
    options = dict(recompute=True, lam=lam, solver="wanda", **(dict(targets=["layers"]) if name == "llama" else {}))
    before = state(model)
    calls, original = [0, -1], nn.Linear.forward

    def forward(self, *args):
        calls[0] += 1
        if calls[0] == calls[1]:
            raise error
        return original(self, *args)

    monkeypatch.setattr(nn.Linear, "forward", forward)
    prune(copy.deepcopy(model), batches, **options)
    total = calls[0]
    for place in torch.linspace(1, total, 12).int().tolist():
        calls[:] = [0, place]
        with pytest.raises(error):
            prune(model, batches, **options)
        assert state(model) == before, place


def test_lent_weights_are_restored_in_every_layout():
    for name in ("llama-tied-biased", "gpt2", "opt"):
        model = make(name)
        layers = tuple(find_structure(model).layers())
        before, addresses = weights(model), [layer.parameter.data_ptr() for layer in layers]
        with pytest.raises(Boom), swapped_weights(layers, masked):
            assert all(0.3 < (layer.matrix == 0).float().mean() < 0.7 for layer in layers)
            raise Boom
        assert_same(model, before)
        assert addresses == [layer.parameter.data_ptr() for layer in layers]
        with pytest.raises(RuntimeError), swapped_weights(layers, lambda layer: torch.zeros(1, 2)):
            pass
        assert_same(model, before)


def test_lambda_one_runs_no_backward_pass(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a backward pass ran")

    monkeypatch.setattr(torch.autograd, "backward", refuse)
    monkeypatch.setattr(torch.autograd, "grad", refuse)
    prune(make("llama"), lam=1, recompute=True)


@pytest.mark.parametrize("recompute", [False, True])
def test_a_head_without_fisher_loss_beside_an_attention_with_one(recompute):
    model = make("llama")
    report = prune(model, targets=["self_attn", "lm_head"], fisher_layers="attention", recompute=recompute).report
    assert report.layers[-1].name == "lm_head" and report.layers[-1].lam == 1 and report.layers[0].lam == 0.9


def test_recomputation_without_data_is_an_error():
    with pytest.raises(MoonshotError, match="recompute=True: without calibration data"):
        MoonshotPruner(make("llama"), config(solver="magnitude", recompute=True)).prune(progress=False)


def test_recomputation_with_a_custom_loss_and_an_allocation():
    model = make("llama")
    options = dict(pattern="unstructured", sparsity=0.5, allocation="owl", recompute=True, lam=0.5)
    pruner = MoonshotPruner(model, config(**options))
    report = pruner.prune(
        token_batches(), loss=lambda output, batch: output.logits.float().square().mean((1, 2)), progress=False
    )
    assert target_zeros(report) == total_size(report) // 2
