"""Solvers do not depend on the unit of a weight, also where the squares of its values leave the range of float32."""

import pytest
import torch
from golden.make import layer
from llama_runs import prune
from models import make

from optimum_moonshot import MoonshotConfig, prune_weight
from optimum_moonshot.errors import FactorizationError
from optimum_moonshot.model.layers import find_structure
from optimum_moonshot.objective.grid import Grid
from optimum_moonshot.solvers import quantization, solver_names

SOLVERS = pytest.mark.parametrize("solver", solver_names())


def pattern(solver):
    return {"pattern": "structured", "sparsity": 0.5} if solver == "osscar" else {"sparsity": 0.5}


@SOLVERS
@pytest.mark.parametrize("lam", [0.5, 1.0])
@pytest.mark.parametrize("exponent", [-110, -60, 64, 100, 120])
def test_the_unit_of_a_weight_does_not_matter(solver, lam, exponent):
    weight, gram, gradients = layer(8, 64, 6)
    settings = MoonshotConfig(solver=solver, lam=lam, **pattern(solver))
    expected = prune_weight(weight, gram, gradients, config=settings)
    result = prune_weight(weight * 2.0**exponent, gram, gradients, config=settings)
    assert torch.equal(result.keep, expected.keep)
    torch.testing.assert_close(result.weight * 2.0**-exponent, expected.weight, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("solver", ["magnitude", "sparsegpt", "obc", "alps", "wanda"])
@pytest.mark.parametrize("exponent", [-142, -136, -128, -100, 100])
def test_quantized_weights_are_on_their_grid_in_any_unit(solver, exponent):
    weight, gram, _ = layer(8, 100, 6)
    for bits, dtype, strength in ((8, torch.float32, 1), (4, torch.float32, 1e24), (3, torch.bfloat16, 1)):
        settings = MoonshotConfig(solver=solver, lam=1, bits=bits, quant_group=64, sparsity=0.5)
        scaled = (weight.double() * 2.0**exponent).to(dtype)
        result = prune_weight(scaled, strength * gram, config=settings)
        Grid(bits, 64, dtype).scales_of(result.weight)
        assert result.weight.isfinite().all()
        assert result.weight.any() or exponent < -130  # a scale has hardly any bits left


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_descent_that_gains_nothing_is_rejected(dtype, monkeypatch):
    weight, gram, _ = layer(8, 64, 6)
    weight = weight.to(dtype)
    settings = MoonshotConfig(solver="magnitude", lam=1, bits=4, quant_group=64)
    monkeypatch.setattr(quantization._Descent, "run", lambda self: self.out.mul_(2))
    result = prune_weight(weight, gram, config=settings)
    assert (result.weight - weight).norm() < 0.2 * weight.norm()


def test_a_layer_of_huge_weights_in_a_model_keeps_the_mask_of_wanda():
    masks = []
    for factor in (1.0, 2.0**100):
        model = make("llama")
        (large,) = (each for each in find_structure(model).layers() if each.name == "model.layers.1.mlp.down_proj")
        with torch.no_grad():
            large.parameter.mul_(factor)
        prune(model, solver="wanda", lam=1, targets=[r"layers\.1\.mlp\.down_proj"])
        masks.append(large.matrix != 0)
    assert torch.equal(*masks) and float(masks[0].float().mean()) == 0.5


@pytest.mark.parametrize("solver", ["wanda", "sparsegpt", "magnitude"])
def test_inputs_whose_loss_has_no_float32_are_refused(solver):
    weight, gram, _ = layer(8, 64, 6)
    with pytest.raises(FactorizationError, match="beyond the range of float32; divide the inputs"):
        prune_weight(1e3 * weight, gram / gram.max() * 3e38, config=MoonshotConfig(solver=solver, sparsity=0.5, lam=1))
