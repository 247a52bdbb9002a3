"""Tables of loss and cost: exact parameters of every configuration, and interpolation that passes its points."""

from contextlib import contextmanager

import pytest
import torch
from models import make

from optimum_moonshot import MoonshotError
from optimum_moonshot.model.layers import find_blocks, find_structure
from optimum_moonshot.model.structured_groups import probe_inputs
from optimum_moonshot.shrink.costs import latency_costs, model_latency, shape_costs
from optimum_moonshot.shrink.losses import block_sets, build_program, interpolated, width_losses
from optimum_moonshot.shrink.report import Target
from optimum_moonshot.shrink.widths import TRIALS, Width, find_widths, trial_levels, within


def parts(name):
    model = make(name)
    layers = {layer.name: layer for layer in find_structure(model).layers()}
    widths, refused = find_widths(model, probe_inputs(model), set(layers), 1)
    return model, widths, refused


@pytest.mark.parametrize("name", ["llama-tied-biased", "qwen3", "opt", "gpt2", "phi", "mixtral", "falcon"])
@pytest.mark.parametrize("unit", ["parameters", "bytes"])
def test_the_savings_are_those_of_a_model_of_the_configuration(name, unit):
    model, widths, _ = parts(name)
    model = model.to(torch.bfloat16)
    costs = shape_costs(model, widths, unit)
    assert widths
    for width in widths:
        for level, config in width.configs.items():
            with torch.device("meta"):
                small = type(model)(config).to(torch.bfloat16)
            saved = sum(each[width.levels.index(level)] for each in costs.savings[width.name])
            assert costs.dense - saved == small.num_parameters() * (1 if unit == "parameters" else 2)


def test_an_architecture_that_derives_the_size_of_a_head_keeps_its_heads_with_a_reason():
    _, widths, refused = parts("gpt2")
    assert [width.name for width in widths] == ["neurons"]
    assert "divisible" in refused["transformer.h.*.attn.c_proj"]


def test_layers_that_are_not_selected_keep_their_width():
    model = make("llama")
    names = {layer.name for layer in find_structure(model).layers() if "layers.1.mlp" not in layer.name}
    widths, refused = find_widths(model, probe_inputs(model), names, 1)
    assert [width.name for width in widths] == ["heads"]
    assert refused == {"model.layers.*.mlp.down_proj": "model.layers.1.mlp.down_proj is not selected"}


def test_interpolation_passes_the_points_and_is_monotone():
    points = {0: 0.0, 10: 0.02, 25: 0.02, 40: 0.3, 75: 2.0}
    values = interpolated(points, range(100))
    assert all(values[x] == pytest.approx(y) for x, y in points.items())
    assert all(after >= before - 1e-12 for before, after in zip(values, values[1:], strict=False))
    assert values[95] - values[85] == pytest.approx(10 * 1.7 / 35)


def test_a_width_ends_at_the_first_trial_that_reaches_the_target_alone():
    width = Width("neurons", 100, (), tuple(range(0, 76, 5)), {})
    savings = [2.0 * level for level in width.levels]
    assert within(width, savings, 40).levels[-1] == 25 and within(width, savings, 51).levels[-1] == 40
    assert within(width, savings, 500).levels == width.levels
    assert trial_levels(within(width, savings, 40)) == (10, 25, 25, 25, 25)
    assert trial_levels(width) == tuple(round(100 * share) for share in TRIALS)


class Additive:
    """A model whose loss is the sum of those of its parts: of each block, and of the neurons of each."""

    BLOCKS, NEURONS = (0.5, 0.1, 0.7), (0.3, 0.2, 0.1)

    def __init__(self, levels):
        self.levels, self.now = levels, 0.0

    def increase(self, key, changed, few=False):
        with changed():
            return self.now

    @contextmanager
    def pruned(self, trial, layers):
        blocks = [int(layer.name.split(".")[2]) for layer in layers]
        self.now = sum(self.NEURONS[block] for block in blocks) * self.levels[trial] / 16
        yield
        self.now = 0.0

    @contextmanager
    def without(self, blocks):
        self.now = sum(self.BLOCKS[block] for block in blocks)
        yield
        self.now = 0.0

    def candidates(self, count, most):
        return [(0,), (1,)]


def test_the_predicted_loss_of_an_additive_model_is_exact():
    model, widths, _ = parts("llama")
    (width,) = (each for each in widths if each.name == "neurons")
    measured = Additive(trial_levels(width))
    losses = width_losses(measured, width, [block.layers for block in find_structure(model).blocks])
    sets = block_sets(measured, 1)
    program = build_program(shape_costs(model, [width], "parameters"), [width], [losses], sets)
    assert sets.sets == ((), (1,))
    for option, level in enumerate(width.levels):
        assert program.choice((0, option)).loss == pytest.approx(0.6 * level / 16)
        assert program.choice((1, option)).loss == pytest.approx(0.1 + 0.4 * level / 16)  # its neurons are gone


def test_the_shares_of_many_blocks_are_measured_in_groups():
    model, widths, _ = parts("llama")
    (width,) = (each for each in widths if each.name == "neurons")
    blocks = [block.layers for block in find_structure(model).blocks]
    measured, calls = Additive(trial_levels(width)), []
    increase = measured.increase
    measured.increase = lambda key, *arguments, **options: calls.append(key) or increase(key, *arguments, **options)
    shares = width_losses(measured, width, [*blocks, *[()] * 5]).shares  # 4 pairs of blocks
    assert shares == pytest.approx((5 / 12, 5 / 12, 1 / 6, *[0] * 5))
    places = [key.partition(" in ")[2] for key in calls if " in " in key]
    assert places == ["blocks 0 to 1", "blocks 2 to 3"]


def test_the_cost_of_a_removed_block_does_not_count_its_neurons_twice():
    model, widths, _ = parts("llama")
    costs = shape_costs(model, widths, "parameters")
    measured = Additive(trial_levels(widths[-1]))
    losses = [width_losses(measured, each, [b.layers for b in find_structure(model).blocks]) for each in widths]
    program = build_program(costs, widths, losses, block_sets(measured, 3))
    last = [len(width.levels) - 1 for width in widths]
    narrow = program.choice((0, *last)).cost
    inside = sum(parameter.numel() for parameter in find_blocks(model)[1][1].parameters())
    saved = sum(costs.savings[width.name][1][-1] for width in widths)
    assert program.choice((1, *last)).cost == narrow - (inside - saved)


@pytest.mark.parametrize("batch_shape", [(1, 1), (2, 8)])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_latencies_are_positive_and_narrower_blocks_are_not_slower(monkeypatch, name, batch_shape):
    monkeypatch.setattr("optimum_moonshot.shrink.costs.SECONDS", 0.0)
    model, widths, _ = parts(name)
    kept = {}

    def keep(name, measure):
        return kept.setdefault(name, measure() if name not in kept else None)

    costs = latency_costs(model, widths, batch_shape, keep)
    assert len(costs.blocks) == 3 and all(each > 0 for each in costs.blocks)
    assert costs.dense >= sum(costs.blocks)
    for savings in costs.savings.values():
        for of_block in savings:
            assert of_block[0] == 0 and list(of_block) == sorted(of_block)
    assert latency_costs(model, widths, batch_shape, keep) == costs  # from the kept measurements
    assert model_latency(model, batch_shape) > 0


def test_a_target_is_a_fraction_or_a_number():
    assert Target.of(parameters=0.75, bytes=None, latency=None).budget(1001) == 750
    assert Target.of(parameters=500, bytes=None, latency=None).budget(1001) == 500
    assert Target.of(parameters=None, bytes="1KB", latency=None).budget(4000) == 1000
    assert Target.of(parameters=None, bytes=None, latency=20).budget(0.05) == pytest.approx(0.02)
    assert Target.of(parameters=None, bytes=None, latency=0.5).budget(0.05) == pytest.approx(0.025)


@pytest.mark.parametrize(
    "values", [{}, {"parameters": 0.5, "latency": 0.5}, {"parameters": 0}, {"bytes": "much"}, {"latency": float("nan")}]
)
def test_targets_that_are_refused(values):
    with pytest.raises(MoonshotError):
        Target.of(**{"parameters": None, "bytes": None, "latency": None, **values})


def test_the_error_of_an_unreachable_target_has_few_reasons():
    refused = {f"part {index}": "long " * 100 for index in range(6)}
    message = str(Target.of(latency=0.1).unreachable(0.05, 0.1, refused))
    assert message.startswith("latency=0.1: the smallest configuration has 50 ms, 0.5000 of the dense model, since")
    assert "part 3 (long" in message and "part 4" not in message and "), 2 more; give at least" in message
    assert len(message) < 650
    narrowed = Target("latency", 0.1, dense=0.2)
    assert "50 ms, 0.2500 of the dense model; give" in str(narrowed.unreachable(0.05, 0.1, {}))
    assert narrowed.budget(0.1) == pytest.approx(0.02)


@pytest.mark.parametrize("value", [1, 1001, 5000])
def test_a_target_of_the_dense_size_is_refused(value):
    with pytest.raises(MoonshotError, match="1,001 parameters"):
        Target.of(parameters=value).budget(1001)
