"""Whole experts leave a model: it computes what it does when its router does not know them, whatever the family."""

import copy
import re
import json
import sys
from pathlib import Path

import pytest
import reference
import torch
import transformers as hf
from models import make, token_batches
from test_experts import family, mixtral, same
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from optimum_moonshot import MoonshotConfig, MoonshotError, MoonshotPruner, PruneReport, load_pruned
from optimum_moonshot.calibration import mixture_sums
from optimum_moonshot.calibration.memory import Storage
from optimum_moonshot.calibration.mixture_sums import MixtureObserver
from optimum_moonshot.checkpoint.verification import verify
from optimum_moonshot.data.batches import split_batches
from optimum_moonshot.model.calls import frozen, run_model
from optimum_moonshot.model.expert_removal import ExpertRemoval
from optimum_moonshot.model.experts import expert_keys
from optimum_moonshot.model.losses import loss_gradient
from optimum_moonshot.model.mixtures import find_mixtures
from optimum_moonshot.objective.patterns import Experts

FAMILIES = (  # fmt: skip
    "afmoe",
    "aria_text",
    "deepseek_v2",
    "deepseek_v3",
    "dots1",
    "ernie4_5_moe",
    "exaone_moe",
    "flex_olmo",
    "glm4_moe",
    "gpt_oss",
    "granitemoe",
    "granitemoehybrid",
    "hunyuan_v1_moe",
    "jamba",
    "lfm2_moe",
    "llama4_text",
    "minimax_m2",
    "mixtral",
    "nemotron_h",
    "olmoe",
    "phimoe",
    "qwen2_moe",
    "qwen3_5_moe_text",
    "qwen3_moe",
    "qwen3_next",
)
REFUSED = {
    "deepseek_v4": "something else than the router's scores says which tokens they get",
    "inkling_text": "has no setting with 3 of 4 experts",
    "jetmoe": "JetMoeParallelExperts does not say which token it sends to which expert",
}
MINE = {"hunyuan_v1_moe": {"num_experts": 4, "moe_topk": [2, 2]}}  # of one expert otherwise


def model_of(name):
    if name not in MINE:
        return family(name).float()
    config = family(name).config
    for field, value in MINE[name].items():
        setattr(config, field, value)
    torch.manual_seed(0)
    return hf.AutoModelForCausalLM.from_config(config).eval().float()


def settled(model):
    """Tokens that differ, experts that matter, routers that choose, and biases: a new model has little of all."""
    generator = torch.Generator().manual_seed(3)
    for module in model.modules():
        for key in expert_keys(module):
            module._parameters[key].data.normal_(std=0.2, generator=generator)
    for name, tensor in model.state_dict().items():
        if "bias" in name and not tensor.any():
            tensor.copy_(0.05 * torch.randn(tensor.shape, generator=generator))
        elif re.search(r"embed\w*\.weight$", name) or (
            re.search(r"(gate|router)(\.\w+)?\.weight$", name) and tensor.shape[0] == 4
        ):
            tensor.normal_(generator=generator)
    return model


def prune(model, batches=None, solver="osscar", sparsity=0.25, **options):
    pruner = MoonshotPruner(
        model, MoonshotConfig(pattern="experts", solver=solver, sparsity=sparsity, num_samples=6, **options)
    )
    pruner.prune(batches or token_batches(), progress=False)
    return pruner


class Unknown(TorchFunctionMode):
    """Routers do not know some experts: their scores are -inf."""

    def __init__(self, gone):
        super().__init__()
        self.gone, self.met = gone, set()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        weight = args[1] if function is functional.linear and len(args) > 1 else None
        if weight is not None and weight.data_ptr() in self.gone:
            self.met.add(weight.data_ptr())
            found = found.clone()
            found[..., self.gone[weight.data_ptr()]] = -torch.inf
        return found


def without(model, gone, batch):
    """The logits of a model with all experts whose routers do not know some of them.

    Args:
        model: as it was.
        gone: mixture → the numbers of the experts.
        batch: inputs.
    """
    model, weights = copy.deepcopy(model), {}
    with frozen(model), torch.no_grad():
        mixtures = find_mixtures(model, token_batches()[0])
        plan = ExpertRemoval.plan(model, mixtures, Experts(0.25), token_batches()[0])
        own = {id(p) for mixture in mixtures for p in mixture.module.parameters()}
        for each in plan.sliced.values():
            some = gone[each.mixture]
            if id(each.tensor) not in own and each.tensor.squeeze().ndim == 1:
                each.tensor.movedim(each.axis, -1)[..., some] = -torch.inf  # what is added to scores
            elif id(each.tensor) not in own:
                weights[each.tensor.data_ptr()] = some
        with Unknown(weights) as router:
            logits = run_model(model, batch).logits
    assert router.met == weights.keys()
    return logits


def logits(model, batch):
    with torch.no_grad():
        return run_model(model.eval(), batch).logits


def removed(pruner):
    return {layer.name: list(layer.experts.removed) for layer in pruner.report.layers}


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family(name, tmp_path):
    model = settled(model_of(name))
    dense, batch = copy.deepcopy(model), token_batches(seed=7)[0]
    pruner = prune(model, lam=0.5)
    assert pruner.model is model and pruner.report.skipped == {}
    gone = removed(pruner)
    assert gone and all(len(some) == 1 for some in gone.values())
    expected = without(dense, gone, batch)
    torch.testing.assert_close(logits(model, batch), expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(expected, logits(dense, batch), rtol=1e-2, atol=1e-3)
    pruner.save_pretrained(tmp_path)
    assert all(list(change) == [4, 3] for change in pruner.report.compaction["config"].values())
    loaded = type(model).from_pretrained(tmp_path)
    assert same(loaded, model) and torch.equal(logits(loaded, batch), logits(model, batch))
    assert verify(tmp_path)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_done_is_refused_before_any_work(name):
    model = family(name)
    before = copy.deepcopy(model)
    with pytest.raises(MoonshotError, match=REFUSED[name]):
        prune(model)
    assert same(model, before) and model.config.to_dict() == before.config.to_dict()
