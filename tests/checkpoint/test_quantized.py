"""Checkpoints of quantized models: files, conversions, runtimes, `verify`, and damage."""

import json

import pytest
import torch
import transformers as hf
from checkpoints import INPUTS, assert_same, files, pruned, tensors
from grid_matrices import on_grid
from packed_models import held
from quantized_models import quantize, quantized
from safetensors import safe_open
from safetensors.torch import save_file
from tiny_mixtures import family

from optimum_moonshot import (
    MoonshotConfig,
    MoonshotError,
    MoonshotPrunedCheckpoint,
    MoonshotPruner,
    convert,
    load_pruned,
    verify,
)
from optimum_moonshot.__main__ import main
from optimum_moonshot.objective.grid import Grid
from optimum_moonshot.reports.prune_report import PruneReport
from optimum_moonshot.reports.record import PruningRecord
from optimum_moonshot.runtime.packed_module import pack_if_smaller

UP = "model.layers.1.mlp.up_proj"
AUTO = hf.AutoModelForCausalLM


def entries(folder):
    """The metadata of the packed layers."""
    layers = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            layers |= json.loads(file.metadata()["moonshot"])["layers"]
    return layers


def assert_files(pruner, bits, folder):
    """Every format holds the weights of a quantized model, is converted to the other one, and verified."""
    for format in ("dense", "packed"):
        pruner.save_pretrained(folder / format, format=format, max_shard_size="20KB")
    layers = entries(folder / "packed")
    assert layers and {entry["codec"] for entry in layers.values()} == {f"int{bits}g64"}
    assert sum(stored.endswith("_codes") for stored in tensors(folder / "packed")) == len(layers)
    assert_same(pruner.model, AUTO.from_pretrained(folder / "packed"))
    for format, other in (("dense", "packed"), ("packed", "dense")):
        convert(folder / format, folder / "converted", other)
        assert_same(pruner.model, load_pruned(folder / "converted"))
        result = verify(folder / format)
        assert result, result.table()
        assert all(layer.bits == bits and layer.on_grid for layer in result.layers)
    return layers


@pytest.mark.parametrize(
    "name, bits, dtype, settings",
    [
        ("llama", 8, torch.bfloat16, dict(pattern="2:4")),
        ("llama", 4, torch.float32, dict(pattern="unstructured", sparsity=0.6)),
        ("llama", 3, torch.float16, dict(pattern="unstructured", sparsity=0.6)),
        ("llama", 4, torch.bfloat16, dict(pattern="unstructured", sparsity=0.0)),
        ("gpt2", 4, torch.bfloat16, dict(pattern="2:4")),
        pytest.param("mixtral", 4, torch.bfloat16, dict(pattern="2:4"), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_saved_loaded_and_converted(name, bits, dtype, settings, tmp_path):
    assert_files(quantized(name, dtype, bits, **settings), bits, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("transposed", [False, True])
def test_stacked_experts(transposed, tmp_path):
    """Fused parameters that are stored as they are, [experts, out, in] or [experts, in, out]."""
    model = family("gpt_oss" if transposed else "jetmoe").to(torch.bfloat16)
    pruner = MoonshotPruner(model, MoonshotConfig(solver="magnitude", pattern="2:4"))
    pruner.prune(progress=False)
    layers = assert_files(quantize(pruner), 4, tmp_path)
    stacked = [entry for entry in layers.values() if entry.get("stacked")]
    assert stacked and {entry["transposed"] for entry in stacked} == {transposed}


@pytest.mark.parametrize("source", ["dense", "packed"])
def test_packed_in_memory_and_back(source, tmp_path):
    pruner = quantized()
    with torch.no_grad():
        expected = pruner.model(INPUTS).logits
    pruner.save_pretrained(tmp_path / source, format=source)
    for inputs in ("int8", "float", "config"):
        if inputs == "config":
            inputs = "float"
            config = MoonshotPrunedCheckpoint(runtime="packed", inputs=inputs)
            model = AUTO.from_pretrained(tmp_path / source, quantization_config=config)
        else:
            model = load_pruned(tmp_path / source, runtime="packed", inputs=inputs)
        assert len(held(model)) == 21
        for name in held(model):
            module = model.get_submodule(name)
            assert (module.codec.name, module.codec.inputs, module.dtype) == ("int4g64", inputs, torch.bfloat16)
        with torch.no_grad():
            assert torch.allclose(model(INPUTS).logits, expected, atol=0.2)
        model.save_pretrained(tmp_path / "again")
        assert_same(pruner.model, load_pruned(tmp_path / "again"))


def test_a_packed_checkpoint_stays_on_its_grid_in_another_dtype(tmp_path):
    pruner = quantized(dtype=torch.float32)
    for source in ("dense", "packed"):
        pruner.save_pretrained(tmp_path / source, format=source)
    unpacked, cast = (AUTO.from_pretrained(tmp_path / name, dtype=torch.bfloat16) for name in ("packed", "dense"))
    kept = load_pruned(tmp_path / "packed", runtime="packed", dtype=torch.bfloat16)
    for name in held(kept):
        weight, dense = unpacked.get_submodule(name).weight, cast.get_submodule(name).weight
        assert torch.equal(kept.get_submodule(name).weight, weight)
        Grid(4, 64, torch.bfloat16).scales_of(weight.detach())
        assert not torch.equal(weight, dense) and torch.allclose(weight, dense, rtol=2**-6)


def test_a_model_changes_between_runtimes(tmp_path):
    pruner = quantized()
    before = {name: tensor.clone() for name, tensor in pruner.model.state_dict().items()}
    assert set(pruner.to_runtime("packed").values()) == {"packed: requested"}
    pruner.to_runtime("packed", inputs="float")
    assert {pruner.model.get_submodule(name).codec.inputs for name in held(pruner.model)} == {"float"}
    pruner.save_pretrained(tmp_path / "packed")
    pruner.to_runtime("dense")
    assert not held(pruner.model)
    after = pruner.model.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    pruner.save_pretrained(tmp_path / "again", format="packed")
    weights = [next(iter(sorted((tmp_path / name).glob("*.safetensors")))).read_bytes() for name in ("packed", "again")]
    assert weights[0] == weights[1]
    for call in (lambda: pruner.to_runtime("packed", inputs="int4"), lambda: load_pruned(tmp_path, inputs=8)):
        with pytest.raises(MoonshotError, match="^inputs="):
            call()


def test_auto_packs_layers_by_the_verdict_of_their_format(tmp_path, monkeypatch):
    quantized().save_pretrained(tmp_path, format="packed")
    assert not held(load_pruned(tmp_path, runtime="auto"))  # they are small
    monkeypatch.setattr("optimum_moonshot.packing.timing.LEAST", 1)
    sets = ("portable", "neon", "avx2", "avx512", "vbmi2", "amx")
    monkeypatch.setattr("optimum_moonshot.packing.quantized.FASTER", sets)
    monkeypatch.setattr("optimum_moonshot.packing.timing.SLOWER", ())
    model = load_pruned(tmp_path, runtime="auto")
    assert model.moonshot_runtime
    assert all("kernels for int4g64" in entry or "no kernel" in entry for entry in model.moonshot_runtime.values())


def test_layers_have_their_own_bits(tmp_path):
    pruner = pruned(dtype=torch.bfloat16)
    names = [layer.name for layer in pruner.report.layers]
    bits = {name: 8 if "q_proj" in name else 4 for name in names if "mlp" not in name}
    quantize(pruner, bits).save_pretrained(tmp_path, format="packed")
    formats = {name.removesuffix(".weight"): entry.get("codec", "bitmask") for name, entry in entries(tmp_path).items()}
    assert formats == {name: f"int{bits[name]}g64" if name in bits else "bitmask" for name in names}
    assert_same(pruner.model, load_pruned(tmp_path))
    result = verify(tmp_path)
    assert result and {layer.name: layer.bits for layer in result.layers} == {name: bits.get(name) for name in names}
    assert "config.json: 2:4, 4, 8 bits, sparsity" in result.declared[0]


def test_bits_per_weight_of_layers_and_model(tmp_path):
    """A row of 16 inputs: a bit each, 4 for half of them, and a scale of 16 bits; of 24, a block is a whole byte."""
    pruner = quantized()
    for format in ("dense", "packed"):
        pruner.save_pretrained(tmp_path / format, format=format)
        result = verify(tmp_path / format)
        stored = tensors(tmp_path / format)
        assert result.model_bits_per_weight == 8 * sum(part.nbytes for part in stored.values()) / result.parameters
        (up,) = [layer for layer in result.layers if layer.name == UP]
        assert up.bits_per_weight == (16 if format == "dense" else 4 * 0.5 + 1 + 16 / 16)
        total = sum(layer.shape[0] * layer.shape[1] for layer in result.layers)
        bits = sum(layer.bits_per_weight * layer.shape[0] * layer.shape[1] for layer in result.layers)
        assert result.bits_per_weight == pytest.approx(bits / total)
        assert f"{result.bits_per_weight:.3f} per weight of these layers, " in result.table()


def test_weights_that_left_the_grid(tmp_path):
    """They can be saved dense, which `verify` reports, but not packed."""
    pruner = quantized()
    weight = pruner.model.get_submodule(UP).weight
    with torch.no_grad():
        weight.mul_(torch.where(torch.rand(weight.shape) < 0.5, 1.1, 1.0))
    message = f"{UP}.*row [0-9]+ is not on a grid of 4 bits with groups of 64.*save them dense"
    with pytest.raises(MoonshotError, match=message):
        pruner.save_pretrained(tmp_path / "packed", format="packed")
    assert not list((tmp_path / "packed").glob("*"))
    with pytest.raises(MoonshotError, match=message):
        pruner.to_runtime("packed")
    assert not held(pruner.model)
    pruner.save_pretrained(tmp_path / "dense")
    result = verify(tmp_path / "dense")
    assert result.mismatches == (f"config.json says 4 bits: 1 of 21 layers are not on their grid, such as {UP}",)


def test_the_commands(tmp_path, capsys):
    quantized().save_pretrained(tmp_path / "dense")
    convert_to = ["convert", str(tmp_path / "dense"), "--format", "packed", "--output", str(tmp_path / "packed")]
    assert main(convert_to) in (0, None)
    capsys.readouterr()
    assert main(["verify", str(tmp_path / "packed")]) in (0, None)
    printed = capsys.readouterr().out
    assert "packed int4g64, bfloat16" in printed and "bits        " in printed and "4 bits" in printed


@pytest.mark.parametrize(
    "entry, words",
    [
        ({"config.bits": 5}, "config.bits=5: give 8, 4, 3"),
        ({"config.bits": "4"}, "config.bits='4': give"),
        ({"config.bits": [4]}, r"config.bits=\[4\]: give"),
        ({"config.quant_group": 100}, "config.quant_group=100: give a multiple of 64"),
        ({"config.quant_group": None}, "config.quant_group=None: give"),
        ({"bits": {"a": 2}}, "bits=2: give"),
        ({"bits": 4}, "bits=4: must be an object or null"),
    ],
    ids=str,
)
def test_a_damaged_record_is_refused_by_its_field(entry, words):
    values = PruningRecord.of(quantized().model).to_dict()
    assert (values["config"]["bits"], values["config"]["quant_group"]) == (4, 64)
    for name, value in entry.items():
        (values["config"] if "." in name else values)[name.rpartition(".")[2]] = value
    with pytest.raises(MoonshotError, match=f"config.json is damaged: moonshot: {words}"):
        PruningRecord.from_dict(values)


def test_the_bits_of_layers():
    values = PruningRecord.of(pruned().model).to_dict()
    assert "bits" not in values
    assert PruningRecord.from_dict(values).layer_grids(["a"]) == {"a": None}
    every = PruningRecord.from_dict({**values, "config": {**values["config"], "bits": 8}})
    assert every.layer_grids(["a"]) == {"a": Grid(8, 128)}
    each = PruningRecord.from_dict({**values, "bits": {"a": 4}})
    assert each.layer_grids(["a", "b"]) == {"a": Grid(4, 128), "b": None}
    assert PruningRecord.from_dict(each.to_dict()) == each
    mixed = PruningRecord.from_dict({**values, "bits": {"a": 8, "b": 4, "c": 8}})
    grids = [record.grids for record in (every, each, mixed, PruningRecord.from_dict(values))]
    assert grids == [(Grid(8, 128),), (Grid(4, 128),), (Grid(4, 128), Grid(8, 128)), ()]


def test_a_quantized_run_is_packed_as_codes(tmp_path):
    for number, settings in enumerate((dict(pattern="2:4", bits=4), dict(bits=8, quant_group=64))):
        pruner = pruned(dtype=torch.bfloat16, **settings)
        pruner.save_pretrained(tmp_path / str(number), format="packed")
        codec = f"int{settings['bits']}g{settings.get('quant_group', 128)}"
        embeddings = {"model.embed_tokens.weight", "lm_head.weight"}
        stored = entries(tmp_path / str(number))
        assert {stored.pop(name)["codec"] for name in embeddings} == {f"int8g{settings.get('quant_group', 128)}"}
        assert {entry["codec"] for entry in stored.values()} == {codec}
        assert_same(pruner.model, load_pruned(tmp_path / str(number)))
        assert verify(tmp_path / str(number)).bits_per_weight < 10


@pytest.mark.parametrize(
    ("columns", "format"),
    [
        (slice(0, 640), "int4g256"),
        (slice(512, 640), "int4g256"),  # within the last group
        (slice(256, 448), "int4g256"),
        (slice(384, 640), "int4g128"),  # from the middle of a group
        (slice(320, 640), "int4g64"),
        (slice(32, 320), "bitmask"),  # from the middle of a block
        (slice(32, 96), "int4g256"),  # a block of its own, within one group
    ],
)
def test_a_part_of_a_weight_is_packed_as_codes_where_it_is_on_a_grid(columns, format):
    weight = on_grid(Grid(4, 256, torch.bfloat16), torch.randn(32, 640) * (torch.rand(32, 640) < 0.4)) + 0.0
    part = weight[:, columns]
    codec, parts = pack_if_smaller(part, [Grid(4, 256), Grid(8, 256)])
    assert codec.name == format and torch.equal(codec.unpack(parts, part.shape), part)


def test_merged_weights_are_packed_with_the_most_bits():
    rows = torch.randn(64, 128) * (torch.rand(64, 128) < 0.4)
    grids = [Grid(bits, 64, torch.bfloat16) for bits in (3, 4, 8)]
    three, four, eight = (on_grid(grid, part) + 0.0 for grid, part in zip(grids, rows.split([30, 30, 4]), strict=True))
    for merged, bits in (([three], 3), ([four, three], 4), ([three, four, eight], 8)):
        weight = torch.cat(merged)
        codec, parts = pack_if_smaller(weight, grids)
        assert codec.name == f"int{bits}g64" and torch.equal(codec.unpack(parts, tuple(weight.shape)), weight)
    assert pack_if_smaller(eight, grids[:2]).codec.name == "bitmask"
    assert pack_if_smaller(four.float(), grids).codec.name == "bitmask"  # its scales are of another dtype


@pytest.mark.parametrize("suffix", ["_codes", "_scale", "_meta"])
def test_a_flipped_bit_is_refused_by_every_reader(suffix, tmp_path):
    quantized().save_pretrained(tmp_path / "packed", format="packed")
    (path,) = (tmp_path / "packed").glob("*.safetensors")
    with safe_open(path, "pt") as file:
        metadata, stored = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    part = stored[f"{UP}.weight{suffix}"]
    part.view(torch.uint8).flatten()[1] ^= 1
    save_file(stored, path, metadata)
    for read in (load_pruned, AUTO.from_pretrained, lambda folder: convert(folder, tmp_path / "out", "dense")):
        with pytest.raises(MoonshotError, match=f"{UP}.*checksum differs"):
            read(tmp_path / "packed")
    assert not verify(tmp_path / "packed") and not (tmp_path / "out").exists()
    assert "moonshot.safetensors" in files(tmp_path / "packed")


@pytest.mark.parametrize("trained", [[UP], None], ids=["one layer", "all"])
def test_layers_that_have_left_their_grid_are_saved_as_not_quantized(tmp_path, trained):
    pruner = pruned(pattern="2:4", bits=4, quant_group=64)
    record, layers = pruner.model.config.moonshot, {layer.name for layer in pruner.report.layers}
    off = set(trained or layers)
    with torch.no_grad():
        for name in off:
            weight = pruner.model.get_submodule(name).weight
            weight *= 1 + 0.1 * torch.rand_like(weight)
    pruner.save_pretrained(tmp_path / "dense")
    result, report = verify(tmp_path / "dense"), PruneReport.load(tmp_path / "dense")
    assert result, result.mismatches
    assert {layer.name for layer in result.layers if layer.bits == 4 and layer.on_grid} == layers - off
    assert {layer.name for layer in report.layers if layer.bits is None} == off
    assert (
        f"{len(off)} of {len(layers)} layers are no longer on their grid, so they are not quantized" in report.notes[-1]
    )
    text = (tmp_path / "dense" / "README.md").read_text()
    assert ("\n  bits:" in text) == ("bits of the surviving weights" in text) == (off != layers)
    assert pruner.model.config.moonshot == record and not pruner.report.notes  # the model itself is unchanged
    assert_same(pruner.model, load_pruned(tmp_path / "dense"))
    convert(tmp_path / "dense", tmp_path / "packed", "packed")
    assert_same(pruner.model, load_pruned(tmp_path / "packed"))
    with pytest.raises(MoonshotError, match="is not on a grid of 4 bits"):
        pruner.save_pretrained(tmp_path / "refused", format="packed")


def test_zeros_that_training_has_filled_are_not_declared(tmp_path):
    pruner = pruned(pattern="unstructured", sparsity=0.5)
    weight = pruner.model.get_submodule(UP).weight
    with torch.no_grad():
        weight[0] = 1.0
    for format in ("dense", "packed"):
        pruner.save_pretrained(tmp_path / format, format=format)
        result, report = verify(tmp_path / format), PruneReport.load(tmp_path / format)
        assert result, result.mismatches
        assert load_pruned(tmp_path / format) is not None
        (layer,) = (layer for layer in report.layers if layer.name == UP)
        assert layer.sparsity == int((weight == 0).sum()) / weight.numel() < 0.5
        assert report.notes == [f"1 of {len(report.layers)} layers have fewer zeros than after the run, such as {UP}"]
