"""SmolLM2-135M: pruned, saved, reloaded in a fresh process, compared with the dense model. `make test-real` runs this.

Calibration and held-out text are those of the demo, so that the figures depend on this repository alone. The weights
come from a file with 4 to 5 bits per weight, so that 4 bits cost less than on weights that were never quantized.
"""

import json
import runpy
import subprocess
import sys

import notebooks
import pytest
import real_models
import torch
import transformers as hf
from command_line import DEMO

from optimum_moonshot import MoonshotConfig, MoonshotPruner, load_pruned, perplexity, verify

pytestmark = pytest.mark.real
CALIBRATION, HELDOUT = str(DEMO / "calibration.txt"), str(DEMO / "heldout.txt")
PROMPT = "The capital of France is"
# The settings of each run, and the bounds on perplexity / dense perplexity, measured with this calibration data.
RUNS = {
    "2:4": (dict(pattern="2:4", lam=1), (1.0, 4.5)),
    "0.6": (dict(sparsity=0.6, lam=1), (1.0, 6.0)),
    "4 bits": (dict(solver="sparsegpt", sparsity=0.0, bits=4, lam=1), (0.9, 1.3)),
    "2:4, 4 bits": (dict(pattern="2:4", bits=4, lam=1), (1.0, 5.0)),
}
RELOADED = """
import json, sys
import transformers as hf
import optimum_moonshot
folder, prompt = sys.argv[1:]
model = hf.AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
tokenizer = hf.AutoTokenizer.from_pretrained(folder)
inputs = tokenizer(prompt, return_tensors="pt")
print(json.dumps(model.generate(**inputs, max_new_tokens=12, do_sample=False)[0].tolist()))
"""


@pytest.fixture(scope="module")
def folder():
    return real_models.smollm2()


def judged(model, tokenizer):
    return perplexity(model, tokenizer, HELDOUT, sequence_length=256, max_windows=12).value


@pytest.fixture(scope="module")
def dense_perplexity(folder):
    model = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return judged(model, hf.AutoTokenizer.from_pretrained(folder))


def load(folder, **settings):
    config = MoonshotConfig(num_samples=16, sequence_length=128, **settings)
    return MoonshotPruner.from_pretrained(folder, config, dtype="float32")


def generated(model, tokenizer):
    inputs = tokenizer(PROMPT, return_tensors="pt")
    return model.generate(**inputs, max_new_tokens=12, do_sample=False)[0].tolist()


def generated_in_a_fresh_process(folder):
    command = [sys.executable, "-c", RELOADED, str(folder), PROMPT]
    run = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", RUNS)
def test_it_is_pruned_saved_reloaded_and_verified(folder, dense_perplexity, tmp_path, name):
    settings, (least, most) = RUNS[name]
    pruner = load(folder, **settings)
    pruner.prune(CALIBRATION, progress=False)
    expected, ratio = (
        generated(pruner.model, pruner.tokenizer),
        judged(pruner.model, pruner.tokenizer) / dense_perplexity,
    )
    print(f"{name}: perplexity {ratio:.2f} times that of the dense model, {dense_perplexity:.2f}")
    assert least < ratio < most
    for format in ("dense", "packed"):
        pruner.save_pretrained(tmp_path / format, format=format)
        checked = verify(tmp_path / format)
        assert checked and not checked.notes, checked
        assert generated_in_a_fresh_process(tmp_path / format) == expected
    packed = load_pruned(tmp_path / "packed", dtype="float32")
    assert generated(packed, pruner.tokenizer) == expected


def test_a_second_run_keeps_the_zeros_of_the_first(folder, tmp_path):
    pruner = load(folder, solver="wanda", pattern="2:4", lam=1)
    pruner.prune(CALIBRATION, progress=False)
    pruner.save_pretrained(tmp_path / "2of4")
    zeros = {name: weight == 0 for name, weight in pruner.model.named_parameters() if "_proj" in name}
    second = load(tmp_path / "2of4", solver="sparsegpt", sparsity=0.0, bits=4, lam=1)
    second.prune(CALIBRATION, progress=False)
    filled = {
        name: int((weight != 0)[zeros[name]].sum()) for name, weight in second.model.named_parameters() if name in zeros
    }
    assert not any(filled.values()), filled
    second.save_pretrained(tmp_path / "int4", format="packed")
    assert verify(tmp_path / "int4")


def test_the_gguf_file_itself_is_pruned_and_saved(folder, tmp_path):
    config = MoonshotConfig(solver="magnitude", pattern="2:4")
    pruner = MoonshotPruner.from_pretrained(real_models.smollm2_gguf(), config, dtype="bfloat16")
    reference = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    for (name, weight), expected in zip(pruner.model.named_parameters(), reference.parameters(), strict=True):
        assert torch.equal(weight, expected), name
    pruner.prune(progress=False)
    pruner.save_pretrained(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert "quantization_config" not in saved
    assert verify(tmp_path / "saved")


def test_it_becomes_smaller(folder, dense_perplexity, tmp_path):
    """Few samples: the choice of the parts is tested, not its quality."""
    config = MoonshotConfig(solver="osscar", pattern="structured", sparsity=0, num_samples=16, sequence_length=64)
    pruner = MoonshotPruner.from_pretrained(folder, config, dtype="float32")
    before = sum(parameter.numel() for parameter in pruner.model.parameters())
    report = pruner.shrink(CALIBRATION, parameters=0.9, progress=False)
    after = sum(parameter.numel() for parameter in pruner.model.parameters())
    ratio = judged(pruner.model, pruner.tokenizer) / dense_perplexity
    print(f"{report}\nperplexity {ratio:.2f} times that of the dense model, {dense_perplexity:.2f}")
    assert 0.88 * before < after <= 0.9 * before and report.parameters == (before, after)
    assert 1.0 < ratio < 6.0
    expected = generated(pruner.model, pruner.tokenizer)
    pruner.save_pretrained(tmp_path / "smaller")
    assert generated_in_a_fresh_process(tmp_path / "smaller") == expected


def test_the_notebook(folder, tmp_path, monkeypatch):
    """Few samples and steps: every cell runs, with the local folder in place of the Hub."""
    name = tmp_path / "HuggingFaceTB" / "SmolLM2-135M-Instruct"
    name.parent.mkdir()
    name.symlink_to(folder)
    results = notebooks.run(tmp_path, monkeypatch, "wanda", 4, 64, 8, 4)
    assert "Paris" in results["answer"](hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    assert results["dense"].value < results["trained"].value < results["pruned"].value
    assert results["callback"].masks.sparsity() == pytest.approx(0.5, abs=1e-4)  # some weights are 0 in the dense model
    assert verify(tmp_path / "outputs/SmolLM2-2of4-trained")


def test_the_demo_shows_the_model_before_and_after(tmp_path, capsys):
    demo = runpy.run_path(str(DEMO.parent / "demo_real.py"))
    config = MoonshotConfig(solver="wanda", sparsity=0.3, lam=1, num_samples=4, sequence_length=64)
    demo["main"](tmp_path, {"pruned": config})
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    (dense, answer), (pruned, _) = rows[0:2], rows[2:4]
    assert dense[0] == "dense" and any("Paris" in word for word in answer)
    assert pruned[0] == "pruned" and float(pruned[1]) > float(dense[1]) and float(pruned[2]) < float(dense[2])
    assert verify(tmp_path / "pruned")
