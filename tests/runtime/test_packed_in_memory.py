"""Pruned layers packed in memory: equal weights and outputs, and equal files when saved."""

import copy
import pickle
import weakref

import pytest
import torch
import transformers as hf
from checkpoints import INPUTS, assert_same, files, pruned, tensors
from models import make, token_batches
from packed_models import MIXED, assert_state, held, state

from optimum_moonshot import MoonshotConfig, MoonshotError, MoonshotPrunedCheckpoint, MoonshotPruner, load_pruned
from optimum_moonshot.checkpoint import in_memory
from optimum_moonshot.packing import Bitmask

AUTO = hf.AutoModelForCausalLM


@pytest.mark.parametrize(
    "name, settings",
    [
        ("llama", dict(pattern="2:4")),
        ("llama", dict(pattern="unstructured", sparsity=0.6)),
        ("llama", MIXED),
        ("llama-tied-biased", dict(pattern="2:4", targets=["lm_head", r"\.[0-2]\."])),
        *((name, dict(pattern="2:4")) for name in ("gpt2", "opt", "mixtral", "vit", "albert")),
    ],
    ids=str,
)
def test_packed_in_memory_and_back(name, settings):
    for dtype in (torch.float32, torch.bfloat16):
        pruner = pruned(name, dtype, **settings)
        model, before = pruner.model, state(pruner.model)
        inputs = torch.randn(2, 3, 16, 16).to(dtype) if name == "vit" else INPUTS
        with torch.no_grad():
            expected = model(inputs).logits
            chosen = pruner.to_runtime("packed")
            packed = {layer for layer, what in chosen.items() if what.startswith("packed: ")}
            assert held(model) == packed and packed and model.moonshot_runtime is chosen
            assert torch.allclose(model(inputs).logits, expected, atol=1e-4 if dtype == torch.float32 else 0.2)
        others = {layer.name for layer in pruner.report.layers} - packed
        assert all("experts" in layer or "lm_head" in layer or "k_proj" in layer for layer in others)
        assert pruner.to_runtime("packed") == {**chosen}  # idempotent
        done = pruner.to_runtime("dense")
        assert not held(model) and set(done.values()) == {"dense: requested"}
        assert_state(model, before)
        assert not model.is_quantized and "save_pretrained" not in vars(model)
        assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("solver", ["sparsegpt", "wanda"])
def test_packing_after_a_rotation_and_recovery(solver, tmp_path):
    settings = dict(solver=solver, lam=0.9, rotation="learned", recover="blockwise", recover_steps=2)
    sizes = dict(num_samples=6, sequence_length=12, batch_size=2)
    pruner = MoonshotPruner(make("llama-tied-biased"), MoonshotConfig(pattern="2:4", **settings, **sizes))
    pruner.prune(token_batches(), progress=False)
    with torch.no_grad():
        expected = pruner.model(INPUTS).logits
    for format in ("dense", "packed"):
        pruner.save_pretrained(tmp_path / format, format=format)
    assert len(held(pruner.model)) == 0 and len(pruner.to_runtime("packed")) == 21 == len(held(pruner.model))
    with torch.no_grad():
        assert torch.allclose(pruner.model(INPUTS).logits, expected, atol=1e-4)
    for format in ("dense", "packed"):
        pruner.save_pretrained(tmp_path / f"{format}-again", format=format)
        before, after = (files(tmp_path / name) for name in (format, f"{format}-again"))
        name = next(name for name in before if name.endswith(".safetensors"))
        assert before[name] == after[name] and before["config.json"] == after["config.json"]


def test_memory_is_the_size_of_the_packed_weights():
    pruner = pruned(dtype=torch.bfloat16)
    dense = sum(layer.shape[0] * layer.shape[1] * 2 for layer in pruner.report.layers)
    pruner.to_runtime("packed")
    packed = sum(part.nbytes for name in held(pruner.model) for part in pruner.model.get_submodule(name).parts.values())
    assert packed == dense * 9 // 16
    assert not any(parameter.ndim == 2 for parameter in pruner.model.model.layers.parameters())


@pytest.mark.parametrize("settings", [dict(pattern="2:4"), MIXED], ids=["2:4", "mixed"])
@pytest.mark.parametrize("options", [{}, {"max_shard_size": "8KB"}], ids=["whole", "shards"])
def test_saved_files_are_those_from_before_packing(settings, options, tmp_path):
    pruner = pruned("llama-tied-biased", torch.bfloat16, **settings)
    for format in ("dense", "packed"):
        pruner.save_pretrained(tmp_path / format, format=format, **options)
    pruner.to_runtime("packed")
    before, kinds = state(pruner.model), held(pruner.model)
    assert kinds
    pruner.save_pretrained(tmp_path / "resaved", **options)
    pruner.save_pretrained(tmp_path / "resaved-dense", format="dense", **options)
    pruner.model.save_pretrained(tmp_path / "own", **options)
    pruner.model.save_pretrained(tmp_path / "own-dense", format="dense", **options)
    assert_state(pruner.model, before)
    assert held(pruner.model) == kinds and pruner.model.is_quantized
    for format, by_pruner, by_model in (("packed", "resaved", "own"), ("dense", "resaved-dense", "own-dense")):
        expected, actual, model_files = (files(tmp_path / name) for name in (format, by_pruner, by_model))
        actual["README.md"] = actual["README.md"].replace(by_pruner.encode(), format.encode())  # the card's heading
        assert model_files == {name: content for name, content in actual.items() if name in model_files}
        assert actual.keys() - model_files.keys() == {"README.md", "moonshot_report.json", "moonshot_report.png"}
        if not options:
            assert actual == expected
            continue
        before, after = tensors(tmp_path / format), tensors(tmp_path / by_pruner)  # shards end at block boundaries
        assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
        assert actual["config.json"] == expected["config.json"] and actual["README.md"] == expected["README.md"]


@pytest.mark.parametrize("format", ["dense", "packed"])
def test_one_decoder_layer_is_dense_while_a_packed_model_is_saved(format, tmp_path, monkeypatch):
    pruner = pruned("llama", torch.bfloat16, pattern="2:4")
    pruner.to_runtime("packed")
    alive, most = weakref.WeakSet(), []
    original = Bitmask.unpack

    def unpack(*args):
        dense = original(*args)
        alive.add(storage := dense.untyped_storage())
        most.append(len(alive))
        del storage
        return dense

    monkeypatch.setattr(Bitmask, "unpack", unpack)
    pruner.save_pretrained(tmp_path / "own", format=format, max_shard_size="1KB")
    assert len(most) >= 21 and max(most) <= 7
    blocks = [module for module in pruner.model.modules() if "_moonshot_weights" in vars(module)]
    assert not blocks and not any(hasattr(module, "_hf_hook") for module in pruner.model.modules())


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_can_be_saved(copied, tmp_path):
    pruner = pruned()
    pruner.save_pretrained(tmp_path / "before", format="packed")
    pruner.to_runtime("packed")
    other = copied(pruner.model)
    pruner.to_runtime("dense")
    assert len(held(other)) == 21
    other.save_pretrained(tmp_path / "copy")
    assert_same(pruner.model, AUTO.from_pretrained(tmp_path / "copy"))
    assert files(tmp_path / "copy")["moonshot.safetensors"] == files(tmp_path / "before")["moonshot.safetensors"]


def test_a_model_that_was_loaded_packed_is_saved_again(packed, tmp_path):
    folder, model = packed
    kept = load_pruned(folder, runtime="packed")
    kept.save_pretrained(tmp_path / "packed")
    kept.save_pretrained(tmp_path / "dense", format="dense")
    before, after = tensors(folder), tensors(tmp_path / "packed")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    for name in ("packed", "dense"):
        assert_same(model, AUTO.from_pretrained(tmp_path / name))
        assert_same(model, load_pruned(tmp_path / name))
    assert len(held(kept)) == 21 and "runtime" not in kept.config.to_json_string()
    in_memory.to_runtime(kept, "dense")
    assert not hasattr(kept, "hf_quantizer") and not hasattr(kept.config, "quantization_config")
    assert_same(model, kept)


def test_a_failed_save_leaves_the_model_packed(tmp_path):
    pruner = pruned()
    pruner.to_runtime("packed")
    (tmp_path / "file").write_text("")
    for save in (pruner.save_pretrained, pruner.model.save_pretrained):
        with pytest.raises(MoonshotError, match="is a file"):
            save(tmp_path / "file")
        with pytest.raises(MoonshotError, match="format='zip'"):
            save(tmp_path / "out", format="zip")
    for name, value in (("state_dict", {}), ("variant", "x"), ("push_to_hub", True)):
        if value:
            with pytest.raises(MoonshotError, match=f"{name}: the model is packed in memory"):
                pruner.model.save_pretrained(tmp_path / "out", **{name: value})
    assert len(held(pruner.model)) == 21 and not (tmp_path / "out").exists()
    pruner.model.save_pretrained(tmp_path / "out", is_main_process=False)
    assert not (tmp_path / "out").exists()


def test_parts_of_a_packed_model_are_not_saved_alone(tmp_path):
    pruner = pruned()
    pruner.to_runtime("packed")
    with pytest.raises(MoonshotError, match="LlamaModel is a part of a model that is packed in memory; save the whole"):
        pruner.model.model.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())
    pruner.to_runtime("dense")
    pruner.model.model.save_pretrained(tmp_path)


def test_state_dicts_load_into_packed_models_only():
    first, second = pruned(pattern="2:4"), pruned(pattern="2:4")
    with torch.no_grad():
        for parameter in second.model.parameters():
            parameter.mul_(2)
    first.to_runtime("packed")
    dense = state(second.model)
    second.to_runtime("packed")
    second.model.load_state_dict(first.model.state_dict())
    with torch.no_grad():
        assert torch.equal(second.model(INPUTS).logits, first.model(INPUTS).logits)
    with pytest.raises(RuntimeError, match="weight_packed"):
        first.model.load_state_dict(dense)
    with pytest.raises(RuntimeError, match="weight_packed"):
        pruned().model.load_state_dict(first.model.state_dict())


def test_functions_that_change_weights_need_a_dense_model(tmp_path):
    pruner = pruned()
    pruner.to_runtime("packed")
    words = r'packed in memory: call pruner.to_runtime\("dense"\) first'
    for call in (
        pruner.prune,
        pruner.compact,
        lambda: pruner.rotate([{"input_ids": INPUTS}]),
        lambda: pruner.sweep([{"input_ids": INPUTS}]),
    ):
        with pytest.raises(MoonshotError, match=words):
            call()
    arguments = hf.TrainingArguments(tmp_path, report_to=[], use_cpu=True)
    with pytest.raises(ValueError, match="cannot perform fine-tuning on purely quantized models"):
        hf.Trainer(pruner.model, arguments)
    pruner.to_runtime("dense")
    hf.Trainer(pruner.model, arguments)


def test_models_that_were_loaded_packed_become_dense_and_are_pruned_again(tmp_path):
    pruned(pattern="2:4").save_pretrained(tmp_path / "packed", format="packed")
    for model in (AUTO.from_pretrained(tmp_path / "packed"), load_pruned(tmp_path / "packed", runtime="packed")):
        pruner = MoonshotPruner(model, MoonshotConfig(solver="magnitude", pattern="1:4"))
        if held(model):
            with pytest.raises(MoonshotError, match=r'call pruner.to_runtime\("dense"\) first'):
                pruner.prune(progress=False)
        for save in (pruner.save_pretrained, pruner.push_to_hub):
            with pytest.raises(MoonshotError, match="model.save_pretrained or model.push_to_hub"):
                save(str(tmp_path / "again"))
        pruner.to_runtime("packed")
        assert held(model)
        pruner.to_runtime("dense")
        assert not held(model)
        assert pruner.prune(progress=False).sparsity == 0.75
        pruner.save_pretrained(tmp_path / "again")


def test_unsupported_models_are_refused():
    model = make("llama")
    pruner = MoonshotPruner(model, MoonshotConfig(solver="magnitude", pattern="2:4"))
    with pytest.raises(MoonshotError, match="not pruned yet"):
        pruner.to_runtime("packed")
    with pytest.raises(MoonshotError, match="the model is not pruned"):
        in_memory.to_runtime(model, "packed")
    plain = MoonshotPruner(make("convnet"), MoonshotConfig(solver="magnitude", pattern="2:4"))
    plain.prune(progress=False)
    with pytest.raises(MoonshotError, match="ConvNet is not a PreTrainedModel"):
        plain.to_runtime("packed")
    pruner = pruned()
    for unknown in ("fast", "semi_structured"):
        with pytest.raises(MoonshotError, match=f"runtime='{unknown}': use .dense. or .packed. or .auto.$"):
            pruner.to_runtime(unknown)
        with pytest.raises(MoonshotError, match=f"runtime='{unknown}': use .dense. or .packed. or .auto.$"):
            MoonshotPrunedCheckpoint(unknown)


def test_a_layer_that_is_no_longer_n_m_keeps_all_dense():
    pruner = pruned()
    with torch.no_grad():
        pruner.model.model.layers[1].mlp.up_proj.weight[3, 4:8] = 1
    before = state(pruner.model)
    with pytest.raises(MoonshotError, match=r"^model\.layers\.1\.mlp\.up_proj: it is not 2:4"):
        pruner.to_runtime("packed")
    assert_state(pruner.model, before)
    assert not pruner.model.is_quantized and "save_pretrained" not in vars(pruner.model)
