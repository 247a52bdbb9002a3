"""Shrinking a mixture of experts: exact costs, and every combination of parts."""

import copy
import dataclasses

import pytest
import torch
import transformers as hf
from llama_runs import assert_same, weights
from marks import slow
from models import token_batches
from removed_experts import logits, logits_without, settled_mixtral

from optimum_moonshot import MoonshotConfig, MoonshotError, MoonshotPruner
from optimum_moonshot.objective.patterns import Experts
from optimum_moonshot.shrink import hidden
from optimum_moonshot.shrink.costs import count_entries
from optimum_moonshot.shrink.experts import find_experts

CONFIG = MoonshotConfig(solver="osscar", pattern="structured", sparsity=0, num_samples=8, batch_size=4)
BATCHES = token_batches(8)


def shrunk(config=CONFIG, **target):
    model = settled_mixtral()
    pruner = MoonshotPruner(model, config)
    return model, pruner, pruner.shrink(BATCHES, progress=False, **target)


def without_other_parts(monkeypatch):
    """Only experts may leave."""

    def refuse(*_):
        raise MoonshotError("it stays")

    monkeypatch.setattr("optimum_moonshot.shrink.measurements.find_widths", lambda *_: ([], {}))
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
    assert torch.equal(logits(loaded, BATCHES[0]), logits(pruner.model, BATCHES[0]))


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
    monkeypatch.setattr("optimum_moonshot.shrink.latency.SECONDS", 0.0)
    _, _, report = shrunk(latency=0.9, batch_shape=(1, 8))
    assert "as many experts as before" in report.refused["experts"]


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
