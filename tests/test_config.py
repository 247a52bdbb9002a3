"""A configuration is validated on creation, and each message names the field and its value."""

import dataclasses
import itertools
import json
import pickle
import re
import types

import numpy as np
import pytest
import torch

from optimum_moonshot.config import MoonshotConfig
from optimum_moonshot.errors import MoonshotError
from optimum_moonshot.objective.patterns import NM, Structured, Unstructured
from optimum_moonshot.options import OPTIONS
from optimum_moonshot.solvers import base, solver_class, solver_names
from optimum_moonshot.solvers.base import make_solver, solver_options
from optimum_moonshot.solvers.wanda import Wanda

NAN, INF = float("nan"), float("inf")
EXPERTS = {"pattern": "experts", "sparsity": 0.5, "solver": "reap"}

BAD = {
    "solver": ["sparse-gpt", "", None, 3, ["wanda"]],
    "pattern": ["2/4", "0:4", "5:4", "structured", 24, None],
    "target_bytes": ["many", 0, -5, True],
    "bits_per_weight": [0, -1, "4", True, NAN, INF],
    "bits": [5, 0, -4, "4", 4.0, True],
    "embedding_bits": [5, 3, 0, -8, "8", 8.0, True, 4],
    "quant_group": [0, -64, 100, 64.0, "128", None, True],
    "group_size": [0, -1, 2.0, "8", True, None, 8],
    "sparsity": [-0.1, 1.5, NAN, INF, "0.5", True, None],
    "allocation": ["even", "", None, 3, ["owl"], {}],
    "owl_threshold": [0, -1, NAN, INF, None, "5"],
    "owl_lambda": [-0.1, 1, NAN, None, "0.08"],
    "alpha_tau": [-0.1, 1, NAN, None, True],
    "recompute": [1, 0, "yes"],
    "lam": [-0.1, 1.1, NAN, INF, "0.9", True],
    "fisher": ["row", True, 1],
    "fisher_layers": ["mlp", None, True, 1],
    "under_calibrated_experts": ["", "pooled", None, True],
    "damping": [0, -0.01, 1.5, NAN, "0.01", True],
    "block_size": [0, -1, 64.0, "128", True],
    "solver_options": [None, "damping=0.1", [("damping", 0.1)], {3: 0.1}],
    "num_samples": [0, -1, 1.5, None, True],
    "batch_size": [0, -8, 2.0, None],
    "seed": [-1, 0.5, None, "0"],
    "sequence_length": [0, 1, 2.5, "2048"],
    "targets": ["q_proj", 5, b"q_proj", {"q_proj"}, ["("], [3], [None]],
    "ignore": [None, "lm_head", {"lm_head": 1}, ["*"], [b"head"]],
    "max_memory": ["8 apples", "", "-1GiB", -5, True, NAN, INF, "GiB", [8]],
    "offload_dir": [5, True],
    "recover": ["", "layerwise", True, 1],
    "recover_steps": [0, -1, 1.5, True],
    "recover_lr": [0, -1e-3, 1.0, NAN, INF, "1e-3", True],
    "rotation": ["", "random", True, 1, ["learned"]],
    "rotation_weights": ["", "loss", None, True],
    "rotation_steps": [0, -1, 1.5, "8", True],
    "rotation_lr": [0, -1e-3, 1.0, NAN, INF, None, "1e-3", True],
    "rotation_rows": [0, -1, 1.5, "8", True],
}


def usual(solver, **more):
    """A configuration of a solver with a pattern it supports."""
    structured = Unstructured not in solver_class(solver).patterns
    return MoonshotConfig(solver=solver, pattern="structured" if structured else "unstructured", sparsity=0.5, **more)


def test_every_field_has_bad_values():
    fields = {field.name for field in dataclasses.fields(MoonshotConfig)}
    assert set(BAD) == fields - {"calibration"}  # any object; load_calibration validates it


def test_declarations_have_no_unknown_entries():
    documented = {
        *("help", "more", "group", "metavar", "choices", "path", "shared", "experts"),
        *("least", "most", "above", "below"),
    }
    assert not [name for name, field in OPTIONS.items() if set(field.metadata) - documented]


class Unprintable:
    """Neither comparable nor printable."""

    def __eq__(self, other):
        raise RuntimeError("not comparable")

    def __repr__(self):
        raise RuntimeError("not printable")

    __hash__ = None


# Values of other programs: comparing or printing these fails, or converting them to floats.
HOSTILE = [
    10**5000, -(10**5000), 10**400, np.array([1, 2]), np.array("2:4"), np.float64(0.5), np.int64(4), b"x", 1j, object(),
    Unprintable(), [10**5000], {"x": 10**5000}, {"x": np.array([1, 2])}, "9" * 5000, "\0", torch.tensor([1, 2]),
]  # fmt: skip


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(MoonshotConfig)])
def test_hostile_values_are_refused_or_work(field):
    for base_values in ({"pattern": "2:4"}, {"pattern": "unstructured", "sparsity": 0.5, "bits": 4}, EXPERTS):
        for value in HOSTILE:
            try:
                config = MoonshotConfig(**{**base_values, field: value})
            except MoonshotError as error:
                assert len(str(error).splitlines()) == 1
            else:
                assert repr(config) and config.to_dict() and config.parsed_pattern


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
def test_values_at_the_bounds_are_accepted(values):
    MoonshotConfig(**values)


def test_expressions_may_be_any_sequence_of_strings():
    configs = [MoonshotConfig(sparsity=0.5, targets=kind(["mlp", "^q"]), ignore=kind(["up"])) for kind in (list, tuple)]
    assert configs[0] == configs[1] and hash(configs[0]) == hash(configs[1])
    assert configs[0].targets == ("mlp", "^q") and configs[0].ignore == ("up",)
    with pytest.raises(MoonshotError, match=r"targets='mlp': give a list of expressions, such as \['mlp'\]"):
        MoonshotConfig(sparsity=0.5, targets="mlp")


def test_a_sparsity_that_contradicts_the_pattern_is_refused():
    with pytest.raises(MoonshotError, match="sparsity=0.6: it contradicts pattern='2:4'.*leave it out"):
        MoonshotConfig(pattern="2:4", sparsity=0.6)


def test_an_unstructured_pattern_needs_a_sparsity():
    with pytest.raises(MoonshotError, match="sparsity=None.*such as sparsity=0.5"):
        MoonshotConfig()


def test_fields_are_keyword_only_and_frozen():
    with pytest.raises(TypeError):
        MoonshotConfig("wanda")
    with pytest.raises(dataclasses.FrozenInstanceError):
        MoonshotConfig(sparsity=0.5).lam = 0.1


def test_the_pattern_is_parsed():
    assert MoonshotConfig(pattern="2:4").parsed_pattern == NM(2, 4)
    assert MoonshotConfig(sparsity=0.6).parsed_pattern == Unstructured(0.6)
    structured = MoonshotConfig(solver="wanda", pattern="structured", sparsity=0.25, group_size=4)
    assert structured.parsed_pattern == Structured(0.25, 4)


def test_a_solver_refuses_an_unsupported_pattern():
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
    assert MoonshotConfig(sparsity=0.5, damping=0.1).hyperparameters() == {"damping": 0.1, "block_size": 128}
    assert usual("wanda", damping=0.1, block_size=64).hyperparameters() == {}
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
            fisher_layers="attention",
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
        MoonshotConfig(sparsity=0.5, solver_options={"block_size": 64, "damping": 1}),
    ],
)
def test_a_configuration_survives_json(config):
    values = config.to_dict()
    assert values["version"] == MoonshotConfig.VERSION
    assert MoonshotConfig.from_dict(json.loads(json.dumps(values))) == config
    assert json.loads(json.dumps(values)) == values


def test_from_dict_keeps_its_argument_and_needs_no_version():
    values = {"sparsity": 0.5, "version": MoonshotConfig.VERSION}
    assert MoonshotConfig.from_dict(values) == MoonshotConfig.from_dict({"sparsity": 0.5})
    assert "version" in values


def test_unknown_fields_and_other_versions_are_rejected():
    with pytest.raises(MoonshotError, match="unknown field lambda, sparsty: .*lam.*sparsity"):
        MoonshotConfig.from_dict({"sparsty": 0.5, "lambda": 0.9})
    for version in (MoonshotConfig.VERSION + 1, 0, None, "2"):
        with pytest.raises(MoonshotError, match=f"version={version!r}"):
            MoonshotConfig.from_dict({"version": version, "sparsity": 0.5})
    with pytest.raises(MoonshotError, match="lam=2"):
        MoonshotConfig.from_dict({"sparsity": 0.5, "lam": 2})


def test_the_dictionary_is_of_plain_types():
    values = MoonshotConfig(sparsity=0.5).to_dict()
    assert type(values["damping"]) is float and values["damping"] == 0.01
    assert values["block_size"] is None and values["solver_options"] == {}


@pytest.mark.parametrize("solver", solver_names())
def test_shared_hyperparameters_read_as_their_values(solver):
    has = "damping" in solver_options(solver)
    config = usual(solver)
    assert config.damping == (0.01 if has else None) and config.block_size is None
    assert usual(solver, damping=0.1, block_size=7).damping == 0.1
    assert config.make_solver() == make_solver(solver, {})


def test_a_shared_hyperparameter_is_kept_in_one_place():
    short = MoonshotConfig(sparsity=0.5, damping=0.1, block_size=64)
    long = MoonshotConfig(sparsity=0.5, solver_options={"block_size": 64, "damping": 0.1})
    both = MoonshotConfig(sparsity=0.5, damping=0.1, block_size=64, solver_options={"damping": 0.1})
    assert short == long == both and hash(short) == hash(long) and short.solver_options == long.solver_options == {}
    assert (long.damping, long.block_size) == (0.1, 64) and short.make_solver() == long.make_solver()
    for name, first, second in (("damping", 0.1, 0.2), ("block_size", 64, 32)):
        message = rf"{name}={first}: solver_options\['{name}'\]={second} is another value; give it once"
        with pytest.raises(MoonshotError, match=message):
            MoonshotConfig(sparsity=0.5, **{name: first}, solver_options={name: second})


def test_the_mapping_of_hyperparameters_is_copied():
    options = {"block_size": 64}
    config = MoonshotConfig(sparsity=0.5, solver_options=options)
    options["block_size"] = 1
    assert config.block_size == 64
    assert MoonshotConfig(sparsity=0.5, solver_options=types.MappingProxyType(options)).block_size == 1


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            {"solver_options": {"strength": 2}},
            "strength=2: solver='sparsegpt' has no .*it has damping, block_size",
        ),
        ({"solver_options": {"damping": 2}}, "damping=2: give a number above 0 and at most 1"),
        ({"solver_options": {"block_size": None}}, "block_size=None: give a whole number"),
        ({"solver": "wanda", "solver_options": {"damping": 0.1}}, "damping=0.1: solver='wanda' has no such .*has none"),
    ],
)
def test_hyperparameters_are_checked_by_their_solver(values, words):
    with pytest.raises(MoonshotError, match=f"^solver_options: {words}"):
        MoonshotConfig(sparsity=0.5, **values)


@pytest.mark.parametrize("options", [{}, {"damping": 0.1}, {"block_size": 64}, {"damping": 0.1, "block_size": 64}])
@pytest.mark.parametrize("way", ["short", "long"])
def test_a_configuration_can_change_its_solver(options, way):
    for first, second in itertools.permutations(solver_names(), 2):
        has = solver_options(first)
        more = {"solver_options": {n: v for n, v in options.items() if n in has}} if way == "long" else options
        other = usual(second)
        changes = {"solver": second, "pattern": other.pattern}
        changed = dataclasses.replace(usual(first, **more), **changes)
        kept = {name: value for name, value in options.items() if way == "short" or name in has}
        assert changed == usual(second, **kept)
        assert changed.hyperparameters() == {
            **other.hyperparameters(), **{n: v for n, v in kept.items() if n in solver_options(second)}
        }  # fmt: skip
        assert dataclasses.replace(changed, damping=0.5).damping == 0.5


def test_unset_hyperparameters_are_the_next_solvers_defaults(registry):
    @base.register_solver("strong")
    @dataclasses.dataclass(frozen=True)
    class Strong(Wanda):
        damping: float = base.hyperparameter(0.3, help="", above=0)
        least: float = 0.0
        limit: int | None = 3

        def __post_init__(self):
            if self.least > self.damping:
                raise ValueError("least: it exceeds the damping")

    changed = dataclasses.replace(MoonshotConfig(sparsity=0.5), solver="strong")
    assert changed.damping == 0.3 and changed == MoonshotConfig(sparsity=0.5, solver="strong")
    assert dataclasses.replace(changed, solver="sparsegpt").damping == 0.01
    assert dataclasses.replace(changed, sparsity=0.6).damping == 0.3
    assert dataclasses.replace(MoonshotConfig(sparsity=0.5, damping=0.2), solver="strong").damping == 0.2
    # The solver's bounds apply, and its checks of combinations of values.
    assert MoonshotConfig(sparsity=0.5, solver="strong", damping=5).make_solver().damping == 5
    assert MoonshotConfig(sparsity=0.5, solver="strong", damping=5, solver_options={"least": 4}).damping == 5
    with pytest.raises(MoonshotError, match="solver='strong': least: it exceeds the damping"):
        MoonshotConfig(sparsity=0.5, solver="strong", solver_options={"least": 4})
    # None is a value if the solver allows it.
    config = MoonshotConfig(sparsity=0.5, solver="strong", solver_options={"limit": None})
    assert config.hyperparameters() == {"damping": 0.3, "least": 0.0, "limit": None}
    with pytest.raises(MoonshotError, match="solver_options: limit=None: solver='sparsegpt' has no such"):
        dataclasses.replace(config, solver="sparsegpt")
    assert dataclasses.replace(config, solver="sparsegpt", solver_options={}) == MoonshotConfig(sparsity=0.5)


def test_a_configuration_can_be_pickled():
    for config in (MoonshotConfig(sparsity=0.5), MoonshotConfig(sparsity=0.5, damping=0.2)):
        copied = pickle.loads(pickle.dumps(config))
        assert copied == config and repr(copied) == repr(config)


def test_equal_settings_have_one_fingerprint():
    config = MoonshotConfig(sparsity=0.5, lam=1, alpha_tau=0)
    for same in (
        dict(lam=1.0, alpha_tau=0.0),
        dict(damping=0.01),
        dict(block_size=128),
        dict(solver_options={"block_size": 128, "damping": 0.01}),
        dict(max_memory="1GiB", offload_dir="folder", batch_size=1),
        dict(targets=None, ignore=[]),
    ):
        assert dataclasses.replace(config, **same).fingerprint() == config.fingerprint(), same
    for other in (dict(damping=0.02), dict(block_size=64), dict(seed=1), dict(lam=0.9), dict(targets=["mlp"])):
        assert dataclasses.replace(config, **other).fingerprint() != config.fingerprint(), other
    # The first match decides, so the order is a setting.
    one, two = ({"mlp": 0.5, "up": 0.25}, {"up": 0.25, "mlp": 0.5})
    assert MoonshotConfig(allocation=one).fingerprint() != MoonshotConfig(allocation=two).fingerprint()
    # Fields without effect do not count.
    assert usual("wanda", damping=0.1).fingerprint() == usual("wanda").fingerprint()


def test_the_representation_shows_changed_fields():
    assert repr(MoonshotConfig(sparsity=0.5)) == "MoonshotConfig(sparsity=0.5)"
    assert repr(MoonshotConfig(pattern="2:4", num_samples=128, calibration=[1])) == "MoonshotConfig(pattern='2:4')"
    for config in (
        MoonshotConfig(solver="wanda", pattern="2:4", damping=0.1, targets=["q"], seed=3),
        MoonshotConfig(allocation={"mlp": "2:4"}, solver_options={"block_size": 64}),
        usual("osscar", group_size=8),
    ):
        assert eval(repr(config)) == config
