"""The slow truth of block-wise recovery: whole models run for every hidden state, Adam written out."""

import copy
import math

import torch


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
    """|output - target|² / |target|² of the tokens that are no padding, one after another."""
    errors = []
    for sample in range(len(outputs)):
        for token in range(outputs.shape[1]):
            if mask is None or mask[sample, token]:
                target = targets[sample, token]
                errors.append((outputs[sample, token] - target).square().sum() / target.square().sum())
    return torch.stack(errors)


def recover(dense, pruned, find_blocks, groups, order, steps, lr, betas=(0.9, 0.95), eps=1e-8):
    """Tune `pruned` (float32) block after block, `steps` steps each and no early stop.

    Args:
        find_blocks: model → list of (block, list of its pruned parameters).
        groups: lists of batches, one list per optimizer step.
        order: block index → iterator over indices of `groups`.
    """
    pruned = copy.deepcopy(pruned)
    for i, (_, parameters) in enumerate(find_blocks(pruned)):
        keeps = [parameter.detach() != 0 for parameter in parameters]
        rates = [lr * p.detach()[keep].square().mean().sqrt() for p, keep in zip(parameters, keeps, strict=True)]
        first = [torch.zeros_like(parameter) for parameter in parameters]
        second = [torch.zeros_like(parameter) for parameter in parameters]
        wanted = order(i)
        for step in range(1, steps + 1):
            errors = []
            for batch in groups[next(wanted)]:
                with torch.no_grad():
                    target = hidden_states(dense, [block for block, _ in find_blocks(dense)], batch)[1][i]
                output = hidden_states(pruned, [block for block, _ in find_blocks(pruned)], batch)[1][i]
                errors.append(relative_errors(output, target, batch.get("attention_mask")))
            gradients = torch.autograd.grad(torch.cat(errors).mean(), parameters)
            cosine = (1 + math.cos(math.pi * (step - 1) / steps)) / 2
            with torch.no_grad():
                for parameter, rate, gradient, keep, m, v in zip(
                    parameters, rates, gradients, keeps, first, second, strict=True
                ):
                    m.copy_(betas[0] * m + (1 - betas[0]) * gradient)
                    v.copy_(betas[1] * v + (1 - betas[1]) * gradient**2)
                    change = m / (1 - betas[0] ** step) / ((v / (1 - betas[1] ** step)).sqrt() + eps)
                    parameter -= rate * cosine * change * keep
    return pruned
