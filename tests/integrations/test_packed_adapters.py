"""LoRA on layers that are packed in memory: the function, gradients and merges of dense layers."""

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lora_models import logits, lora, peft, train
from masked_models import loss_of, pruned, zeros
from models import token_batches
from packed_models import assert_state, held, state
from quantized_models import quantized
from tiny_mixtures import mixtral, prune

from optimum_moonshot import MoonshotError
from optimum_moonshot.checkpoint.in_memory import to_runtime
from optimum_moonshot.integrations.peft import (
    MARK,
    PackedLoraLinear,
    SparseLinear,
    SparseLoraConfig,
    SparsePackedLinear,
    sparse_lora,
)
from optimum_moonshot.packing.bitmask import Bitmask
from optimum_moonshot.runtime.packed_layers import PackedLinear

ROOT = Path(__file__).resolve().parents[2]
MASKED = pytest.mark.parametrize("masked", [False, True], ids=["plain", "masked"])
MODELS = pytest.mark.parametrize("name", ["llama", "gpt2"])


def packed(name="llama", dtype=torch.float32, **settings):
    model = pruned(name, **settings).to(dtype)
    to_runtime(model, "packed")
    return model


def both(name, dtype, masked):
    """A dense and a packed model with the same adapters."""
    models = [lora(pruned(name).to(dtype)), lora(packed(name, dtype))]
    peft.set_peft_model_state_dict(models[1], peft.get_peft_model_state_dict(models[0]))
    return [sparse_lora(model) if masked else model for model in models]


def gradients(model):
    loss_of(model, token_batches()[0]).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_an_adapter_of_packed_experts_is_refused(tmp_path):
    """PEFT finds no such parameter, and would leave the adapter out with a warning."""
    model = mixtral()
    prune(model, solver="magnitude", pattern="2:4")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], target_parameters=["mlp.experts.down_proj"])
    peft.get_peft_model(copy.deepcopy(model), config).save_pretrained(tmp_path)
    to_runtime(model, "packed")
    message = r"target_parameters='mlp\.experts\.down_proj'.*down_proj is packed in memory.*dequantize"
    for adapt in (lambda: peft.get_peft_model(model, config), lambda: peft.PeftModel.from_pretrained(model, tmp_path)):
        with pytest.raises(MoonshotError, match=message):
            adapt()
    model.dequantize()
    peft.PeftModel.from_pretrained(model, tmp_path)


@MODELS
@MASKED
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-4)], ids=str)
def test_outputs_and_gradients_are_those_of_dense_layers(name, masked, dtype, tolerance):
    dense, adapted = both(name, dtype, masked)
    assert held(adapted)
    assert_equal_training(dense, adapted, tolerance)


def assert_equal_training(dense, adapted, tolerance):
    """Equal logits and gradients of the adapters, and no other gradients."""
    assert (logits(dense) - logits(adapted)).abs().max() < tolerance
    expected, actual = gradients(dense.eval()), gradients(adapted.eval())
    assert actual.keys() == expected.keys() and all("lora_" in parameter for parameter in actual)
    for parameter, gradient in expected.items():
        assert (actual[parameter] - gradient).abs().max() < tolerance * gradient.abs().max(), parameter


@MODELS
@MASKED
@pytest.mark.parametrize("bits", [8, 4, 3])
def test_outputs_and_gradients_on_integer_codes_are_those_of_dense_layers(name, masked, bits):
    models = [quantized(name, torch.float32, bits).model for _ in range(2)]
    to_runtime(models[1], "packed", inputs="float")
    dense, adapted = (lora(model) for model in models)
    peft.set_peft_model_state_dict(adapted, peft.get_peft_model_state_dict(dense))
    dense, adapted = (sparse_lora(model) if masked else model for model in (dense, adapted))
    codecs = {module.codec.name for module in adapted.modules() if isinstance(module, PackedLinear)}
    assert codecs == {f"int{bits}g64"}
    assert_equal_training(dense, adapted, 1e-4)


@MASKED
@pytest.mark.parametrize("autocast", [False, True])
def test_training_holds_no_dense_matrix(masked, autocast):
    _, adapted = both("llama", torch.bfloat16, masked)
    layer = adapted.base_model.model.model.layers[0].mlp.up_proj
    saved = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda kept: kept)
    x = torch.randn(5, 16, dtype=torch.bfloat16, requires_grad=True)
    with hooks, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        outputs = layer(x)
    outputs.sum().backward()
    assert x.grad.abs().sum() > 0 and layer.lora_A["default"].weight.grad.abs().sum() > 0
    assert saved and not {(24, 16), (16, 24)} & {tuple(tensor.shape) for tensor in saved}


@MODELS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_masked_merge_is_that_into_the_dense_weight(name, dtype, tmp_path):
    dense, adapted = both(name, dtype, masked=True)
    names, expected = held(packed(name, dtype)), logits(adapted)
    merged, reference = adapted.merge_and_unload(), dense.merge_and_unload()
    assert held(merged) == names and not any(isinstance(module, PackedLoraLinear) for module in merged.modules())
    assert dtype == torch.bfloat16 or (logits(merged) - expected).abs().max() <= 1e-5
    merged.save_pretrained(tmp_path)
    merged.dequantize()
    for parameter, weight in reference.state_dict().items():
        assert torch.equal(merged.state_dict()[parameter], weight), parameter
    assert all(torch.equal(mask, zeros(merged)[layer]) for layer, mask in zeros(pruned(name)).items())
    again = type(merged).from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(again[parameter], weight) for parameter, weight in reference.state_dict().items())


def test_a_merged_adapter_can_be_unmerged():
    _, adapted = both("llama", torch.float32, masked=True)
    plain, expected = logits(packed()), logits(adapted)
    adapted.merge_adapter(safe_merge=True)
    assert (logits(adapted) - expected).abs().max() <= 1e-5
    with adapted.disable_adapter():
        assert (logits(adapted) - plain).abs().max() <= 1e-5
    assert (logits(adapted) - expected).abs().max() <= 1e-5


def test_the_bias_of_an_adapter_is_merged():
    adapted = sparse_lora(lora(packed("gpt2"), target_modules=["c_attn"], lora_bias=True))
    before = packed("gpt2").transformer.h[0].attn.c_attn.bias
    expected = logits(adapted)
    layer = adapted.base_model.model.transformer.h[0].attn.c_attn
    adapted.merge_adapter()
    assert (logits(adapted) - expected).abs().max() <= 1e-5
    assert not torch.equal(layer.get_base_layer().bias, before)
    adapted.unmerge_adapter()
    assert torch.allclose(layer.get_base_layer().bias, before, atol=1e-6)


@MODELS
def test_a_plain_adapter_is_merged_after_dequantization_only(name):
    dense, adapted = both(name, torch.float32, masked=False)
    expected = logits(adapted)
    with pytest.raises(MoonshotError, match=r"off its grid; call model.dequantize\(\) first, or train with Sparse"):
        adapted.merge_and_unload()
    assert torch.equal(logits(adapted), expected)
    adapted.dequantize()
    assert not held(adapted) and (logits(adapted) - expected).abs().max() <= 1e-5
    merged, reference = adapted.merge_and_unload().state_dict(), dense.merge_and_unload().state_dict()
    assert merged.keys() == reference.keys()
    assert all(torch.equal(merged[parameter], weight) for parameter, weight in reference.items())


@MODELS
def test_masks_survive_dequantization(name):
    dense, adapted = both(name, torch.float32, masked=True)
    adapted.dequantize()
    kinds = [{type(module) for module in model.modules() if hasattr(module, "lora_A")} for model in (dense, adapted)]
    assert kinds[0] == kinds[1] and SparseLinear in kinds[0]
    assert torch.equal(logits(adapted), logits(dense))
    merged, reference = adapted.merge_and_unload().state_dict(), dense.merge_and_unload().state_dict()
    assert all(torch.equal(merged[parameter], weight) for parameter, weight in reference.items())


@pytest.mark.parametrize("fails", [True, False], ids=["refused", "inexact"])
def test_a_format_that_cannot_hold_the_merged_weight_is_unchanged(fails, monkeypatch):
    adapted = sparse_lora(lora(packed("gpt2"), lora_bias=True))
    before = {name: tensor.clone() for name, tensor in adapted.state_dict().items()}
    pack = Bitmask.pack

    def on_a_grid(codec, matrix, pattern):
        if fails:
            raise MoonshotError("a weight is not on the grid")
        return pack(codec, (matrix * 8).round() / 8, pattern)

    monkeypatch.setattr(Bitmask, "pack", on_a_grid)
    hint = r"call model.dequantize\(\) first, or keep an adapter unmerged, beside the weight"
    with pytest.raises(MoonshotError, match=f"bitmask cannot represent the new weight; {hint}"):
        adapted.merge_adapter()
    assert not any(getattr(module, "merged", False) for module in adapted.modules())
    assert all(torch.equal(adapted.state_dict()[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize("bits", [8, 4, 3])
def test_a_masked_adapter_is_merged_into_codes_after_dequantization_only(bits):
    model = quantized("llama", torch.float32, bits).model
    to_runtime(model, "packed", inputs="float")
    adapted = sparse_lora(lora(model))
    before, expected = state(adapted), logits(adapted)
    hint = r"call model.dequantize\(\) first, or keep an adapter unmerged, beside the weight"
    with pytest.raises(MoonshotError, match=f"int{bits}g64 cannot represent the new weight; {hint}"):
        adapted.merge_and_unload()
    assert_state(adapted, before)
    adapted.dequantize()
    merged = adapted.merge_and_unload()
    assert not held(merged) and (logits(merged) - expected).abs().max() <= 1e-4
    pruned_model = quantized("llama", torch.float32, bits).model
    assert all(torch.equal(mask, zeros(merged)[layer]) for layer, mask in zeros(pruned_model).items())


@MODELS
def test_all_linear_selects_the_layers_of_the_dense_model(name):
    model = packed(name, targets=["mlp"])
    adapted = lora(model)
    assert adapted.peft_config["default"].target_modules == lora(pruned(name)).peft_config["default"].target_modules
    kinds = {name: type(module) for name, module in sparse_lora(adapted).named_modules() if hasattr(module, "lora_A")}
    assert {kind for name, kind in kinds.items() if "mlp" in name} == {SparsePackedLinear}
    assert {kind for name, kind in kinds.items() if "mlp" not in name} == {peft.tuners.lora.Linear}
    adapted.add_adapter("second", peft.LoraConfig(r=2, target_modules="all-linear"))
    assert adapted.peft_config["second"].target_modules == adapted.peft_config["default"].target_modules


def test_a_configuration_that_masks_from_the_start(tmp_path):
    config = SparseLoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    adapted = peft.get_peft_model(packed(), config)
    assert {type(module) for module in adapted.modules() if hasattr(module, "lora_A")} == {SparsePackedLinear}
    adapted.save_pretrained(tmp_path)
    assert MARK in (tmp_path / "adapter_config.json").read_text()
    for base in (packed(), pruned()):
        assert (logits(peft.PeftModel.from_pretrained(base, tmp_path)) - logits(adapted)).abs().max() <= 1e-5


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(use_dora=True), "up_proj: DoraLinearVariant fills the zeros"),
        (dict(init_lora_weights="pissa"), "up_proj: init_lora_weights='pissa'"),
    ],
)
def test_options_that_change_the_packed_weight_are_refused(options, words):
    with pytest.raises(MoonshotError, match=words):
        lora(packed(), **{"target_modules": ["up_proj"], **options})


@MASKED
@pytest.mark.parametrize("changes", [{}, {"gradient_checkpointing": True}, {"bf16": True}], ids=str)
def test_a_trainer_trains_adapters_of_a_packed_model(masked, changes, tmp_path):
    from training_runs import samples, trainer

    model = packed(dtype=torch.bfloat16)
    adapted = lora(model, init_lora_weights=True)
    before = {name: tensor.clone() for name, tensor in model.named_buffers()}
    run = trainer(tmp_path, sparse_lora(adapted) if masked else adapted, data=samples(4), max_steps=8, **changes)
    run.train()
    losses = [entry["loss"] for entry in run.state.log_history if "loss" in entry]
    assert sum(losses[-3:]) < 0.9 * sum(losses[:3])
    assert all(torch.equal(dict(model.named_buffers())[name], tensor) for name, tensor in before.items())


def test_adapters_that_transformers_adds_are_saved_alone(tmp_path):
    from training_runs import trainer

    model = packed()
    model.add_adapter(peft.LoraConfig(r=4, target_modules=["up_proj"], init_lora_weights=False))
    trainer(tmp_path, model).train()
    model.save_pretrained(tmp_path / "adapter")
    assert {path.name for path in (tmp_path / "adapter").glob("*.safetensors")} == {"adapter_model.safetensors"}
    again = packed()
    again.load_adapter(tmp_path / "adapter")
    assert (logits(again) - logits(model)).abs().max() <= 1e-5


RELOAD = """
import sys, torch
from optimum_moonshot import load_pruned
from peft import PeftModel
folder = sys.argv[1]
for name in ("plain", "masked"):
    for runtime in ("packed", "dense"):
        model = PeftModel.from_pretrained(load_pruned(folder + "/base", runtime), f"{folder}/{name}").eval()
        difference = model(input_ids=torch.load(folder + "/ids")).logits - torch.load(f"{folder}/{name}/logits")
        print(float(difference.abs().max()) <= 1e-5)
"""


@pytest.mark.slow
def test_adapters_are_loaded_in_another_process(tmp_path):
    packed().save_pretrained(tmp_path / "base")
    torch.save(token_batches()[0]["input_ids"], tmp_path / "ids")
    for name in ("plain", "masked"):
        adapted = train(lora(packed()) if name == "plain" else sparse_lora(lora(packed())))
        adapted.save_pretrained(tmp_path / name)
        torch.save(logits(adapted), tmp_path / name / "logits")
    command = [sys.executable, "-c", RELOAD, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0 and done.stdout.split() == ["True"] * 4, done.stderr
