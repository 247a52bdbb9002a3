"""Tiny pruned models whose surviving weights are on a grid."""

import dataclasses

import torch
from checkpoints import pruned
from grid_matrices import on_grid

from optimum_moonshot.model.layers import find_structure
from optimum_moonshot.objective.grid import Grid
from optimum_moonshot.reports.record import PruningRecord


def quantize(pruner, bits=4, group=64):
    """Round the pruned layers of a pruner's model to a grid, and note it in the record; `bits` of all, or by layer."""
    model, each = pruner.model, bits if isinstance(bits, dict) else None
    record = PruningRecord.of(model)
    config = {**record.config, "bits": bits if each is None else None, "quant_group": group}
    record = dataclasses.replace(record, config=config, bits=each)
    for layer in find_structure(model, record.targets, record.ignore).layers():
        if each is None or layer.name in each:
            grid = Grid(bits if each is None else each[layer.name], group, layer.parameter.dtype)
            with torch.no_grad():
                layer.assign(on_grid(grid, layer.matrix))
    record.attach(model)
    return pruner


def quantized(name="llama", dtype=torch.bfloat16, bits=4, **settings):
    """A pruner of a tiny quantized model."""
    return quantize(pruned(name, dtype, **settings), bits)
