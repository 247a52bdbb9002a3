"""`verify`: the weights of a folder against its declared metadata, whichever tool wrote it last."""

import json
import shutil

import pytest
import torch
import yaml
from checkpoints import pruned, tensors
from models import make
from safetensors.torch import load_file, save_file

import optimum_moonshot
from optimum_moonshot import MoonshotError, verify
from optimum_moonshot.__main__ import main
from optimum_moonshot.model.layers import find_structure

UP = "model.layers.1.mlp.up_proj"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A dense 2:4 Llama in one file, to copy."""
    folder = tmp_path_factory.mktemp("saved")
    pruned().save_pretrained(folder)
    return folder


@pytest.fixture
def dense(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "dense")


def change(folder, **entries):
    """Other tensors, or none, in the one file of a folder."""
    path = folder / "model.safetensors"
    found = load_file(path)
    for name, tensor in entries.items():
        found.pop(name, None)
        found |= {} if tensor is None else {name: tensor.contiguous()}
    save_file(found, path, {"format": "pt"})


def weight(folder, layer=UP):
    return tensors(folder)[f"{layer}.weight"]


def quantize(folder, scheme, method="other"):
    """Every projection by a scheme: layer, weight → tensors; config.json says so."""
    entries = {}
    for name, tensor in tensors(folder).items():
        if "_proj" in name:
            entries |= {name: None, **scheme(name, tensor)}
    change(folder, **entries)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": method}}))


@pytest.mark.parametrize("format", ["dense", "packed"])
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("llama", {}),
        ("llama-tied-biased", dict(targets=["layers", "lm_head"])),
        ("gpt2", {}),
        ("vit", {}),
        ("opt", dict(pattern="unstructured", sparsity=0.6)),
        ("mixtral", {}),
    ],
)
def test_what_was_saved_is_what_is_found(name, settings, format, tmp_path):
    pruner = pruned(name, torch.bfloat16, **{"pattern": "2:4", **settings})
    pruner.save_pretrained(tmp_path, format=format, max_shard_size="10KB")
    for source in (None, "moonshot_report.json", "README.md"):
        if source is not None:
            (tmp_path / source).unlink()
        found = verify(tmp_path)
        assert found and not found.mismatches and not found.notes, found.table()
        assert found.format == format and found.checksums is (True if format == "packed" else None)
        assert len(found.declared) == {None: 3, "moonshot_report.json": 2, "README.md": 1}[source]
        assert {layer.name for layer in found.layers} == {layer.name for layer in pruner.report.layers}
        assert found.sparsity == pytest.approx(pruner.report.sparsity, abs=1e-9)
        parameters = {id(each): each for each in pruner.model.parameters()}.values()
        zeros = sum(int((each == 0).sum()) for each in parameters)
        if name != "vit":  # which keeps no buffers in its files
            assert found.parameters == pruner.report.parameters
            assert found.model_sparsity == pytest.approx(zeros / found.parameters)
        matrices = {
            layer.name: layer.matrix for layer in find_structure(pruner.model, settings.get("targets")).layers()
        }
        for layer in found.layers:
            matrix = matrices[layer.name]
            assert sorted(layer.shape) == sorted(matrix.shape) and layer.zeros == int((matrix == 0).sum())
            assert layer.follows is (True if settings.get("pattern", "2:4") == "2:4" else None)
            assert (layer.declared is None) == (source is not None)


def test_one_weight_that_came_back(dense):
    changed = weight(dense)
    changed[changed == 0] = torch.where(torch.arange(int((changed == 0).sum())) == 7, 0.1, 0.0)
    change(dense, **{f"{UP}.weight": changed})
    found = verify(dense)
    assert not found and found.model_sparsity < found.sparsity < 0.5
    (wrong,) = [layer for layer in found.layers if layer.follows is False]
    assert wrong.name == UP and wrong.sparsity < wrong.declared == 0.5 and wrong.pattern == "2:4"
    for source in ("config.json", "moonshot_report.json", "README.md"):
        assert f"{source} says 2:4: 1 of 21 layers are not, such as {UP}" in found.mismatches
    fewer = f"moonshot_report.json: 1 of 21 layers have fewer zeros than it says, such as {UP} with 0.4974 for 0.5000"
    assert fewer in found.mismatches
    assert "not 2:4" in found.table() and "mismatches" in found.table().splitlines()[-1]


def test_zeros_in_other_places_keep_the_sparsity_alone(dense):
    change(dense, **{f"{UP}.weight": weight(dense).flatten().sort()[0].view(24, 16)})
    found = verify(dense)
    assert found.sparsity == 0.5
    assert [line for line in found.mismatches if "2:4" not in line] == [] and len(found.mismatches) == 3


def test_the_direction_of_square_weights_is_known(tmp_path):
    """GPT-2 stores [d_in, d_out]: its output projection is square, and 2:4 one way only."""
    pruned("gpt2").save_pretrained(tmp_path)
    name = "transformer.h.1.attn.c_proj.weight"
    stored = name if name in tensors(tmp_path) else name.removeprefix("transformer.")
    change(tmp_path, **{stored: tensors(tmp_path)[stored].T})
    for source in (None, "moonshot_report.json"):
        if source is not None:
            (tmp_path / source).unlink()
        found = verify(tmp_path)
        assert [layer.name for layer in found.layers if layer.follows is False] == ["transformer.h.1.attn.c_proj"]


def nearest(name, tensor):
    """Symmetric round-to-nearest in 8 bits, a scale for each row."""
    scale = tensor.abs().amax(1, keepdim=True) / 127
    return {name: (tensor / scale).round().to(torch.int8), f"{name}_scale": scale}


def shifted(name, tensor):
    """Asymmetric round-to-nearest in 8 bits with zero points for groups of 8 inputs."""
    groups = tensor.view(len(tensor), -1, 8)
    low, high = groups.amin(2), groups.amax(2)
    scale = (high - low) / 255
    point = (-low / scale).round()
    numbers = (groups / scale[..., None]).round() + point[..., None]
    values = {name: numbers.clamp(0, 255).view(tensor.shape).to(torch.uint8)}
    return {**values, f"{name}_scale": scale, f"{name}_zero_point": point.to(torch.uint8)}


def eight_bit_floats(name, tensor):
    return {name: tensor.to(torch.float8_e4m3fn), f"{name}_scale": torch.ones(1)}


def codes(name, tensor):
    """As bitsandbytes stores 4 bits."""
    book = torch.linspace(-1, 1, 15).tolist() + [1.5]  # the 0 is number 7
    scaled = tensor / tensor.abs().amax()
    numbers = (scaled.flatten()[:, None] - torch.tensor(book)).abs().argmin(1)
    state = torch.tensor(list(json.dumps({"shape": list(tensor.shape)}).encode()), dtype=torch.uint8)
    packed = (numbers[::2] << 4 | numbers[1::2]).to(torch.uint8)[:, None]
    beside = {"absmax": torch.ones(4), "quant_map": torch.tensor(book).round(decimals=6)}
    parts = {f"{name}.{part}": value for part, value in beside.items()}
    return {name: packed, **parts, f"{name}.quant_state.bitsandbytes__nf4": state}


def words(name, tensor):
    """As compressed-tensors stores 4 bits: eight in a word, 8 added."""
    scale = tensor.abs().amax(1, keepdim=True) / 7
    numbers = ((tensor / scale).round() + 8).long().view(len(tensor), -1, 8)
    word = sum(numbers[..., place] << 4 * place for place in range(8))
    shape = torch.tensor(tensor.shape)
    return {f"{name}_packed": word.to(torch.int32), f"{name}_scale": scale, f"{name}_shape": shape}


def torchao(name, tensor):
    stem, values = name.removesuffix("weight"), nearest("w", tensor)
    parts = {"qdata": values["w"], "scale": values["w_scale"]}
    parts["zero_point"] = torch.zeros(len(tensor), 1, dtype=torch.int8)
    return {f"{stem}_weight_{part}": value for part, value in parts.items()}


@pytest.mark.parametrize("scheme", [nearest, shifted, eight_bit_floats, codes, words, torchao])
def test_zeros_that_a_quantization_keeps(scheme, dense):
    quantize(dense, scheme)
    found = verify(dense)
    assert found, found.table()
    assert found.format == "other" and "another tool has quantized it (other)" in found.table()
    assert found.sparsity >= 0.5 and all(layer.follows for layer in found.layers)
    assert found.parameters == optimum_moonshot.PruneReport.load(dense).parameters


@pytest.mark.parametrize("scheme", [nearest, shifted, eight_bit_floats, codes, words, torchao])
def test_zeros_that_a_quantization_loses(scheme, dense):
    """As by GPTQ, which moves the error of one weight to those after it, removed ones too."""
    torch.manual_seed(0)
    quantize(dense, lambda name, tensor: scheme(name, tensor + 0.1 * torch.randn_like(tensor)), "gptq")
    found = verify(dense)
    assert not found and found.sparsity < 0.45 and found.format == "gptq"
    assert "README.md says 2:4: 21 of 21 layers are not" in " ".join(found.mismatches)
    assert any(line.startswith("config.json says sparsity 0.5000: the layers have ") for line in found.mismatches)


def test_weights_that_cannot_be_told(dense):
    def scheme(name, tensor):
        stem = name.removesuffix("weight")
        return {f"{stem}qweight": torch.zeros(2, 2, dtype=torch.int32), f"{stem}scales": torch.ones(2)}

    quantize(dense, scheme, "gptq")
    found = verify(dense)
    assert not found and found.sparsity is found.model_sparsity is found.parameters is None
    (line,) = [line for line in found.mismatches if "cannot be read" in line]
    assert line.endswith(
        "its weight, quantized by gptq, cannot be read: it is stored as qweight, scales, in which its zeros cannot be "
        "determined (21 layers differ)"
    )


def test_more_zeros_are_a_note(dense):
    change(dense, **{f"{UP}.weight": weight(dense).where(weight(dense) > 0, torch.zeros(()))})
    found = verify(dense)
    assert found and any(note.startswith(f"{UP}: sparsity 0.7") for note in found.notes)


def test_layers_that_are_lost_or_of_another_shape(dense):
    down = "model.layers.0.mlp.down_proj"
    change(dense, **{f"{UP}.weight": None, f"{down}.weight": torch.zeros(16, 8)})
    found = verify(dense)
    assert f"{down}: its shape is [16, 8], the report says [16, 24] (2 layers differ)" in found.mismatches
    assert next(layer for layer in found.layers if layer.name == UP).problem == "no file holds its weight"


def test_a_damaged_packed_checkpoint(packed_copy):
    assert verify(packed_copy)
    path = sorted(packed_copy.glob("*.safetensors"))[0]
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    found = verify(packed_copy)
    assert not found and found.checksums is False and "its checksum differs" in " ".join(found.mismatches)
    path.write_bytes(content[:-100])
    with pytest.raises(MoonshotError, match="is truncated"):
        verify(packed_copy)


def test_what_would_be_loaded_on_top(dense):
    (dense / "adapter_config.json").write_text("{}")
    assert "transformers would load it too" in " ".join(verify(dense).mismatches)


def rewrite(folder, source, edit):
    path = folder / source
    if source == "README.md":
        _, header, text = path.read_text(encoding="utf-8").split("---\n", 2)
        values = yaml.safe_load(header)
        edit(values["moonshot"])
        path.write_text(f"---\n{yaml.safe_dump(values)}---\n{text}", encoding="utf-8")
    else:
        values = json.loads(path.read_text())
        edit(values["moonshot"] if source == "config.json" else values)
        path.write_text(json.dumps(values))


@pytest.mark.parametrize(
    ("source", "edit", "line"),
    [
        ("README.md", lambda told: told.update(pattern="1:4"), "README.md says 1:4: 21 of 21 layers are not, such as"),
        ("README.md", lambda told: told.update(sparsity=0.6), "README.md says sparsity 0.6000: the layers have 0.5000"),
        ("README.md", lambda told: told.update(format="packed"), "README.md says that it is packed: it is dense"),
        ("README.md", lambda told: told.clear(), "README.md is damaged: moonshot={}: not an entry of this package"),
        ("config.json", lambda told: told["config"].update(pattern="1:8"), "config.json says 1:8: 21 of 21 layers"),
        ("config.json", lambda told: told.update(sparsity=2), "config.json is damaged: moonshot: sparsity=2"),
        ("config.json", lambda told: told.update(version=99), "config.json, moonshot: version=99: this release"),
        (
            "moonshot_report.json",
            lambda told: told["layers"][0].update(sparsity=0.75),
            "moonshot_report.json: 1 of 21 layers have fewer zeros than it says, such as model.layers.0.self_attn",
        ),
        ("moonshot_report.json", lambda told: told.pop("layers"), "moonshot_report.json is damaged"),
        ("moonshot_report.json", lambda told: told["layers"][0].update(shape=[1]), "moonshot_report.json is damaged"),
    ],
)
def test_a_text_that_says_something_else(source, edit, line, dense):
    rewrite(dense, source, edit)
    found = verify(dense)
    assert not found and any(line in said for said in found.mismatches), found.mismatches


def test_every_layer_by_its_own_rule(tmp_path):
    pruner = pruned("llama", pattern="unstructured", sparsity=0.3, allocation={"mlp": "2:4", r"\.0\.self_attn": 0.7})
    pruner.save_pretrained(tmp_path)
    found = verify(tmp_path)
    assert found and {layer.pattern for layer in found.layers if "mlp" in layer.name} == {"2:4"}
    assert {layer.pattern for layer in found.layers if "mlp" not in layer.name} == {None}
    assert "config.json: by layer, sparsity" in found.table()


def test_a_compacted_model_declares_no_zeros(tmp_path):
    pruner = pruned("llama", pattern="structured", sparsity=0.5)
    pruner.compact()
    pruner.save_pretrained(tmp_path)
    found = verify(tmp_path)
    assert found and found.notes == ("the model was compacted: no zeros are declared",)
    assert found.sparsity == 0 and "structured, sparsity 0.5000, compacted" in found.table()


def test_a_model_that_nobody_pruned(tmp_path):
    make("llama").save_pretrained(tmp_path)
    found = verify(tmp_path)
    assert found and not found.declared and found.sparsity == 0 and len(found.layers) == 21
    assert found.table().endswith("verdict     no metadata declares that it is pruned")


def test_an_architecture_that_transformers_does_not_know(dense):
    config = json.loads((dense / "config.json").read_text())
    (dense / "config.json").write_text(json.dumps({**config, "model_type": "unheard_of", "architectures": ["Own"]}))
    found = verify(dense)
    assert found and len(found.layers) == 21 and "known from the report alone" in found.notes[0]


def test_mistakes_are_named(tmp_path):
    with pytest.raises(MoonshotError, match="holds no config.json"):
        verify(tmp_path)
    with pytest.raises(MoonshotError, match="checksums: verify takes trust_remote_code, revision, token"):
        verify(tmp_path, checksums=False)
    make("llama").config.save_pretrained(tmp_path)
    with pytest.raises(MoonshotError, match="holds no model.safetensors"):
        verify(tmp_path)


def run(capsys, *argv):
    """Exit status, and what a command printed."""
    try:
        main(["verify", *map(str, argv)])
        status = 0
    except SystemExit as error:
        status = error.code
    return status, capsys.readouterr()


def test_the_command(dense, capsys, tmp_path):
    status, printed = run(capsys, dense)
    assert status == 0 and printed.out.splitlines()[-1] == "verdict     matches its metadata"
    assert "sparsity    0.5000 over 21 layers, 0." in printed.out and len(printed.out.splitlines()) == 22 + 7
    status, printed = run(capsys, dense, "--json")
    values = json.loads(printed.out)
    assert status == 0 and values["matches"] and values["layers"][0]["pattern"] == "2:4" and values["sparsity"] == 0.5
    quantize(dense, lambda name, tensor: nearest(name, tensor + 0.1), "gptq")
    status, printed = run(capsys, dense)
    assert status == 1 and "mismatch    README.md says 2:4: 21 of 21 layers are not" in printed.out
    status, printed = run(capsys, dense, "--json")
    assert status == 1 and not json.loads(printed.out)["matches"]
    for argument, code in ((tmp_path / "nothing", 2), (tmp_path, 1)):
        status, printed = run(capsys, argument)
        assert status == code and printed.err.startswith("error: ") and printed.err.count("\n") == 1
    assert "--json" in run(capsys, "--help")[1].out
