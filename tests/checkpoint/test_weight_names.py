"""Rows of fused parameters, found by transformers' own converters: every kind of operation in its mapping."""

import pytest
import torch
from transformers import PretrainedConfig
from transformers.conversion_mapping import _build_checkpoint_conversion_mapping
from transformers.core_model_loading import Interleave, Transpose, WeightConverter

from optimum_moonshot.checkpoint.weight_files import Target

EXPERTS, ROWS, COLUMNS = 4, 6, 8


def converters():
    """One converter to a single parameter for every sequence of operations, by what they are called."""
    conversions = {}
    for entries in _build_checkpoint_conversion_mapping().values():
        for entry in entries:
            if isinstance(entry, WeightConverter) and len(entry.target_patterns) == 1:
                conversions.setdefault(f"{entry.operations} {len(entry.source_patterns)}", entry)
    return conversions


def stored(converter, fused):
    """Random weights with their patterns: one of every pattern, or of every expert."""
    each = "*" in converter.source_patterns[0]
    shape = (EXPERTS, ROWS, COLUMNS) if fused and not each else (ROWS, COLUMNS)
    count = EXPERTS if each else 1
    return [(pattern, torch.randn(shape)) for pattern in converter.source_patterns for _ in range(count)]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", converters())
def test_rows_of_the_parameter_are_the_rows_that_were_found(name, fused):
    converter, config = converters()[name], PretrainedConfig()
    target = Target(converter.target_patterns[0], None, converter)
    weights = stored(converter, fused)
    try:
        parameter = target.merged((), config, weights)
    except (IndexError, AttributeError, ValueError, KeyError, RuntimeError):
        pytest.skip("these operations need other shapes, or settings of a model")
    shapes = [(pattern, weight.shape) for pattern, weight in weights]
    order = target.row_order(parameter.shape, config, shapes)
    rows = torch.cat([weight.flatten(0, -2) for _, weight in weights])
    kept = {*map(tuple, parameter.flatten(0, -2).tolist())} == {*map(tuple, rows.tolist())}
    assert (order is not None) == kept
    if order is not None:
        assert torch.equal(parameter.flatten(0, -2), rows[order])


def test_interleaved_rows_are_kept_and_columns_are_not():
    def order(operation, shape):
        target = Target("a", "a", WeightConverter("a", "a", [operation]))
        return target.row_order(shape, PretrainedConfig(), [("a", shape)])

    assert order(Interleave(dim=1), (2, 4, 8)).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert order(Interleave(dim=2), (2, 4, 8)) is None
    assert order(Transpose(1, 2), (2, 4, 8)) is None
    assert order(Transpose(1, 2, check_dims=True), (2, 4, 8)).tolist() == [*range(8)]
