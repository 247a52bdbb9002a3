"""Pruned layers held packed in memory: the same weights and outputs, saved as before, and packed where it is faster."""

import copy
import pickle
import weakref
from types import SimpleNamespace

import pytest
import torch
import transformers as hf
from checkpoints import INPUTS, assert_same, files, pruned, tensors
from models import make, token_batches
from torch import nn

from optimum_moonshot import MoonshotConfig, MoonshotError, MoonshotPrunedCheckpoint, MoonshotPruner, load_pruned
from optimum_moonshot.checkpoint import in_memory
from optimum_moonshot.kernels import find_library
from optimum_moonshot.objective.patterns import NM
from optimum_moonshot.packing import Bitmask, Codec, bitmask_speed, find_codec
from optimum_moonshot.runtime.packed_linear import PackedLinear

AUTO = hf.AutoModelForCausalLM
MIXED = dict(pattern="unstructured", allocation={"q_proj": "1:4", "k_proj": 0.05, "mlp": "2:4", "[vo]_proj": 0.6})
CPU = torch.device("cpu")


def held(model):
    """The names of the layers that are packed."""
    return {name for name, module in model.named_modules() if isinstance(module, PackedLinear)}


def state(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_state(model, expected):
    found = model.state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


@pytest.fixture
def small_layers_count(monkeypatch):
    """A processor with AVX2 kernels, whatever this one has, and no layer too small for them."""
    library = SimpleNamespace(instruction_set="avx2", computes=lambda dtype: dtype.itemsize < 8)
    monkeypatch.setattr(bitmask_speed, "find_library", lambda: library)
    monkeypatch.setattr(bitmask_speed, "_LEAST", 1)


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
        assert pruner.to_runtime("packed") == {**chosen}  # again changes nothing
        done = pruner.to_runtime("dense")
        assert not held(model) and set(done.values()) == {"dense: asked for"}
        assert_state(model, before)
        assert not model.is_quantized and "save_pretrained" not in vars(model)
        assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("solver", ["sparsegpt", "wanda"])
def test_after_a_rotation_and_recovery_too(solver, tmp_path):
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


def test_memory_is_that_of_the_packed_weights():
    pruner = pruned(dtype=torch.bfloat16)
    dense = sum(layer.shape[0] * layer.shape[1] * 2 for layer in pruner.report.layers)
    pruner.to_runtime("packed")
    packed = sum(part.nbytes for name in held(pruner.model) for part in pruner.model.get_submodule(name).parts.values())
    assert packed == dense * 9 // 16
    assert not any(parameter.ndim == 2 for parameter in pruner.model.model.layers.parameters())


@pytest.mark.parametrize("settings", [dict(pattern="2:4"), MIXED], ids=["2:4", "mixed"])
@pytest.mark.parametrize("options", [{}, {"max_shard_size": "8KB"}], ids=["whole", "shards"])
def test_what_is_saved_is_what_it_was_before_packing(settings, options, tmp_path):
    pruner = pruned("llama-tied-biased", torch.bfloat16, **settings)
    for format in ("dense", "packed"):
        pruner.save_pretrained(tmp_path / format, format=format, **options)
    pruner.to_runtime("packed")
    before, kinds = state(pruner.model), held(pruner.model)
    assert kinds
    pruner.save_pretrained(tmp_path / "again", **options)
    pruner.save_pretrained(tmp_path / "again-dense", format="dense", **options)
    pruner.model.save_pretrained(tmp_path / "own", **options)
    pruner.model.save_pretrained(tmp_path / "own-dense", format="dense", **options)
    assert_state(pruner.model, before)
    assert held(pruner.model) == kinds and pruner.model.is_quantized
    for format, ours, own in (("packed", "again", "own"), ("dense", "again-dense", "own-dense")):
        expected, found, alone = (files(tmp_path / name) for name in (format, ours, own))
        found["README.md"] = found["README.md"].replace(ours.encode(), format.encode())  # the card's heading
        assert alone == {name: content for name, content in found.items() if name in alone}
        assert found.keys() - alone.keys() == {"README.md", "moonshot_report.json", "moonshot_report.png"}
        if not options:
            assert found == expected
            continue
        before, after = tensors(tmp_path / format), tensors(tmp_path / ours)  # a file ends where a block does
        assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
        assert found["config.json"] == expected["config.json"] and found["README.md"] == expected["README.md"]


@pytest.mark.parametrize("format", ["dense", "packed"])
def test_one_decoder_layer_is_dense_while_a_packed_model_is_saved(format, tmp_path, monkeypatch):
    pruner = pruned("llama", torch.bfloat16, pattern="2:4")
    pruner.to_runtime("packed")
    alive, most = weakref.WeakSet(), []
    own = Bitmask.unpack

    def unpack(*args):
        dense = own(*args)
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
def test_copies_are_saved_as_well(copied, tmp_path):
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
    assert len(held(kept)) == 21 and not hasattr(kept, "hf_quantizer")
    assert not hasattr(kept.config, "quantization_config") and "runtime" not in kept.config.to_json_string()
    in_memory.to_runtime(kept, "dense")
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


def test_states_go_between_packed_models_and_to_no_dense_one():
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


def test_what_changes_weights_asks_for_a_dense_model(tmp_path):
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


def test_what_cannot_be_packed_says_so():
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
    with pytest.raises(MoonshotError, match="runtime='fast': use .dense. or .packed. or .semi_structured. or .auto."):
        pruner.to_runtime("fast")
    with pytest.raises(MoonshotError, match="runtime='semi_structured': use .dense. or .packed. or .auto.$"):
        MoonshotPrunedCheckpoint("semi_structured")


def test_a_layer_that_is_not_nm_any_more_leaves_all_dense():
    pruner = pruned()
    with torch.no_grad():
        pruner.model.model.layers[1].mlp.up_proj.weight[3, 4:8] = 1
    before = state(pruner.model)
    with pytest.raises(MoonshotError, match=r"^model\.layers\.1\.mlp\.up_proj: it is not 2:4"):
        pruner.to_runtime("packed")
    assert_state(pruner.model, before)
    assert not pruner.model.is_quantized and "save_pretrained" not in vars(pruner.model)


class Half(torch.Tensor):
    """Stands for torch's 2:4 tensors, which are on GPUs only."""

    def to_dense(self):
        return torch.Tensor.mul(self, 1).as_subclass(torch.Tensor)


def test_torchs_2_4_tensors_become_dense_for_everything_else(monkeypatch, tmp_path):
    monkeypatch.setattr(in_memory, "SparseSemiStructuredTensor", Half)
    pruner = pruned()
    before, layer = state(pruner.model), pruner.model.model.layers[1].mlp.up_proj
    pruner.save_pretrained(tmp_path / "before")
    sparse = nn.Parameter(layer.weight.detach().clone().as_subclass(Half), requires_grad=False)
    layer.weight = sparse
    pruner.save_pretrained(tmp_path / "after")
    assert layer.weight is sparse
    assert files(tmp_path / "before")["model.safetensors"] == files(tmp_path / "after")["model.safetensors"]
    assert len([what for what in pruner.to_runtime("packed").values() if what.startswith("packed")]) == 21
    pruner.to_runtime("dense")
    assert_state(pruner.model, before)


def test_without_a_gpu_semi_structured_is_dense_and_says_why():
    pruner = pruned()
    pruner.to_runtime("packed")
    chosen = pruner.to_runtime("semi_structured", batch_shape=(2, 8))
    assert len(chosen) == 21 and not held(pruner.model)
    assert all("NVIDIA GPUs only" in what for what in chosen.values())
    with pytest.raises(MoonshotError, match="batch_shape"):
        pruner.to_runtime("semi_structured", batch_shape=(0, 1))


def verdict(dtype=torch.bfloat16, device=CPU, share=0.5625, shape=(2048, 2048)):
    return find_codec("bitmask").decoding(shape, NM(2, 4), share, dtype, device)


def test_packed_is_chosen_where_the_figures_say_that_it_is_faster(monkeypatch):
    library = SimpleNamespace(instruction_set="portable", computes=lambda dtype: dtype.itemsize < 8)
    monkeypatch.setattr(bitmask_speed, "find_library", lambda: library)
    assert verdict() == (False, "the portable kernel is slower")
    for library.instruction_set in ("avx2", "avx512", "vbmi2", "amx"):
        assert verdict() == (True, f"{library.instruction_set} kernels")
        assert verdict(share=0.9) == (False, "more than 87% of the bytes are left")
        assert verdict(torch.float32, share=0.53).faster
        most = 55 if library.instruction_set == "avx2" else 64
        assert verdict(torch.float32, share=0.65) == (False, f"more than {most}% of the bytes are left")
        assert verdict(torch.float64) == (False, "no kernel for torch.float64")
        assert verdict(shape=(256, 512)) == (False, "smaller than 262144 weights")
    assert verdict(device=torch.device("mps")) == (False, "no kernel for mps")
    monkeypatch.setattr(bitmask_speed, "find_library", lambda: None)
    assert verdict() == (False, "no compiled kernel here")
    monkeypatch.setattr(bitmask_speed, "find_gpu_kernels", lambda: None)
    assert verdict(device=torch.device("cuda")) == (False, "no kernel for cuda: Triton is missing")
    assert Codec.decoding(find_codec("bitmask"), (9, 9), None, 0.1, torch.float32, CPU) == (
        False,
        "bitmask weights are unpacked at every call",
    )


def test_what_was_not_measured_is_tried(monkeypatch):
    gains = iter([1.3, 0.8, 1.3, 0.8])
    monkeypatch.setattr(bitmask_speed, "_gain", lambda *facts: next(gains))
    monkeypatch.setattr(bitmask_speed, "find_gpu_kernels", lambda: bitmask_speed)
    library = SimpleNamespace(instruction_set="neon", computes=lambda dtype: True)
    monkeypatch.setattr(bitmask_speed, "find_library", lambda: library)
    for device, name in ((CPU, "neon"), (torch.device("cuda", 0), "Triton")):
        assert verdict(device=device) == (True, f"{name} kernels, 1.30 times the dense speed when tried")
        assert verdict(device=device) == (False, f"{name} kernels, 0.80 times the dense speed when tried")
    assert verdict(torch.float64, torch.device("cuda")) == (False, "no kernel for torch.float64")


@pytest.mark.parametrize("pattern", [None, NM(2, 4)], ids=str)
def test_trying_it_multiplies_both_and_leaves_no_trace(pattern, monkeypatch):
    monkeypatch.setattr(bitmask_speed, "_CYCLED", 1 << 18)
    calls = []
    monkeypatch.setattr(bitmask_speed, "_seconds", lambda call, device: calls.append(call()) or len(calls))
    before = torch.get_rng_state()
    with torch.device("meta"):  # where transformers makes models
        gain = bitmask_speed._gain.__wrapped__((8, 4096), pattern, 0.53125, torch.float32, CPU)
    assert torch.equal(torch.get_rng_state(), before) and gain < 1
    for dense, packed in zip(calls[::2], calls[1::2], strict=True):
        assert dense.shape == (1, 8) and torch.allclose(dense, packed, atol=1e-3)


def test_auto_packs_what_is_faster_and_says_so_in_one_line(small_layers_count, caplog):
    pruner = pruned(dtype=torch.bfloat16, **MIXED)
    chosen = pruner.to_runtime("auto")
    assert held(pruner.model) == {name for name in chosen if "k_proj" not in name}
    (line,) = [record.message for record in caplog.records if "runtime=" in record.message]
    assert line.startswith(
        "runtime='auto': packed: 18 of 21 layers, 0.0 MiB in place of 0.0 (avx2 kernels); dense: 3 ("
    )
    assert "packing makes it no smaller" in line
    chosen = pruner.to_runtime("packed")  # 0.05 takes more bytes packed than dense
    assert all(chosen[name].startswith("dense") == ("k_proj" in name) for name in chosen)


def test_auto_unpacks_what_is_not_faster(small_layers_count, monkeypatch, caplog):
    pruner = pruned()
    pruner.to_runtime("packed")
    monkeypatch.setattr(bitmask_speed, "_LEAST", 300)
    chosen = pruner.to_runtime()
    assert held(pruner.model) == {name for name in chosen if "mlp" in name}
    assert "packed: 9 of 21 layers" in caplog.text and "dense: 12 (smaller than 300 weights)" in caplog.text
    monkeypatch.setattr(bitmask_speed, "find_library", lambda: None)
    pruner.to_runtime()
    assert not held(pruner.model)
    assert "runtime='auto': dense: 21 of 21 layers (no compiled kernel here)" in caplog.text


LOADERS = {
    "load_pruned": lambda folder, runtime, **options: load_pruned(folder, runtime=runtime, **options),
    "from_pretrained": lambda folder, runtime, **options: AUTO.from_pretrained(
        folder, quantization_config=MoonshotPrunedCheckpoint(runtime=runtime), **options
    ),
}


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("format", ["dense", "packed"])
def test_auto_loads_packed_what_is_faster(loader, format, small_layers_count, caplog, tmp_path):
    settings = {"targets": [r"\.[0-2]\.", "lm_head"], "allocation": {**MIXED["allocation"], "lm_head": 0.6}}
    pruner = pruned("llama-tied-biased", torch.bfloat16, **{**MIXED, **settings})
    with torch.no_grad():
        expected = pruner.model(INPUTS).logits
    pruner.save_pretrained(tmp_path, format=format)
    model = LOADERS[loader](tmp_path, "auto")
    layers = {name for name in model.moonshot_runtime if model.moonshot_runtime[name] == "packed: avx2 kernels"}
    assert held(model) == layers and len(layers) == 18 and not any("k_proj" in name for name in layers)
    (line,) = [record.message for record in caplog.records if "runtime=" in record.message]
    assert "packed: 18 of " in line and "tied to another weight" in line
    with torch.no_grad():
        assert torch.allclose(model(INPUTS).logits, expected, atol=0.2)
    model.save_pretrained(tmp_path / "again", format="dense")
    assert_same(pruner.model, AUTO.from_pretrained(tmp_path / "again"))
    for runtime, count in (("packed", 18), ("dense", 0)):
        assert len(held(LOADERS[loader](tmp_path, runtime))) == count


@pytest.mark.parametrize("loader", LOADERS)
def test_auto_loads_dense_where_nothing_is_faster(loader, packed, monkeypatch, caplog):
    for library, why in (
        (None, "no compiled kernel here"),
        (SimpleNamespace(instruction_set="avx2", computes=lambda dtype: True), "smaller than 262144 weights"),
    ):
        monkeypatch.setattr(bitmask_speed, "find_library", lambda library=library: library)
        model = LOADERS[loader](packed[0], "auto")
        assert_same(packed[1], model)
        assert f"runtime='auto': dense: 21 of 21 layers ({why})" in caplog.text
        assert not model.is_quantized and "save_pretrained" not in vars(model)


def test_the_dtype_that_is_loaded_decides_and_the_place(packed, small_layers_count, caplog, tmp_path):
    assert len(held(load_pruned(packed[0], "auto", dtype=torch.float32))) == 21
    assert not held(load_pruned(packed[0], "auto", dtype=torch.float64))
    assert "no kernel for torch.float64" in caplog.text
    parts = [f"model.{name}" for name in ("embed_tokens", "layers.0", "layers.2", "norm", "rotary_emb")]
    places = {**dict.fromkeys([*parts, "lm_head"], "cpu"), "model.layers.1": "disk"}
    model = load_pruned(packed[0], "auto", device_map=places, offload_folder=tmp_path)
    assert len(held(model)) == 14 and not any("layers.1." in name for name in held(model))
    with torch.no_grad():
        assert torch.allclose(model(INPUTS).logits, packed[1](INPUTS).logits, atol=0.2)
    assert "dense: 7 (offloaded)" in caplog.text


@pytest.mark.parametrize("loader", LOADERS)
def test_loading_packed_unpacks_nothing(loader, packed, small_layers_count, monkeypatch):
    monkeypatch.setattr(Bitmask, "unpack", lambda *arguments: pytest.fail("a weight was unpacked"))
    for runtime in ("packed", "auto"):
        assert len(held(LOADERS[loader](packed[0], runtime))) == 21


def test_the_default_is_dense_and_silent(packed, caplog):
    for model in (load_pruned(packed[0]), AUTO.from_pretrained(packed[0])):
        assert_same(packed[1], model)
        assert not hasattr(model, "moonshot_runtime")
    assert "runtime=" not in caplog.text


def test_a_model_that_is_not_pruned_is_refused(tmp_path):
    make("llama").save_pretrained(tmp_path)
    with pytest.raises(MoonshotError, match="the model is not pruned"):
        AUTO.from_pretrained(tmp_path, quantization_config=MoonshotPrunedCheckpoint(runtime="auto"))


def test_this_processors_kernels_are_in_the_figures_or_tried():
    library = find_library()
    if library is None:
        pytest.skip("installed without a C compiler")
    known = {*bitmask_speed._MOST, *bitmask_speed._SLOWER, "neon"}
    assert library.instruction_set in known and set(library.instruction_sets) <= known
    assert verdict().faster == (library.instruction_set in bitmask_speed._MOST) or library.instruction_set == "neon"
