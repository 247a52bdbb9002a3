"""Damaged folders of models, and bad output folders: one line each, and nothing is written."""

import json
import re
import shutil

import pytest
from command_line import DEMO, failure
from invalid_inputs import BATCHES, config
from models import make

from optimum_moonshot import MoonshotError, MoonshotPruner, PruneReport, convert
from optimum_moonshot.evaluation.report import EvalReport
from optimum_moonshot.evaluation.zeroshot import ZeroShot


def changed(name, content):
    def change(folder):
        (folder / name).write_text(content, encoding="utf-8")

    return change


def configured(**changes):
    def change(folder):
        values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        (folder / "config.json").write_text(json.dumps({**values, **changes}), encoding="utf-8")

    return change


def cut(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100_000])


def absent(folder):
    (folder / "model.safetensors").unlink()
    weight_map = {"lm_head.weight": "model-00001-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
MODELS = [
    (configured(quantization_config=GPTQ), MoonshotError, "its weights are quantized (gptq) and cannot be loaded"),
    (configured(quantization_config={"quant_method": "awq", "bits": 4}), MoonshotError, "quantized (awq) and"),
    (configured(quantization_config={"quant_method": "moonshot"}), MoonshotError, "this release reads format 'packed'"),
    (configured(hidden_size=-4), MoonshotError, "cannot be loaded (Trying to create tensor with negative dimension"),
    (configured(hidden_size="x"), MoonshotError, "hidden_size"),
    (configured(hidden_size=512, intermediate_size=64), MoonshotError, "cannot be loaded"),
    (configured(model_type="nothing"), MoonshotError, "does not recognize this architecture"),
    (cut, MoonshotError, "cannot be loaded (Error while deserializing header"),
    (absent, MoonshotError, "model-00001-of-00002.safetensors with lm_head.weight is missing"),
    (changed("config.json", "[]"), MoonshotError, "model: cannot be loaded ("),
    (changed("config.json", "{"), OSError, "is not a valid JSON file"),
    (changed("tokenizer.json", '{"broken"'), MoonshotError, "its tokenizer (tokenizer.json, tokenizer_"),
    (changed("tokenizer.json", "{}"), MoonshotError, "cannot be loaded"),
    (changed("tokenizer.json", ""), MoonshotError, "repair or remove these files, and pass a tokenizer"),
    (changed("tokenizer_config.json", "[]"), MoonshotError, "its tokenizer (tokenizer.json, tokenizer_"),
]  # fmt: skip


@pytest.mark.parametrize("change, kind, words", MODELS, ids=[words[:40] for *_, words in MODELS])
def test_folders_of_models(tmp_path, capsys, change, kind, words):
    folder = tmp_path / "model"
    shutil.copytree(DEMO, folder)
    change(folder)
    with pytest.raises(kind, match=re.escape(words)) as error:
        MoonshotPruner.from_pretrained(folder, config())
    assert str(folder) in str(error.value) or "moonshot" in str(error.value) or "mismatched" in str(error.value)
    status, lines = failure(
        capsys, "prune", folder, "--pattern", "2:4", "--solver", "magnitude", "--output", tmp_path / "o"
    )
    assert status == 1 and words.split("(")[0].strip() in lines[-1]
    assert {path.name for path in tmp_path.iterdir()} == {"model"}


@pytest.mark.parametrize("name", [None, 5, "", b"model"])
def test_names_of_models(name):
    with pytest.raises(MoonshotError, match=re.escape(f"name_or_path={name!r}: give a path")):
        MoonshotPruner.from_pretrained(name, config())
    with pytest.raises(MoonshotError, match="config is a dict: give a MoonshotConfig"):
        MoonshotPruner.from_pretrained(DEMO, {"pattern": "2:4"})


def test_a_model_without_a_tokenizer_loads(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(DEMO, folder, ignore=lambda *_: ["tokenizer.json", "tokenizer_config.json"])
    pruner = MoonshotPruner.from_pretrained(folder, config())
    with pytest.raises(MoonshotError, match="tokenizer=None: text calibration needs one"):
        pruner.prune(DEMO / "calibration.txt", progress=False)


@pytest.mark.parametrize("name", ["llama", "gpt2", "bloom", "bert"])
def test_a_tokenizer_invented_by_transformers_is_ignored(tmp_path, name):
    make(name).save_pretrained(tmp_path)
    assert MoonshotPruner.from_pretrained(tmp_path, config()).tokenizer is None
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(MoonshotError, match=r"its tokenizer \(tokenizer_config.json\) cannot be loaded"):
        MoonshotPruner.from_pretrained(tmp_path, config())


PLACES = [
    ("file", "is a file; give a folder"),
    ("file/in", "cannot be written: [Errno 20] Not a directory"),
    ("link", "is a link to a folder that does not exist; create that folder, or give another"),
    ("x" * 300, "cannot be written: [Errno 36] File name too long"),
    ("a\0b", "give a path"),
    (5, "directory=5: give a path"),
    (None, "directory=None: give a path"),
    ("", "directory='': give a path"),
    (b"x", "directory=b'x': give a path"),
]


@pytest.mark.parametrize("directory, words", PLACES)
def test_output_folders(tmp_path, pruned, directory, words):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    place = tmp_path / directory if isinstance(directory, str) and directory else directory
    with pytest.raises(MoonshotError, match=re.escape(words)) as error:
        pruned.save_pretrained(place)
    assert str(error.value).startswith("directory=")
    assert {path.name for path in tmp_path.iterdir()} == {"file", "link"}


CALLS = {
    "prune": lambda pruner, folder: pruner.prune(BATCHES, progress=False, resume_dir=folder),
    "rotate": lambda pruner, folder: pruner.rotate(BATCHES, progress=False, resume_dir=folder),
    "shrink": lambda pruner, folder: pruner.shrink(BATCHES, parameters=0.5, progress=False, resume_dir=folder),
    "plan": lambda pruner, folder: pruner.plan(BATCHES, resume_dir=folder),
    "sweep": lambda pruner, folder: pruner.sweep(BATCHES, progress=False, work_dir=folder),
    "prune_path": lambda pruner, folder: pruner.prune_path(BATCHES, [0.5], progress=False, work_dir=folder),
    "PruneReport.load": lambda pruner, folder: PruneReport.load(folder),
    "ZeroShot.load": lambda pruner, folder: ZeroShot.load(folder),
    "EvalReport.load": lambda pruner, folder: EvalReport.load(folder),
    "convert": lambda pruner, folder: convert(DEMO, folder, "packed"),
}


@pytest.mark.parametrize("folder", ["", 5, False, b"x", "a\0b"])
@pytest.mark.parametrize("call", CALLS)
def test_folders_of_runs(tmp_path, monkeypatch, call, folder):
    """In every call: the current folder is not used for an empty path, and another type is no TypeError."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MoonshotError, match=rf"^\w+={re.escape(repr(folder))}: give a path$"):
        CALLS[call](MoonshotPruner(make("llama"), config()), folder)
    assert not list(tmp_path.iterdir())
