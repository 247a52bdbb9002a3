"""`verify`: the weights of a folder against its declared metadata."""

import json
import re
import shutil

import pytest
import torch
import transformers as hf
import yaml
from checkpoint_edits import change_config, change_json
from checkpoints import pruned, tensors
from models import make
from safetensors.torch import load_file, save_file
from tiny_configs import tiny_config

import optimum_moonshot
from optimum_moonshot import MoonshotConfig, MoonshotError, MoonshotPruner, verify
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
    """Replaces tensors in the single file of a folder; removes those given as None."""
    path = folder / "model.safetensors"
    contents = load_file(path)
    for name, tensor in entries.items():
        contents.pop(name, None)
        contents |= {} if tensor is None else {name: tensor.contiguous()}
    save_file(contents, path, {"format": "pt"})


def weight(folder, layer=UP):
    return tensors(folder)[f"{layer}.weight"]


def quantize(folder, scheme, method="compressed-tensors"):
    """Quantizes every projection by `scheme(name, weight)` → tensors, and declares it in config.json."""
    entries = {}
    for name, tensor in tensors(folder).items():
        if "_proj" in name:
            entries |= {name: None, **scheme(name, tensor)}
    change(folder, **entries)
    change_config(folder, quantization_config={"quant_method": method})


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
def test_saved_weights_match_their_metadata(name, settings, format, tmp_path):
    pruner = pruned(name, torch.bfloat16, **{"pattern": "2:4", **settings})
    pruner.save_pretrained(tmp_path, format=format, max_shard_size="10KB")
    for source in (None, "moonshot_report.json", "README.md"):
        if source is not None:
            (tmp_path / source).unlink()
        result = verify(tmp_path)
        assert result and not result.mismatches and not result.notes, result.table()
        assert result.format == format and result.checksums is (True if format == "packed" else None)
        assert len(result.declared) == {None: 3, "moonshot_report.json": 2, "README.md": 1}[source]
        assert {layer.name for layer in result.layers} == {layer.name for layer in pruner.report.layers}
        assert result.sparsity == pytest.approx(pruner.report.sparsity, abs=1e-9)
        parameters = {id(each): each for each in pruner.model.parameters()}.values()
        zeros = sum(int((each == 0).sum()) for each in parameters)
        if name != "vit":  # its files hold no buffers
            assert result.parameters == pruner.report.parameters
            assert result.model_sparsity == pytest.approx(zeros / result.parameters)
        matrices = {
            layer.name: layer.matrix for layer in find_structure(pruner.model, settings.get("targets")).layers()
        }
        for layer in result.layers:
            matrix = matrices[layer.name]
            assert sorted(layer.shape) == sorted(matrix.shape) and layer.zeros == int((matrix == 0).sum())
            assert layer.follows is (True if settings.get("pattern", "2:4") == "2:4" else None)
            assert (layer.declared is None) == (source is not None)


def test_a_restored_weight_is_a_mismatch(dense):
    changed = weight(dense)
    changed[changed == 0] = torch.where(torch.arange(int((changed == 0).sum())) == 7, 0.1, 0.0)
    change(dense, **{f"{UP}.weight": changed})
    result = verify(dense)
    assert not result and result.model_sparsity < result.sparsity < 0.5
    (wrong,) = [layer for layer in result.layers if layer.follows is False]
    assert wrong.name == UP and wrong.sparsity < wrong.declared == 0.5 and wrong.pattern == "2:4"
    for source in ("config.json", "moonshot_report.json", "README.md"):
        assert f"{source} says 2:4: 1 of 21 layers are not, such as {UP}" in result.mismatches
    fewer = f"moonshot_report.json: 1 of 21 layers have fewer zeros than it says, such as {UP} with 0.4974 for 0.5000"
    assert fewer in result.mismatches
    assert "not 2:4" in result.table() and "mismatches" in result.table().splitlines()[-1]


def test_misplaced_zeros_break_the_pattern_alone(dense):
    change(dense, **{f"{UP}.weight": weight(dense).flatten().sort()[0].view(24, 16)})
    result = verify(dense)
    assert result.sparsity == 0.5
    assert [line for line in result.mismatches if "2:4" not in line] == [] and len(result.mismatches) == 3


def test_square_weights_are_checked_along_their_inputs(tmp_path):
    """GPT-2 stores [d_in, d_out]: its output projection is square, and 2:4 along one dimension only."""
    pruned("gpt2").save_pretrained(tmp_path)
    name = "transformer.h.1.attn.c_proj.weight"
    stored = name if name in tensors(tmp_path) else name.removeprefix("transformer.")
    change(tmp_path, **{stored: tensors(tmp_path)[stored].T})
    for source in (None, "moonshot_report.json"):
        if source is not None:
            (tmp_path / source).unlink()
        result = verify(tmp_path)
        assert [layer.name for layer in result.layers if layer.follows is False] == ["transformer.h.1.attn.c_proj"]


def words(name, tensor):
    """The 4-bit format of compressed-tensors: eight numbers in a word, with an offset of 8."""
    scale = tensor.abs().amax(1, keepdim=True) / 7
    numbers = ((tensor / scale).round() + 8).long().view(len(tensor), -1, 8)
    word = sum(numbers[..., place] << 4 * place for place in range(8))
    shape = torch.tensor(tensor.shape)
    return {f"{name}_packed": word.to(torch.int32), f"{name}_scale": scale, f"{name}_shape": shape}


def test_a_quantization_that_keeps_zeros_matches(dense):
    rewrite(dense, "README.md", lambda data: data.update(format="compressed-tensors"))
    quantize(dense, words)
    result = verify(dense)
    assert result, result.table()
    assert result.format == "compressed-tensors" and {layer.stored for layer in result.layers} == {
        "compressed-tensors int4"
    }
    assert result.sparsity >= 0.5 and all(layer.follows for layer in result.layers)
    assert result.parameters == optimum_moonshot.PruneReport.load(dense).parameters
    assert all(layer.bits_per_weight > 4 for layer in result.layers)  # and the scales


def test_a_quantization_that_loses_zeros_is_a_mismatch(dense):
    """GPTQ, for example, compensates an error in all later weights, the pruned ones included."""
    torch.manual_seed(0)
    quantize(dense, lambda name, tensor: words(name, tensor + 0.1 * torch.randn_like(tensor)))
    result = verify(dense)
    assert not result and result.sparsity < 0.45
    assert "README.md says that it is dense: it is compressed-tensors" in result.mismatches
    assert "README.md says 2:4: 21 of 21 layers are not" in " ".join(result.mismatches)
    assert any(line.startswith("config.json says sparsity 0.5000: the layers have ") for line in result.mismatches)


def test_a_mismatch_shows_the_digits_that_differ(dense):
    """With four digits the message read "says sparsity 0.5000: the layers have 0.5000"."""
    path = dense / "model.safetensors"
    tensors = load_file(path)
    weight = next(tensor for name, tensor in tensors.items() if "up_proj" in name)
    weight[0, (weight[0] == 0).nonzero()[0]] = 1
    save_file(tensors, path, {"format": "pt"})
    lines = [line for line in verify(dense).mismatches if "says sparsity" in line]
    pairs = [re.findall(r"0\.\d+", line) for line in lines]
    assert pairs and all(said != counted and float(said) > float(counted) for said, counted in pairs), lines


def test_unreadable_weights_are_a_mismatch(dense):
    quantize(dense, lambda name, tensor: {**words(name, tensor), f"{name}_shape": torch.tensor([7, 7])})
    result = verify(dense)
    assert not result and result.sparsity is result.model_sparsity is result.parameters is None
    (line,) = [line for line in result.mismatches if "cannot be read" in line]
    assert "its weight cannot be read: it is stored as [" in line and line.endswith("not supported (21 layers differ)")


def test_a_checkpoint_that_another_program_has_quantized_is_refused(dense):
    quantize(dense, words, "gptq")
    with pytest.raises(MoonshotError, match=r"quantized by another program \(gptq\); verify the checkpoint that it"):
        verify(dense)


def test_more_zeros_are_a_note(dense):
    change(dense, **{f"{UP}.weight": weight(dense).where(weight(dense) > 0, torch.zeros(()))})
    result = verify(dense)
    assert result and any(note.startswith(f"{UP}: sparsity 0.7") for note in result.notes)


def test_missing_layers_and_other_shapes_are_named(dense):
    down = "model.layers.0.mlp.down_proj"
    change(dense, **{f"{UP}.weight": None, f"{down}.weight": torch.zeros(16, 8)})
    result = verify(dense)
    assert f"{down}: its shape is [16, 8], the report says [16, 24] (2 layers differ)" in result.mismatches
    assert next(layer for layer in result.layers if layer.name == UP).problem == "its weight is in no file"


def test_a_damaged_packed_checkpoint_is_a_mismatch_or_an_error(packed_copy):
    assert verify(packed_copy)
    path = sorted(packed_copy.glob("*.safetensors"))[0]
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    result = verify(packed_copy)
    assert not result and result.checksums is False and "its checksum differs" in " ".join(result.mismatches)
    path.write_bytes(content[:-100])
    with pytest.raises(MoonshotError, match="is truncated"):
        verify(packed_copy)


def test_an_adapter_beside_the_weights_is_a_mismatch(dense):
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
        change_json(path, lambda values: edit(values["moonshot"] if source == "config.json" else values))


@pytest.mark.parametrize(
    ("source", "edit", "line"),
    [
        ("README.md", lambda data: data.update(pattern="1:4"), "README.md says 1:4: 21 of 21 layers are not, such as"),
        (
            "README.md",
            lambda data: data.update(sparsity=0.6),
            "README.md says sparsity 0.6000: the layers have 0.5000",
        ),
        ("README.md", lambda data: data.update(format="packed"), "README.md says that it is packed: it is dense"),
        ("README.md", lambda data: data.clear(), "README.md is damaged: moonshot={}: not an entry of this package"),
        ("config.json", lambda data: data["config"].update(pattern="1:8"), "config.json says 1:8: 21 of 21 layers"),
        ("config.json", lambda data: data.update(sparsity=2), "config.json is damaged: moonshot: sparsity=2"),
        ("config.json", lambda data: data.update(version=99), "config.json, moonshot: version=99: this release"),
        (
            "moonshot_report.json",
            lambda data: data["layers"][0].update(sparsity=0.75),
            "moonshot_report.json: 1 of 21 layers have fewer zeros than it says, such as model.layers.0.self_attn",
        ),
        ("moonshot_report.json", lambda data: data.pop("layers"), "moonshot_report.json is damaged"),
        ("moonshot_report.json", lambda data: data["layers"][0].update(shape=[1]), "moonshot_report.json is damaged"),
    ],
)
def test_metadata_that_contradicts_the_weights(source, edit, line, dense):
    rewrite(dense, source, edit)
    result = verify(dense)
    assert not result and any(line in mismatch for mismatch in result.mismatches), result.mismatches


def test_every_layer_is_checked_against_its_own_rule(tmp_path):
    pruner = pruned("llama", pattern="unstructured", sparsity=0.3, allocation={"mlp": "2:4", r"\.0\.self_attn": 0.7})
    pruner.save_pretrained(tmp_path)
    result = verify(tmp_path)
    assert result and {layer.pattern for layer in result.layers if "mlp" in layer.name} == {"2:4"}
    assert {layer.pattern for layer in result.layers if "mlp" not in layer.name} == {None}
    assert "config.json: by layer, sparsity" in result.table()


def test_a_compacted_model_declares_no_zeros(tmp_path):
    pruner = pruned("llama", pattern="structured", sparsity=0.5)
    pruner.compact()
    pruner.save_pretrained(tmp_path)
    result = verify(tmp_path)
    assert result and result.notes == ("the model was compacted: no zeros are declared",)
    assert result.sparsity == 0 and "structured, sparsity 0.5000, compacted" in result.table()


def test_a_dense_model_declares_nothing(tmp_path):
    make("llama").save_pretrained(tmp_path)
    result = verify(tmp_path)
    assert result and not result.declared and result.sparsity == 0 and len(result.layers) == 21
    assert result.table().endswith("verdict     no metadata declares that it is pruned")


def test_an_unknown_architecture_is_read_from_the_report(dense):
    change_config(dense, model_type="unheard_of", architectures=["Own"])
    result = verify(dense)
    assert result and len(result.layers) == 21 and "the layers are those of the report" in result.notes[0]


def test_mistakes_are_named(tmp_path):
    with pytest.raises(MoonshotError, match="has no config.json"):
        verify(tmp_path)
    with pytest.raises(MoonshotError, match="checksums: the options of verify are trust_remote_code, revision, token"):
        verify(tmp_path, checksums=False)
    make("llama").config.save_pretrained(tmp_path)
    with pytest.raises(MoonshotError, match="has neither model.safetensors"):
        verify(tmp_path)


def run(capsys, *argv):
    """The exit status and output of a command."""
    try:
        main(["verify", *map(str, argv)])
        status = 0
    except SystemExit as error:
        status = error.code
    return status, capsys.readouterr()


def test_the_verify_command_reports_matches_and_mismatches(dense, capsys, tmp_path):
    status, printed = run(capsys, dense)
    assert status == 0 and printed.out.splitlines()[-1] == "verdict     matches its metadata"
    assert "sparsity    0.5000 over 21 layers, 0." in printed.out and len(printed.out.splitlines()) == 22 + 8
    status, printed = run(capsys, dense, "--json")
    values = json.loads(printed.out)
    assert status == 0 and values["matches"] and values["layers"][0]["pattern"] == "2:4" and values["sparsity"] == 0.5
    quantize(dense, lambda name, tensor: {name: tensor + 0.1})
    status, printed = run(capsys, dense)
    assert status == 1 and "mismatch    README.md says 2:4: 21 of 21 layers are not" in printed.out
    status, printed = run(capsys, dense, "--json")
    assert status == 1 and not json.loads(printed.out)["matches"]
    for argument, code in ((tmp_path / "nothing", 2), (tmp_path, 1)):
        status, printed = run(capsys, argument)
        assert status == code and printed.err.startswith("error: ") and printed.err.count("\n") == 1
    assert "--json" in run(capsys, "--help")[1].out


# Families whose stored weights transformers splits, merges or permutes, and by which operations.
CONVERTED = [
    ("nomic_bert", "NomicBertForMaskedLM"), ("gte", "GteForMaskedLM"),  # Chunk
    ("kimi_k25", "Kimi_K25ForConditionalGeneration"),  # Chunk and PermuteForRope, beside experts
    ("inkling_mm_model", "InklingForConditionalGeneration"),  # Interleave and Chunk
    ("minimax_m3_vl", "MiniMaxM3SparseForConditionalGeneration"),  # Concatenate
]  # fmt: skip


@pytest.mark.parametrize("family, name", CONVERTED)
def test_weights_that_transformers_splits_or_merges(tmp_path, family, name):
    if not hasattr(hf, name):
        pytest.skip(f"transformers {hf.__version__} has no {name}")
    torch.manual_seed(0)
    model = getattr(hf, name)(tiny_config(family, name))
    pruner = MoonshotPruner(model, MoonshotConfig(solver="magnitude", pattern="2:4"))
    pruner.prune(progress=False)
    pruner.save_pretrained(tmp_path)
    result = verify(tmp_path)
    assert result, result.mismatches
    expected = {layer.name: (layer.shape, layer.sparsity) for layer in pruner.report.layers}
    assert {layer.name: (layer.shape, layer.sparsity) for layer in result.layers} == expected
    assert all(layer.follows for layer in result.layers)
    state = tensors(tmp_path).values()
    total = sum(tensor.numel() for tensor in state)
    assert result.parameters == total and result.model_bits_per_weight == 8 * sum(t.nbytes for t in state) / total
    # The zeros of every stored weight count: in each, one that is filled is found.
    matrices = [
        key for key, tensor in tensors(tmp_path).items() if tensor.ndim == 2 and (tensor == 0).float().mean() >= 0.5
    ]
    for key in (matrices[0], matrices[-1]):
        tensor = tensors(tmp_path)[key]
        change(tmp_path, **{key: tensor.masked_fill(tensor == 0, 1.0)})
        assert any("2:4" in line for line in verify(tmp_path).mismatches), key
        change(tmp_path, **{key: tensor[:-1]})
        assert not verify(tmp_path), key
        change(tmp_path, **{key: tensor})
    assert verify(tmp_path)


def test_weights_on_a_grid_that_transformers_splits(tmp_path):
    torch.manual_seed(0)
    model = hf.NomicBertForMaskedLM(tiny_config("nomic_bert", "NomicBertForMaskedLM"))
    pruner = MoonshotPruner(model, MoonshotConfig(solver="magnitude", pattern="2:4", bits=4, quant_group=64))
    pruner.prune(progress=False)
    pruner.save_pretrained(tmp_path)
    result = verify(tmp_path)
    assert result and all(layer.on_grid for layer in result.layers)
    key = next(key for key in tensors(tmp_path) if "qkv" in key.lower())
    tensor = tensors(tmp_path)[key]
    change(tmp_path, **{key: tensor * (1 + torch.rand_like(tensor))})
    assert any("not on their grid" in line for line in verify(tmp_path).mismatches)
