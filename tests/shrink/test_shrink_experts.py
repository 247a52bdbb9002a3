"""Shrinking a mixture of experts: exact costs, and every combination of parts."""

import copy
import dataclasses
import itertools

import pytest
import torch
import transformers as hf
from llama_runs import assert_same, weights
from marks import slow
from models import token_batches
from removed_experts import logits, logits_without, settled_mixtral

from optimum_moonshot import MoonshotConfig, MoonshotError, MoonshotPruner
from optimum_moonshot.model.layers import find_structure
from optimum_moonshot.objective.patterns import Experts
from optimum_moonshot.shrink import hidden
from optimum_moonshot.shrink.costs import count_entries, shape_costs
from optimum_moonshot.shrink.experts import find_experts
from optimum_moonshot.shrink.losses import BlockSets, WidthLosses, build_program
from optimum_moonshot.shrink.widths import EXPERT_NEURONS, find_widths

CONFIG = MoonshotConfig(solver="osscar", pattern="structured", sparsity=0, num_samples=8, batch_size=4)
BATCHES = token_batches(8)


def shrunk(config=CONFIG, **target):
    model = settled_mixtral()
    pruner = MoonshotPruner(model, config)
    return model, pruner, pruner.shrink(BATCHES, progress=False, **target)


def without_other_parts(monkeypatch, *names):
    """Only experts and the widths of these names may leave."""

    def refuse(*_):
        raise MoonshotError("it stays")

    def widths(*arguments):
        reducible, refused = find_widths(*arguments)
        return [width for width in reducible if width.name in names], refused

    monkeypatch.setattr("optimum_moonshot.shrink.measurements.find_widths", widths)
    monkeypatch.setattr("optimum_moonshot.shrink.decision.MOST_BLOCKS", 0.0)
    monkeypatch.setattr(hidden, "find_stream", refuse)


def test_the_cost_of_an_expert_is_the_difference_of_configurations():
    model = settled_mixtral()
    width, refused = find_experts(model, BATCHES[0])
    assert not refused and width.levels == tuple(range(7))
    assert [each.left for each in width.removals] == [7, 6, 5, 4, 2]
    small = copy.deepcopy(model.config)
    small.num_local_experts -= 1
    saved = sum(width.expert_cost(block, count_entries) for block in model.model.layers)
    assert model.num_parameters() - saved == type(model)(small).num_parameters()


def test_a_model_measured_without_experts_is_the_one_that_loses_them():
    model = settled_mixtral()
    before, removal = weights(model), find_experts(model, BATCHES[0])[0].removals[-1]
    keep = {each.name: torch.tensor([0, 3]) for each in removal.mixtures}
    with removal.removed(keep):
        measured = logits(model, BATCHES[0])
    assert_same(model, before)
    assert model.config.num_local_experts == 8
    removal.apply(keep)
    assert torch.equal(logits(model, BATCHES[0]), measured)


def test_experts_alone_leave_as_by_their_pattern(monkeypatch, tmp_path):
    without_other_parts(monkeypatch)
    model, pruner, report = shrunk(parameters=0.8)
    before, after = report.widths["experts"]
    expected = settled_mixtral()
    config = dataclasses.replace(CONFIG, pattern=Experts.kind, sparsity=1 - after / before)
    prune_report = MoonshotPruner(expected, config).prune(BATCHES, progress=False)
    assert torch.equal(logits(pruner.model, BATCHES[0]), logits(expected, BATCHES[0]))
    removed = {layer.name: layer.experts.removed for layer in prune_report.layers}
    torch.testing.assert_close(
        logits(pruner.model, BATCHES[0]), logits_without(model, removed, BATCHES[0]), rtol=1e-4, atol=1e-5
    )
    assert report.parameters == (model.num_parameters(), pruner.model.num_parameters())
    pruner.save_pretrained(tmp_path)
    assert torch.equal(
        logits(hf.AutoModelForCausalLM.from_pretrained(tmp_path), BATCHES[0]), logits(expected, BATCHES[0])
    )
    assert f"experts {before} → {after}" in report.line()


@pytest.mark.parametrize("unit", ["parameters", "bytes"])
def test_the_cost_of_every_combination_is_that_of_its_configuration(unit):
    """Neurons of removed experts are counted once, and not at all in removed blocks."""
    model = settled_mixtral().to(torch.bfloat16)
    widths = [width for width in parts_of(model) if width.name != "heads"]
    assert [width.name for width in widths] == [EXPERT_NEURONS, "experts"]
    losses = [WidthLosses((0.0,) * len(width.levels), (0.5, 0.5)) for width in widths]
    costs = shape_costs(model, widths, unit)
    program = build_program(costs, widths, losses, BlockSets(((), (1,)), (0.0, 1.0)))
    for blocks, (f, neurons), (e, experts) in itertools.product(
        range(2), *(enumerate(width.levels) for width in widths)
    ):
        config = copy.deepcopy(model.config)
        config.num_hidden_layers, config.num_local_experts = 2 - blocks, 8 - experts
        config.intermediate_size = 24 - neurons
        with torch.device("meta"):
            expected = type(model)(config).num_parameters() * (1 if unit == "parameters" else 2)
        assert program.choice((blocks, f, e)).cost == pytest.approx(expected, abs=1e-3)
    assert costs.least(1) == pytest.approx(program.least_cost().cost) == pytest.approx(expected)


def parts_of(model):
    names = {layer.name for layer in find_structure(model).layers()}
    return [*find_widths(model, BATCHES[0], names, 1)[0], find_experts(model, BATCHES[0])[0]]


def test_neurons_of_experts_alone_leave_as_by_their_pattern(monkeypatch, tmp_path):
    without_other_parts(monkeypatch, EXPERT_NEURONS)
    monkeypatch.setattr("optimum_moonshot.shrink.measurements.expert_trials", lambda *_: (None, {}))
    model, pruner, report = shrunk(parameters=0.8)
    before, after = report.widths[EXPERT_NEURONS]
    assert (before, after) == (24, 16) and pruner.model.config.intermediate_size == 16
    config = dataclasses.replace(CONFIG, sparsity=1 / 3, lam=1.0, targets=[r"experts\.down_proj"])
    masked = settled_mixtral()
    MoonshotPruner(masked, config).prune(BATCHES, progress=False)
    expected = logits(masked, BATCHES[0])
    torch.testing.assert_close(logits(pruner.model, BATCHES[0]), expected, rtol=1e-4, atol=1e-5)
    assert report.parameters == (model.num_parameters(), pruner.model.num_parameters())
    pruner.save_pretrained(tmp_path)
    assert_same(hf.AutoModelForCausalLM.from_pretrained(tmp_path), weights(pruner.model))


@pytest.mark.parametrize("recover", [None, slow("blockwise"), slow("distill")])
def test_experts_and_their_neurons_leave_together(monkeypatch, recover, tmp_path):
    """A quarter of the parameters, which neither reaches alone."""
    without_other_parts(monkeypatch, EXPERT_NEURONS)
    config = dataclasses.replace(CONFIG, recover=recover, recover_steps=None if recover is None else 2)
    model, pruner, report = shrunk(config, parameters=0.3)
    (experts, fewer), (neurons, narrower) = report.widths["experts"], report.widths[EXPERT_NEURONS]
    assert experts > fewer and neurons > narrower
    small = pruner.model.config
    assert (small.num_local_experts, small.intermediate_size) == (fewer, narrower)
    assert report.parameters[1] == pruner.model.num_parameters() <= 0.3 * report.parameters[0]
    assert all({"experts", EXPERT_NEURONS} <= {*candidate.allowed} for candidate in report.considered)
    assert "experts 8 →" in report.line() and "neurons of experts 24 →" in report.line()
    pruner.save_pretrained(tmp_path)
    assert_same(hf.AutoModelForCausalLM.from_pretrained(tmp_path), weights(pruner.model))


@pytest.mark.slow
@pytest.mark.parametrize("recover", [None, slow("blockwise"), "distill"])
@pytest.mark.parametrize("share", [slow(0.7), 0.45])
def test_the_budget_is_not_exceeded_with_experts_and_other_parts(share, recover, tmp_path):
    config = dataclasses.replace(CONFIG, recover=recover, recover_steps=None if recover is None else 2)
    model, pruner, report = shrunk(config, parameters=share)
    assert report.parameters[1] == pruner.model.num_parameters() <= share * report.parameters[0]
    assert model.config.num_local_experts == 8 and model.num_parameters() == report.parameters[0]
    pruner.save_pretrained(tmp_path)
    loaded = hf.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_same(loaded, weights(pruner.model))
    # Products of experts of 8 neurons are rounded by the place of the tensors in memory.
    torch.testing.assert_close(logits(loaded, BATCHES[0]), logits(pruner.model, BATCHES[0]), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("recover", ["blockwise", "distill"])
def test_experts_that_leave_alone_are_recovered(monkeypatch, recover):
    without_other_parts(monkeypatch)
    config = dataclasses.replace(CONFIG, recover=recover, recover_steps=8)
    _, pruner, report = shrunk(config, parameters=0.8)
    assert report.widths["experts"][1] < 8
    assert all(each.loss_after <= each.loss_before for each in pruner.report.recovery) and pruner.report.recovery


def test_experts_that_cannot_leave_stay_with_the_reason(monkeypatch):
    config = dataclasses.replace(CONFIG, targets=["o_proj"])
    _, _, report = shrunk(config, parameters=0.8)
    assert "removes equally many experts" in report.refused["experts"]
    monkeypatch.setattr("optimum_moonshot.shrink.costs.SECONDS", 0.0)
    _, _, report = shrunk(latency=0.9, batch_shape=(1, 8))
    assert "as many experts as before" in report.refused["experts"]


@pytest.mark.slow
def test_measurements_of_experts_serve_a_repeated_run(monkeypatch, tmp_path):
    _, _, first = shrunk_in(tmp_path)

    def fail(*_):
        raise AssertionError("measured again")

    monkeypatch.setattr("optimum_moonshot.shrink.experts.ExpertTrials.run", fail)
    _, _, second = shrunk_in(tmp_path)
    assert second == first


def shrunk_in(folder):
    model = settled_mixtral()
    pruner = MoonshotPruner(model, CONFIG)
    return model, pruner, pruner.shrink(BATCHES, progress=False, parameters=0.8, resume_dir=folder)
