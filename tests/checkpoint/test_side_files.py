"""A saved or converted folder has every file of its source that is not a weight, and none from elsewhere."""

import json
import os
import shutil
import socket
from pathlib import Path

import pytest
import transformers as hf
from models import make

from optimum_moonshot import MoonshotConfig, MoonshotPruner, convert
from optimum_moonshot.checkpoint import origin
from optimum_moonshot.checkpoint.origin import SideFiles, Source, copy_side_files, source_of

SIDE = [
    "LICENSE", "NOTICE.txt", "modules.json", "sentence_bert_config.json", "config_sentence_transformers.json",
    "1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors", "3_Dense/pytorch_model.bin",
    "preprocessor_config.json", "processor_config.json", "chat_template.jinja", "additional_chat_templates/tool.jinja",
    "modeling_own.py", "code/tool_parser.py", "tokenizer.model", "voices/a.npy", "tekken.json", "a/b/c/d/deep.txt",
]  # fmt: skip
WEIGHTS = [
    "pytorch_model.bin", "model.fp16.safetensors", "consolidated.safetensors", "tf_model.h5", "flax_model.msgpack",
    "rust_model.ot", "model.onnx", "onnx/model.onnx", "onnx/model.onnx_data", "openvino/openvino_model.bin",
    "openvino/openvino_model.xml", "x.gguf", "q/x.gguf", "model.tflite", "other.safetensors.index.json", "last.ckpt",
    "adapter_config.json", "original/consolidated.00.pth.partial", "coreml/m.mlpackage/Data/x.txt",
]  # fmt: skip
RUNS = [
    "training_args.bin", "optimizer.pt", "checkpoint-500/config.json", "runs/a/events.out.tfevents.1", ".git/config",
    ".env", "run/run.json", "run/layers/x.safetensors", "output/trainer_state.json", "output/x.txt", "wandb/x.txt",
    "out.partial/x.txt", "__pycache__/x.pyc",
]  # fmt: skip


def fill(folder, names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"content of {name}")


def copied(folder):
    """The files in a folder that `fill` wrote, by their relative names."""
    paths = (path for path in folder.rglob("*") if path.is_file() and path.read_bytes().startswith(b"content of"))
    return {path.relative_to(folder).as_posix() for path in paths}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("side") / "source"
    make("llama").save_pretrained(folder)
    pruner = MoonshotPruner.from_pretrained(folder, MoonshotConfig(solver="magnitude", pattern="2:4"))
    pruner.prune(progress=False)
    fill(folder, [*SIDE, *WEIGHTS, *RUNS, "quantize_config.json"])
    return folder, pruner


@pytest.mark.parametrize("format", ["dense", "packed"])
def test_a_saved_folder_has_the_files_beside_the_weights(source, format, tmp_path):
    folder, pruner = source
    pruner.save_pretrained(tmp_path / "out", format=format)
    assert copied(tmp_path / "out") == set(SIDE)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["moonshot"]
    pruner.save_pretrained(folder / "inside", format=format)  # does not contain itself
    assert copied(folder / "inside") == set(SIDE)
    for path in sorted((folder / "inside").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    (folder / "inside").rmdir()


def test_a_converted_folder_has_the_same_files(source, tmp_path):
    source[1].save_pretrained(tmp_path / "saved")
    fill(tmp_path / "saved", [name for name in RUNS if name != "adapter_config.json"])
    for target in (tmp_path / "converted", tmp_path / "saved" / "inside"):
        convert(tmp_path / "saved", target, "packed")
        assert copied(target) == set(SIDE)
    convert(tmp_path / "saved", tmp_path / "saved", "packed")
    assert set(SIDE) <= copied(tmp_path / "saved")


def test_what_the_pruner_saves_itself_replaces_the_sources_files(source, tmp_path, tokenizer):
    folder, pruner = source
    fill(folder, ["tokenizer.json", "tokenizer_config.json", "generation_config.json", "README.md"])
    with_tokenizer = MoonshotPruner(pruner.model, pruner.config, tokenizer)
    with_tokenizer.report = pruner.report
    with_tokenizer.save_pretrained(tmp_path / "out")
    assert copied(tmp_path / "out") == set(SIDE)
    assert hf.AutoTokenizer.from_pretrained(tmp_path / "out").vocab == tokenizer.vocab


def test_links_out_of_the_folder_special_files_and_loops(tmp_path, caplog, monkeypatch):
    source, target, outside = tmp_path / "source", tmp_path / "target", tmp_path / "outside"
    for folder in (source / "a", target, outside):
        folder.mkdir(parents=True)
    fill(source, ["a/x.txt", "large.txt"])
    fill(outside, ["secret.txt"])
    links = {
        "file": outside / "secret.txt", "relative": "../outside/secret.txt", "folder": outside, "up": "..",
        "loop": ".", "again": ".", "a/up": "..", "a/back": "../a", "self": "self", "null": "/dev/zero", "gone": "none",
    }  # fmt: skip
    for name, to in links.items():
        (source / name).symlink_to(to)
    (source / "good.txt").symlink_to("a/x.txt")
    (source / "good").symlink_to("a")
    os.mkfifo(source / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        monkeypatch.chdir(source)  # names of sockets are short
        server.bind("socket")
    (source / "large.txt").write_text("content of 0" + "0" * 99)
    monkeypatch.setattr(origin, "LARGEST", 100)
    copy_side_files(source, target)
    names = {path.relative_to(target).as_posix() for path in target.rglob("*") if not path.is_dir()}
    assert names == {"a/x.txt", "good.txt"}
    assert "file (a link to a file outside the folder)" in caplog.text and "good (a link to a folder)" in caplog.text
    assert not any(path.is_symlink() for path in target.rglob("*"))


def test_the_snapshot_of_a_repository_links_to_its_blobs(source, tmp_path, caplog):
    cache = tmp_path / "models--org--name"
    snapshot, blobs = cache / "snapshots" / ("0" * 40), cache / "blobs"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "main").write_text("0" * 40)
    blobs.mkdir()
    for number, name in enumerate([*SIDE, *WEIGHTS, "config.json"]):
        (blobs / str(number)).write_text(f"content of {name}")
        (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / name).symlink_to(os.path.relpath(blobs / str(number), (snapshot / name).parent))
    (snapshot / "secret").symlink_to("../../refs/main")
    (tmp_path / "out").mkdir()
    source = Source("org/name", {"cache_dir": tmp_path, "local_files_only": True})
    SideFiles(source).save_pretrained(tmp_path / "out")
    assert copied(tmp_path / "out") == set(SIDE)
    assert "secret (a link to a file outside the folder)" in caplog.text


@pytest.mark.parametrize("name", ["", None, "/no/such/folder", "org/never-loaded", "a//b", "x" * 5000])
def test_a_model_from_nowhere_has_no_other_files(name, tmp_path):
    model = make("llama")
    model.name_or_path = name
    SideFiles(source_of(model)).save_pretrained(tmp_path)
    assert not list(Path(tmp_path).iterdir())


def test_a_subfolder_is_the_source_of_its_own_files(tmp_path):
    top, model = tmp_path / "source", make("llama")
    model.save_pretrained(top / "deep" / "model")
    fill(top, ["LICENSE"])
    fill(top / "deep" / "model", ["1_Pooling/config.json"])
    pruner = MoonshotPruner.from_pretrained(
        top, MoonshotConfig(solver="magnitude", pattern="2:4"), subfolder="deep/model"
    )
    pruner.prune()
    pruner.save_pretrained(tmp_path / "out")
    assert copied(tmp_path / "out") == {"1_Pooling/config.json"}
    source = Source("org/name", {"subfolder": "deep/model", "cache_dir": tmp_path, "local_files_only": True})
    snapshot = tmp_path / "models--org--name" / "snapshots" / ("0" * 40)
    (snapshot.parent.parent / "refs").mkdir(parents=True)
    (snapshot.parent.parent / "refs" / "main").write_text("0" * 40)
    shutil.copytree(top, snapshot)
    (tmp_path / "other").mkdir()
    SideFiles(source).save_pretrained(tmp_path / "other")
    assert copied(tmp_path / "other") == {"1_Pooling/config.json"}
