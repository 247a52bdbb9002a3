"""Experts with integer codes, packed in memory by the same module: the weights and outputs of the dense model."""

import pytest
import torch
from checkpoints import assert_same, tensors
from grid_matrices import on_grid, random_matrix
from marks import slow_but
from packed_models import assert_state, held, state
from tiny_mixtures import family, mixtral, prune

from optimum_moonshot import load_pruned
from optimum_moonshot.objective.grid import Grid
from optimum_moonshot.objective.patterns import NM
from optimum_moonshot.packing import Quantized

IDS = torch.randint(3, 90, (2, 9), generator=torch.Generator().manual_seed(0))
MODELS = {"mixtral": mixtral, "gpt_oss": lambda: family("gpt_oss"), "qwen3_5": lambda: family("qwen3_5_moe_text")}


def logits(model):
    with torch.no_grad():
        return model(IDS, use_cache=False).logits


@pytest.mark.parametrize("settings", [{"pattern": "2:4"}, {"pattern": "unstructured", "sparsity": 0.6}, {}], ids=str)
@pytest.mark.parametrize("name", slow_but(["mixtral", "gpt_oss"], MODELS))
def test_quantized_experts_are_packed_loaded_and_saved(name, settings, tmp_path):
    model = MODELS[name]().bfloat16()
    pruner = prune(model, solver="magnitude", bits=4, quant_group=64, **settings)
    expected, before = logits(model), state(model)
    pruner.save_pretrained(tmp_path / "packed", format="packed")
    chosen = pruner.to_runtime("packed", inputs="float")
    assert {entry for layer, entry in chosen.items() if "experts" in layer} == {"packed: requested"}
    weights = {weight for weight in held(model) if "experts" in weight}
    assert len(weights) == 4 and not weights & {parameter for parameter, _ in model.named_parameters()}
    assert torch.allclose(logits(model), expected, atol=2e-2, rtol=2e-2)

    loaded = load_pruned(tmp_path / "packed", runtime="packed", inputs="float").eval()
    assert held(loaded) == held(model) and torch.equal(logits(loaded), logits(model))
    assert torch.allclose(logits(load_pruned(tmp_path / "packed", runtime="packed")), expected, atol=5e-2, rtol=5e-2)
    loaded.save_pretrained(tmp_path / "again")
    stored, again = tensors(tmp_path / "packed"), tensors(tmp_path / "again")
    assert stored.keys() == again.keys() and all(torch.equal(stored[key], again[key]) for key in stored)
    assert any(key.endswith("_codes") and "experts" in key for key in stored)

    pruner.to_runtime("dense")
    assert_state(model, before)
    assert_same(model, load_pruned(tmp_path / "packed", runtime="dense"))


@pytest.mark.parametrize("bits", [8, 4, 3])
@pytest.mark.parametrize("pattern, density", [(NM(2, 4), 0.5), (None, 0.3), (None, 1.0)], ids=str)
def test_rows_and_stacks_of_packed_codes(bits, pattern, density):
    grid, d_in = Grid(bits, 64, torch.bfloat16), 200
    matrices = [random_matrix(grid, 6, d_in, pattern, density, seed) for seed in range(3)]
    codec = Quantized.of(grid)
    parts = codec.stack([codec.pack(matrix, pattern) for matrix in matrices], [(6, d_in)] * 3)
    codec.check(parts, (18, d_in), torch.bfloat16, pattern)
    dense = torch.cat(matrices)
    assert torch.equal(codec.unpack(parts, (18, d_in)), dense)
    for plan in (None, codec.plan(parts, (18, d_in))):
        rows, planned = codec.rows(parts, (18, d_in), 4, 11, plan)
        codec.check(rows, (7, d_in))
        for each in (None, planned):
            assert torch.equal(codec.unpack(rows, (7, d_in), each), dense[4:11])
    wide, inputs, counts = codec.with_inputs("float"), torch.randn(6, d_in).bfloat16(), torch.tensor([1, 0, 4])
    outputs = wide.grouped(inputs, counts, parts, (18, d_in), wide.plan(parts, (18, d_in)))
    exact = [inputs[:1].double() @ matrices[0].double().T, inputs[1:5].double() @ matrices[2].double().T]
    assert torch.allclose(outputs[:5].double(), torch.cat(exact), rtol=1e-2, atol=1e-2) and not outputs[5].any()


def test_matrices_with_and_without_a_bitmask_are_stacked():
    grid, d_in = Grid(4, 64, torch.bfloat16), 203
    matrices = [random_matrix(grid, 6, d_in, None, 0.2), on_grid(grid, 1 + torch.rand(6, d_in))]
    codec = Quantized.of(grid)
    packed = [codec.pack(matrix, None) for matrix in matrices]
    assert packed[0]["_meta"].shape[1] and not packed[1]["_meta"].shape[1]
    parts = codec.stack(packed, [(6, d_in)] * 2)
    codec.check(parts, (12, d_in))
    assert torch.equal(codec.unpack(parts, (12, d_in)), torch.cat(matrices))


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"pattern": "unstructured", "sparsity": 0.6}, {}], ids=str)
def test_a_model_with_quantized_experts_compiles_to_one_graph(settings):
    model = mixtral(num_hidden_layers=1).bfloat16()
    prune(model, solver="magnitude", bits=4, quant_group=64, **settings).to_runtime("packed")
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        assert torch.equal(compiled(IDS, use_cache=False).logits, logits(model))
