"""The code in a model card runs: it prunes the dense model again to the same weights, and loads and exports them."""

import math
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
import transformers as hf
from command_line import DEMO, ROOT
from models import make

from optimum_moonshot import MoonshotConfig, MoonshotPruner, convert, load_pruned
from optimum_moonshot.__main__ import main
from optimum_moonshot.checkpoint.base_card import find_source
from optimum_moonshot.checkpoint.card import literal, programs, pruning_code

CONVERTER = ROOT / "tests" / "support" / "fake_converter.py"
DATA = dict(num_samples=8, sequence_length=16)
STRUCTURED = dict(solver="osscar", pattern="structured")
CASES = {
    "plain": (dict(pattern="2:4", lam=1, damping=0.02, solver_options={"block_size": 16}, seed=3), "dense"),
    "quantized": (dict(pattern="2:4", solver="magnitude", bits=4, quant_group=64, embedding_bits=16), "packed"),
    "allocated": (dict(sparsity=0.5, allocation={"mlp": 0.25, r"q_proj$": "4:8"}, ignore=["v_proj"]), "packed"),
    "recovered": (dict(pattern="2:4", solver="wanda", recover="blockwise", recover_steps=3, max_memory="1GB"), "dense"),
    "rotated": (dict(pattern="2:4", lam=1, rotation="learned", rotation_steps=2), "dense"),
    "rotated before": (dict(pattern="2:4", lam=1, rotation_steps=2), "dense"),
    "compacted": (dict(**STRUCTURED, sparsity=0.5, targets=["mlp"]), "dense"),
    "shrunk": ({}, "dense"),
}


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """A folder with a dense model and a text."""
    root = tmp_path_factory.mktemp("dense")
    config = hf.LlamaConfig(**{**make("llama").config.to_dict(), "vocab_size": 2048})
    hf.LlamaForCausalLM(config).save_pretrained(root / "base")
    hf.AutoTokenizer.from_pretrained(DEMO).save_pretrained(root / "base")
    (root / "text.txt").write_text((DEMO / "calibration.txt").read_text(encoding="utf-8")[:40_000], encoding="utf-8")
    return root


def prune(dense, case):
    settings, _ = CASES[case]
    method = MoonshotConfig(**DATA, **settings) if settings else None
    pruner, text = MoonshotPruner.from_pretrained(dense / "base", method), str(dense / "text.txt")
    if case == "shrunk":
        pruner.shrink(text, parameters=0.8, progress=False, **DATA)
        return pruner
    if case == "rotated before":
        pruner.rotate(text, progress=False)
    pruner.prune(text, progress=False)
    if case == "compacted":
        pruner.compact()
    return pruner


def blocks(folder, language="python"):
    text = (folder / "README.md").read_text(encoding="utf-8").split("# Card of the dense model")[0]
    return re.findall(rf"^```{language}\n(.*?)\n```$", text, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("case", CASES)
def test_the_code_prunes_to_the_same_weights_and_loads_them(case, dense, tmp_path, monkeypatch):
    prune(dense, case).save_pretrained(tmp_path / "first" / "small", format=CASES[case][1])
    loading, pruning = blocks(tmp_path / "first" / "small")
    again = shutil.copytree(dense, tmp_path / "again")
    monkeypatch.chdir(again)
    exec(pruning, {})
    assert blocks(again / "small") == [loading, pruning]
    names = {}
    exec(loading, names)
    expected = load_pruned(tmp_path / "first" / "small").state_dict()
    loaded = names["model"].state_dict()
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


def test_a_converted_checkpoint_has_the_code_of_its_format(dense, tmp_path):
    prune(dense, "plain").save_pretrained(tmp_path / "first")
    convert(tmp_path / "first", tmp_path / "second", "packed")
    (_, first), (_, second) = blocks(tmp_path / "first"), blocks(tmp_path / "second")
    assert second == first.replace('("first")', '("second", format="packed")') != first


def test_a_model_and_data_in_memory_are_left_open(tmp_path):
    pruner = MoonshotPruner(make("llama"), MoonshotConfig(pattern="2:4", num_samples=2))
    pruner.prune([{"input_ids": torch.arange(24).view(2, 12)}], progress=False)
    pruner.save_pretrained(tmp_path)
    _, code = blocks(tmp_path)
    assert 'model = ...  # "LlamaForCausalLM"\n' in code and 'calibration = ...  # "list of 1 items"\n' in code
    assert "pruner.prune(calibration)" in code
    compile(code, "card", "exec")


def test_the_dense_model_is_named_without_its_folders(tmp_path):
    (tmp_path / "model.gguf").touch()
    assert find_source(str(tmp_path / "model.gguf")) == "model.gguf" and find_source(str(tmp_path)) == tmp_path.name
    assert (
        find_source("org/model") == "org/model" and find_source("") is None and find_source("/no/such/folder") is None
    )


def test_the_commands_name_the_programs_that_load_the_model(dense, tmp_path, monkeypatch, capsys):
    """llama.cpp's converter is replaced by a script; `make test-vllm` and `make test-gguf` load such models."""
    prune(dense, "plain").save_pretrained(tmp_path / "with space", format="packed")
    serving, exporting = blocks(tmp_path / "with space", "bash")
    assert shlex.split(serving) == ["vllm", "serve", "with space"]
    monkeypatch.setenv("LLAMA_CPP_CONVERTER", str(CONVERTER))
    monkeypatch.setenv("RECORD", str(tmp_path / "record.json"))
    monkeypatch.chdir(tmp_path)
    program, group, *arguments = shlex.split(exporting)
    assert (program, group) == ("optimum-cli", "moonshot")
    main(arguments)
    assert "model.gguf" in capsys.readouterr().out and Path("model.gguf").stat().st_size > 0


def test_programs_are_named_where_they_load_the_architecture(dense):
    report = prune(dense, "compacted").report
    named = {
        (architecture, format): [command.split()[0] for _, command in programs(report, architecture, "small", format)]
        for architecture in ("LlamaForCausalLM", "GPT2LMHeadModel", "BertForMaskedLM")
        for format in ("dense", "compressed-tensors")
    }
    assert named["LlamaForCausalLM", "dense"] == ["vllm", "optimum-cli"]
    assert named["LlamaForCausalLM", "compressed-tensors"] == named["GPT2LMHeadModel", "dense"] == ["vllm"]
    assert named["BertForMaskedLM", "dense"] == []


@pytest.mark.parametrize(
    "value",
    [None, True, 0.1, -3, "a", 'quo"ted\\', "two\nlines", "\x1b\u202e\U0001f600", ["x", None], {"a": [1.5, {}]}],
)
def test_a_literal_is_its_value_in_one_printable_line(value):
    text = literal(value)
    assert eval(text) == value and text.isprintable()


@pytest.mark.parametrize(
    "metric, dense, pruned, recovered",
    [
        ("perplexity", 20.0, 25.0, "80.0%"),
        ("accuracy", 0.5, 0.45, "90.0%"),
        ("perplexity", 20.0, math.inf, ""),
        ("accuracy", 0.0, 0.1, ""),
        ("accuracy", None, 0.1, ""),
        ("KL divergence", 0.1, 0.2, ""),
    ],
)
def test_the_recovery_of_a_measurement(metric, dense, pruned, recovered, tmp_path):
    pruner = MoonshotPruner(make("llama"), MoonshotConfig(solver="magnitude", pattern="2:4"))
    pruner.prune(progress=False)
    pruner.report.record_evaluation("data", dense, pruned, metric)
    pruner.save_pretrained(tmp_path)
    (row,) = re.findall(rf"^\| {metric} on data \|.*\|$", (tmp_path / "README.md").read_text(), re.MULTILINE)
    assert row.split("|")[4].strip() == recovered


def test_no_code_for_a_pruned_model_that_lost_tokens(dense):
    pruner = prune(dense, "plain")
    assert pruning_code(pruner.report, "base", "LlamaForCausalLM", "small", "dense") is not None
    pruner.shrink(vocabulary=["Some text.", "And more."], progress=False)
    assert pruning_code(pruner.report, "base", "LlamaForCausalLM", "small", "dense") is None
