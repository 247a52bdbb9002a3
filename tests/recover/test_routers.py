"""Distillation of routers alone: nothing else changes, and the model without its experts is taught by the dense one."""

import dataclasses

import pytest
import torch
from expert_removal import model_of, settled
from models import make, token_batches
from recovery_runs import SAMPLES, config, interrupt, prune, same, state, without_seconds
from test_distill import divergence, heldout

from optimum_moonshot import MoonshotConfig, MoonshotError, MoonshotPruner
from optimum_moonshot.model.mixtures import router_names
from optimum_moonshot.recover.distill import Distillation
from optimum_moonshot.recover.run import TrainingBytes

ROUTERS = {"recover": "routers", "recover_steps": 10, "recover_lr": 0.02}
EXPERTS = {"solver": "osscar", "pattern": "experts", "sparsity": 0.25}
NEURONS = {"solver": "osscar", "pattern": "structured", "sparsity": 2 / 3, "targets": [r"experts\.down_proj"]}
SHRINKING = MoonshotConfig(solver="osscar", pattern="structured", sparsity=0, num_samples=SAMPLES, batch_size=4)
BATCHES = token_batches(SAMPLES)


def mixture(name="qwen3_moe"):
    return settled(model_of(name))


@pytest.mark.parametrize("changes", [{"pattern": "2:4"}, NEURONS, EXPERTS], ids=["2:4", "neurons", "experts"])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "mixtral"])
def test_only_routers_train(name, changes):
    plain, model = mixture(name), mixture(name)
    prune(plain, BATCHES, **changes)
    (block,) = prune(model, BATCHES, **changes, **ROUTERS).recovery
    assert block.loss_after < block.loss_before
    routers, expected = router_names(plain), state(plain)
    assert routers == {key for key in expected if ".gate." in key or ".router." in key} - {*dict(plain.named_buffers())}
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected[key]) == (key not in routers), key


@pytest.mark.parametrize("recover", ["routers", "distill"])
def test_the_teacher_of_a_model_without_experts_is_the_dense_one(recover):
    dense, plain, model = mixture(), mixture(), mixture()
    prune(plain, BATCHES, **EXPERTS)
    (block,) = prune(model, BATCHES, **EXPERTS, **{**ROUTERS, "recover": recover, "recover_lr": 0.01}).recovery
    assert model.config.num_experts == 3 and model.num_parameters() == plain.num_parameters()
    changed = [key for key, tensor in plain.named_parameters() if not torch.equal(tensor, model.get_parameter(key))]
    assert len(changed) == (2 if recover == "routers" else len(dict(plain.named_parameters())))
    batch = heldout(BATCHES)
    for each in (dense, plain, model):
        each.set_experts_implementation("eager")  # others have no float64
    with torch.no_grad():
        expected = [float(divergence(dense, each, batch) / batch["input_ids"].numel()) for each in (plain, model)]
    assert [block.loss_before, block.loss_after] == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("changes", [NEURONS, EXPERTS], ids=["neurons", "experts"])
def test_an_interrupted_run_resumes_bit_for_bit(changes, tmp_path, monkeypatch):
    whole, resumed = mixture(), mixture()
    dense, full = state(resumed), prune(whole, BATCHES, **changes, **ROUTERS)
    interrupt(monkeypatch, Distillation, "loss", 5)
    with pytest.raises(KeyboardInterrupt):
        prune(resumed, BATCHES, tmp_path / "run", **changes, **ROUTERS)
    assert same(resumed, dense) and resumed.config.num_experts == 4
    report = prune(resumed, BATCHES, tmp_path / "run", **changes, **ROUTERS)
    assert any("steps of the distillation were reused" in note for note in report.notes)
    assert same(resumed, state(whole)) and without_seconds(report) == without_seconds(full)


@pytest.mark.slow
def test_shrinking_trains_routers_after_experts_and_neurons_are_removed():
    """The decision does not depend on the recovery."""
    models = []
    for options in ({}, ROUTERS):
        pruner = MoonshotPruner(mixture("mixtral"), dataclasses.replace(SHRINKING, **options))
        report = pruner.shrink(BATCHES, parameters=0.4, progress=False)
        models.append((pruner, report))
    (plain, first), (recovered, second) = models
    assert (
        first.widths == second.widths and plain.model.config.to_dict().keys() == recovered.model.config.to_dict().keys()
    )
    (block,) = recovered.report.recovery
    assert block.loss_after <= block.loss_before
    names = router_names(plain.model)
    for key, tensor in plain.model.state_dict().items():
        assert key in names or torch.equal(tensor, recovered.model.state_dict()[key]), key


def test_models_and_runs_without_routers_to_train_are_refused(monkeypatch, tmp_path):
    with pytest.raises(MoonshotError, match="recover='routers': LlamaForCausalLM has no routers beside fused experts"):
        prune(make("llama"), BATCHES, **ROUTERS)
    mixture().save_pretrained(tmp_path)
    pruner = MoonshotPruner.from_pretrained(tmp_path, config(**EXPERTS, **ROUTERS), offload="disk")
    with pytest.raises(MoonshotError, match="offloaded blocks .* use recover='blockwise'"):
        pruner.prune(BATCHES, progress=False)
    monkeypatch.setattr(TrainingBytes, "of", lambda *_: TrainingBytes(*[2**50] * 4))
    with pytest.raises(MoonshotError, match="recover='routers': end-to-end training needs .* GiB in host memory"):
        prune(mixture(), BATCHES, **ROUTERS)


def test_the_memory_is_that_of_a_copy_and_the_routers():
    model = mixture()
    count, trained = (
        sum(map(torch.numel, values)) for values in (model.parameters(), map(model.get_parameter, router_names(model)))
    )
    size = TrainingBytes.of(model, config(**ROUTERS))
    assert size == TrainingBytes(4 * count, 12 * trained, 4 * trained, 20 * trained)
