"""The example programs and the notebook, on a tiny untrained model: they keep what they promise, and training helps."""

import importlib.util
import re
import runpy
import subprocess
import sys
from pathlib import Path

import notebooks
import pytest
import torch
import transformers as hf
from datasets import Dataset

from optimum_moonshot import MoonshotConfig, MoonshotPruner, load_pruned, verify
from optimum_moonshot.masks import find_pruned, follows
from optimum_moonshot.objective.patterns import NM

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
DEMO = EXAMPLES / "demo_model"
SHORT = dict(num_samples=8, sequence_length=64)
SPEED = re.compile(r"(\w+) +([\d.]+) tokens/s, +([\d.]+) MiB")


@pytest.fixture
def tiny(tmp_path):
    return save_tiny(tmp_path / "tiny", 64)


def save_tiny(folder, positions):
    torch.manual_seed(0)
    sizes = dict(vocab_size=2048, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, max_position_embeddings=positions)).save_pretrained(folder)
    hf.AutoTokenizer.from_pretrained(DEMO).save_pretrained(folder)
    return str(folder)


def run(name, *args, **kwargs):
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"](*args, **kwargs)


@pytest.fixture
def texts(tmp_path):
    """Calibration and held-out text, short."""
    for name in ("calibration.txt", "heldout.txt"):
        (tmp_path / name).write_text((DEMO / name).read_text(encoding="utf-8")[:30_000], encoding="utf-8")
    return {"calibration": str(tmp_path / "calibration.txt"), "test": str(tmp_path / "heldout.txt")}


@pytest.fixture
def paragraphs():
    return Dataset.from_dict({"text": (DEMO / "calibration.txt").read_text(encoding="utf-8")[:60_000].split("\n\n")})


def test_sparse_finetune(tiny, paragraphs, tmp_path):
    config = MoonshotConfig(sparsity=0.7, **SHORT)
    dense, pruned, trained = run("sparse_finetune", tmp_path / "out", tiny, paragraphs, config, steps=20)
    assert 0 < trained < pruned and dense > 0
    layers = find_pruned(hf.AutoModelForCausalLM.from_pretrained(tmp_path / "out"))
    assert len(layers) == 14
    for layer in layers:
        assert (layer.matrix == 0).float().mean().item() == pytest.approx(0.7, abs=0.01), layer.name


def test_sparse_lora(tiny, paragraphs, tmp_path):
    pytest.importorskip("peft")
    losses = run("sparse_lora", tmp_path / "out", tiny, paragraphs, MoonshotConfig(pattern="2:4", **SHORT), steps=20)
    assert losses[-1] < losses[0]
    for layer in find_pruned(hf.AutoModelForCausalLM.from_pretrained(tmp_path / "out")):
        assert follows(layer.matrix, NM(2, 4)), layer.name


def test_a_pruned_model_is_quantized(tiny, texts, tmp_path, capsys):
    pruner = MoonshotPruner.from_pretrained(tiny, MoonshotConfig(pattern="2:4", solver="wanda", lam=1, **SHORT))
    pruner.prune(texts["calibration"], progress=False)
    pruner.save_pretrained(tmp_path / "pruned")
    config = MoonshotConfig(bits=4, lam=1, **SHORT)
    run("quantize_pruned", tmp_path / "pruned", tmp_path / "out", config=config, **texts)
    before, after = map(int, re.search(r"(\d+) → (\d+) bytes", capsys.readouterr().out.replace(",", "")).groups())
    assert after < before and verify(tmp_path / "out")
    quantized = load_pruned(tmp_path / "out").state_dict()
    for name, weight in pruner.model.state_dict().items():
        if name.endswith("_proj.weight"):
            assert not quantized[name][weight == 0].any() and quantized[name].unique().numel() < weight.unique().numel()


def parameters(folder):
    return hf.AutoModelForCausalLM.from_pretrained(folder).num_parameters()


def test_a_model_is_shrunk(tiny, texts, tmp_path, capsys):
    sizes = dict(num_samples=4, sequence_length=32, recover_steps=4)
    run("shrink_to_half", tmp_path / "out", tiny, parameters=0.9, **texts, **sizes)
    before, after = map(parameters, (tiny, tmp_path / "out"))
    assert after <= 0.9 * before
    assert f"{before:,} → {after:,} parameters" in capsys.readouterr().out


def test_a_packed_model_generates(tiny, texts, tmp_path, capsys, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "vllm" else find(name))
    pruner = MoonshotPruner.from_pretrained(tiny, MoonshotConfig(pattern="2:4", solver="wanda", lam=1, **SHORT))
    pruner.prune(texts["calibration"], progress=False)
    pruner.save_pretrained(tmp_path / "packed", format="packed")
    run("serve", str(tmp_path / "packed"), "The history", 8)
    rows = {name: (float(rate), float(size)) for name, rate, size in SPEED.findall(capsys.readouterr().out)}
    assert list(rows) == ["dense", "packed", "auto"] and min(rate for rate, _ in rows.values()) > 0
    assert rows["packed"][1] < rows["dense"][1]


def test_the_notebook(tmp_path, capsys, monkeypatch):
    folder = tmp_path / "HuggingFaceTB" / "SmolLM2-135M-Instruct"
    save_tiny(folder, 256)
    tokenizer = hf.AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    results = notebooks.run(tmp_path, monkeypatch, "alps", 4, 64, 20, 8)
    assert results["trained"].value < results["pruned"].value
    for output in ("outputs/SmolLM2-2of4", "outputs/SmolLM2-2of4-trained"):
        layers = find_pruned(load_pruned(tmp_path / output))
        assert len(layers) == 14 and all(follows(layer.matrix, NM(2, 4)) for layer in layers)
    assert "moonshot.safetensors" in capsys.readouterr().out


@pytest.mark.parametrize(("beside", "source"), [(True, ".."), (False, "optimum-moonshot")])
def test_the_first_cell_installs_the_package_with_packages_that_match_torch(
    beside, source, monkeypatch, capsys, tmp_path
):
    (tmp_path / "examples").mkdir()
    monkeypatch.chdir(tmp_path / "examples")
    if beside:
        (tmp_path / "setup.cfg").touch()
    cell = notebooks.cells()[0]
    installed, commands = {"torchvision"}, []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name in installed else None)
    monkeypatch.setattr(subprocess, "run", lambda command, check: commands.append(command))
    exec(cell, {})
    assert commands == [[sys.executable, "-m", "pip", "install", "-q", source, "torchvision"]]
    installed.add("optimum_moonshot")
    exec(cell, {})
    assert len(commands) == 1 and capsys.readouterr().out.count(f"torch {torch.__version__} on ") == 2
