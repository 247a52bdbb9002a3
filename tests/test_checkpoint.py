"""Checkpoints on disk: what comes back is bit for bit what was saved, and what is damaged is refused by name."""

import json
import resource
import shutil
from contextlib import contextmanager

import pytest
import torch
import transformers as hf
from models import make, token_batches
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from optimum_moonshot import MoonshotConfig, MoonshotError, MoonshotPruner, convert, load_pruned
from optimum_moonshot.packing import PackedLinear

INPUTS = token_batches()[0]["input_ids"]


def pruned(name="llama", dtype=torch.float32, **settings):
    """A pruner that has pruned a tiny model by magnitude."""
    settings = settings or dict(pattern="2:4")
    pruner = MoonshotPruner(make(name).to(dtype), MoonshotConfig(solver="magnitude", **settings))
    pruner.prune(progress=False)
    return pruner


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def tensors(folder):
    found = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return found


def assert_same(model, other):
    expected, found = model.state_dict(), other.state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name].to("cpu"), tensor), name


@contextmanager
def full_disk(size):
    """No file can grow beyond `size` bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """A packed 2:4 Llama in bfloat16, in two shards, and its model."""
    folder, pruner = tmp_path_factory.mktemp("packed"), pruned(dtype=torch.bfloat16)
    pruner.save_pretrained(folder, format="packed", max_shard_size="10KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return folder, pruner.model


@pytest.fixture
def copy(packed, tmp_path):
    return shutil.copytree(packed[0], tmp_path / "copy")


SETTINGS = [
    dict(pattern="2:4"),
    dict(pattern="4:8"),
    dict(pattern="1:4"),
    dict(pattern="unstructured", sparsity=0.6),
    dict(pattern="2:4", targets=["lm_head", r"\.[0-2]\."]),
    dict(pattern="2:4", ignore=[r"\.1\.", "attn"]),
    dict(pattern="4:16"),  # fits no layer of 24 inputs
]


@pytest.mark.parametrize(
    "name, settings",
    [
        *(("llama", settings) for settings in SETTINGS),
        *(("gpt2", settings) for settings in SETTINGS[::2]),
        *((name, SETTINGS[4]) for name in ("llama-tied-biased", "opt", "mixtral")),
    ],
    ids=str,
)
def test_every_way_back_gives_the_same_weights(name, settings, tmp_path):
    for dtype in (torch.float32, torch.bfloat16) if name == "llama" else (torch.float16,):
        pruner = pruned(name, dtype, **settings)
        folders = [tmp_path / f"{kind}-{dtype}" for kind in ("packed", "dense", "again")]
        pruner.save_pretrained(folders[0], format="packed")
        convert(folders[0], folders[1], "dense")
        convert(folders[1], folders[2], "packed")
        assert_same(pruner.model, hf.AutoModelForCausalLM.from_pretrained(folders[0]))
        for folder in folders:
            assert_same(pruner.model, load_pruned(folder))
        first, last = tensors(folders[0]), tensors(folders[2])
        assert first.keys() == last.keys() and all(torch.equal(first[key], last[key]) for key in first)
        count = {layer.removesuffix("_packed") for layer in first if layer.endswith("_packed")}
        assert len(count) == len(pruner.report.layers)
        kept = load_pruned(folders[0], runtime="packed")
        for module_name, module in kept.named_modules():
            if isinstance(module, PackedLinear):
                expected = pruner.model.get_submodule(module_name).weight
                expected = expected.T if name == "gpt2" else expected
                assert torch.equal(module.weight, expected)
        if dtype == torch.float32:
            assert torch.allclose(kept(INPUTS).logits, pruner.model(INPUTS).logits, atol=1e-4)


def test_two_of_four_takes_nine_sixteenths_of_the_pruned_layers(packed):
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
    offloaded = hf.AutoModelForCausalLM.from_pretrained(
        folder, device_map={"": "disk"}, offload_folder=tmp_path / "off"
    )
    with torch.no_grad():
        assert torch.allclose(offloaded(INPUTS).logits, model(INPUTS).logits, atol=0.1)
    inner = hf.AutoModel.from_pretrained(folder)  # without the prefix "model." and the head
    assert_same(model.model, inner)


def test_a_loaded_model_is_an_ordinary_one(packed, tmp_path):
    folder, model = packed
    loaded = hf.AutoModelForCausalLM.from_pretrained(folder)
    assert not hasattr(loaded, "hf_quantizer") and not hasattr(loaded.config, "quantization_config")
    assert not loaded.is_quantized and not hasattr(loaded.config, "_is_quantized")
    loaded.save_pretrained(tmp_path)
    assert tensors(tmp_path).keys() == {name for name in model.state_dict()}
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    assert_same(model, hf.AutoModelForCausalLM.from_pretrained(tmp_path))
    assert loaded.half().dtype == torch.float16


def test_a_packed_model_in_memory_is_not_saved(packed, tmp_path):
    kept = load_pruned(packed[0], runtime="packed")
    assert sum(isinstance(module, PackedLinear) for module in kept.modules()) == 21
    with pytest.raises(ValueError, match="not serializable"):
        kept.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_layer_that_is_not_nm_any_more_is_named_and_nothing_is_written(tmp_path):
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


def test_negative_zeros_come_back_as_zeros(tmp_path):
    pruner = pruned()
    with torch.no_grad():
        weight = pruner.model.model.layers[0].mlp.up_proj.weight
        weight[weight == 0] = -0.0
        weight[0, :4] = -0.0  # a group with fewer survivors than 2
    pruner.save_pretrained(tmp_path, format="packed")
    loaded = load_pruned(tmp_path).model.layers[0].mlp.up_proj.weight
    assert torch.equal(loaded, weight) and not (torch.signbit(loaded) & (loaded == 0)).any()


def test_what_packing_does_not_make_smaller_stays_dense(tmp_path):
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


@pytest.mark.parametrize("format", ["dense", "packed"])
def test_a_full_disk_leaves_the_old_files(format, tmp_path):
    pruner = pruned()
    pruner.save_pretrained(tmp_path)
    (tmp_path / "mine.txt").write_text("kept")
    before = files(tmp_path)
    with full_disk(20_000), pytest.raises(MoonshotError, match="cannot be written.*(File too large|os error 27)"):
        pruner.save_pretrained(tmp_path, format=format)
    assert files(tmp_path) == before and {path.name for path in tmp_path.iterdir()} == set(before)
    with full_disk(20_000), pytest.raises(MoonshotError, match="output=.*cannot be written"):
        convert(tmp_path, tmp_path / "out", "packed")
    assert not list((tmp_path / "out").iterdir())


def test_a_folder_that_holds_another_model(packed, tmp_path):
    folder = shutil.copytree(packed[0], tmp_path / "folder")
    (folder / "adapter_config.json").write_text("{}")
    (folder / "mine.txt").write_text("kept")
    pruner = pruned("gpt2")
    pruner.save_pretrained(folder)
    assert {path.name for path in folder.glob("*.safetensors*")} == {"model.safetensors"}
    assert not (folder / "adapter_config.json").exists() and (folder / "mine.txt").read_text() == "kept"
    assert_same(pruner.model, load_pruned(folder))


def test_converting_in_place_and_what_cannot_be_converted(packed, copy, tmp_path):
    folder, model = packed
    (copy / "extra").mkdir()
    (copy / "extra" / "note.txt").write_text("mine")
    convert(copy, copy, "dense")
    assert_same(model, hf.AutoModelForCausalLM.from_pretrained(copy))
    index = json.loads((copy / "model.safetensors.index.json").read_text())
    total = sum(tensor.nbytes for tensor in tensors(copy).values())
    assert index["weight_map"].keys() == tensors(copy).keys() and index["metadata"]["total_size"] == total
    assert (copy / "extra" / "note.txt").read_text() == "mine" and not list(copy.glob(".saving*"))
    with pytest.raises(MoonshotError, match="is a dense checkpoint already"):
        convert(copy, tmp_path / "out", "dense")
    with pytest.raises(MoonshotError, match="format='zip'"):
        convert(copy, tmp_path / "out", "zip")
    make("llama").save_pretrained(tmp_path / "plain")
    for call in (
        lambda: convert(tmp_path / "plain", tmp_path / "out", "packed"),
        lambda: load_pruned(tmp_path / "plain"),
    ):
        with pytest.raises(MoonshotError, match="the model is not pruned"):
            call()
    (tmp_path / "empty").mkdir()
    with pytest.raises(MoonshotError, match="holds no config.json"):
        convert(tmp_path / "empty", tmp_path / "out", "dense")
    with pytest.raises(MoonshotError, match="converted|dense checkpoint; convert"):
        load_pruned(copy, runtime="packed")
    with pytest.raises(MoonshotError, match="runtime='fast'"):
        load_pruned(copy, runtime="fast")


def layer_at(path, position):
    """Which layer's bytes lie at a position of a safetensors file."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header.pop("__metadata__")
    for name, entry in header.items():
        start, end = (8 + length + offset for offset in entry["data_offsets"])
        if start <= position < end:
            return name.removesuffix("_packed").removesuffix("_meta").removesuffix(".weight")
    return None


@pytest.mark.parametrize("seed", range(4))
def test_a_flipped_bit_is_found_wherever_it_is(copy, seed):
    generator = torch.Generator().manual_seed(seed)
    path = sorted(copy.glob("*.safetensors"))[seed % 2]
    content = path.read_bytes()
    for _ in range(10):
        position = int(torch.randint(len(content), (1,), generator=generator))
        damaged = bytearray(content)
        damaged[position] ^= 1 << int(torch.randint(8, (1,), generator=generator))
        path.write_bytes(damaged)
        layer = layer_at(path, position) if position > 8 + int.from_bytes(content[:8], "little") else None
        with pytest.raises(MoonshotError, match=None if layer is None else f"^{layer}: .*checksum differs"):
            load_pruned(copy)


@pytest.mark.parametrize("format", ["dense", "packed"])
def test_a_truncated_or_missing_file_is_named(copy, format, tmp_path):
    folder = copy
    if format == "dense":
        folder = tmp_path / "dense"
        convert(copy, folder, "dense")
    path = sorted(folder.glob("*.safetensors"))[-1]
    content = path.read_bytes()
    for size in (len(content) - 1, len(content) - 5000, len(content) // 2 + 3000):
        path.write_bytes(content)
        layer = layer_at(path, size)
        path.write_bytes(content[:size])
        with pytest.raises(MoonshotError, match=f"^{layer}: {path.name} is truncated"):
            load_pruned(folder)
    for size in (0, 5, 100):
        path.write_bytes(content[:size])
        with pytest.raises(MoonshotError, match="its header cannot be read"):
            load_pruned(folder)
    path.unlink()
    with pytest.raises(MoonshotError, match=f"{path.name} is missing, which holds"):
        load_pruned(folder)


def rewrite(path, change):
    """A safetensors file with other tensors or metadata."""
    with safe_open(path, "pt") as file:
        found = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        metadata = dict(file.metadata())
    change(found, metadata)
    save_file(found, path, metadata)


def test_files_that_contradict_themselves_are_refused(copy):
    path = sorted(copy.glob("*.safetensors"))[0]
    name = next(name for name in load_file(path) if name.endswith("_meta"))
    layer = name.removesuffix(".weight_meta")
    original = path.read_bytes()

    def refused(change, words):
        path.write_bytes(original)
        rewrite(path, change)
        with pytest.raises(MoonshotError, match=words):
            load_pruned(copy)

    refused(lambda found, metadata: found.pop(name), f"{layer}: .*weight_meta is missing")
    refused(lambda found, metadata: metadata.pop("moonshot"), ": the file's metadata has no checksum of it")
    refused(lambda found, metadata: found.update(extra=torch.ones(2)), "extra: the file's metadata has no checksum")
    refused(lambda found, metadata: metadata.update(moonshot="{"), "metadata of the packed layers is damaged")
    refused(lambda found, metadata: metadata.update(moonshot='{"version": 2, "layers": {}, "sha256": {}}'), "version=2")

    def claim(field, value):
        def change(found, metadata):
            described = json.loads(metadata["moonshot"])
            described["layers"][layer + ".weight"][field] = value
            metadata["moonshot"] = json.dumps(described)

        return change

    refused(claim("pattern", "1:4"), f"{layer}: it is not 1:4")
    refused(claim("shape", [7, 16]), f"{layer}: weight_meta is torch.uint8")
    refused(claim("dtype", "float16"), f"{layer}: its values are torch.bfloat16, float16 was written")


def test_transformers_alone_refuses_a_weight_that_does_not_fit(copy, caplog):
    path = sorted(copy.glob("*.safetensors"))[0]

    def change(found, metadata):
        name = next(name for name in found if name.endswith("_meta"))
        found[name][0, 0] ^= 1

    rewrite(path, change)
    with pytest.raises(RuntimeError, match="conversion of the weights"):
        hf.AutoModelForCausalLM.from_pretrained(copy)


def test_a_dense_checkpoint_that_lost_its_zeros_is_refused(tmp_path):
    pruner = pruned()
    pruner.save_pretrained(tmp_path)
    rewrite(tmp_path / "model.safetensors", lambda found, _: found["model.layers.2.mlp.up_proj.weight"].add_(1))
    with pytest.raises(MoonshotError, match=r"^model\.layers\.2\.mlp\.up_proj: it has \d+ zeros, its report says 192"):
        load_pruned(tmp_path)


def test_without_a_gpu_that_multiplies_2_4_faster_layers_stay_dense_and_say_why(packed, caplog):
    folder, model = packed
    loaded = load_pruned(folder, runtime="semi_structured", batch_shape=(2, 8))
    assert_same(model, loaded)
    assert len(loaded.moonshot_runtime) == 21
    assert all(reason.startswith("dense: ") for reason in loaded.moonshot_runtime.values())
    assert "0 of 21 layers run as 2:4 tensors at 16 tokens" in caplog.text and "stay dense" in caplog.text
    with pytest.raises(MoonshotError, match="batch_shape"):
        load_pruned(folder, runtime="semi_structured", batch_shape=(0, 8))


def test_a_repository_that_does_not_exist(monkeypatch):
    with pytest.raises(MoonshotError, match="no folder, and no repository"):
        load_pruned("nobody/nothing", local_files_only=True)


def test_convolutions_are_packed_too(tmp_path):
    config = hf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=4)
    model = hf.ResNetForImageClassification(config).eval()
    pruner = MoonshotPruner(model, MoonshotConfig(solver="magnitude", pattern="1:4"))
    pruner.prune(progress=False)
    pruner.save_pretrained(tmp_path, format="packed")
    assert any(name.endswith("convolution.weight_packed") for name in tensors(tmp_path))
    for runtime in ("dense", "packed"):  # convolutions run dense
        assert_same(model, load_pruned(tmp_path, runtime=runtime))


def test_a_compacted_model_is_loaded_and_what_is_left_of_its_zeros_packed(tmp_path):
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
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        layers = json.loads(file.metadata()["moonshot"])["layers"]
    patterns = {name.split(".")[-2]: layer["pattern"] for name, layer in layers.items()}
    assert patterns["q_proj"] == "1:4" and patterns["up_proj"] == "2:4" and patterns["k_proj"] == "unstructured"
