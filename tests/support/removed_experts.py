"""Runs that remove experts, and the dense model with masked routers as their reference."""

import copy

import torch
from expert_removal import settled
from models import token_batches
from tiny_mixtures import mixtral
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from optimum_moonshot import MoonshotConfig, MoonshotPruner
from optimum_moonshot.experts.removal import ExpertRemoval
from optimum_moonshot.model.calls import frozen, run_model
from optimum_moonshot.model.mixtures import find_mixtures
from optimum_moonshot.objective.patterns import Experts


def settled_mixtral(**changes):
    return settled(mixtral(8, **changes))


def config(solver="osscar", sparsity=0.25, **options):
    return MoonshotConfig(pattern="experts", solver=solver, sparsity=sparsity, num_samples=6, **options)


def prune(model, batches=None, **options):
    pruner = MoonshotPruner(model, config(**options))
    pruner.prune(batches or token_batches(), progress=False)
    return pruner


def removed(pruner):
    """The indices of the removed experts, by mixture."""
    return {layer.name: list(layer.experts.removed) for layer in pruner.report.layers}


def logits(model, batch):
    with torch.no_grad():
        return run_model(model.eval(), batch).logits


class MaskedRouters(TorchFunctionMode):
    """Sets the scores of experts to -inf: `masked` has their indices by the address of the router's weight."""

    def __init__(self, masked):
        super().__init__()
        self.masked, self.called = masked, set()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        weight = args[1] if function is functional.linear and len(args) > 1 else None
        if weight is not None and weight.data_ptr() in self.masked:
            self.called.add(weight.data_ptr())
            output = output.clone()
            output[..., self.masked[weight.data_ptr()]] = -torch.inf
        return output


def logits_without(model, experts, batch):
    """The logits of a copy of the dense `model` whose routers cannot choose `experts`: mixture → indices."""
    model, masked = copy.deepcopy(model), {}
    with frozen(model), torch.no_grad():
        mixtures = find_mixtures(model, token_batches()[0])
        plan = ExpertRemoval.plan(model, mixtures, Experts(0.25), token_batches()[0])
        inside = {id(p) for mixture in mixtures for p in mixture.module.parameters()}
        for each in plan.sliced.values():
            indices = experts[each.mixture]
            if id(each.tensor) not in inside and each.tensor.squeeze().ndim == 1:
                each.tensor.movedim(each.axis, -1)[..., indices] = -torch.inf  # a bias that is added to the scores
            elif id(each.tensor) not in inside:
                masked[each.tensor.data_ptr()] = indices
        with MaskedRouters(masked) as routers:
            output = run_model(model, batch).logits
    assert routers.called == masked.keys()
    return output
