"""Checkpoints on disk are restored bit for bit; errors name the layer, file or option."""

import json
import shutil
from copy import deepcopy

import pytest
import torch
import transformers as hf
from checkpoints import INPUTS, assert_same, files, pruned, tensors
from full_disk import full_disk
from marks import slow
from models import make
from safetensors import safe_open
from transformers import conversion_mapping
from transformers.core_model_loading import WeightRenaming

from optimum_moonshot import MoonshotConfig, MoonshotError, MoonshotPruner, convert, load_pruned
from optimum_moonshot.runtime.packed_layers import PackedLinear
from optimum_moonshot.runtime.packed_module import is_packed

SETTINGS = [
    dict(pattern="2:4"),
    dict(pattern="4:8"),
    dict(pattern="1:4"),
    dict(pattern="unstructured", sparsity=0.6),
    dict(pattern="2:4", targets=["lm_head", r"\.[0-2]\."]),
    dict(pattern="2:4", ignore=[r"\.1\.", "attn"]),
    dict(pattern="4:16"),  # fits no layer of 24 inputs
    dict(pattern="unstructured", sparsity=1.0),  # nothing is left to store
]


@pytest.mark.parametrize(
    "name, settings",
    [
        *(("llama", settings) for settings in SETTINGS),
        *(slow("gpt2", settings) for settings in SETTINGS[::2]),
        *((name, SETTINGS[4]) for name in ("llama-tied-biased", "opt", "mixtral")),
        *(("vit", settings) for settings in (SETTINGS[0], SETTINGS[3])),  # some releases store it under other names
    ],
    ids=str,
)
def test_every_format_restores_the_same_weights(name, settings, tmp_path):
    for dtype in (torch.float32, torch.bfloat16) if name == "llama" else (torch.float16,):
        pruner = pruned(name, dtype, **settings)
        folders = [tmp_path / f"{kind}-{dtype}" for kind in ("packed", "dense", "again")]
        pruner.save_pretrained(folders[0], format="packed")
        convert(folders[0], folders[1], "dense")
        convert(folders[1], folders[2], "packed")
        assert_same(pruner.model, type(pruner.model).from_pretrained(folders[0]))
        for folder in folders:
            assert_same(pruner.model, load_pruned(folder))
        first, last = tensors(folders[0]), tensors(folders[2])
        assert first.keys() == last.keys() and all(torch.equal(first[key], last[key]) for key in first)
        count = {layer.removesuffix("_packed") for layer in first if layer.endswith("_packed")}
        # Two fused layers in each block, stored as 4 × 3 matrices.
        fused = [layer for layer in pruner.report.layers if "experts" in layer.name]
        assert len(count) == len(pruner.report.layers) + 5 * len(fused)
        kept = load_pruned(folders[0], runtime="packed")
        for module_name, module in kept.named_modules():
            if isinstance(module, PackedLinear):
                expected = pruner.model.get_submodule(module_name).weight
                expected = expected.T if name == "gpt2" else expected
                assert torch.equal(module.weight, expected)
        if name == "llama" and dtype == torch.float32:
            assert torch.allclose(kept(INPUTS).logits, pruner.model(INPUTS).logits, atol=1e-4)


def test_errors_use_the_models_name_of_a_renamed_layer(tmp_path, monkeypatch):
    original, renaming = conversion_mapping.get_checkpoint_conversion_mapping, WeightRenaming("first", "fc1")
    monkeypatch.setattr(
        conversion_mapping,
        "get_checkpoint_conversion_mapping",
        lambda kind: [renaming] if kind == "opt" else original(kind),
    )
    pruner = pruned("opt")
    layer = next(layer.name for layer in pruner.report.layers if layer.name.endswith(".fc1"))
    with torch.no_grad():
        pruner.model.get_submodule(layer).weight.fill_(1)
    pruner.save_pretrained(tmp_path / "dense")
    assert f"{layer}.weight" not in tensors(tmp_path / "dense")
    with pytest.raises(MoonshotError, match=f"^{layer}: it is not 2:4"):
        pruner.save_pretrained(tmp_path / "packed", format="packed")
    with pytest.raises(MoonshotError, match=rf"^{layer}: it has \d+ zeros, its report says"):
        load_pruned(tmp_path / "dense")


def test_2_4_takes_nine_sixteenths_of_the_pruned_layers(packed):
    folder, model = packed
    stored = sum(tensor.nbytes for name, tensor in tensors(folder).items() if name.endswith(("_packed", "_meta")))
    dense = sum(p.nbytes for name, p in model.named_parameters() if ".layers." in name and p.ndim == 2)
    assert stored == dense * 9 // 16


def test_a_tied_head_that_is_pruned_is_packed_once(tmp_path):
    pruner = pruned("llama-tied-biased", pattern="2:4", targets=["lm_head"])
    pruner.save_pretrained(tmp_path, format="packed")
    assert [name for name in tensors(tmp_path) if name.endswith("_packed")] == ["model.embed_tokens.weight_packed"]
    for runtime in ("dense", "packed"):  # an embedding is not kept packed
        model = load_pruned(tmp_path, runtime=runtime)
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert_same(pruner.model, model)


def test_loading_with_other_dtypes_devices_and_shards(packed, tmp_path):
    folder, model = packed
    assert_same(model, hf.AutoModelForCausalLM.from_pretrained(folder, dtype="auto", device_map="cpu"))
    assert_same(model, hf.AutoModelForCausalLM.from_pretrained(folder, device_map="auto"))
    wide = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for name, tensor in wide.state_dict().items():
        assert tensor.dtype == torch.float32 and torch.equal(tensor, model.state_dict()[name].float())
    places = {name: "disk" if name == "layers" else "cpu" for name, _ in model.model.named_children()}
    places = {"lm_head": "cpu", **{f"model.{name}": place for name, place in places.items()}}
    offloaded = hf.AutoModelForCausalLM.from_pretrained(folder, device_map=places, offload_folder=tmp_path / "off")
    with torch.no_grad():
        assert torch.allclose(offloaded(INPUTS).logits, model(INPUTS).logits, atol=0.1)
    for dtype in (torch.bfloat16, torch.float32):  # without the prefix "model." and the head
        assert_same(deepcopy(model.model).to(dtype), hf.AutoModel.from_pretrained(folder, dtype=dtype))


def test_layers_that_transformers_keeps_in_float32_keep_their_dtype(tmp_path):
    config = hf.T5Config(
        vocab_size=96, d_model=16, d_kv=4, d_ff=24, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    pruner = MoonshotPruner(hf.T5ForConditionalGeneration(config), MoonshotConfig(solver="magnitude", pattern="2:4"))
    pruner.prune(progress=False)
    for kind in ("packed", "dense"):
        pruner.save_pretrained(tmp_path / kind, format=kind)
    cls = type(pruner.model)
    dense, packed = (cls.from_pretrained(tmp_path / kind, dtype=torch.float16) for kind in ("dense", "packed"))
    assert {tensor.dtype for tensor in dense.state_dict().values()} == {torch.float16, torch.float32}
    assert_same(dense, packed)


def test_a_loaded_model_is_an_ordinary_one(packed, tmp_path):
    folder, model = packed
    loaded = hf.AutoModelForCausalLM.from_pretrained(folder)
    assert not hasattr(loaded, "hf_quantizer") and not hasattr(loaded.config, "quantization_config")
    assert not loaded.is_quantized and not hasattr(loaded.config, "_is_quantized")
    loaded.save_pretrained(tmp_path)
    assert tensors(tmp_path).keys() == set(model.state_dict())
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    assert_same(model, hf.AutoModelForCausalLM.from_pretrained(tmp_path))
    assert loaded.half().dtype == torch.float16


def test_a_layer_that_lost_its_pattern_is_named_and_nothing_is_written(tmp_path):
    pruner = pruned()
    pruner.save_pretrained(tmp_path, format="packed")
    before = files(tmp_path)
    with torch.no_grad():
        pruner.model.model.layers[1].mlp.up_proj.weight[3, 4:8] = 1
    name = r"model\.layers\.1\.mlp\.up_proj: it is not 2:4: 4 of 4 weights from row 3, input 4 on"
    with pytest.raises(MoonshotError, match=name):
        pruner.save_pretrained(tmp_path, format="packed")
    assert files(tmp_path) == before
    pruner.save_pretrained(tmp_path / "dense")
    with pytest.raises(MoonshotError, match=name):
        convert(tmp_path / "dense", tmp_path / "out", "packed")


def test_negative_zeros_are_restored_as_zeros(tmp_path):
    pruner = pruned()
    with torch.no_grad():
        weight = pruner.model.model.layers[0].mlp.up_proj.weight
        weight[weight == 0] = -0.0
        weight[0, :4] = -0.0  # a group with fewer survivors than 2
    pruner.save_pretrained(tmp_path, format="packed")
    loaded = load_pruned(tmp_path).model.layers[0].mlp.up_proj.weight
    assert torch.equal(loaded, weight) and not (torch.signbit(loaded) & (loaded == 0)).any()


def test_layers_that_packing_would_enlarge_stay_dense(tmp_path):
    pruner = pruned(pattern="unstructured", sparsity=0.0)
    with pytest.raises(MoonshotError, match="makes no layer smaller"):
        pruner.save_pretrained(tmp_path, format="packed")
    pruner = pruned(pattern="unstructured", sparsity=0.01)
    for layer in pruner.model.model.layers[1:]:
        with torch.no_grad():
            layer.mlp.up_proj.weight.fill_(1)
    pruner = pruned(pattern="unstructured", sparsity=0.3)
    with torch.no_grad():
        pruner.model.model.layers[0].mlp.up_proj.weight.fill_(1)
    pruner.save_pretrained(tmp_path, format="packed")
    assert "model.layers.0.mlp.up_proj.weight" in tensors(tmp_path)
    assert "model.layers.1.mlp.up_proj.weight_packed" in tensors(tmp_path)
    assert_same(pruner.model, hf.AutoModelForCausalLM.from_pretrained(tmp_path))


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(push_to_hub=True), "call the pruner's push_to_hub"),
        (dict(is_main_process=False), "call it in one process"),
        (dict(max_shards=1), "max_shards=1: LlamaForCausalLM.save_pretrained has no such option"),
        (dict(variant="fp16"), "a packed checkpoint has no variants"),
        (dict(variant="a/b"), "variant='a/b': give a name"),
        (dict(state_dict=True), "state_dict=True: give the weights by their names"),
        (dict(state_dict={"a": 1}), "state_dict={'a': 1}: give the weights by their names"),
        (dict(max_shard_size="lots"), "max_shard_size='lots': give a number of bytes"),
        (dict(max_shard_size=None), "max_shard_size=None: give a number of bytes"),
    ],
    ids=str,
)
def test_unsupported_options_are_refused_before_writing(options, words, tmp_path):
    with pytest.raises(MoonshotError, match=words):
        pruned().save_pretrained(tmp_path / "out", format="packed", **options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_a_packed_model_on_the_meta_device_is_unpacked_there(name):
    pruner = pruned(name)
    shapes = {key: (tensor.shape, tensor.dtype) for key, tensor in pruner.model.state_dict().items()}
    pruner.to_runtime("packed")
    assert is_packed(pruner.model)
    model = pruner.model.to("meta")
    model.dequantize()
    assert not is_packed(model) and all(tensor.is_meta for tensor in model.state_dict().values())
    assert {key: (tensor.shape, tensor.dtype) for key, tensor in model.state_dict().items()} == shapes


def test_invalid_paths_are_refused(tmp_path):
    pruner = pruned()
    for path in (None, 3, b"folder", ""):
        for call in (
            lambda path=path: pruner.save_pretrained(path),
            lambda path=path: convert(path, tmp_path, "packed"),
            lambda path=path: load_pruned(path),
        ):
            with pytest.raises(MoonshotError, match="(directory|source|name_or_path)=.*give a path"):
                call()


@pytest.mark.parametrize("format", ["dense", "packed"])
def test_a_full_disk_preserves_the_old_files(format, tmp_path):
    pruner = pruned()
    pruner.save_pretrained(tmp_path)
    (tmp_path / "notes.txt").write_text("kept")
    before = files(tmp_path)
    with full_disk(20_000), pytest.raises(MoonshotError, match="cannot be written.*(File too large|os error 27)"):
        pruner.save_pretrained(tmp_path, format=format)
    assert files(tmp_path) == before and {path.name for path in tmp_path.iterdir()} == set(before)
    with full_disk(20_000), pytest.raises(MoonshotError, match="output=.*cannot be written"):
        convert(tmp_path, tmp_path / "out", "packed")
    assert not list((tmp_path / "out").iterdir())


def test_saving_replaces_the_files_of_another_model(packed, tmp_path):
    folder = shutil.copytree(packed[0], tmp_path / "folder")
    (folder / "adapter_config.json").write_text("{}")
    (folder / "notes.txt").write_text("kept")
    pruner = pruned("gpt2")
    pruner.save_pretrained(folder)
    assert {path.name for path in folder.glob("*.safetensors*")} == {"model.safetensors"}
    assert not (folder / "adapter_config.json").exists() and (folder / "notes.txt").read_text() == "kept"
    assert_same(pruner.model, load_pruned(folder))


def test_converting_in_place_and_invalid_conversions(packed, packed_copy, tmp_path):
    folder, model = packed
    (packed_copy / "extra").mkdir()
    (packed_copy / "extra" / "note.txt").write_text("kept")
    convert(packed_copy, packed_copy, "dense")
    assert_same(model, hf.AutoModelForCausalLM.from_pretrained(packed_copy))
    index = json.loads((packed_copy / "model.safetensors.index.json").read_text())
    total = sum(tensor.nbytes for tensor in tensors(packed_copy).values())
    assert index["weight_map"].keys() == tensors(packed_copy).keys() and index["metadata"]["total_size"] == total
    assert (packed_copy / "extra" / "note.txt").read_text() == "kept" and not list(packed_copy.glob(".saving*"))
    with pytest.raises(MoonshotError, match="is a dense checkpoint already"):
        convert(packed_copy, tmp_path / "out", "dense")
    with pytest.raises(MoonshotError, match="format='zip'"):
        convert(packed_copy, tmp_path / "out", "zip")
    make("llama").save_pretrained(tmp_path / "plain")
    for call in (
        lambda: convert(tmp_path / "plain", tmp_path / "out", "packed"),
        lambda: load_pruned(tmp_path / "plain"),
    ):
        with pytest.raises(MoonshotError, match="the model is not pruned"):
            call()
    (tmp_path / "empty").mkdir()
    with pytest.raises(MoonshotError, match="has no config.json"):
        convert(tmp_path / "empty", tmp_path / "out", "dense")
    with pytest.raises(MoonshotError, match="runtime='fast'"):
        load_pruned(packed_copy, runtime="fast")


def test_convolutions_are_packed_too(tmp_path):
    config = hf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=4)
    model = hf.ResNetForImageClassification(config).eval()
    pruner = MoonshotPruner(model, MoonshotConfig(solver="magnitude", pattern="1:4"))
    pruner.prune(progress=False)
    pruner.save_pretrained(tmp_path, format="packed")
    assert any(name.endswith("convolution.weight_packed") for name in tensors(tmp_path))
    for runtime in ("dense", "packed"):  # convolutions run dense
        assert_same(model, load_pruned(tmp_path, runtime=runtime))


def test_a_structured_model_is_restored_before_and_after_compaction(tmp_path):
    pruner = pruned(pattern="structured", sparsity=0.5)
    assert pruner.report.sparsity > 0
    pruner.save_pretrained(tmp_path / "zeros", format="packed")
    assert_same(pruner.model, load_pruned(tmp_path / "zeros"))
    pruner.compact()
    pruner.save_pretrained(tmp_path / "small")
    assert_same(pruner.model, load_pruned(tmp_path / "small"))


def test_every_layer_is_packed_by_its_own_pattern(tmp_path):
    allocation = {"q_proj": "1:4", "mlp": "2:4", "[kvo]_proj": 0.6}
    pruner = pruned(pattern="unstructured", allocation=allocation)
    pruner.save_pretrained(tmp_path, format="packed")
    assert_same(pruner.model, load_pruned(tmp_path))
    with safe_open(tmp_path / "moonshot.safetensors", "pt") as file:
        layers = json.loads(file.metadata()["moonshot"])["layers"]
    patterns = {name.split(".")[-2]: layer["pattern"] for name, layer in layers.items()}
    assert patterns["q_proj"] == "1:4" and patterns["up_proj"] == "2:4" and patterns["k_proj"] == "unstructured"


def test_equal_weights_give_equal_bytes(tmp_path):
    """The order of metadata entries in safetensors is random."""
    pruner = pruned("llama", torch.bfloat16, pattern="2:4")
    for number in range(6):
        pruner.save_pretrained(tmp_path / "model", format="packed", max_shard_size="10KB")
        convert(tmp_path / "model", tmp_path / f"{number}" / "dense", "dense")
        (tmp_path / "model").rename(tmp_path / f"{number}" / "packed")
    for first in (tmp_path / "0").rglob("*.safetensors"):
        copies = {(tmp_path / f"{n}" / first.relative_to(tmp_path / "0")).read_bytes() for n in range(6)}
        assert len(copies) == 1, first.name


@pytest.mark.parametrize("where", ["dense", "packed", "in memory"])
def test_generation_settings_that_transformers_does_not_save_are_named(where, tmp_path):
    """The results are still there, and are saved once the setting is changed."""
    pruner = pruned("llama", pattern="2:4")
    if where == "in memory":
        pruner.to_runtime("packed")
    options = {} if where == "in memory" else {"format": where}
    pruner.model.generation_config.update(do_sample=False, temperature=0.5)
    with pytest.raises(
        MoonshotError, match="generation_config: `temperature`: `do_sample` is not set.*change it"
    ) as caught:
        pruner.save_pretrained(tmp_path / "saved", **options)
    assert "\n" not in str(caught.value) and not list((tmp_path / "saved").glob("*.json"))
    pruner.model.generation_config.temperature = None
    pruner.save_pretrained(tmp_path / "saved", **options)
    assert_same(pruner.model, load_pruned(tmp_path / "saved", runtime="packed" if where == "in memory" else "dense"))
