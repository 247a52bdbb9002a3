"""Every reader of this package verifies packed weights; transformers alone cannot read them."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
import transformers as hf
from checkpoint_edits import change_config, change_description, change_file, change_json, read_header, write_header
from checkpoints import assert_same, pruned
from damage import flip
from safetensors import safe_open
from safetensors.torch import load_file

from optimum_moonshot import MoonshotError, convert, load_pruned
from optimum_moonshot.runtime.packed_layers import PackedLinear

AUTO = hf.AutoModelForCausalLM


def readers(folder, output):
    """The readers of weights of this package, by name."""
    return {
        "load_pruned": lambda: load_pruned(folder),
        "load_pruned, packed": lambda: load_pruned(folder, runtime="packed"),
        "from_pretrained": lambda: AUTO.from_pretrained(folder),
        "AutoModel": lambda: hf.AutoModel.from_pretrained(folder),
        "convert": lambda: convert(folder, output, "dense"),
    }


def refused(folder, output, message, names=None):
    """Every reader, or the named ones, raises and writes nothing."""
    for name, read in readers(folder, output).items():
        if names is None or name in names:
            with pytest.raises(MoonshotError, match=message):
                read()
            assert not output.exists() or not list(output.iterdir()), name


@pytest.mark.parametrize("seed", range(3))
def test_a_flipped_bit_reaches_no_reader(packed_copy, tmp_path, seed):
    path = sorted(packed_copy.glob("*.safetensors"))[seed % 2]
    flip(path, seed)
    refused(packed_copy, tmp_path / "out", rf"^\S+: it is damaged: its checksum differs \({path.name}\)")


def test_checksums_are_skipped_by_the_environment_variable_alone(packed_copy, tmp_path, monkeypatch):
    path = sorted(packed_copy.glob("*.safetensors"))[0]
    with safe_open(path, "pt") as file:
        name = next(name for name in file.keys() if "norm" in name)  # noqa: SIM118
        before = file.get_tensor(name).clone()
    old, new = (tensor.view(torch.uint8).numpy().tobytes() for tensor in (before, before + 1))
    path.write_bytes(path.read_bytes().replace(old, new, 1))
    monkeypatch.setenv("MOONSHOT_VERIFY", "0")
    assert torch.equal(AUTO.from_pretrained(packed_copy).get_parameter(name), before + 1)
    for name in ("load_pruned", "convert"):  # these promise verified weights
        with pytest.raises(MoonshotError, match="its checksum differs"):
            readers(packed_copy, tmp_path / "out")[name]()
    for value in ("", "no", "2"):
        monkeypatch.setenv("MOONSHOT_VERIFY", value)
        with pytest.raises(MoonshotError, match=f"MOONSHOT_VERIFY='{value}': 0 skips"):
            AUTO.from_pretrained(packed_copy)
    monkeypatch.delenv("MOONSHOT_VERIFY")
    change_json(packed_copy / "config.json", lambda config: config["quantization_config"].update(verify=False))
    refused(packed_copy, tmp_path / "out", r"unknown fields: \{'verify': False\}")


def test_an_intact_folder_loads_without_checksums(packed, monkeypatch):
    monkeypatch.setenv("MOONSHOT_VERIFY", "0")
    assert_same(packed[1], AUTO.from_pretrained(packed[0]))


def test_a_config_that_sets_the_runtime_is_refused(packed_copy, tmp_path):
    """The runtime is the caller's choice, never that of a downloaded file."""
    for entry in ({"runtime": "packed"}, {"bits": 4}, {"runtime": "dense", "x": None}):
        quantization = {"quant_method": "moonshot", "format": "packed", "version": 1, **entry}
        change_config(packed_copy, quantization_config=quantization)
        refused(packed_copy, tmp_path / "out", "quantization_config in config.json has unknown fields: ")


def test_the_runtime_of_one_load_does_not_affect_the_next(packed):
    kept = load_pruned(packed[0], runtime="packed")
    assert any(isinstance(module, PackedLinear) for module in kept.modules())
    for loaded in (AUTO.from_pretrained(packed[0]), load_pruned(packed[0])):
        assert not any(isinstance(module, PackedLinear) for module in loaded.modules())


def test_a_model_beside_the_files_of_the_index_is_not_loaded(packed_copy, tmp_path):
    stray = pruned().model
    stray.save_pretrained(tmp_path / "stray")
    shutil.copy(tmp_path / "stray" / "model.safetensors", packed_copy)
    expected = AUTO.from_pretrained(packed_copy)  # through the index of the packed files
    assert_same(expected, load_pruned(packed_copy))
    convert(packed_copy, tmp_path / "dense", "dense")
    assert_same(expected, load_pruned(tmp_path / "dense"))
    shutil.copy(tmp_path / "stray" / "model.safetensors", tmp_path / "dense")
    with pytest.raises(MoonshotError, match="model.safetensors beside model-00001.*which the index names"):
        load_pruned(tmp_path / "dense")
    with pytest.raises(MoonshotError, match="model.safetensors beside model-00001.*which the index names"):
        convert(tmp_path / "dense", tmp_path / "out", "packed")


@pytest.mark.parametrize("format", ["dense", "packed"])
def test_adapters_and_other_files_that_transformers_would_load_are_refused(format, packed, tmp_path):
    folder = shutil.copytree(packed[0], tmp_path / "copy")
    if format == "dense":
        folder = tmp_path / "dense"
        convert(packed[0], folder, "dense")
    other = "packed" if format == "dense" else "dense"
    for name in ("adapter_config.json", "shard-00001-model-00001-of-00001.safetensors"):
        (folder / name).write_text('{"base_model_name_or_path": "elsewhere", "peft_type": "LORA"}')
        for read in (load_pruned, lambda path: convert(path, tmp_path / "out", other)):
            with pytest.raises(MoonshotError, match=f"{name}: transformers would load it too"):
                read(folder)
        (folder / name).unlink()
    shutil.copy(next(folder.glob("*.safetensors")), folder / "other.safetensors")
    change_config(folder, transformers_weights="other.safetensors")
    if format == "packed":  # its index takes precedence over config.json
        assert_same(packed[1], load_pruned(folder))
        assert_same(packed[1], AUTO.from_pretrained(folder))
    else:
        with pytest.raises(MoonshotError, match="config.json names transformers_weights='other.safetensors'"):
            load_pruned(folder)


def test_weights_of_another_shape_are_refused_despite_ignore_mismatched_sizes(packed_copy):
    change_config(packed_copy, vocab_size=64)
    with pytest.raises(MoonshotError, match="(embed_tokens|lm_head): its shape in the files is not"):
        load_pruned(packed_copy, ignore_mismatched_sizes=True)


OUTSIDE = ["../x.safetensors", "/etc/passwd", "a/../../x", "..", "", ".", "C:\\x", "..\\x", "away/x.safetensors", "\0"]


@pytest.mark.parametrize("file", [*OUTSIDE, "x" * 999], ids=lambda file: repr(file)[:14])
@pytest.mark.parametrize("format", ["dense", "packed"])
def test_an_index_that_names_files_outside_its_folder_is_refused(format, packed, file, tmp_path):
    folder = shutil.copytree(packed[0], tmp_path / "copy")
    if format == "dense":
        folder = tmp_path / "dense"
        convert(packed[0], folder, "dense")
    outside = tmp_path / "outside"
    outside.mkdir()
    first = sorted(folder.glob("*.safetensors"))[0]
    for place in (outside / "x.safetensors", tmp_path / "x.safetensors"):
        shutil.copy(first, place)
    (folder / "away").symlink_to(outside)
    index = next(folder.glob("*.index.json"))
    change_json(index, lambda values: values["weight_map"].update(dict.fromkeys(values["weight_map"], file)))
    words = "weights must be in the folder of their index|with .* is missing"
    with pytest.raises(MoonshotError, match=words):
        load_pruned(folder)
    with pytest.raises(MoonshotError, match=words):
        convert(folder, tmp_path / "out", "dense" if format == "packed" else "packed")


def test_files_of_one_name_in_several_folders_are_all_converted(packed, tmp_path):
    folder = tmp_path / "dense"
    convert(packed[0], folder, "dense")
    files = sorted(folder.glob("*.safetensors"))
    moved = {path.name: f"part{number}/weights.safetensors" for number, path in enumerate(files)}
    for path in files:
        (folder / moved[path.name]).parent.mkdir()
        path.rename(folder / moved[path.name])
    change_json(
        folder / "model.safetensors.index.json",
        lambda index: index.update(weight_map={name: moved[file] for name, file in index["weight_map"].items()}),
    )
    (folder / "part0" / "notes.txt").write_text("kept")
    assert_same(packed[1], load_pruned(folder))
    convert(folder, tmp_path / "packed", "packed")
    assert_same(packed[1], load_pruned(tmp_path / "packed"))
    assert (tmp_path / "packed" / "part0" / "notes.txt").read_text() == "kept"
    assert len(list((tmp_path / "packed").rglob("*.safetensors"))) == len(files)


@pytest.mark.parametrize(
    "change, words",
    [
        *(
            (lambda d, name, value=value: d["layers"][name].update(shape=value), "shape=")
            for value in ("x", ["24", "16"], [-24, 16], [2**70, 16], [[24, 16]], {}, None)
        ),
        *(
            (lambda d, name, value=value: d["layers"][name].update(pattern=value), "pattern=")
            for value in (None, 7, ["2:4"], {"2": 4}, "9" * 5000 + ":1")
        ),
        (lambda d, name: d["layers"].update({name: [1, 2]}), "not an object"),
        (lambda d, name: d["layers"][name].update(transposed=True), "weight_meta is|checksum of its metadata differs"),
        (lambda d, name: d["layers"][name].update(pattern="unstructured"), "checksum of its metadata differs"),
        (lambda d, name: d.update(checksum=None), "checksum of its metadata differs"),
    ],
    ids=range(16),
)
def test_a_damaged_description_is_named_with_file_and_layer(packed_copy, tmp_path, change, words):
    path = sorted(packed_copy.glob("*.safetensors"))[0]
    layer = next(name for name in load_file(path) if name.endswith("_meta")).removesuffix("_meta")
    change_description(path, lambda described: change(described, layer))
    shown = words if "metadata" in words else rf"^{layer.removesuffix('.weight')}: .*({words}).*"
    refused(packed_copy, tmp_path / "out", rf"{shown}.*{path.name}|checksum of its metadata.*{path.name}")


DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    "text",
    ["null", "[]", "3", '"x"', "{}", DEEP, '{"version": 1, "layers": [], "sha256": {}}', '{"version": true}', "{"],
    ids=lambda text: text[:9],
)
def test_an_invalid_description_is_refused(packed_copy, tmp_path, text):
    path = sorted(packed_copy.glob("*.safetensors"))[0]
    change_file(path, lambda _, metadata: metadata.update(moonshot=text))
    refused(packed_copy, tmp_path / "out", f"(metadata of the packed layers is damaged|version=).*{path.name}")


NO_STRINGS = [{"moonshot": value} for value in (None, {}, [1])]


@pytest.mark.parametrize("metadata", [None, [], "x", 3, *NO_STRINGS, "deep"], ids=str)
def test_metadata_must_map_strings_to_strings(packed_copy, tmp_path, metadata):
    path = sorted(packed_copy.glob("*.safetensors"))[0]
    header = json.dumps({**read_header(path)[0], "__metadata__": metadata})
    write_header(path, header.replace('"deep"', DEEP) if metadata == "deep" else header)
    refused(packed_copy, tmp_path / "out", path.name)


def test_damaged_json_files_are_refused(packed_copy, tmp_path):
    index = packed_copy / "moonshot.safetensors.index.json"
    intact = index.read_text()
    for text in (DEEP, "null", *(f'{{"weight_map": {value}}}' for value in ("[]", "{}", "null", '{"a": [1]}'))):
        index.write_text(text)
        refused(packed_copy, tmp_path / "out", f"{index.name} is damaged", ("load_pruned", "convert"))
        with pytest.raises(Exception):  # noqa: B017 — transformers reads it before this package does
            AUTO.from_pretrained(packed_copy)
    index.write_text(intact)
    change_json(index, lambda values: values.update(metadata=[1]))
    with pytest.raises(MoonshotError, match="its metadata is not an object"):
        convert(packed_copy, tmp_path / "out", "dense")
    index.unlink()
    refused(packed_copy, tmp_path / "out", "index.json is missing", ("load_pruned", "convert"))
    index.write_text(intact)
    for text in (DEEP, "[]", '{"quantization_config": {"quant_method": "moonshot", "version": [2]}}'):
        (packed_copy / "config.json").write_text(text)
        refused(packed_copy, tmp_path / "out", "config.json is damaged|version': \\[2\\]", ("load_pruned", "convert"))


@pytest.mark.parametrize(
    "values",
    [
        *({"hidden_size": size} for size in ("x", 2**70, None)),
        *({"architectures": names} for names in ([3], "x", ["AutoConfig"], [])),
        *({"dtype": dtype} for dtype in ("bfloat17", [], "int8")),
        *({"num_attention_heads": 0}, {"model_type": 3}, {"vocab_size": -1}, {"rope_parameters": []}),
    ],
    ids=str,
)
def test_a_config_that_transformers_rejects_is_one_clear_error(packed, packed_copy, values):
    change_config(packed_copy, **values)
    try:
        assert_same(packed[1], load_pruned(packed_copy))
    except MoonshotError as error:
        assert "transformers" in str(error) or "config.json" in str(error)


def test_weights_missing_from_the_index_are_refused(packed_copy, tmp_path):
    """A whole file, or one tensor; transformers alone initializes missing weights at random."""
    index = packed_copy / "moonshot.safetensors.index.json"
    intact = json.loads(index.read_text())
    places = intact["weight_map"]
    first = min(places.values())
    for kept, words in [
        ({name: file for name, file in places.items() if file != first}, "is one of . files, the index names"),
        (dict(list(places.items())[1:]), "is in a file and not in the index"),
        ({**places, "extra": first}, "extra is named by the index and in no file"),
    ]:
        index.write_text(json.dumps({**intact, "weight_map": kept}))
        refused(packed_copy, tmp_path / "out", words)


def test_a_smaller_or_larger_model_than_saved_is_refused(packed_copy):
    for layers in (2, 4):
        change_config(packed_copy, num_hidden_layers=layers)
        for read in (load_pruned, AUTO.from_pretrained):
            with pytest.raises(MoonshotError, match="not in the model of config.json|no file contains it"):
                read(packed_copy)


def test_a_new_head_on_a_packed_model_is_initialized(packed):
    model = hf.AutoModelForSequenceClassification.from_pretrained(packed[0], num_labels=3)
    assert_same(packed[1].model, model.model) and model.score.weight.shape == (3, 16)


def test_a_tensor_of_another_dtype_is_refused(packed_copy, tmp_path):
    """bfloat16 and float16 have the same size: equal checksums, other numbers."""
    path = sorted(packed_copy.glob("*.safetensors"))[0]
    header, _ = read_header(path)
    name = next(name for name in header if "norm" in name)
    header[name]["dtype"] = "F16"
    write_header(path, json.dumps(header))
    refused(packed_copy, tmp_path / "out", rf"{name} is stored as float16 \[16\], bfloat16 \[16\] was written")


def without_the_package(folder):
    """The exit status and last line of a process that does not import this package."""
    code = f"""
import sys
from transformers import AutoModelForCausalLM
AutoModelForCausalLM.from_pretrained({str(folder)!r})
assert not any(name.startswith("optimum_moonshot") for name in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=folder)
    return done.returncode, done.stderr.strip().splitlines()[-1]


@pytest.mark.slow
def test_without_this_package_a_packed_checkpoint_is_an_error(packed, tmp_path):
    """Rather than a model of random numbers with a warning and exit status 0."""
    assert without_the_package(packed[0]) == (
        1,
        "ValueError: The transformers file in the config seems to be incorrect: it is neither a safetensors file "
        "(*.safetensors) nor a safetensors index file (*.safetensors.index.json): this checkpoint is packed: "
        "pip install optimum-moonshot, and import optimum_moonshot to load it",
    )
    # Releases of transformers without support for that entry look for model.safetensors.
    single = tmp_path / "single"
    pruned().save_pretrained(single, format="packed")
    change_json(single / "config.json", lambda config: config.pop("transformers_weights"))
    status, line = without_the_package(single)
    assert status == 1 and line.startswith("OSError: Error no file named model.safetensors")


@pytest.mark.slow
def test_converted_and_loaded_models_do_not_refer_to_packed_files(packed, tmp_path):
    config = json.loads((packed[0] / "config.json").read_text())
    assert config["quantization_config"] == {"quant_method": "moonshot", "format": "packed", "version": 1}
    for model in (load_pruned(packed[0]), load_pruned(packed[0], runtime="packed"), AUTO.from_pretrained(packed[0])):
        assert not hasattr(model.config, "transformers_weights")
    convert(packed[0], tmp_path / "dense", "dense")
    assert "transformers_weights" not in json.loads((tmp_path / "dense" / "config.json").read_text())
    assert without_the_package(tmp_path / "dense")[0] == 0
    single = tmp_path / "single"
    pruned().save_pretrained(single, format="packed")
    packed_names = {"moonshot.safetensors", "moonshot.safetensors.index.json"}
    assert {path.name for path in single.glob("*.safetensors*")} == packed_names
    convert(single, single, "dense")
    assert {path.name for path in single.glob("*.safetensors*")} == {"model.safetensors"}
    convert(single, single, "packed")
    assert {path.name for path in single.glob("*.safetensors*")} == packed_names
    assert os.path.isfile(single / "README.md")
