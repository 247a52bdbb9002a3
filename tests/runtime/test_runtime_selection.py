"""Selection of the runtime: layers are packed where that is faster, and a log line explains the choice."""

from types import SimpleNamespace

import pytest
import torch
import transformers as hf
from checkpoints import INPUTS, assert_same, pruned
from models import make
from packed_models import MIXED, held

from optimum_moonshot import MoonshotError, MoonshotPrunedCheckpoint, load_pruned
from optimum_moonshot.kernels.library import find_library
from optimum_moonshot.objective.patterns import NM
from optimum_moonshot.packing import Bitmask, Codec, bitmask, find_codec, timing

AUTO = hf.AutoModelForCausalLM
CPU = torch.device("cpu")


@pytest.fixture
def small_layers_count(monkeypatch):
    """A processor with AVX2 kernels, regardless of the real one, and no lower limit on layer sizes."""
    library = SimpleNamespace(instruction_set="avx2", computes=lambda dtype: dtype.itemsize < 8)
    monkeypatch.setattr(timing, "find_library", lambda: library)
    monkeypatch.setattr(timing, "LEAST", 1)


def verdict(dtype=torch.bfloat16, device=CPU, share=0.5625, shape=(2048, 2048)):
    return find_codec("bitmask").decoding(shape, NM(2, 4), share, dtype, device)


def test_packed_is_chosen_where_measurements_were_faster(monkeypatch):
    library = SimpleNamespace(instruction_set="portable", computes=lambda dtype: dtype.itemsize < 8)
    monkeypatch.setattr(timing, "find_library", lambda: library)
    assert verdict() == (False, "the portable kernel is slower")
    for library.instruction_set in ("avx2", "avx512", "vbmi2", "amx"):
        assert verdict() == (True, f"{library.instruction_set} kernels")
        assert verdict(share=0.9) == (False, "more than 87% of the bytes remain")
        assert verdict(torch.float32, share=0.53).faster
        most = 55 if library.instruction_set == "avx2" else 64
        assert verdict(torch.float32, share=0.65) == (False, f"more than {most}% of the bytes remain")
        assert verdict(torch.float64) == (False, "no kernel for torch.float64")
        assert verdict(shape=(256, 512)) == (False, "smaller than 262144 weights")
    assert verdict(device=torch.device("mps")) == (False, "no kernel for mps")
    monkeypatch.setattr(timing, "find_library", lambda: None)
    assert verdict() == (False, "no compiled kernel here")
    monkeypatch.setattr(timing, "find_gpu_kernels", lambda *_: None)
    assert verdict(device=torch.device("cuda")) == (False, "no kernel for cuda: Triton is missing")
    assert Codec.decoding(find_codec("bitmask"), (9, 9), None, 0.1, torch.float32, CPU) == (
        False,
        "bitmask weights are unpacked at every call",
    )


def test_unmeasured_hardware_is_timed(monkeypatch):
    gains = iter([1.3, 0.8, 1.3, 0.8])
    monkeypatch.setattr(timing, "_gain", lambda *facts: next(gains))
    monkeypatch.setattr(timing, "find_gpu_kernels", lambda *_: timing)
    library = SimpleNamespace(instruction_set="neon", computes=lambda dtype: True)
    monkeypatch.setattr(timing, "find_library", lambda: library)
    for device, name in ((CPU, "neon"), (torch.device("cuda", 0), "Triton")):
        assert verdict(device=device) == (True, f"{name} kernels, 1.30 times the dense speed when tried")
        assert verdict(device=device) == (False, f"{name} kernels, 0.80 times the dense speed when tried")
    assert verdict(torch.float64, torch.device("cuda")) == (False, "no kernel for torch.float64")


@pytest.mark.parametrize("name", ["bitmask", "int8g128", "int4g128", "int3g64"])
@pytest.mark.parametrize("pattern", [None, NM(2, 4)], ids=str)
def test_timing_multiplies_both_and_keeps_the_random_state(pattern, name, monkeypatch):
    monkeypatch.setattr(timing, "_CYCLED", 1 << 18)
    calls = []
    monkeypatch.setattr(timing, "_seconds", lambda call, device: calls.append(call()) or len(calls))
    before = torch.get_rng_state()
    with torch.device("meta"):  # transformers creates models there
        codec = find_codec(name).with_inputs("float")
        gain = timing._gain.__wrapped__(codec, (8, 4096), pattern, 0.5, torch.float32, CPU)
    assert torch.equal(torch.get_rng_state(), before) and gain < 1
    for dense, packed in zip(calls[::2], calls[1::2], strict=True):
        assert dense.shape == (1, 8) and torch.allclose(dense, packed, atol=1e-3)


def test_auto_packs_faster_layers_and_logs_one_line(small_layers_count, caplog):
    pruner = pruned(dtype=torch.bfloat16, **MIXED)
    chosen = pruner.to_runtime("auto")
    assert held(pruner.model) == {name for name in chosen if "k_proj" not in name}
    (line,) = [record.message for record in caplog.records if "runtime=" in record.message]
    assert line.startswith(
        "runtime='auto': packed: 18 of 21 layers, 0.0 MiB in place of 0.0 (avx2 kernels); dense: 3 ("
    )
    assert "packing does not make it smaller" in line
    chosen = pruner.to_runtime("packed")  # at sparsity 0.05 packing needs more bytes
    assert all(chosen[name].startswith("dense") == ("k_proj" in name) for name in chosen)


def test_auto_unpacks_slower_layers(small_layers_count, monkeypatch, caplog):
    pruner = pruned()
    pruner.to_runtime("packed")
    monkeypatch.setattr(timing, "LEAST", 300)
    chosen = pruner.to_runtime()
    assert held(pruner.model) == {name for name in chosen if "mlp" in name}
    assert "packed: 9 of 21 layers" in caplog.text and "dense: 12 (smaller than 300 weights)" in caplog.text
    monkeypatch.setattr(timing, "find_library", lambda: None)
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
def test_auto_loads_faster_layers_packed(loader, format, small_layers_count, caplog, tmp_path):
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
def test_auto_loads_dense_where_packing_is_not_faster(loader, packed, monkeypatch, caplog):
    for library, why in (
        (None, "no compiled kernel here"),
        (SimpleNamespace(instruction_set="avx2", computes=lambda dtype: True), "smaller than 262144 weights"),
    ):
        monkeypatch.setattr(timing, "find_library", lambda library=library: library)
        model = LOADERS[loader](packed[0], "auto")
        assert_same(packed[1], model)
        assert f"runtime='auto': dense: 21 of 21 layers ({why})" in caplog.text
        assert not model.is_quantized and "save_pretrained" not in vars(model)


def test_the_loaded_dtype_and_device_decide(packed, small_layers_count, caplog, tmp_path):
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


def test_the_kernels_of_this_cpu_are_measured_or_timed():
    library = find_library()
    if library is None:
        pytest.skip("installed without a C compiler")
    instruction_sets = {*bitmask._MOST, *timing.SLOWER, "neon"}
    assert library.instruction_set in instruction_sets and set(library.instruction_sets) <= instruction_sets
    assert verdict().faster == (library.instruction_set in bitmask._MOST) or library.instruction_set == "neon"
