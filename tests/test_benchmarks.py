"""The weights and layers that the benchmarks of quantized survivors compare: correct, or their speed is none."""

import subprocess
import sys

import alternatives
import generate
import pytest
import random_weights
import runtime
import serving
import torch
from random_weights import Setting, imitate_pruning, random_weight
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from optimum_moonshot import load_pruned
from optimum_moonshot.objective.grid import Grid
from optimum_moonshot.runtime.packed_layers import PackedLinear

SETTINGS = ["2:4", "0.8", "int4", "2:4 int8", "2:4 int3", "0.6 int4"]


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.mark.parametrize("name", SETTINGS)
def test_random_weights_follow_their_setting_and_are_multiplied_exactly(name):
    shape, setting = (48, 320), Setting.of(name)
    weight = random_weight(*shape, setting.pattern, setting.grid(torch.bfloat16)).bfloat16()
    kept = (weight != 0).float().mean().item()
    assert kept == pytest.approx({"2:4": 0.5, "0.8": 0.2, "0.6": 0.4}.get(name.split(" ")[0], 1), abs=0.02)
    if setting.bits is not None:
        grid = Grid(setting.bits, dtype=torch.bfloat16)
        step = grid.per_weight(grid.scales_of(weight), shape[1])
        assert torch.equal(grid.values(grid.codes(weight, step), step), weight)
    torch.manual_seed(0)
    calls, size = runtime.copies_of(name, shape, torch.bfloat16, 1)
    x = torch.randn(3, shape[1], dtype=torch.bfloat16)
    reference = x.double() @ weight.double().T
    assert size < weight.nbytes and len(calls) == 2
    for call in calls:
        assert (call(x) - reference).norm() < 0.02 * reference.norm()


@pytest.mark.parametrize("name", SETTINGS)
def test_a_stack_of_random_experts_is_multiplied_by_the_inputs_of_each(name):
    setting, x = Setting.of(name), torch.randn(6, 320, dtype=torch.bfloat16)
    torch.manual_seed(0)
    weight = random_weight(4 * 24, 320, setting.pattern, setting.grid(torch.bfloat16)).bfloat16()
    torch.manual_seed(0)
    (call, _), _ = runtime.copies_of(name, (4 * 24, 320), torch.bfloat16, 1, experts=4)
    parts = x.double().split(runtime.counts(6, 4).tolist())
    exact = torch.cat([part @ matrix.T for part, matrix in zip(parts, weight.double().view(4, 24, 320), strict=True)])
    assert (call(x) - exact).norm() < 0.02 * exact.norm()


@pytest.mark.parametrize("name", ["", "2:4int4", "int5", "dense", "1.5"])
def test_a_setting_that_does_not_exist_is_an_error(name):
    with pytest.raises(ValueError, match="is no setting"):
        Setting.of(name)


@pytest.mark.parametrize("name", ["2:4 int4", "int4 e4", "int4 e16", "0.8"])
def test_an_imitated_pruning_is_saved_and_loaded_like_a_real_one(name, tmp_path):
    sizes = dict(hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2, vocab_size=64)
    model = LlamaForCausalLM(LlamaConfig(**sizes)).bfloat16()
    imitate_pruning(model, name)
    size = random_weights.save(model, tmp_path)
    loaded = load_pruned(tmp_path, runtime="packed")
    layers = {key: module for key, module in loaded.named_modules() if isinstance(module, PackedLinear)}
    assert ("lm_head" in layers) == (name in ("2:4 int4", "int4 e4"))
    assert len(layers) - ("lm_head" in layers) == 14 and size < alternatives.tensor_bytes(model.state_dict().values())
    for key, layer in layers.items():
        assert torch.equal(layer.weight, model.get_submodule(key).weight)


@pytest.mark.parametrize(("name", "bits"), [("torch int4pack", 4), ("torch int8pack", 8)])
def test_the_layers_of_torch_multiply_by_rounded_weights(name, bits):
    linear = nn.Linear(256, 64, bias=False, dtype=torch.bfloat16)
    layer, x = alternatives.converted(name, linear), torch.randn(2, 3, 256, dtype=torch.bfloat16)
    blocks = linear.weight.detach().double().unflatten(1, (-1, alternatives.GROUP if bits == 4 else 256))
    scale = blocks.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)
    reference = x.double() @ ((blocks / scale).round() * scale).flatten(1).T
    assert (layer(x) - reference).norm() < 0.02 * reference.norm()


def test_alternatives_that_are_not_installed_are_left_out_with_the_reason(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torchao", None)
    names = ["dense", "2:4 int4", "torch int4pack", "torchao int4"]
    assert alternatives.available(names) == names[:3]
    assert "without torchao int4: ModuleNotFoundError" in capsys.readouterr().out


def test_all_layers_but_the_head_are_converted():
    sizes = dict(hidden_size=128, intermediate_size=256, num_hidden_layers=1, num_attention_heads=2, vocab_size=64)
    model = LlamaForCausalLM(LlamaConfig(**sizes)).bfloat16()
    ids = torch.arange(5)[None]
    before = model(ids).logits
    alternatives.convert_layers("torch int8pack", model)
    kinds = [type(module) for module in model.modules() if isinstance(module, nn.Linear | alternatives.Int8)]
    assert kinds == [*[alternatives.Int8] * 7, nn.Linear]
    assert (model(ids).logits - before).norm() < 0.05 * before.norm()


def test_the_table_compares_with_dense_of_as_many_threads(tmp_path):
    figures = {"weights": 1, "file": 4e6, "resident": 5e6, "peak": 1}
    speeds = [("dense", 1, 2.0, 3.0), ("int4", 1, 5.0, 1.5), ("dense", 2, 4.0, 2.0), ("int4", 2, 4.0, 4.0)]
    runs = [
        {"setting": setting, "threads": threads, "tokens_per_second": rate, "first_token_seconds": first, **figures}
        for setting, threads, rate, first in speeds
    ]
    results = {"runs": runs, "options": {"threads": [1, 2], "prompt": 512}}
    assert "| int4 | 4 | 5 | 5.0 (2.50) | 4.0 (1.00) | 1.50 (2.00) | 4.00 (0.50) |" in generate.table(results)
    generate.picture({**results, "runs": [{**run, "runtime": "packed"} for run in runs]}, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000


def test_the_results_of_serving_are_written_after_every_setting(monkeypatch):
    def measured(folder, options):
        if len(written) == 2:
            raise subprocess.CalledProcessError(1, "vllm")
        return {"bytes_added": 1}

    written = []
    monkeypatch.setattr(sys, "argv", ["serving.py", "--quantized"])
    monkeypatch.setattr(serving, "make", lambda *_: 5)
    monkeypatch.setattr(serving, "run", measured)
    monkeypatch.setattr(serving, "write", lambda name, results: written.append((name, list(results["settings"]))))
    with pytest.raises(subprocess.CalledProcessError):
        serving.main()
    assert written == [("quantized_serving", ["dense"]), ("quantized_serving", ["dense", "2:4"])]
    assert f"{serving.EXPORTED}int8" not in serving.QUANTIZED["settings"]
