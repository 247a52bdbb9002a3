"""The shipped, trained model: the effect of pruning on a real language model, not only on random matrices."""

import re
import runpy
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from optimum_moonshot import MoonshotConfig, MoonshotPruner, perplexity

ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / "examples" / "demo_model"


def pruned_perplexity(compact: bool = False, **choice) -> float:
    config = MoonshotConfig(**choice, num_samples=32, sequence_length=128)
    pruner = MoonshotPruner.from_pretrained(DEMO, config, dtype=torch.float32)
    pruner.prune(str(DEMO / "calibration.txt"), progress=False)
    if compact:
        assert pruner.compact().config == {"intermediate_size": (704, 563)}
    text = (DEMO / "heldout.txt").read_text()[:40_000]
    return perplexity(pruner.model, pruner.tokenizer, [text], sequence_length=128).value


@pytest.mark.slow
def test_the_better_the_method_the_lower_the_perplexity():
    dense = pruned_perplexity(solver="magnitude", sparsity=0.0)
    magnitude = pruned_perplexity(solver="magnitude", sparsity=0.8)
    wanda = pruned_perplexity(solver="wanda", sparsity=0.8, lam=1.0)
    both_wanda = pruned_perplexity(solver="wanda", sparsity=0.8, lam=0.5)
    single = pruned_perplexity(solver="sparsegpt", sparsity=0.8, lam=1.0)
    both = pruned_perplexity(solver="sparsegpt", sparsity=0.8, lam=0.5)
    assert dense < both < single < both_wanda < wanda < magnitude


@pytest.mark.slow
def test_osscar_removes_the_neurons_that_matter_least():
    structured = dict(pattern="structured", sparsity=0.2, lam=1.0)
    magnitude, wanda = (pruned_perplexity(solver=solver, **structured) for solver in ("magnitude", "wanda"))
    assert pruned_perplexity(solver="osscar", compact=True, **structured) < wanda < magnitude


@pytest.mark.slow
def test_recovery_repairs_most_of_the_damage():
    dense = pruned_perplexity(solver="magnitude", sparsity=0.0)
    pruned = pruned_perplexity(sparsity=0.8, lam=1.0)
    recovered = pruned_perplexity(sparsity=0.8, lam=1.0, recover="blockwise", recover_steps=15)
    assert dense < recovered < 0.8 * pruned


@pytest.mark.release
def test_the_demo_prints_the_table_of_the_readme_and_saves_its_models(tmp_path, capsys):
    runpy.run_path(str(ROOT / "examples" / "prune_demo.py"))["main"](str(tmp_path))
    lines = capsys.readouterr().out.splitlines()
    printed, total = lines[1:5], lines[6]
    readme = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    start = readme.index(next(line for line in readme if line.startswith("dense  ")))
    for line, shown in zip(printed, readme[start : start + 4], strict=True):
        name, value, size = re.match(r"(.{20})\s+([\d.]+)\s+([\d.]+)", line).groups()
        assert shown.startswith(name) and f" {size}" in shown
        assert float(value) == pytest.approx(float(shown[20:].split()[0]), abs=0.3)
    assert re.sub(r"\d+", "…", total) == re.sub(r"\d+", "…", readme[start + 5])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "sparsegpt")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    for name, module in model.model.layers.named_modules():
        if isinstance(module, torch.nn.Linear):
            groups = (module.weight != 0).view(-1, 4).sum(1)
            assert (groups <= 2).all(), name
