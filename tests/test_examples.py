"""The fine-tuning examples, on a tiny untrained model: they run, keep the zeros, and training helps."""

import runpy
from pathlib import Path

import pytest
import torch
import transformers as hf

from optimum_moonshot import MoonshotConfig
from optimum_moonshot.masks import find_pruned, follows
from optimum_moonshot.objective.patterns import NM

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
SHORT = dict(num_samples=8, sequence_length=64)


@pytest.fixture
def tiny(tmp_path):
    torch.manual_seed(0)
    sizes = dict(vocab_size=2048, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, max_position_embeddings=64)).save_pretrained(tmp_path / "tiny")
    hf.AutoTokenizer.from_pretrained(EXAMPLES / "demo_model").save_pretrained(tmp_path / "tiny")
    return str(tmp_path / "tiny")


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
