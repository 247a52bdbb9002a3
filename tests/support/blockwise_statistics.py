"""Reference statistics of blockwise passes, computed sample by sample."""

import reference
import torch
from models import CAUSAL, PLAIN, VISION, image_batches, token_batches
from transformers.pytorch_utils import Conv1D

CHAINS = [*CAUSAL, "vit", "deit"]
CONVOLUTIONAL = [name for name in (*VISION, *PLAIN) if name not in CHAINS]


def batches_for(name, **options):
    return image_batches() if name in (*VISION, *PLAIN) else token_batches(**options)


def matrix_of(layer, parameter):
    return parameter.T if isinstance(layer.modules[0], Conv1D) else parameter.flatten(1)


def rows_of(module, inputs, keep):
    """The rows of inputs that the layer multiplies: [groups, T, d_in]."""
    if not isinstance(module, torch.nn.Conv2d):
        rows = inputs.reshape(-1, inputs.shape[-1])
        return (rows if keep is None else rows[keep])[None]
    shape = (module.kernel_size, module.stride, module.padding, module.dilation, module.groups, module.padding_mode)
    return reference.patches(inputs, *shape)[0]


def sample_loss(model, single, keep):
    if "labels" in single:
        output = model(single["pixel_values"])
        return torch.nn.functional.cross_entropy(getattr(output, "logits", output), single["labels"])
    logits, ids = model(**single).logits[0], single["input_ids"][0]
    real = torch.ones_like(ids, dtype=torch.bool) if keep is None else keep
    return torch.nn.functional.cross_entropy(logits[:-1][real[1:]], ids[1:][real[1:]])


def slow_statistics(model, layers, batches):
    """Σ x xᵀ over real tokens or patches, and autograd's weight gradient of each sample's loss."""
    grams, gradients = {layer.name: 0 for layer in layers}, {layer.name: [] for layer in layers}
    for batch in batches:
        for n in range(len(next(iter(batch.values())))):
            single = {name: tensor[n : n + 1] for name, tensor in batch.items()}
            keep = single["attention_mask"][0].bool() if "attention_mask" in single else None
            handles = []
            for layer in layers:

                def observe(module, args, output, name=layer.name, keep=keep):
                    rows = rows_of(module, args[0].detach(), keep)
                    gram = rows.mT @ rows
                    grams[name] = grams[name] + (gram if len(gram) > 1 else gram[0])

                handles.append(layer.modules[0].register_forward_hook(observe))
            model.zero_grad()
            sample_loss(model, single, keep).backward()
            for layer in layers:
                gradients[layer.name].append(matrix_of(layer, layer.parameter.grad).clone())
            for handle in handles:
                handle.remove()
    model.zero_grad()
    return grams, {name: torch.stack(matrices) for name, matrices in gradients.items()}


def close(actual, expected):
    return (actual - expected).norm() <= 2e-4 * expected.norm() + 1e-9
