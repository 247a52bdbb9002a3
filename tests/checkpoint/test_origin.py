"""Checkpoints that transformers changes while loading: dequantized ones are saved in 16 bits; no weight is lost."""

import json
import logging
import shutil
from types import SimpleNamespace

import pytest
import torch
import transformers as hf
from foreign_checkpoints import configure, deepseek, fp8, llama, mxfp4, read, write
from models import make

from optimum_moonshot import MoonshotConfig, MoonshotError, MoonshotPruner, convert, load_pruned, verify
from optimum_moonshot.checkpoint.origin import Origin, find_origin

BATCHES = [{"input_ids": torch.randint(3, 128, (2, 12), generator=torch.Generator().manual_seed(n))} for n in range(3)]
IDS = BATCHES[0]["input_ids"]
AHEAD = "model.layers.61"


def settings(**changes):
    return MoonshotConfig(
        **{"solver": "wanda", "lam": 1, "pattern": "2:4", "num_samples": 6, "batch_size": 2} | changes
    )


def assert_plain(folder, model):
    """The folder is an ordinary checkpoint of 16 bits that gives the outputs of the model."""
    values, tensors = read(folder)
    assert "quantization_config" not in json.dumps(values)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    again = hf.AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        assert torch.equal(again(IDS).logits, model(IDS).logits)


@pytest.fixture(scope="module", params=[fp8, mxfp4])
def quantized(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param.__name__)
    request.param(folder)
    return folder


@pytest.mark.parametrize("offload", [None, "disk"])
def test_dequantized_weights_are_saved_in_16_bits(tmp_path, quantized, offload):
    pruner = MoonshotPruner.from_pretrained(quantized, settings(), offload)
    report = pruner.prune(BATCHES, progress=False)
    method = read(quantized)[0]["quantization_config"]["quant_method"]
    assert any(f"dequantized ({method})" in note for note in report.notes)
    pruner.save_pretrained(tmp_path / "dense")
    pruner.save_pretrained(tmp_path / "packed", format="packed")
    assert_plain(tmp_path / "dense", pruner.model)
    assert verify(tmp_path / "dense") and verify(tmp_path / "packed")
    for name in ("dense", "packed"):
        with torch.no_grad():
            assert torch.equal(load_pruned(tmp_path / name)(IDS).logits, pruner.model(IDS).logits)


def test_a_dequantized_model_of_the_user(tmp_path, quantized):
    model = hf.AutoModelForCausalLM.from_pretrained(quantized)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    pruner = MoonshotPruner(model, settings())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    pruner.prune(BATCHES, progress=False)
    pruner.save_pretrained(tmp_path / "out")
    assert_plain(tmp_path / "out", model)


def test_after_every_other_change(tmp_path):
    fp8(tmp_path / "fp8")
    mxfp4(tmp_path / "mxfp4")
    pruner = MoonshotPruner.from_pretrained(tmp_path / "fp8", settings(rotation_steps=2))
    pruner.rotate(BATCHES, progress=False)
    assert any("dequantized (fp8)" in note for note in pruner.rotation.notes)
    pruner.save_pretrained(tmp_path / "rotated")
    assert_plain(tmp_path / "rotated", pruner.model)
    pruner = MoonshotPruner.from_pretrained(tmp_path / "fp8", settings(bits=4, quant_group=64))
    pruner.prune(BATCHES, progress=False)
    pruner.save_pretrained(tmp_path / "exported", format="compressed-tensors")
    assert read(tmp_path / "exported")[0]["quantization_config"]["quant_method"] == "compressed-tensors"
    # An export of this package can be pruned again, since transformers dequantizes it too.
    again = MoonshotPruner.from_pretrained(tmp_path / "exported", settings(solver="magnitude"))
    with torch.no_grad():
        assert torch.allclose(again.model(IDS).logits, pruner.model(IDS).logits, atol=0.02)
    kept = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    with pytest.raises(MoonshotError, match="quantized: .*load the model dequantized to prune it"):
        MoonshotPruner(kept, settings(targets=["proj"])).prune(BATCHES, progress=False)
    pruner = MoonshotPruner.from_pretrained(
        tmp_path / "mxfp4", settings(solver="reap", pattern="experts", sparsity=0.5)
    )
    pruner.prune(BATCHES, progress=False)
    pruner.save_pretrained(tmp_path / "experts")
    assert_plain(tmp_path / "experts", pruner.model)


def test_a_quantizer_that_cannot_save_is_refused_at_the_start():
    model = make("llama")
    config = SimpleNamespace(quant_method="quanto")
    model.hf_quantizer = SimpleNamespace(quantization_config=config, is_serializable=lambda: False)
    with pytest.raises(
        MoonshotError, match=r"model: its weights are quantized \(quanto\), and quanto cannot save them"
    ):
        MoonshotPruner(model, settings())


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """The folder of a model with a layer for multi-token prediction, and the tensors of this layer."""
    folder = tmp_path_factory.mktemp("deepseek")
    return folder, deepseek(folder)


def assert_copied(folder, unloaded):
    values, tensors = read(folder)
    assert all(torch.equal(tensors[name], tensor) for name, tensor in unloaded.items())
    assert values["num_nextn_predict_layers"] == 1
    assert verify(folder)
    load_pruned(folder)


@pytest.mark.parametrize("offload", [None, "disk"])
def test_weights_that_transformers_does_not_load_are_copied(tmp_path, source, offload):
    folder, unloaded = source
    pruner = MoonshotPruner.from_pretrained(folder, settings(solver="magnitude"), offload)
    report = pruner.prune(progress=False)
    pruner.save_pretrained(tmp_path / "dense")
    assert report.skipped[AHEAD] == "transformers does not load it; saved as it was"
    pruner.save_pretrained(tmp_path / "packed", format="packed")
    pruner.save_pretrained(tmp_path / "shards", max_shard_size="200KB")
    for name in ("dense", "packed", "shards"):
        assert_copied(tmp_path / name, unloaded)
        assert AHEAD in (tmp_path / name / "README.md").read_text()
    index = json.loads((tmp_path / "dense" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(read(tmp_path / "dense")[1])
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in read(tmp_path / "dense")[1].values())
    convert(tmp_path / "packed", tmp_path / "unpacked", "dense")
    assert_copied(tmp_path / "unpacked", unloaded)
    # A second run finds them in what the first one has saved, also packed.
    second = MoonshotPruner.from_pretrained(tmp_path / "packed", settings(solver="magnitude"))
    second.prune(progress=False)
    second.save_pretrained(tmp_path / "second")
    assert_copied(tmp_path / "second", unloaded)


def test_weights_of_a_model_of_the_user_and_of_one_that_is_packed_in_memory(tmp_path, source):
    folder, unloaded = source
    pruner = MoonshotPruner(hf.AutoModelForCausalLM.from_pretrained(folder), settings(solver="magnitude"))
    pruner.prune(progress=False)
    pruner.to_runtime("packed")
    pruner.save_pretrained(tmp_path / "packed")
    assert_copied(tmp_path / "packed", unloaded)


def test_weights_that_fit_no_longer_are_named_and_not_promised(tmp_path, source, caplog):
    folder, unloaded = source
    quantized = tmp_path / "quantized"
    fp8(quantized, deepseek)
    rotated = MoonshotPruner.from_pretrained(folder, settings(rotation_steps=2))
    rotated.rotate(BATCHES, progress=False)
    smaller = MoonshotPruner.from_pretrained(folder, settings(solver="reap", pattern="experts", sparsity=0.5))
    smaller.prune(BATCHES, progress=False)
    floats = MoonshotPruner.from_pretrained(quantized, settings(solver="magnitude"))
    floats.prune(progress=False)
    part = tmp_path / "part"
    shutil.copytree(folder, part)
    configure(part, architectures=["Another"])
    partial = MoonshotPruner(hf.DeepseekV3ForCausalLM.from_pretrained(part), settings(solver="magnitude"))
    partial.prune(progress=False)
    changed = tmp_path / "changed"
    shutil.copytree(folder, changed)
    gone = MoonshotPruner.from_pretrained(changed, settings(solver="magnitude"))
    gone.prune(progress=False)
    shutil.rmtree(changed)
    for name, pruner, why in (
        ("rotated", rotated, "it uses hidden states in the basis before the rotation"),
        ("smaller", smaller, "it does not fit the smaller model"),
        ("floats", floats, "it is quantized, unlike the saved model"),
        ("partial", partial, "the model is a part of the one in the checkpoint"),
        ("gone", gone, "has changed since the model was loaded"),
    ):
        with caplog.at_level(logging.WARNING):
            caplog.clear()
            pruner.save_pretrained(tmp_path / "out" / name)
        assert f"not in the saved checkpoint: {AHEAD} (" in caplog.text and why in caplog.text
        values, tensors = read(tmp_path / "out" / name)
        assert not unloaded.keys() & tensors.keys() and values["num_nextn_predict_layers"] == 0
        assert AHEAD in (tmp_path / "out" / name / "README.md").read_text()
        entries = pruner.rotation.refused if pruner.report is None else pruner.report.skipped
        assert entries[AHEAD].startswith("transformers does not load it; not saved: ") and why in entries[AHEAD]


def test_former_buffers_are_no_weights(tmp_path):
    make("gpt-neox").save_pretrained(tmp_path)
    _, tensors = read(tmp_path)
    write(tmp_path, tensors | {"gpt_neox.layers.0.attention.bias": torch.ones(1, 1, 4, 4, dtype=torch.uint8)})
    origin = find_origin(hf.GPTNeoXForCausalLM.from_pretrained(tmp_path))
    assert origin == Origin()


def test_other_models_have_no_origin(tmp_path):
    llama(tmp_path)
    for model in (hf.LlamaForCausalLM.from_pretrained(tmp_path), torch.nn.Linear(4, 4)):
        assert not find_origin(model).notes and not find_origin(model).unloaded
