"""The interface of packed formats: the registry, the metadata, and a second format from file to forward.

The second format, registered only here, has three tensors with other names; code that assumes those of the first fails.
"""

import ast
import json
from dataclasses import replace
from pathlib import Path

import pytest
import reference_packing as reference
import torch
import transformers as hf
from checkpoints import INPUTS, assert_same, pruned, tensors
from safetensors import safe_open

import optimum_moonshot
from optimum_moonshot import MoonshotError, convert, load_pruned
from optimum_moonshot.checkpoint import packed_files
from optimum_moonshot.errors import require
from optimum_moonshot.objective.patterns import NM
from optimum_moonshot.packing import Codec, PackedLayer, codec, find_codec, register_codec, weight_of
from optimum_moonshot.runtime.packed_layers import PackedLinear

PACKAGE = Path(optimum_moonshot.__file__).parent


class Coordinates(Codec):
    """Row, input and value of every nonzero."""

    name = "coordinates"
    suffixes = ("_rows", "_inputs", "_at_packed")  # the last is also a suffix of the first format

    def pack(self, matrix, pattern):
        rows, inputs = matrix.nonzero(as_tuple=True)
        return dict(zip(self.suffixes, (rows.short(), inputs.short(), matrix[rows, inputs]), strict=True))

    def check(self, parts, shape, dtype=None, pattern=None):
        rows, inputs, values = (parts[suffix] for suffix in self.suffixes)
        require(len(rows) == len(inputs) == len(values), "as many rows as inputs as values")
        require(dtype in (None, values.dtype) and (rows < shape[0]).all() and (inputs < shape[1]).all(), "other sizes")

    def unpack(self, parts, shape, plan=None):
        rows, inputs, values = (parts[suffix] for suffix in self.suffixes)
        dense = values.new_zeros(shape)
        dense[rows.int(), inputs.int()] = values
        return dense

    def rows(self, parts, shape, first, stop, plan=None):
        rows, inputs, values = (parts[suffix] for suffix in self.suffixes)
        within = (rows >= first) & (rows < stop)
        return dict(zip(self.suffixes, (rows[within] - first, inputs[within], values[within]), strict=True)), None

    def stack(self, matrices, shapes):
        starts = [sum(d_out for d_out, _ in shapes[:index]) for index in range(len(shapes))]
        moved = [{**parts, "_rows": parts["_rows"] + start} for parts, start in zip(matrices, starts, strict=True)]
        return super().stack(moved, shapes)

    def packed_bytes(self, matrix, pattern):
        return int(matrix.count_nonzero()) * (4 + matrix.dtype.itemsize)


@pytest.fixture
def coordinates(monkeypatch):
    """Register the second format for one test, and pack every layer in it."""
    monkeypatch.setattr(codec, "_CODECS", dict(codec._CODECS))
    register_codec(Coordinates())
    ours = packed_files.pruned_layers
    monkeypatch.setattr(
        packed_files,
        "pruned_layers",
        lambda model: {name: replace(layer, format="coordinates") for name, layer in ours(model).items()},
    )


@pytest.mark.parametrize("name", ["llama", "gpt2", "vit"])
def test_a_second_format_works_from_file_to_forward(name, coordinates, tmp_path):
    pruner = pruned(name, pattern="unstructured", sparsity=0.7)
    pruner.save_pretrained(tmp_path / "packed", format="packed")
    stored = tensors(tmp_path / "packed")
    assert sum(tensor.endswith(".weight_at_packed") for tensor in stored) == len(pruner.report.layers)
    assert not any(tensor.endswith(("weight_packed", "_meta")) for tensor in stored)
    for runtime in ("dense", "packed"):
        loaded = load_pruned(tmp_path / "packed", runtime=runtime)
        kept = [module for module in loaded.modules() if isinstance(module, PackedLinear)]
        assert len(kept) == (len(pruner.report.layers) if runtime == "packed" else 0)
        if name != "vit":
            assert torch.allclose(loaded(INPUTS).logits, pruner.model(INPUTS).logits, atol=1e-4)
    assert_same(pruner.model, type(pruner.model).from_pretrained(tmp_path / "packed"))
    convert(tmp_path / "packed", tmp_path / "dense", "dense")
    assert_same(pruner.model, load_pruned(tmp_path / "dense"))


def test_the_metadata_names_every_format_but_the_first(coordinates, tmp_path, monkeypatch):
    pruned(pattern="unstructured", sparsity=0.7).save_pretrained(tmp_path, format="packed")
    with safe_open(next(tmp_path.glob("*.safetensors")), "pt") as file:
        entries = json.loads(file.metadata()["moonshot"])["layers"].values()
    assert {entry["codec"] for entry in entries} == {"coordinates"}
    first = PackedLayer((4, 8), False, "2:4", "bfloat16")
    assert first.describe() == {"shape": [4, 8], "transposed": False, "pattern": "2:4", "dtype": "bfloat16"}
    for layer in (first, replace(first, format="coordinates")):
        assert PackedLayer.read(json.loads(json.dumps(layer.describe()))) == layer
    monkeypatch.undo()
    for read in (load_pruned, hf.AutoModelForCausalLM.from_pretrained):
        with pytest.raises(MoonshotError, match="_proj: codec='coordinates': this release reads bitmask"):
            read(tmp_path)


def test_formats_are_looked_up_by_name_and_registered_once(coordinates):
    assert find_codec("bitmask").suffixes == ("_packed", "_meta")
    for unknown in ("zip", None, ["bitmask"]):
        with pytest.raises(MoonshotError, match="codec=.*this release reads bitmask, coordinates"):
            find_codec(unknown)
    with pytest.raises(MoonshotError, match="'coordinates' is already registered"):
        register_codec(Coordinates())
    named = {"a.weight_packed": "a.weight", "a.weight_at_packed": "a.weight", "b_meta": "b", "a.weight": "a.weight"}
    assert {stored: weight_of(stored) for stored in named} == named


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("pattern", [None, NM(2, 4), NM(8, 16), NM(16, 32)], ids=str)
def test_a_layer_packs_its_weight_in_its_stored_layout(pattern, transposed):
    matrix = reference.random_matrix(6, 64, pattern, torch.float32) + 0.0  # no −0.0
    tensor = matrix.T.contiguous() if transposed else matrix.view(6, 16, 2, 2)
    layer = PackedLayer(tuple(tensor.shape), transposed, str(pattern or "unstructured"), "float32")
    assert layer.matrix == (6, 64)
    packed = layer.pack("x.weight", tensor)
    assert list(packed) == layer.names("x.weight") == ["x.weight_packed", "x.weight_meta"]
    assert sum(part.nbytes for part in packed.values()) == layer.stored_bytes(tensor)
    layer.check("x.weight", {**packed, "other": torch.ones(1)})
    again = layer.unpack("x.weight", packed)
    assert torch.equal(again, tensor) and again.is_contiguous()
    packed.pop("x.weight_meta")
    for call in (layer.check, layer.unpack):
        with pytest.raises(MoonshotError, match="^x.weight_meta is missing"):
            call("x.weight", packed)


ENTRY = {"shape": [4, 8], "transposed": False, "pattern": "2:4", "dtype": "bfloat16"}


@pytest.mark.parametrize(
    "change, words",
    [
        *(
            ({"shape": shape}, "^shape=.*two or more sizes")
            for shape in ("4x8", [4], [], 8, None, ["4", "8"], [4, -8], [0, 8], [4, 2**70], [2**40, 2**40], [4.0, 8])
        ),
        *(({"shape": [4, True]}, "^shape="), ({"shape": {"0": 4}}, "^shape=")),
        *(({"pattern": pattern}, "^pattern=") for pattern in (None, 4, ["2:4"], "", "2:", "3:2", "0:4", "2:4:8", "x")),
        ({"pattern": "9" * 5000 + ":" + "9" * 5000}, "^pattern="),
        ({"pattern": "2:16"}, "^pattern='2:16': m must divide the 8 weights of a row"),
        *(({"dtype": dtype}, "^dtype=") for dtype in (None, 16, "int8", "bfloat17", "Tensor", [])),
        *(({"transposed": value}, "^transposed=") for value in (None, 0, "false", [])),
        ({"shape": [4, 8, 1], "transposed": True}, "only a matrix can be transposed"),
        *(({"codec": name}, "^codec=") for name in (None, 1, {}, "zip")),
        ({"bits": 4}, r"unknown fields: \['bits'\]"),
    ],
    ids=str,
)
def test_a_damaged_entry_is_refused_by_its_field(change, words):
    with pytest.raises(MoonshotError, match=words):
        PackedLayer.read({**ENTRY, **change})


def test_an_invalid_entry_is_refused():
    for entry in (None, [], "x", 3):
        with pytest.raises(MoonshotError, match="not an object"):
            PackedLayer.read(entry)
    for field in ENTRY:
        with pytest.raises(MoonshotError, match=f"has no {field}"):
            PackedLayer.read({name: value for name, value in ENTRY.items() if name != field})


OTHER = "compressed_tensors.py"  # another format, which uses the same names


def test_no_other_package_uses_the_names_of_packed_tensors():
    ends = tuple(find_codec("bitmask").suffixes)
    for path in PACKAGE.rglob("*.py"):
        if path.parent.name != "packing" and path.name != OTHER:
            strings = [node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)]
            assert not [text for text in strings if isinstance(text, str) and text.endswith(ends)], path
