"""LoRA on pruned models: the merge keeps the zeros and the function."""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers as hf
from lora_models import logits, lora, peft, train
from masked_models import pruned, zeros
from models import make, token_batches

from optimum_moonshot import MoonshotCallback, MoonshotError, MoonshotPruner
from optimum_moonshot.integrations.peft import MARK, SparseLinear, SparseLoraConfig, sparse_lora
from optimum_moonshot.masks import find_pruned, follows
from optimum_moonshot.objective.patterns import NM

ROOT = Path(__file__).resolve().parents[2]


def assert_sparse(model, before):
    for layer in find_pruned(model):
        assert torch.equal(layer.matrix == 0, before[layer.name]) and follows(layer.matrix, NM(2, 4)), layer.name


@pytest.mark.parametrize("name", ["llama", "qwen2", "opt", "gpt2"])
@pytest.mark.parametrize("changes", [{}, {"use_rslora": True}, {"init_lora_weights": True}], ids=str)
def test_a_merge_keeps_zeros_and_function(name, changes):
    model = pruned(name)
    before = zeros(model)
    adapted = train(sparse_lora(lora(model, **changes)))
    expected = logits(adapted)
    merged = adapted.merge_and_unload()
    assert (logits(merged) - expected).abs().max() <= 1e-5
    assert_sparse(merged, before)
    assert set(zeros(merged)) == set(before)
    assert (logits(merged) - logits(pruned(name))).abs().max() > 1e-3


def test_without_a_mask_the_merge_fills_the_zeros():
    merged = train(lora(pruned())).merge_and_unload()
    with pytest.raises(MoonshotError, match="no layer of the model is pruned"):
        find_pruned(merged)


def test_the_gradients_are_those_of_the_masked_product():
    model = pruned()
    layer = sparse_lora(lora(model)).base_model.model.model.layers[1].mlp.up_proj
    x = torch.randn(5, 16)
    layer(x).square().sum().backward()
    keep = layer.get_base_layer().weight != 0
    a, b = (m["default"].weight.detach().clone().requires_grad_() for m in (layer.lora_A, layer.lora_B))
    (x @ (layer.get_base_layer().weight + keep * (b @ a) * 2.0).T).square().sum().backward()
    assert torch.allclose(layer.lora_A["default"].weight.grad, a.grad, atol=1e-4)
    assert torch.allclose(layer.lora_B["default"].weight.grad, b.grad, atol=1e-4)


def test_dropout_is_honoured():
    adapted = sparse_lora(lora(pruned(), lora_dropout=0.5))
    layer = adapted.base_model.model.model.layers[0].mlp.up_proj
    x = torch.randn(400, 16)
    plain = layer.get_base_layer()(x)
    adapted.eval()
    quiet = layer(x) - plain
    assert torch.equal(quiet, layer(x) - plain)
    adapted.train()
    torch.manual_seed(0)
    noisy = layer(x) - plain
    torch.manual_seed(0)
    dropped = torch.nn.functional.dropout(x, 0.5)
    expected = dropped @ (layer.get_delta_weight("default")).T
    assert torch.allclose(noisy, expected, atol=1e-5) and not torch.allclose(noisy, quiet, atol=1e-2)


def test_adapters_are_saved_and_loaded(tmp_path):
    model = pruned()
    dense = copy.deepcopy(model)
    adapted = train(sparse_lora(lora(model)))
    adapted.save_pretrained(tmp_path)
    loaded = sparse_lora(peft.PeftModel.from_pretrained(dense, tmp_path))
    assert torch.equal(logits(loaded), logits(adapted))
    assert not any("keep" in name for name in peft.get_peft_model_state_dict(adapted))


@pytest.mark.slow
@pytest.mark.parametrize(
    "first", ["optimum_moonshot.integrations.peft", "peft", "optimum_moonshot", "peft, optimum_moonshot"]
)
def test_registration_does_not_depend_on_the_import_order(first):
    """In another process: this package's adapter module may be the first to import PEFT."""
    mapping = "from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING as mapping"
    code = f"import {first}\nimport optimum_moonshot\nfrom optimum_moonshot.integrations.peft import MARK\n{mapping}"
    command = [sys.executable, "-c", f"{code}\nassert mapping[MARK].__name__ == 'SparseLoraConfig'"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr


RELOAD = """
import sys, torch, transformers
{imports}
from peft import AutoPeftModelForCausalLM, PeftConfig, PeftModel
folder = sys.argv[1]
adapter = folder + "/adapter"
for load in {loads}:
    base = transformers.AutoModelForCausalLM.from_pretrained(folder + "/base")
    try:
        model = eval(load).eval()
        print(torch.equal(model(input_ids=torch.load(folder + "/ids")).logits, torch.load(folder + "/logits")))
    except Exception as error:
        print(type(error).__name__, error)
"""
LOADS = (
    "PeftModel.from_pretrained(base, adapter)",
    "AutoPeftModelForCausalLM.from_pretrained(adapter)",
    "(base.load_adapter(adapter), base)[1]",
    "PeftModel.from_pretrained(base, adapter, config=PeftConfig.from_pretrained(adapter))",
    "transformers.AutoModelForCausalLM.from_pretrained(adapter)",
)


def reload(folder, imports):
    """The output of another process for every way to load an adapter."""
    command = [sys.executable, "-c", RELOAD.format(imports=imports, loads=LOADS), str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The files of a pruned model and its masked adapter, with inputs and logits."""
    folder = tmp_path_factory.mktemp("adapter")
    pruned().save_pretrained(folder / "base")
    model = hf.AutoModelForCausalLM.from_pretrained(folder / "base")
    adapted = train(sparse_lora(lora(model, task_type="CAUSAL_LM")))
    adapted.save_pretrained(folder / "adapter")
    torch.save(logits(adapted).detach(), folder / "logits")
    torch.save(token_batches()[0]["input_ids"], folder / "ids")
    return folder


@pytest.mark.slow
def test_a_masked_adapter_is_refused_without_this_package(saved):
    lines = reload(saved, "")
    assert len(lines) == len(LOADS)
    assert all(line.startswith("KeyError") and "import optimum_moonshot before loading it" in line for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize(
    "imports",
    ["import importlib.util, optimum_moonshot; importlib.util.find_spec('peft')", "import peft, optimum_moonshot"],
)
def test_with_this_package_a_loaded_adapter_is_masked(saved, imports):
    assert reload(saved, imports) == ["True"] * len(LOADS)


def test_a_loaded_adapter_trains_merges_and_is_saved(saved, tmp_path):
    base = hf.AutoModelForCausalLM.from_pretrained(saved / "base")
    before = zeros(base)
    loaded = peft.PeftModel.from_pretrained(base, saved / "adapter", is_trainable=True)
    assert torch.equal(logits(loaded), torch.load(saved / "logits"))
    assert sparse_lora(loaded) is loaded and torch.equal(logits(loaded), torch.load(saved / "logits"))
    expected = logits(train(loaded))
    loaded.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["peft_type"] == MARK
    assert loaded.peft_config["default"].peft_type == "LORA"
    loaded.load_adapter(saved / "adapter", "first")
    loaded.set_adapter("first")
    assert torch.equal(logits(loaded), torch.load(saved / "logits"))
    loaded.set_adapter("default")
    merged = loaded.merge_and_unload()
    assert (logits(merged) - expected).abs().max() <= 1e-5
    assert_sparse(merged, before)


def test_every_adapter_on_a_masked_layer_is_marked(tmp_path):
    adapted = sparse_lora(lora(pruned()))
    adapted.add_adapter("second", peft.LoraConfig(r=2, target_modules=["up_proj"]))
    adapted.add_weighted_adapter(["default", "second"], [0.7, 0.3], adapter_name="both", combination_type="cat")
    adapted.save_pretrained(tmp_path)
    types = [json.loads(path.read_text())["peft_type"] for path in tmp_path.rglob("adapter_config.json")]
    assert types == [MARK] * 3


def test_adapters_on_dense_layers_are_not_marked(tmp_path):
    model = pruned(targets=["up_proj"])
    adapted = lora(model, target_modules=["q_proj"])
    adapted.add_adapter("second", peft.LoraConfig(r=2, target_modules=["up_proj"]))
    sparse_lora(adapted).save_pretrained(tmp_path)
    paths = {name: tmp_path / name / "adapter_config.json" for name in ("second",)} | {
        "default": tmp_path / "adapter_config.json"
    }
    types = {name: json.loads(path.read_text())["peft_type"] for name, path in paths.items()}
    assert types == {"default": "LORA", "second": MARK}


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_configuration_that_masks_from_the_start(name):
    settings = dict(r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(pruned(name, targets=["mlp"]), SparseLoraConfig(**settings))
    adapters = {name: type(module) for name, module in adapted.named_modules() if hasattr(module, "lora_A")}
    assert {kind for name, kind in adapters.items() if "mlp" in name} == {SparseLinear}
    assert {kind for name, kind in adapters.items() if "mlp" not in name} == {peft.tuners.lora.Linear}
    torch.manual_seed(1)
    expected = logits(adapted)
    assert torch.equal(logits(sparse_lora(adapted)), expected)
    for options, words in ((dict(use_dora=True), "DoraLinearVariant"), (dict(init_lora_weights="pissa"), "pissa")):
        with pytest.raises(MoonshotError, match=words):
            peft.get_peft_model(pruned(name), SparseLoraConfig(**{**settings, **options}))


def test_an_adapter_whose_bias_cannot_be_merged_is_refused_at_once():
    with pytest.raises(MoonshotError, match="q_proj: lora_bias=True: the layer has no bias"):
        sparse_lora(lora(pruned(), lora_bias=True))
    adapted = sparse_lora(lora(pruned("gpt2"), lora_bias=True))  # its layers have biases
    expected = logits(adapted)
    adapted.merge_adapter()
    torch.testing.assert_close(logits(adapted), expected, atol=1e-5, rtol=1e-5)


def test_training_adapters_without_a_mask_emits_a_warning(tmp_path, caplog):
    from training_runs import trainer

    trainer(tmp_path, lora(pruned()), MoonshotCallback()).train()
    (message,) = [record.getMessage() for record in caplog.records if "without a mask" in record.getMessage()]
    assert "21 pruned layers have adapters without a mask (base_model.model.model.layers.0.self_attn.q_" in message
    assert "call sparse_lora(trainer.model)" in message
    caplog.clear()
    trainer(tmp_path, sparse_lora(lora(pruned())), MoonshotCallback()).train()
    only_dense = lora(pruned(targets=["up_proj"]), target_modules=["q_proj"])
    trainer(tmp_path, only_dense, MoonshotCallback()).train()
    assert "without a mask" not in caplog.text


def test_several_adapters():
    model = pruned()
    before = zeros(model)
    adapted = sparse_lora(lora(model))
    adapted.add_adapter("second", peft.LoraConfig(r=2, target_modules=["up_proj"], init_lora_weights=False))
    first = logits(adapted)
    adapted.set_adapter("second")
    second = logits(adapted)
    assert not torch.allclose(first, second, atol=1e-3)
    adapted.add_weighted_adapter(["default", "second"], [0.7, 0.3], adapter_name="both", combination_type="cat")
    for name, expected in (("second", second), ("default", first), ("both", None)):
        adapted.set_adapter(name)
        expected = logits(adapted) if expected is None else expected
        adapted.merge_adapter([name])
        assert (logits(adapted) - expected).abs().max() <= 1e-5
        base = {layer.name: layer.matrix for layer in find_pruned(adapted)}
        assert all(follows(matrix, NM(2, 4)) for matrix in base.values()) and len(base) == 21
        adapted.unmerge_adapter()
        assert (logits(adapted) - expected).abs().max() <= 1e-5
    with adapted.disable_adapter():
        assert (logits(adapted) - logits(pruned())).abs().max() <= 1e-5
    merged = adapted.merge_and_unload(adapter_names=["default", "second"])
    assert_sparse(merged, before)


def test_adapters_on_further_layers_need_a_second_call():
    model = pruned()
    before = zeros(model)
    adapted = sparse_lora(lora(model, target_modules=["q_proj"]))
    adapted.add_adapter("second", peft.LoraConfig(r=2, target_modules=["up_proj"], init_lora_weights=False))
    adapted.set_adapter("second")
    assert sparse_lora(adapted) is adapted
    expected = logits(adapted)
    merged = adapted.merge_and_unload(adapter_names=["second"])
    assert (logits(merged) - expected).abs().max() <= 1e-5
    assert_sparse(merged, before)


def test_dense_layers_keep_a_plain_adapter():
    adapted = sparse_lora(lora(pruned(targets=["up_proj"])))
    kinds = {
        name.rpartition(".")[2]: type(module) for name, module in adapted.named_modules() if hasattr(module, "lora_A")
    }
    assert kinds["up_proj"] is SparseLinear and kinds["q_proj"] is peft.tuners.lora.Linear


def test_bfloat16():
    model = pruned().bfloat16()
    before = zeros(model)
    adapted = train(sparse_lora(lora(model)))
    merged = adapted.merge_and_unload()
    assert merged.dtype == torch.bfloat16
    assert_sparse(merged, before)


def test_ia3_keeps_zeros_by_itself():
    model = pruned()
    before = zeros(model)
    config = peft.IA3Config(target_modules=["up_proj", "down_proj"], feedforward_modules=["down_proj"])
    adapted = train(sparse_lora(peft.get_peft_model(model, config)))
    expected = logits(adapted)
    merged = adapted.merge_and_unload()
    assert (logits(merged) - expected).abs().max() <= 1e-5
    assert_sparse(merged, before)


@pytest.mark.parametrize(
    ("make_config", "message"),
    [
        (lambda: peft.LoraConfig(target_modules=["up_proj"], use_dora=True), "DoraLinearVariant fills the zeros"),
        (lambda: peft.LoHaConfig(target_modules=["up_proj"]), "a PEFT loha Linear adapter cannot keep"),
        (lambda: peft.LoKrConfig(target_modules=["up_proj"]), "a PEFT lokr .* cannot keep"),
        (lambda: peft.OFTConfig(target_modules=["up_proj"]), "a PEFT oft .* cannot keep"),
        (lambda: peft.LoraConfig(target_modules=["up_proj"], init_lora_weights="pissa"), "init_lora_weights='pissa'"),
        (lambda: peft.LoraConfig(target_modules=["lm_head"]), "no adapter is on a pruned layer"),
    ],
)  # fmt: skip
def test_adapters_that_cannot_keep_zeros_are_refused(make_config, message):
    adapted = peft.get_peft_model(pruned(), make_config())
    kinds = [type(module) for module in adapted.modules()]
    with pytest.raises(MoonshotError, match=message):
        sparse_lora(adapted)
    assert [type(module) for module in adapted.modules()] == kinds


def test_invalid_requests_are_refused():
    with pytest.raises(MoonshotError, match="model is a LlamaForCausalLM: give what get_peft_model returns"):
        sparse_lora(pruned())
    merged = lora(pruned(targets=["up_proj"]), target_modules=["q_proj", "up_proj"])
    merged.merge_adapter()
    with pytest.raises(MoonshotError):
        sparse_lora(merged)
    adapted = sparse_lora(lora(pruned()))
    with pytest.raises(MoonshotError, match="a new adapter: DoraLinearVariant"):
        adapted.add_adapter("dora", peft.LoraConfig(target_modules=["up_proj"], use_dora=True))
    adapted = sparse_lora(lora(pruned()))
    before = zeros(adapted)
    with pytest.raises(MoonshotError, match="init_lora_weights='pissa'"):
        adapted.add_adapter("pissa", peft.LoraConfig(target_modules=["up_proj"], init_lora_weights="pissa"))
    assert_sparse(adapted, before)
    adapted = sparse_lora(lora(pruned()))
    with pytest.raises(MoonshotError, match="adapter_names: masked adapters do not support mixed batches"):
        adapted.eval()(**token_batches()[0], adapter_names=["default", "__base__"])


def test_a_model_with_adapters_is_not_pruned(tmp_path):
    from training_runs import CONFIG, trainer

    adapted = lora(make("llama"))
    with pytest.raises(MoonshotError, match="it has PEFT adapters; prune it before"):
        MoonshotPruner(adapted, CONFIG).prune(token_batches(), progress=False)
    with pytest.raises(MoonshotError, match="it has PEFT adapters; prune it before"):
        trainer(tmp_path, adapted, MoonshotCallback(CONFIG, begin_step=3)).train()


def test_fully_trained_layers_beside_adapters_keep_their_zeros(tmp_path):
    from training_runs import trainer

    model = pruned()
    before = zeros(model)
    adapted = sparse_lora(lora(model, target_modules=["up_proj"], modules_to_save=["down_proj"]))
    trainer(tmp_path, adapted, MoonshotCallback(teacher=make("llama"))).train()
    expected = logits(adapted)
    merged = adapted.merge_and_unload()
    assert (logits(merged) - expected).abs().max() <= 1e-5
    assert not torch.equal(merged.model.layers[0].mlp.down_proj.weight, pruned().model.layers[0].mlp.down_proj.weight)
    assert_sparse(merged, before)
    assert set(zeros(merged)) == set(before)


def test_masked_adapters_under_the_trainer(tmp_path):
    from training_runs import trainer

    model = pruned()
    before = zeros(model)
    adapted = sparse_lora(lora(model, init_lora_weights=True, target_modules=["up_proj", "q_proj"]))
    run = trainer(tmp_path, adapted, MoonshotCallback())
    run.train()
    assert run.state.log_history[-1]["moonshot_sparsity"] == 0.5
    expected = logits(adapted)
    merged = adapted.merge_and_unload()
    assert (logits(merged) - expected).abs().max() <= 1e-5
    assert_sparse(merged, before)
