"""Pruned experts keep their zeros while they train: under the Trainer, and under masked adapters."""

import copy

import pytest
import torch
from lora_models import logits, lora, train
from masked_models import zeros
from models import token_batches
from tiny_mixtures import experts, family, mixtral, same
from training_runs import HALF, samples, trainer

from optimum_moonshot import MoonshotCallback, MoonshotConfig, MoonshotError, MoonshotPruner
from optimum_moonshot.masks import find_pruned
from optimum_moonshot.model.calls import run_model
from optimum_moonshot.model.layer_kinds import expert_parameters

peft = pytest.importorskip("peft")
from optimum_moonshot.integrations.peft import (  # noqa: E402
    SparseLoraConfig,
    SparseParameter,
    sparse_lora,
)


def pruned(model=None, pattern="2:4"):
    model = (model or mixtral()).float()
    MoonshotPruner(model, MoonshotConfig(solver="magnitude", pattern=pattern)).prune(progress=False)
    return model


def fused(model):
    """The experts' parameters by the names that PEFT uses."""
    keys = {
        f"{name.rpartition('.')[2]}.{key}"
        for name, module in model.named_modules()
        for key in expert_parameters(module)
    }
    return sorted(keys)


def adapted_experts(model, **changes):
    return lora(model, target_modules=[], target_parameters=fused(model), **changes)


def wrappers(model):
    return [module for module in model.modules() if isinstance(module, SparseParameter)]


def test_experts_that_a_resumed_training_does_not_restore_are_an_error(tmp_path):
    """Their names in the files are others, and a Trainer leaves them as they are; those of the checkpoint are right."""
    config = MoonshotConfig(pattern="2:4", solver="magnitude", num_samples=4)
    settings = dict(max_steps=4, save_strategy="steps", save_steps=2)
    whole = trainer(tmp_path, mixtral().float(), MoonshotCallback(config, begin_step=1), **settings)
    whole.train()
    checkpoint = tmp_path / "checkpoint-2"
    resumed = trainer(tmp_path / "again", mixtral().float(), MoonshotCallback(config, begin_step=1), **settings)
    with pytest.raises(
        MoonshotError, match="resume_from_checkpoint: .*not restored.*was 0.5000; create the model by from_"
    ):
        resumed.train(resume_from_checkpoint=str(checkpoint))
    model = type(whole.model).from_pretrained(checkpoint)
    resumed = trainer(tmp_path / "again", model, MoonshotCallback(config, begin_step=1), **settings)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert same(whole.model, resumed.model)


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "llama4_text", "jetmoe", "nemotron_h", "hunyuan_v1_moe"])
def test_a_merge_keeps_zeros_and_function(name):
    """In every layout: [E, out, in], [E, in, out], with biases, one expert."""
    model = pruned(family(name))
    plain, before = copy.deepcopy(model), zeros(model)
    try:
        filled = adapted_experts(copy.deepcopy(model)).merge_and_unload()
    except RuntimeError:
        pytest.skip("this release of PEFT does not adapt a layer of one expert")
    assert not any(int((layer.parameter == 0).sum()) for layer in experts(filled))
    adapted = train(sparse_lora(adapted_experts(model)), steps=2)
    assert len(wrappers(adapted)) == len(experts(plain))
    expected = logits(adapted)
    merged = adapted.merge_and_unload()
    assert (logits(merged) - expected).abs().max() <= 1e-4
    for layer in find_pruned(merged):
        assert torch.equal(layer.matrix == 0, before[layer.name])
    assert set(zeros(merged)) == set(before) and not same(merged, plain)


def test_the_gradients_are_those_of_the_masked_product():
    model, batch, name = pruned(), token_batches()[0], "model.layers.1.mlp.experts.gate_up_proj"
    plain = copy.deepcopy(model)
    adapted = sparse_lora(lora(model, target_modules=[], target_parameters=["1.mlp.experts.gate_up_proj"]))
    (wrapper,) = wrappers(adapted)
    run_model(adapted, batch).logits.square().sum().backward()
    a, b = (part["default"].weight.detach().clone().requires_grad_() for part in (wrapper.lora_A, wrapper.lora_B))
    weight, delta = plain.get_parameter(name), torch.einsum("ore,eri->eoi", b.view(-1, 4, 4), a.view(4, 4, -1)) * 2.0
    delta = delta if delta.shape == weight.shape else delta.mT  # the layout of earlier releases of PEFT
    changed = torch.func.functional_call(plain, {name: weight + delta * (weight != 0)}, kwargs=batch)
    changed.logits.square().sum().backward()
    for adapter, factor in ((wrapper.lora_A, a), (wrapper.lora_B, b)):
        assert factor.grad.any()
        torch.testing.assert_close(adapter["default"].weight.grad, factor.grad, rtol=1e-3, atol=1e-4)


def test_adapters_of_experts_are_saved_and_loaded(tmp_path):
    model = pruned()
    dense = copy.deepcopy(model)
    adapted = train(sparse_lora(adapted_experts(model)), steps=2)
    adapted.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(copy.deepcopy(dense), tmp_path)
    assert torch.equal(logits(loaded), logits(adapted)) and len(wrappers(loaded)) == 4


def test_a_configuration_masks_experts_and_linear_layers(tmp_path, caplog):
    """As soon as PEFT creates the adapters, a second one too; the Trainer logs a warning for an unmasked one."""
    model = pruned()
    unmasked = copy.deepcopy(model)
    settings = dict(r=2, target_modules=["q_proj"], target_parameters=fused(model), init_lora_weights=False)
    adapted = peft.get_peft_model(model, SparseLoraConfig(**settings))
    try:
        adapted.add_adapter("second", SparseLoraConfig(**settings))
    except ValueError:
        pytest.skip("this release of PEFT has one adapter with target_parameters")
    assert len(wrappers(adapted)) == 4
    before = zeros(adapted)
    adapted.base_model.set_adapter(["default", "second"])
    expected = logits(adapted)
    merged = adapted.merge_and_unload(adapter_names=["default", "second"])
    assert (logits(merged) - expected).abs().max() <= 1e-4
    for mask, layer in zip(before.values(), find_pruned(merged), strict=True):
        assert torch.equal(layer.matrix == 0, mask)
    trainer(tmp_path, adapted_experts(unmasked), MoonshotCallback(), max_steps=1).train()
    assert "4 pruned layers have adapters without a mask (base_model.model.model.layers.0.mlp.experts" in caplog.text


def test_masked_adapters_of_experts_under_the_trainer(tmp_path):
    model = pruned()
    before = zeros(model)
    adapted = sparse_lora(adapted_experts(model))
    run = trainer(tmp_path, adapted, MoonshotCallback(), max_steps=2)
    run.train()
    assert run.state.log_history[-1]["moonshot_sparsity"] == 0.5
    merged = adapted.merge_and_unload()
    assert all(torch.equal(layer.matrix == 0, before[layer.name]) for layer in find_pruned(merged))


@pytest.mark.parametrize("changes", [{}, {"bf16": True}, {"gradient_checkpointing": True}], ids=str)
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_experts_keep_their_zeros_under_the_trainer(name, changes, tmp_path, capsys):
    model = pruned(family(name))
    before, old = zeros(model), [layer.parameter.detach().clone() for layer in experts(model)]
    run = trainer(tmp_path, model, MoonshotCallback(), max_steps=3, **changes)
    run.train()
    assert {layer.name for layer in experts(model)} <= before.keys()
    assert all(torch.equal(layer.matrix == 0, before[layer.name]) for layer in find_pruned(model))
    assert not any(torch.equal(layer.parameter, was) for layer, was in zip(experts(model), old, strict=True))
    assert run.state.log_history[-1]["moonshot_sparsity"] == 0.5
    assert "every removed weight is zero; every layer is 2:4" in capsys.readouterr().out


def test_experts_are_pruned_during_training(tmp_path):
    model = mixtral()
    callback = MoonshotCallback(HALF, begin_step=1, end_step=3, every=1)
    trainer(tmp_path, model, callback, max_steps=5, data=samples(8)).train()
    assert sum("experts" in layer.name for layer in callback.report.layers) == 4
    for layer in experts(model):
        assert all(int((matrix == 0).sum()) == round(0.6 * matrix.numel()) for matrix in layer.parameter)
