"""The costs of a model with a smaller hidden size: those of the narrowed model, of each of its parts."""

import pytest
import torch
from models import make, token_batches

from optimum_moonshot.model.layers import find_structure
from optimum_moonshot.model.structured_groups import probe_inputs
from optimum_moonshot.shrink.costs import Costs, Narrowing, shape_costs
from optimum_moonshot.shrink.decision import Tables
from optimum_moonshot.shrink.experts import find_experts
from optimum_moonshot.shrink.hidden import HiddenSizes
from optimum_moonshot.shrink.hidden_size import cut_stream
from optimum_moonshot.shrink.losses import BlockSets, WidthLosses
from optimum_moonshot.shrink.report import Target
from optimum_moonshot.shrink.stream import observe_stream
from optimum_moonshot.shrink.widths import Width, find_widths


def costs(model, unit, narrowing=None):
    layers = {layer.name: layer for layer in find_structure(model).layers()}
    widths, _ = find_widths(model, probe_inputs(model), set(layers), 1)
    experts, _ = find_experts(model, probe_inputs(model))
    return shape_costs(model, [*widths, *filter(None, [experts])], unit, narrowing)


@pytest.mark.parametrize("name", ["llama", "llama-tied-biased", "qwen2", "qwen3", "phi3", "mixtral"])
@pytest.mark.parametrize("unit", ["parameters", "bytes"])
def test_the_costs_of_all_parts_are_those_of_the_narrowed_model(name, unit):
    model = make(name).to(torch.bfloat16)
    stream = observe_stream(model, token_batches(4), lam=1.0)
    small, _ = cut_stream(stream, 8)
    predicted, actual = costs(model, unit, Narrowing(16, 8, stream.axes)), costs(small, unit)
    assert predicted == actual
    assert predicted.dense == small.num_parameters() * (1 if unit == "parameters" else 2)


def test_the_least_cost_has_no_part_that_may_leave():
    savings = {"neurons": ((0.0, 2.0), (0.0, 3.0), (0.0, 2.0)), "heads": ((0.0, 1.0), (0.0, 1.0), (0.0, 1.0))}
    each = Costs("parameters", 50.0, (10.0, 10.0, 8.0), savings)
    assert [each.least(blocks) for blocks in (0, 1, 2)] == [40.0, 33.0, 27.0]
    assert each.scaled(0.5).least(1) == 16.5


def test_sizes_are_ranked_by_the_loss_of_all_parts_then_by_the_cost():
    """The neurons cost 10 of 100, all of which is in proportion to the hidden size; their removal loses 0.5."""
    width = Width("neurons", 1, (), (0, 1), {})
    dense = Costs("parameters", 100.0, (), {"neurons": ((0.0, 10.0),)})
    sets = BlockSets(((),), (0.0,))
    tables = Tables((width,), {}, (WidthLosses((0.0, 0.5), (1.0,)),), sets, dense, dense)
    sizes = HiddenSizes(
        None, {10: 0.0, 9: 0.1, 8: 0.1, 7: 0.4}, {size: dense.scaled(size / 10) for size in (10, 9, 8, 7)}
    )
    assert sizes.ranked(tables, Target("parameters", 90)) == [9, 8, 7, 10]
    assert sizes.ranked(tables, Target("parameters", 75)) == [7, 8]
    assert sizes.ranked(tables, Target("parameters", 62)) == []
    assert sizes.least(tables) == 63
    sizes.refuse(7, "the number of heads")
    assert sizes.least(tables) == 72
