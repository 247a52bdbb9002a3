"""Hyperparameters: names, types and bounds are declared once, by the fields of a solver's dataclass, and checked."""

import re
from dataclasses import dataclass, field

import pytest

from optimum_moonshot.errors import MoonshotError
from optimum_moonshot.solvers import solver_names
from optimum_moonshot.solvers.base import hyperparameter, make_solver, parse_option, register_solver, solver_options
from optimum_moonshot.solvers.wanda import Wanda

pytestmark = pytest.mark.usefixtures("registry")


@dataclass(frozen=True)
class Every(Wanda):
    """A hyperparameter of every kind."""

    fraction: float = hyperparameter(0.5, help="a fraction", above=0, most=1)
    count: int = hyperparameter(4, help="a count", least=1, most=9)
    flag: bool = False
    word: str = "word"
    limit: int | None = hyperparameter(None, help="at most", least=0)
    rate: "float | None" = None


@pytest.fixture
def options():
    register_solver("every")(Every)
    return solver_options("every")


GOOD = {
    "fraction": [0.25, 1, 1.0, 1e-9],
    "count": [1, 9],
    "flag": [True, False],
    "word": ["", "none", "1"],
    "limit": [None, 0, 10**12],
    "rate": [None, -1.5, 3],
}
BAD = {
    "fraction": [0, 1.5, -0.1, float("nan"), float("inf"), "0.5", None, True],
    "count": [0, 10, 4.0, "4", None, True],
    "flag": [0, 1, "true", None],
    "word": [None, 3, b"word"],
    "limit": [-1, 1.0, "none", False],
    "rate": [float("nan"), "1", True],
}


def pairs(values):
    return pytest.mark.parametrize(("name", "value"), [(name, value) for name in values for value in values[name]])


def test_a_solvers_hyperparameters_are_its_fields(options):
    assert list(options) == ["fraction", "count", "flag", "word", "limit", "rate"]
    assert {name: option.default for name, option in options.items()} == {
        name: getattr(Every(), name) for name in options
    }
    assert options["fraction"].metadata["help"] == "a fraction" and options["flag"].metadata["help"] == ""
    assert options["fraction"].type is float and options["limit"].type == int | None
    assert options["rate"].type == float | None  # also if the annotation is a string


@pairs(GOOD)
def test_a_good_value_reaches_the_solver(options, name, value):
    assert getattr(make_solver("every", {name: value}), name) == value


@pairs(BAD)
def test_a_bad_value_is_refused_by_name_and_value(options, name, value):
    with pytest.raises(MoonshotError, match=rf"^{name}={re.escape(repr(value))}: give "):
        make_solver("every", {name: value})
    with pytest.raises(MoonshotError, match=rf"^{name}={re.escape(repr(value))}: give "):
        Every(**{name: value})  # the constructor checks too


def test_messages_name_the_bounds(options):
    for name, text in (
        ("fraction", "a number above 0 and at most 1"),
        ("count", "a whole number of at least 1 and at most 9"),
        ("flag", "True or False"),
        ("limit", "a whole number of at least 0, or None"),
    ):
        with pytest.raises(MoonshotError, match=f"give {text}$"):
            make_solver("every", {name: "?"})


@pytest.mark.parametrize("name", solver_names())
def test_an_unknown_hyperparameter_is_refused_with_the_supported_names(name):
    has = ", ".join(solver_options(name)) or "none"
    with pytest.raises(MoonshotError, match=rf"^strength=2: solver='{name}' has no such hyperparameter; it has {has}$"):
        make_solver(name, {"strength": 2})


@pytest.mark.parametrize("name", solver_names())
def test_every_solver_has_defaults_and_documents_its_hyperparameters(name):
    made, options = make_solver(name, {}), solver_options(name)
    assert made == make_solver(name, {key: option.default for key, option in options.items()})
    assert all(option.metadata["help"] for option in options.values())


def test_bounds_of_the_builtin_solvers():
    for name in ("sparsegpt", "obc", "cap", "osscar"):
        assert make_solver(name, {"damping": 1}).damping == 1
        for damping in (0, 1.01, None, True):
            with pytest.raises(MoonshotError, match=f"damping={damping}: give a number above 0 and at most 1"):
                make_solver(name, {"damping": damping})
    for name in ("sparsegpt", "cap"):
        assert make_solver(name, {"block_size": 1}).block_size == 1
        for size in (0, 64.0, "128"):
            with pytest.raises(MoonshotError, match=f"block_size={size!r}: give a whole number of at least 1"):
                make_solver(name, {"block_size": size})


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("fraction", "0.25", 0.25),
        ("fraction", "1e-3", 1e-3),
        ("fraction", "1", 1.0),
        ("count", "7", 7),
        ("flag", "true", True),
        ("flag", "False", False),
        ("word", "none", "none"),
        ("word", "", ""),
        ("limit", "none", None),
        ("limit", "None", None),
        ("limit", "12", 12),
        ("rate", "-2", -2.0),
    ],
)
def test_text_is_parsed_to_the_type_of_the_hyperparameter(options, name, text, value):
    result = parse_option(options[name], text)
    assert result == value and type(result) is type(value)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("fraction", "half"),
        ("fraction", "nan"),
        ("fraction", "2"),
        ("count", "4.0"),
        ("count", ""),
        ("count", "none"),
        ("flag", "1"),
        ("limit", "null"),
    ],
)
def test_text_of_another_type_is_refused(options, name, text):
    with pytest.raises(MoonshotError, match=rf"^{name}=.*{text}.*: give "):
        parse_option(options[name], text)


def test_a_solver_with_unsupported_hyperparameters_is_not_registered():
    def refused(kind, default, message):
        cls = dataclass(frozen=True)(type("Custom", (Wanda,), {"__annotations__": {"option": kind}, "option": default}))
        with pytest.raises(MoonshotError, match=message):
            register_solver("custom")(cls)
        assert "custom" not in solver_names()

    refused(tuple, (), r"^Custom\.option has the type .*tuple.*; use one of bool, int, float, str")
    refused(int | float, 1, r"^Custom\.option has the type int \| float; use one of")
    refused(int, field(), r"^Custom\.option has no default")
    refused(int, hyperparameter(0, help="", least=1), r"^Custom: default: option=0: give a whole number of at least 1")
    refused("Missing", 1, "^Custom: an annotation cannot be read .*Missing")
    with pytest.raises(MoonshotError, match="^Plain is not a dataclass; put @dataclass"):
        register_solver("plain")(type("Plain", (), {}))
