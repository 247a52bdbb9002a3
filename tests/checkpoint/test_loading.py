"""`load_pruned` names the layer of damaged files, and reports its choice of runtime."""

import pytest
import torch
import transformers as hf
from checkpoint_edits import change_config, change_description, change_file, change_json, read_header
from checkpoints import pruned
from safetensors.torch import load_file

from optimum_moonshot import MoonshotConfig, MoonshotError, MoonshotPruner, convert, load_pruned


def layer_at(path, position):
    """The layer that a byte of a safetensors file belongs to; None for the header."""
    header, first = read_header(path)
    header.pop("__metadata__")
    for name, entry in header.items():
        start, end = (first + offset for offset in entry["data_offsets"])
        if start <= position < end:
            return name.removesuffix("_packed").removesuffix("_meta").removesuffix(".weight")
    return None


@pytest.mark.parametrize("seed", range(4))
def test_a_flipped_bit_is_detected_anywhere(packed_copy, seed):
    generator = torch.Generator().manual_seed(seed)
    path = sorted(packed_copy.glob("*.safetensors"))[seed % 2]
    content = path.read_bytes()
    for _ in range(10):
        position = int(torch.randint(len(content), (1,), generator=generator))
        damaged = bytearray(content)
        damaged[position] ^= 1 << int(torch.randint(8, (1,), generator=generator))
        path.write_bytes(damaged)
        layer = layer_at(path, position) if position > 8 + int.from_bytes(content[:8], "little") else None
        with pytest.raises(MoonshotError, match=None if layer is None else f"^{layer}: .*checksum differs"):
            load_pruned(packed_copy)


@pytest.mark.parametrize("format", ["dense", "packed"])
def test_a_truncated_or_missing_file_is_named(packed_copy, format, tmp_path):
    folder = packed_copy
    if format == "dense":
        folder = tmp_path / "dense"
        convert(packed_copy, folder, "dense")
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
    with pytest.raises(MoonshotError, match=rf"{path.name} with \S+ is missing"):
        load_pruned(folder)


def test_files_that_contradict_themselves_are_refused(packed_copy):
    path = sorted(packed_copy.glob("*.safetensors"))[0]
    name = next(name for name in load_file(path) if name.endswith("_meta"))
    layer = name.removesuffix(".weight_meta")
    original = path.read_bytes()

    def refused(change, message):
        path.write_bytes(original)
        change_file(path, change)
        with pytest.raises(MoonshotError, match=message):
            load_pruned(packed_copy)

    refused(lambda tensors, _: tensors.pop(name), f"{layer}: .*weight_meta is missing")
    refused(lambda _, metadata: metadata.pop("moonshot"), f"no description of its tensors.*{path.name}")
    refused(lambda tensors, _: tensors.update(extra=torch.ones(2)), "extra: extra has no checksum in the file's")
    refused(lambda _, metadata: metadata.update(moonshot="{"), "metadata of the packed layers is damaged")
    newer = '{"version": 3, "layers": {}, "sha256": {}}'
    refused(lambda _, metadata: metadata.update(moonshot=newer), "version=3")
    for entry, message in (
        ({"pattern": "1:4"}, "it is not 1:4"),
        ({"shape": [7, 16]}, "weight_meta is torch.uint8"),
        ({"dtype": "float16"}, "its values are torch.bfloat16, torch.float16 was written"),
    ):
        path.write_bytes(original)
        change_description(path, lambda values, entry=entry: values["layers"][f"{layer}.weight"].update(entry))
        with pytest.raises(MoonshotError, match=f"{layer}: {message}"):
            load_pruned(packed_copy)


def test_from_pretrained_compares_checksums_too(packed_copy):
    path = sorted(packed_copy.glob("*.safetensors"))[0]

    def change(tensors, metadata):
        name = next(name for name in tensors if name.endswith("_meta"))
        tensors[name][0, 0] ^= 1

    change_file(path, change)
    with pytest.raises(MoonshotError, match=rf"its checksum differs \({path.name}\)"):
        hf.AutoModelForCausalLM.from_pretrained(packed_copy)


def test_a_dense_checkpoint_without_its_zeros_is_refused(tmp_path):
    pruner = pruned()
    pruner.save_pretrained(tmp_path)
    change_file(tmp_path / "model.safetensors", lambda tensors, _: tensors["model.layers.2.mlp.up_proj.weight"].add_(1))
    with pytest.raises(MoonshotError, match=r"^model\.layers\.2\.mlp\.up_proj: it has \d+ zeros, its report says 192"):
        load_pruned(tmp_path)


def test_missing_weights_are_refused(packed_copy, tmp_path):
    """transformers alone initializes them at random, with a warning."""
    name = "model.layers.2.mlp.up_proj"
    pruner = pruned()
    pruner.save_pretrained(tmp_path / "dense")
    change_file(tmp_path / "dense" / "model.safetensors", lambda tensors, _: tensors.pop(f"{name}.weight"))
    with pytest.raises(MoonshotError, match=f"^{name}: no file contains it"):
        load_pruned(tmp_path / "dense")
    with pytest.raises(MoonshotError, match=f"^{name}: no file contains it.*would be random"):
        MoonshotPruner.from_pretrained(tmp_path / "dense", MoonshotConfig(pattern="2:4"))
    change_json(packed_copy / "config.json", lambda config: config.pop("quantization_config"))
    with pytest.raises(MoonshotError, match="has neither model.safetensors.*config.json has no quantization_config"):
        load_pruned(packed_copy)


@pytest.mark.parametrize("runtime", ["dense", "packed"])
def test_files_that_do_not_fit_config_json_are_refused(packed_copy, runtime):
    change_config(packed_copy, num_hidden_layers=2)
    with pytest.raises(MoonshotError, match=r"^model\.layers\.2\..*not in the model of config.json"):
        load_pruned(packed_copy, runtime=runtime)
    change_config(packed_copy, intermediate_size=32)
    with pytest.raises(MoonshotError, match=r"^model\.layers\.0\.mlp.*it was saved as \(.*, config.json says"):
        load_pruned(packed_copy, runtime=runtime)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b'{"weight_map": {"a": 1}}', b'{"layers": 1}'])
def test_damaged_json_is_named(packed_copy, content, tmp_path):
    for name in ("config.json", "model.safetensors.index.json", "moonshot_report.json"):
        folder = tmp_path / name
        convert(packed_copy, folder, "dense")
        (folder / name).write_bytes(content)
        damage = "its model is unknown" if name == "config.json" and len(content) > 3 else f"{name} is damaged"
        with pytest.raises(MoonshotError, match=damage):
            load_pruned(folder)


def test_options_that_bypass_the_checks_are_refused(packed):
    for name in ("config", "output_loading_info", "subfolder", "variant", "state_dict", "adapter_kwargs"):
        with pytest.raises(MoonshotError, match=f"{name}: load_pruned does not support it"):
            load_pruned(packed[0], **{name: "x"})
    with pytest.raises(MoonshotError, match="quantization_config: .* is pruned already"):
        load_pruned(packed[0], quantization_config=MoonshotConfig(pattern="2:4"))


def test_an_unknown_runtime_is_refused(packed):
    with pytest.raises(MoonshotError, match="runtime='semi_structured': use .dense. or .packed. or .auto.$"):
        load_pruned(packed[0], runtime="semi_structured")


def test_a_missing_repository_is_named():
    with pytest.raises(MoonshotError, match="neither a folder nor a readable repository"):
        load_pruned("nobody/nothing", local_files_only=True)
