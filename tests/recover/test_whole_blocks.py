"""Recovery trains every parameter of a block that lost neurons, heads or experts, and no other tensor of the model."""

from functools import partial

import pytest
import torch
import transformers as hf
from expert_removal import model_of, settled
from models import make, token_batches
from recovery_runs import (
    LITERAL_SAMPLES,
    SAMPLES,
    assert_recovered,
    interrupt,
    literal_batches,
    same,
    shuffled,
    state,
    without_seconds,
)
from recovery_runs import config as recovery_config
from recovery_runs import prune as prune_and_recover
from reference_recovery import recover
from removed_experts import logits
from torch import nn

from optimum_moonshot import MoonshotPruner, PruneReport
from optimum_moonshot.experts.removal import ExpertRemoval
from optimum_moonshot.model.layers import find_blocks, find_structure
from optimum_moonshot.pipeline import variant as variant_module
from optimum_moonshot.recover import tuning
from optimum_moonshot.recover.student import shared_names, trainable
from optimum_moonshot.recover.tuning import Tuner, split_heldout

STRUCTURED = dict(solver="osscar", pattern="structured", sparsity=0.5, recover_lr=0.01, num_samples=64)
EXPERTS = dict(solver="osscar", pattern="experts", sparsity=0.25, recover_lr=0.01)
SETTINGS = {"recover": "blockwise", "recover_steps": 10}
config, prune = partial(recovery_config, **SETTINGS), partial(prune_and_recover, **SETTINGS)


def mixture():
    return settled(model_of("qwen3_moe"))


def compacted(model, **changes):
    pruner = MoonshotPruner(model, config(**{**STRUCTURED, **changes}))
    report = pruner.prune(token_batches(64), progress=False)
    zeroed = logits(pruner.model, token_batches()[0])
    pruner.compact()
    return report, zeroed, logits(pruner.model, token_batches()[0]), pruner.model


@pytest.mark.parametrize("recover_by", ["blockwise", "gradual"])
@pytest.mark.parametrize("name", ["llama", "opt", "gpt2"])
def test_all_of_a_block_trains_but_dead_neurons_and_heads(name, recover_by):
    dense, model = make(name), make(name)
    flags = [parameter.requires_grad for parameter in model.parameters()]
    report = prune(model, token_batches(64), **{**STRUCTURED, "recover": recover_by})
    assert [parameter.requires_grad for parameter in model.parameters()] == flags
    assert_recovered(report)
    assert all(block.loss_after <= block.loss_before for block in report.recovery)
    assert any("trained all parameters of the blocks" in note for note in report.notes)
    for layer in report.layers:
        assert layer.sparsity == pytest.approx(0.5), layer.name
    before, parameters = state(dense), dict(model.named_parameters())
    changed = {key for key, tensor in parameters.items() if not torch.equal(tensor, before[key])}
    assert all(any(key.startswith(f"{block}.") for block, _ in find_blocks(model)) for key in changed)
    for block in report.recovery:
        inside = {key for key in parameters if key.startswith(f"{block.name}.")}
        if block.loss_after < block.loss_before:  # softmax does not depend on the bias of keys
            assert all("k_proj.bias" in key for key in inside - changed), inside - changed


def test_rows_that_produce_dead_neurons_keep_their_values():
    dense, model = make("llama"), make("llama")
    prune(model, token_batches(64), **STRUCTURED)
    for before, after in zip(dense.model.layers, model.model.layers, strict=True):
        dead = ~(after.mlp.down_proj.weight != 0).any(0)
        assert dead.sum() == dead.numel() // 2
        for key in ("gate_proj", "up_proj"):
            old, new = getattr(before.mlp, key).weight, getattr(after.mlp, key).weight
            assert torch.equal(old[dead], new[dead]) and not torch.equal(old[~dead], new[~dead])


@pytest.mark.parametrize("name", ["llama", "opt", "gpt2"])
def test_dead_groups_are_removed_after_a_recovery(name):
    report, zeroed, small, model = compacted(make(name))
    assert model.num_parameters() < report.parameters
    assert torch.allclose(zeroed, small, atol=1e-4)


def test_equals_the_literal_version(monkeypatch):
    monkeypatch.setattr(tuning, "EVALUATIONS", 1)
    batches = literal_batches(False)
    dense, plain, recovered = make("llama"), make("llama"), make("llama")
    settings = {**STRUCTURED, "num_samples": LITERAL_SAMPLES, "recover_steps": 3}
    prune(plain, batches, **{**settings, "recover": None})
    prune(recovered, batches, **settings)
    groups, _ = split_heldout([1] * LITERAL_SAMPLES)
    monkeypatch.undo()

    def whole(model):
        return [(block, list(block.parameters())) for _, block in find_blocks(model)]

    grouped = [[batches[index] for index in group] for group in groups]
    truth = recover(dense, plain, whole, grouped, shuffled(len(groups)), steps=3, lr=settings["recover_lr"])
    start, result = dict(plain.named_parameters()), dict(recovered.named_parameters())
    for name, expected in truth.named_parameters():
        assert (result[name] - expected).norm() <= 2e-3 * (expected - start[name]).norm(), name


def test_zeros_of_an_earlier_pruning_remain():
    sparse, model = make("llama"), make("llama")
    for each in (sparse, model):
        prune(each, recover=None, targets=["gate_proj", "q_proj"])
    prune(model, token_batches(64), **STRUCTURED)
    for name, weight in sparse.named_parameters():
        if "gate_proj" in name or "q_proj" in name:
            assert torch.equal(weight == 0, model.get_parameter(name) == 0), name


def test_parameters_that_other_blocks_share_do_not_train():
    dense, model = make("llama"), make("llama")
    for each in (dense, model):
        layers = each.model.layers
        layers[2].input_layernorm.weight = layers[0].input_layernorm.weight
        layers[1].mlp.gate_proj = layers[0].mlp.gate_proj
    names = shared_names(model, find_structure(model).blocks)
    assert names == {f"model.layers.{i}.input_layernorm.weight" for i in (0, 2)} | {
        f"model.layers.{i}.mlp.gate_proj.weight" for i in (0, 1)
    }
    prune(model, token_batches(64), **STRUCTURED)
    for name in names:
        assert torch.equal(model.get_parameter(name), dense.get_parameter(name)), name
    assert model.model.layers[2].input_layernorm.weight is model.model.layers[0].input_layernorm.weight
    assert not torch.equal(model.model.layers[2].mlp.gate_proj.weight, dense.model.layers[2].mlp.gate_proj.weight)


def test_tables_of_embeddings_and_integers_do_not_train():
    module = nn.Module()
    module.table, module.linear = nn.Embedding(4, 2), nn.Linear(2, 2)
    module.codes = nn.Parameter(torch.ones(3, dtype=torch.int8), requires_grad=False)
    assert trainable(module).keys() == {"linear.weight", "linear.bias"}


@pytest.mark.parametrize("kind", ["structured", "experts"])
def test_an_interrupted_run_resumes_bit_for_bit(kind, tmp_path, monkeypatch):
    new, settings = (partial(make, "llama"), STRUCTURED) if kind == "structured" else (mixture, EXPERTS)
    whole, resumed = new(), new()
    before = state(whole)
    full = prune(whole, token_batches(64), **settings)
    interrupt(monkeypatch, Tuner, "finish", 2)
    with pytest.raises(KeyboardInterrupt):
        prune(resumed, token_batches(64), **settings, resume_dir=tmp_path / "run")
    assert same(resumed, before)
    report = prune(resumed, token_batches(64), **settings, resume_dir=tmp_path / "run")
    assert any("1 recovered blocks were reused" in note for note in report.notes)
    assert same(resumed, state(whole)) and without_seconds(report) == without_seconds(full)


@pytest.mark.parametrize("kind", ["structured", "experts"])
def test_a_failure_while_results_are_written_restores_the_model(kind, monkeypatch):
    model, settings = (make("llama"), STRUCTURED) if kind == "structured" else (mixture(), EXPERTS)
    before, settings_before = state(model), model.config.to_dict()
    monkeypatch.setattr(variant_module, "NamedParameter", Failing)
    Failing.writes = 5
    with pytest.raises(KeyboardInterrupt):
        prune(model, **{**settings, "num_samples": SAMPLES})
    assert same(model, before) and model.config.to_dict() == settings_before


class Failing(variant_module.NamedParameter):
    """A parameter that cannot be written after some others were."""

    writes = 0

    def write(self, tensor):
        Failing.writes -= 1
        if Failing.writes == 0:
            raise KeyboardInterrupt
        super().write(tensor)


def test_recovery_that_gains_nothing_keeps_every_pruned_parameter():
    plain, model = make("llama"), make("llama")
    prune(plain, **{**STRUCTURED, "num_samples": SAMPLES, "recover": None})
    report = prune(model, **{**STRUCTURED, "num_samples": SAMPLES, "recover_lr": 0.9})
    assert all("no gain: the pruned weights were kept" in block.notes for block in report.recovery)
    assert same(model, state(plain))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_without_some_experts_are_tuned_with_their_router(dtype, tmp_path):
    plain, model = mixture().to(dtype), mixture().to(dtype)
    prune(plain, token_batches(64), **EXPERTS, num_samples=64, recover=None)
    report = prune(model, token_batches(64), **EXPERTS, num_samples=64)
    assert_recovered(report) if dtype == torch.float32 else None
    assert [block.name for block in report.recovery] == [name for name, _ in find_blocks(model)]
    assert all(block.loss_after <= block.loss_before for block in report.recovery)
    assert model.num_parameters() == plain.num_parameters() < mixture().num_parameters()
    for name, tensor in model.state_dict().items():
        inside, other = name.startswith("model.layers."), plain.state_dict()[name]
        assert tensor.shape == other.shape and tensor.dtype == dtype
        assert dtype == torch.bfloat16 or torch.equal(tensor, other) != inside, name
    assert PruneReport.from_dict(report.to_dict()).to_dict() == report.to_dict()
    assert report.seconds["total"] >= report.seconds["recovery"] > 0
    model.save_pretrained(tmp_path)
    assert same(hf.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype), state(model))


def test_the_loss_of_a_smaller_block_is_that_of_the_smaller_model(monkeypatch):
    """The blocks' losses before the recovery: those of the model without the experts."""
    dense, plain = mixture(), mixture()
    batches = token_batches(SAMPLES, size=1)
    report = prune(mixture(), batches, **EXPERTS, recover_steps=1)
    prune(plain, batches, **EXPERTS, recover=None)
    errors = []
    for batch in batches[-(SAMPLES // 8) :]:
        inputs = {key: value for key, value in batch.items()}
        states = [run(**inputs, output_hidden_states=True).hidden_states[1] for run in (plain, dense)]
        errors.append((states[0] - states[1]).square().sum(-1) / states[1].square().sum(-1))
    assert torch.cat(errors).mean().item() == pytest.approx(report.recovery[0].loss_before, rel=1e-4)


def test_a_failed_recovery_leaves_all_experts(monkeypatch):
    model = mixture()
    before, settings_before = state(model), model.config.to_dict()
    interrupt(monkeypatch, torch.Tensor, "backward", 3)
    monkeypatch.setattr(ExpertRemoval, "apply", lambda *_: pytest.fail("experts were removed"))
    with pytest.raises(KeyboardInterrupt):
        prune(model, **EXPERTS)
    assert same(model, before) and model.config.to_dict() == settings_before
