"""Allocation by a dict of layers and sparsities: its entries, and the patterns that allow it."""

import json

import pytest
import torch
from llama_runs import prune
from models import make

from optimum_moonshot import MoonshotConfig, MoonshotError
from optimum_moonshot.config import PatternRules, parse_rules
from optimum_moonshot.functional import prune_weight
from optimum_moonshot.objective.patterns import NM, Unstructured


def test_an_allocation_by_name():
    model = make("llama")
    rules = {"model.layers.1.mlp.up_proj": 0.25, r"layers\.1\.": 0.75, "mlp": "1:4", "q_proj": 0}
    report = prune(model, pattern="unstructured", sparsity=0.5, allocation=rules).report
    table = report.table()
    for layer in report.layers:
        assert f"{layer.name} " in table  # names are not wrapped beside the additional column
        weight = model.get_submodule(layer.name).weight
        if "layers.1." in layer.name:
            expected = 0.25 if "mlp.up_proj" in layer.name else 0.75
        else:
            expected = 0.75 if "mlp" in layer.name else 0.0 if "q_proj" in layer.name else 0.5
        assert layer.target_sparsity == layer.sparsity == expected
        if "mlp" in layer.name and "layers.1." not in layer.name:
            assert ((weight.view(-1, 4) != 0).sum(1) == 1).all()


def test_groups_of_several_sizes_in_one_model():
    model = make("llama")
    report = prune(model, pattern="2:4", allocation={"mlp": "4:16"}).report
    assert all("down_proj" not in layer.name for layer in report.layers) and len(report.skipped) == 3
    for layer in report.layers:
        kept = model.get_submodule(layer.name).weight != 0
        n, m = (4, 16) if "mlp" in layer.name else (2, 4)
        assert (kept.view(-1, m).sum(1) == n).all() and layer.target_sparsity == 1 - n / m


def test_an_exact_name_takes_precedence_and_then_the_first_match():
    names = ["a.0", "a.00", "b.0"]
    rules = parse_rules({"0": 0.1, "a.0": "2:4", "a": 0.3})
    with pytest.raises(MoonshotError, match="'a' has no effect: each layer it matches has an earlier"):
        PatternRules(None, rules).of(names)
    rules = parse_rules({"a.0": "2:4", "a": 0.3})
    assert PatternRules(NM(1, 2), rules).of(names) == {"a.0": NM(2, 4), "a.00": Unstructured(0.3), "b.0": NM(1, 2)}
    with pytest.raises(MoonshotError, match="no entry for b.0; add one, or set `sparsity` for layers"):
        PatternRules(None, rules).of(names)
    with pytest.raises(MoonshotError, match="'c' has no effect: it matches no pruned layer"):
        PatternRules(NM(1, 2), parse_rules({"c": 0.5})).of(names)


def test_a_dict_needs_no_sparsity_where_it_covers_every_layer():
    report = prune(make("llama"), pattern="unstructured", allocation={"mlp": "2:4", "attn": 0.25}).report
    assert {layer.target_sparsity for layer in report.layers} == {0.5, 0.25}
    with pytest.raises(MoonshotError, match="allocation: no entry for .*self_attn"):
        prune(make("llama"), pattern="unstructured", allocation={"mlp": "2:4"})


@pytest.mark.parametrize(
    ("allocation", "message"),
    [
        ({}, "allocation={}: it has no entry"),
        ({"mlp": 1.5}, r"allocation\['mlp'\]=1.5: give a sparsity between 0 and 1"),
        ({"mlp": float("nan")}, r"allocation\['mlp'\]=nan"),
        ({"mlp": True}, r"allocation\['mlp'\]=True"),
        ({"mlp": None}, r"allocation\['mlp'\]=None"),
        ({"mlp": "half"}, r"allocation\['mlp'\]='half'"),
        ({"mlp": "5:4"}, r"allocation\['mlp'\]: pattern='5:4'"),
        ({"(": 0.5}, "allocation: '\\(' is not a regular expression"),
        ({3: 0.5}, "allocation: 3 is not the name of a layer"),
        ({"": 0.5}, "allocation: '' is not the name of a layer"),
    ],
)
def test_a_bad_entry_is_refused(allocation, message):
    with pytest.raises(MoonshotError, match=message):
        MoonshotConfig(sparsity=0.5, allocation=allocation)


@pytest.mark.parametrize("allocation", ["owl", "alpha"])
@pytest.mark.parametrize("pattern", ["2:4", "structured"])
def test_methods_need_unstructured_patterns(allocation, pattern):
    sparsity = 0.5 if pattern == "structured" else None
    with pytest.raises(MoonshotError, match=f"allocation='{allocation}': pattern='{pattern}'.*unstructured"):
        MoonshotConfig(solver="magnitude", pattern=pattern, sparsity=sparsity, allocation=allocation)
    with pytest.raises(MoonshotError, match="sparsity=None"):
        MoonshotConfig(allocation=allocation)


def test_structured_patterns_refuse_n_m_and_single_matrices_every_allocation():
    with pytest.raises(MoonshotError, match="between 0 and 1 with structured pruning"):
        MoonshotConfig(solver="magnitude", pattern="structured", sparsity=0.5, allocation={"mlp": "2:4"})
    for allocation in ("owl", {"mlp": 0.5}):
        with pytest.raises(MoonshotError, match="allocation=.*this is a single one; leave it out"):
            prune_weight(
                torch.randn(4, 8), config=MoonshotConfig(solver="magnitude", sparsity=0.5, allocation=allocation)
            )


def test_a_configuration_copies_the_dict():
    rules = {"mlp": 0.5}
    one = MoonshotConfig(sparsity=0.5, allocation=rules)
    rules["mlp"] = 2
    assert one.allocation == {"mlp": 0.5} and one.to_dict()["allocation"] is not one.allocation
    assert hash(one) == hash(MoonshotConfig(sparsity=0.5, allocation={"mlp": 0.5}))
    assert MoonshotConfig.from_dict(json.loads(json.dumps(one.to_dict()))) == one
