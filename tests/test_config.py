"""A configuration is checked when it is made, and each message names the field and its value."""

import dataclasses
import json
import re

import pytest

from optimum_moonshot.config import MoonshotConfig
from optimum_moonshot.errors import MoonshotError
from optimum_moonshot.objective.patterns import NM, Structured, Unstructured
from optimum_moonshot.solvers import solver_class, solver_names

NAN, INF = float("nan"), float("inf")

BAD = {
    "solver": ["sparse-gpt", "", None, 3, ["wanda"]],
    "pattern": ["2/4", "0:4", "5:4", "structured", 24, None],
    "group_size": [0, -1, 2.0, "8", True, None, 8],
    "sparsity": [-0.1, 1.5, NAN, INF, "0.5", True, None],
    "allocation": ["even", "", None, 3, ["owl"], {}],
    "owl_threshold": [0, -1, NAN, INF, None, "5"],
    "owl_lambda": [-0.1, 1, NAN, None, "0.08"],
    "alpha_tau": [-0.1, 1, NAN, None, True],
    "recompute": [1, 0, None, "yes"],
    "lam": [-0.1, 1.1, NAN, INF, "0.9", True],
    "fisher": ["mlp", None, True, 1],
    "damping": [0, -0.01, 1.5, NAN, None, "0.01"],
    "block_size": [0, -1, 64.0, "128", True],
    "num_samples": [0, -1, 1.5, None, True],
    "batch_size": [0, -8, 2.0, None],
    "seed": [-1, 0.5, None, "0"],
    "sequence_length": [0, 1, 2.5, "2048"],
    "targets": ["q_proj", 5, b"q_proj", {"q_proj"}, ["("], [3], [None]],
    "ignore": [None, "lm_head", {"lm_head": 1}, ["*"], [b"head"]],
    "max_memory": ["8 apples", "", "-1GiB", -5, True, NAN, INF, "GiB", [8]],
    "offload_dir": [5, True],
    "recover": ["", "layerwise", True, 1],
    "recover_steps": [0, -1, 1.5, None, True],
    "recover_lr": [0, -1e-3, 1.0, NAN, INF, None, "1e-3", True],
}


def usual(solver, **more):
    """A configuration of a solver with a pattern that it takes."""
    structured = Unstructured not in solver_class(solver).patterns
    return MoonshotConfig(solver=solver, pattern="structured" if structured else "unstructured", sparsity=0.5, **more)


def test_every_field_has_bad_values():
    fields = {field.name for field in dataclasses.fields(MoonshotConfig)}
    assert set(BAD) == fields - {"calibration"}  # any data; load_calibration refuses what is none


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in BAD.items() for value in values])
def test_a_bad_value_is_refused_by_field_and_value(field, value):
    with pytest.raises(MoonshotError) as error:
        MoonshotConfig(**{"sparsity": 0.5, field: value})
    shown = value[0] if field in ("targets", "ignore") and isinstance(value, list) else value
    assert re.match(rf"{field}\b", str(error.value)) and repr(shown) in str(error.value)


@pytest.mark.parametrize(
    "values",
    [
        {"sparsity": 0},
        {"sparsity": 1},
        {"sparsity": 0.5, "lam": 0},
        {"sparsity": 0.5, "lam": 1},
        {"sparsity": 0.5, "damping": 1},
        {"sparsity": 0.5, "block_size": 1, "num_samples": 1, "batch_size": 1, "sequence_length": 2},
        {"sparsity": 0.5, "targets": [], "ignore": ["^lm", "mlp"]},
        {"pattern": "2:4", "sparsity": 0.5},
        {"pattern": "1:1"},
    ],
)
def test_values_at_the_bounds_are_taken(values):
    MoonshotConfig(**values)


def test_expressions_are_any_sequence_of_strings():
    configs = [MoonshotConfig(sparsity=0.5, targets=kind(["mlp", "^q"]), ignore=kind(["up"])) for kind in (list, tuple)]
    assert configs[0] == configs[1] and hash(configs[0]) == hash(configs[1])
    assert configs[0].targets == ("mlp", "^q") and configs[0].ignore == ("up",)
    with pytest.raises(MoonshotError, match=r"targets='mlp': give a list of expressions, such as \['mlp'\]"):
        MoonshotConfig(sparsity=0.5, targets="mlp")


def test_a_sparsity_that_contradicts_the_pattern_is_refused():
    with pytest.raises(MoonshotError, match="sparsity=0.6 contradicts pattern='2:4'.*leave it out"):
        MoonshotConfig(pattern="2:4", sparsity=0.6)


def test_an_unstructured_pattern_needs_a_sparsity():
    with pytest.raises(MoonshotError, match="sparsity=None.*such as sparsity=0.5"):
        MoonshotConfig()


def test_fields_are_given_by_name_and_do_not_change():
    with pytest.raises(TypeError):
        MoonshotConfig("wanda")
    with pytest.raises(dataclasses.FrozenInstanceError):
        MoonshotConfig(sparsity=0.5).lam = 0.1


def test_the_pattern_is_parsed():
    assert MoonshotConfig(pattern="2:4").parsed_pattern == NM(2, 4)
    assert MoonshotConfig(sparsity=0.6).parsed_pattern == Unstructured(0.6)
    structured = MoonshotConfig(solver="wanda", pattern="structured", sparsity=0.25, group_size=4)
    assert structured.parsed_pattern == Structured(0.25, 4)


def test_a_solver_that_cannot_make_a_pattern_says_so():
    message = "pattern='structured': solver='sparsegpt' takes unstructured or n:m; choose another"
    with pytest.raises(MoonshotError, match=message):
        MoonshotConfig(solver="sparsegpt", pattern="structured", sparsity=0.5)


@pytest.mark.parametrize("pattern", ["unstructured", "2:4"])
def test_groups_of_columns_belong_to_the_structured_pattern(pattern):
    with pytest.raises(MoonshotError, match=f"group_size=8: pattern='{pattern}' has no groups.*leave it out"):
        MoonshotConfig(pattern=pattern, sparsity=0.5, group_size=8)


def test_the_default_lambda_is_the_papers_for_each_kind():
    config = MoonshotConfig(sparsity=0.5)
    assert (config.resolve_lam(), config.resolve_lam("language"), config.resolve_lam("vision")) == (0.9, 0.9, 0.5)
    assert MoonshotConfig(sparsity=0.5, solver="magnitude").resolve_lam("vision") == 1
    for solver in solver_names():
        assert usual(solver, lam=0).resolve_lam() == 0


def test_a_solver_gets_its_hyperparameters():
    solver = MoonshotConfig(sparsity=0.5, damping=0.1, block_size=64).make_solver()
    assert (solver.damping, solver.block_size) == (0.1, 64)
    assert MoonshotConfig(sparsity=0.5).make_solver().block_size == 128
    assert MoonshotConfig(sparsity=0.5, solver="cap").make_solver().block_size == 192
    for name in solver_names():
        usual(name).make_solver()


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ("8GiB", 8 * 2**30),
        ("500MB", 500 * 10**6),
        ("1.5 kib", 1536),
        (" 2tb ", 2 * 10**12),
        ("123", 123),
        (123, 123),
        (None, None),
    ],
)
def test_memory_is_given_in_bytes_or_with_a_unit(size, expected):
    assert MoonshotConfig(sparsity=0.5, max_memory=size).max_memory_bytes == expected


@pytest.mark.parametrize(
    "config",
    [
        MoonshotConfig(sparsity=0.5),
        MoonshotConfig(
            solver="wanda",
            pattern="2:4",
            lam=0.5,
            fisher="attention",
            damping=0.1,
            block_size=64,
            targets=["q_proj", "k_proj$"],
            ignore=["lm_head"],
            num_samples=4,
            sequence_length=32,
            batch_size=2,
            seed=7,
            max_memory="8GiB",
            offload_dir="cache",
        ),
        MoonshotConfig(solver="magnitude", pattern="structured", sparsity=0.25, group_size=64),
    ],
)
def test_a_configuration_survives_json(config):
    values = config.to_dict()
    assert values["version"] == MoonshotConfig.VERSION
    assert MoonshotConfig.from_dict(json.loads(json.dumps(values))) == config
    assert json.loads(json.dumps(values)) == values


def test_from_dict_leaves_its_argument_alone_and_needs_no_version():
    values = {"sparsity": 0.5, "version": MoonshotConfig.VERSION}
    assert MoonshotConfig.from_dict(values) == MoonshotConfig.from_dict({"sparsity": 0.5})
    assert "version" in values


def test_unknown_fields_and_newer_versions_are_refused():
    with pytest.raises(MoonshotError, match="unknown field lambda, sparsty: .*lam.*sparsity"):
        MoonshotConfig.from_dict({"sparsty": 0.5, "lambda": 0.9})
    for version in (MoonshotConfig.VERSION + 1, 0, None, "1"):
        with pytest.raises(MoonshotError, match=f"version={version}"):
            MoonshotConfig.from_dict({"version": version, "sparsity": 0.5})
    with pytest.raises(MoonshotError, match="lam=2"):
        MoonshotConfig.from_dict({"sparsity": 0.5, "lam": 2})
