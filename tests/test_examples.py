"""The fine-tuning examples, on a tiny untrained model: they run, keep the zeros, and training helps; the notebooks."""

import importlib.util
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers as hf

from optimum_moonshot import MoonshotConfig, load_pruned
from optimum_moonshot.masks import find_pruned, follows
from optimum_moonshot.objective.patterns import NM

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
SHORT = dict(num_samples=8, sequence_length=64)
SPEED = re.compile(r"(\w+) +([\d.]+) tokens/s, +([\d.]+) MiB")


@pytest.fixture
def tiny(tmp_path):
    return save_tiny(tmp_path / "tiny", 64)


def save_tiny(folder, positions):
    torch.manual_seed(0)
    sizes = dict(vocab_size=2048, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, max_position_embeddings=positions)).save_pretrained(folder)
    hf.AutoTokenizer.from_pretrained(EXAMPLES / "demo_model").save_pretrained(folder)
    return str(folder)


def run(name, monkeypatch, *args, **kwargs):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"](*args, **kwargs)


def test_sparse_finetune(tiny, tmp_path, monkeypatch, capsys):
    output = str(tmp_path / "out")
    config = MoonshotConfig(sparsity=0.7, **SHORT)
    results = run("sparse_finetune", monkeypatch, output, model=tiny, steps=10, config=config)
    assert list(results) == ["dense", "pruned", "recovered"]
    assert results["recovered"][0] < results["pruned"][0]
    assert results["pruned"][1] == results["recovered"][1] == pytest.approx(0.7, abs=1e-3)
    assert "recovered" in capsys.readouterr().out
    assert len(find_pruned(hf.AutoModelForCausalLM.from_pretrained(output))) == 14


def test_sparse_lora(tiny, tmp_path, monkeypatch):
    pytest.importorskip("peft")
    output = str(tmp_path / "out")
    config = MoonshotConfig(pattern="2:4", **SHORT)
    results = run("sparse_lora", monkeypatch, output, model=tiny, steps=10, config=config)
    assert list(results) == ["dense", "pruned", "adapter", "merged"]
    assert results["merged"][0] == pytest.approx(results["adapter"][0], rel=1e-5)
    assert results["merged"][0] < results["pruned"][0] and results["merged"][1] == 0.5
    for layer in find_pruned(hf.AutoModelForCausalLM.from_pretrained(output)):
        assert follows(layer.matrix, NM(2, 4)), layer.name


def cells_of(name):
    """The sources of the code cells of a notebook, of nbformat 4.5 and stored without outputs."""
    notebook = json.loads((EXAMPLES / f"{name}.ipynb").read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5) and notebook["metadata"]["kernelspec"]
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for cell in notebook["cells"]:
        extra = {"execution_count", "outputs"} if cell in code else set()
        assert cell.keys() == {"cell_type", "id", "metadata", "source"} | extra
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    return ["".join(cell["source"]) for cell in code]


def run_notebook(name):
    """Run the cells with fewer samples; Jupyter is not needed, because no cell uses its magic."""
    namespace = {"__name__": "notebook"}
    for source in cells_of(name):
        exec(compile(source.replace("num_samples=128", "num_samples=8"), f"{name}.ipynb", "exec"), namespace)
    return namespace


@pytest.fixture
def demo(tmp_path, monkeypatch):
    """A smaller model in place of `demo_model`, in the current folder."""
    folder = tmp_path / "demo_model"
    save_tiny(folder, 256)
    for name in ("calibration.txt", "heldout.txt"):
        (folder / name).write_text((EXAMPLES / "demo_model" / name).read_text(encoding="utf-8")[:50_000])
    monkeypatch.chdir(tmp_path)
    return folder


def test_the_notebook_that_prunes(demo, capsys):
    results = run_notebook("prune")
    assert results["report"].sparsity == 0.5 and results["pruned"].value > 0
    size = int(re.findall(r"([\d,]+) bytes", capsys.readouterr().out)[0].replace(",", ""))
    assert 0 < size < (demo / "model.safetensors").stat().st_size
    layers = find_pruned(load_pruned(results["output"]))
    assert len(layers) == 14 and all(follows(layer.matrix, NM(2, 4)) for layer in layers)


def test_the_notebook_that_serves(demo, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "vllm" else find(name))
    run_notebook("serve")
    printed = capsys.readouterr().out
    rows = {name: (float(rate), float(size)) for name, rate, size in SPEED.findall(printed)}
    assert list(rows) == ["dense", "packed", "auto"] and min(rate for rate, _ in rows.values()) > 0
    assert rows["packed"][1] < rows["dense"][1] and printed.endswith("vLLM is not installed\n")


@pytest.mark.parametrize(("beside", "source"), [(True, ".."), (False, "optimum-moonshot")])
def test_the_first_cell_installs_the_package_with_packages_that_match_torch(
    beside, source, monkeypatch, capsys, tmp_path
):
    (tmp_path / "examples").mkdir()
    monkeypatch.chdir(tmp_path / "examples")
    if beside:
        (tmp_path / "setup.cfg").touch()
    cell = cells_of("prune")[0]
    assert cells_of("serve")[0] == cell
    installed, commands = {"torchvision"}, []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name in installed else None)
    monkeypatch.setattr(subprocess, "run", lambda command, check: commands.append(command))
    exec(cell, {})
    assert commands == [[sys.executable, "-m", "pip", "install", "-q", source, "torchvision"]]
    installed.add("optimum_moonshot")
    exec(cell, {})
    assert len(commands) == 1 and capsys.readouterr().out.count(f"torch {torch.__version__} on ") == 2
