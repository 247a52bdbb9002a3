"""Reference implementation of recovery: the whole model runs for every hidden state, with a literal Adam."""

import copy
import math

import torch

from optimum_moonshot import prune_weight
from optimum_moonshot.recover.student import VECTOR_LR


def hidden_states(model, blocks, batch):
    """Inputs and outputs of every block in one run of the whole model."""
    inputs, outputs, handles = [], [], []
    for block in blocks:
        handles.append(
            block.register_forward_pre_hook(lambda _, args, kwargs: inputs.append(args[0]), with_kwargs=True)
        )
        handles.append(
            block.register_forward_hook(
                lambda _, args, output: outputs.append(output if torch.is_tensor(output) else output[0])
            )
        )
    model(**batch)
    for handle in handles:
        handle.remove()
    return inputs, outputs


def relative_errors(outputs, targets, mask):
    """|output - target|² / |target|² of the tokens other than padding, one by one."""
    errors = []
    for sample in range(len(outputs)):
        for token in range(outputs.shape[1]):
            if mask is None or mask[sample, token]:
                target = targets[sample, token]
                errors.append((outputs[sample, token] - target).square().sum() / target.square().sum())
    return torch.stack(errors)


def recover(dense, pruned, find_blocks, groups, order, steps, lr):
    """Tune `pruned` (float32) block after block, `steps` steps each and no early stop.

    Args:
        find_blocks: model → list of (block, list of its pruned parameters).
        groups: lists of batches, one list per optimizer step.
        order: block index → iterator over indices of `groups`.
    """
    pruned = copy.deepcopy(pruned)
    for i in range(len(find_blocks(pruned))):
        wanted = order(i)
        tune(dense, pruned, find_blocks, i, groups, wanted, steps, lr, lambda step: cosine(step, steps))
    return pruned


def recover_gradually(dense, pruned, find_blocks, groups, order, steps, lr, stages, batches, between):
    """Prune and tune block by block; `pruned` is only the initial state of the run.

    Args:
        find_blocks, groups, order, steps, lr: as for `recover`.
        stages: parameter → the configurations of `prune_weight`, one for each stage.
        batches: all of them, which the Gram matrices are of.
        between: steps after every stage but the last.
    """
    pruned = copy.deepcopy(pruned)
    for i, (_, parameters) in enumerate(find_blocks(pruned)):
        wanted = order(i)
        with torch.no_grad():
            for parameter, value in zip(parameters, find_blocks(dense)[i][1], strict=True):
                parameter.copy_(value)
        count = len(stages(parameters[0]))
        for stage in range(count):
            grams = [gram(pruned, parameter, batches) for parameter in parameters]
            with torch.no_grad():
                for parameter, inputs in zip(parameters, grams, strict=True):
                    parameter.copy_(prune_weight(parameter, inputs, config=stages(parameter)[stage]).weight)
            if stage < count - 1:
                tune(dense, pruned, find_blocks, i, groups, wanted, between, lr, lambda step: 1.0)
        tune(dense, pruned, find_blocks, i, groups, wanted, steps, lr, lambda step: cosine(step, steps))
    return pruned


def gram(model, parameter, batches):
    """Σ x xᵀ over the tokens other than padding, from runs of the whole model."""
    (module,) = [module for module in model.modules() if getattr(module, "weight", None) is parameter]
    seen = []
    handle = module.register_forward_hook(lambda _, args, output: seen.append(args[0].detach()))
    total = torch.zeros(parameter.shape[1], parameter.shape[1])
    for batch in batches:
        model(**batch)
        inputs = seen.pop().flatten(0, -2)
        if "attention_mask" in batch:
            inputs = inputs[batch["attention_mask"].flatten().bool()]
        total += inputs.T @ inputs
    handle.remove()
    return total


def cosine(step, steps):
    """The factor of the learning rate, from 1 at the first step towards 0."""
    return (1 + math.cos(math.pi * (step - 1) / steps)) / 2


def tune(dense, pruned, find_blocks, i, groups, wanted, steps, lr, share, betas=(0.9, 0.95), eps=1e-8):
    """Steps of Adam on the surviving weights of block `i`.

    Args:
        wanted: iterator over indices of `groups`.
        share: step, from 1 on → share of `lr`.
    """
    parameters = find_blocks(pruned)[i][1]
    keeps = [parameter.detach() != 0 for parameter in parameters]
    rates = [
        lr * (VECTOR_LR if p.ndim == 1 else 1) * p.detach()[keep].square().mean().sqrt()
        for p, keep in zip(parameters, keeps, strict=True)
    ]
    first = [torch.zeros_like(parameter) for parameter in parameters]
    second = [torch.zeros_like(parameter) for parameter in parameters]
    for step in range(1, steps + 1):
        errors = []
        for batch in groups[next(wanted)]:
            with torch.no_grad():
                target = hidden_states(dense, [block for block, _ in find_blocks(dense)], batch)[1][i]
            output = hidden_states(pruned, [block for block, _ in find_blocks(pruned)], batch)[1][i]
            errors.append(relative_errors(output, target, batch.get("attention_mask")))
        gradients = torch.autograd.grad(torch.cat(errors).mean(), parameters)
        with torch.no_grad():
            for parameter, rate, gradient, keep, m, v in zip(
                parameters, rates, gradients, keeps, first, second, strict=True
            ):
                m.copy_(betas[0] * m + (1 - betas[0]) * gradient)
                v.copy_(betas[1] * v + (1 - betas[1]) * gradient**2)
                change = m / (1 - betas[0] ** step) / ((v / (1 - betas[1] ** step)).sqrt() + eps)
                parameter -= rate * share(step) * change * keep
