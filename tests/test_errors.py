"""Errors: structure, rendering, pickling and copying."""

import copy
import pickle
from pathlib import Path

import pytest

from optimum_moonshot.commands.common import UsageError
from optimum_moonshot.errors import (
    UNSET,
    FactorizationError,
    MoonshotError,
    check_choice,
    error_context,
    require,
    truncated_repr,
)


def test_an_error_reads_field_message_and_hint():
    error = MoonshotError("too much", field="lam", value=2, hint="set lam=1, or raise seed")
    assert str(error) == "lam=2: too much; set lam=1, or raise seed"
    assert str(error.within("model.layers.0")) == "model.layers.0: lam=2: too much; set lam=1, or raise seed"
    assert str(MoonshotError("no field")) == "no field" and str(MoonshotError(field="lam")) == "lam"


@pytest.mark.parametrize("kind", [MoonshotError, FactorizationError, UsageError])
@pytest.mark.parametrize(
    "value", [UNSET, None, 1.5, "x", [1, 2], Path("a"), lambda: None, iter(())], ids=lambda value: type(value).__name__
)
def test_an_error_survives_pickling_and_copying(kind, value):
    error = kind("see seed", field="lam", value=value, hint="stop").within("layer")
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(other) is kind and str(other) == str(error)
        assert (other.message, other.field, other.hint, other.prefixes) == (
            "see seed",
            "lam",
            "stop",
            ("layer",),
        )
        assert (other.value is UNSET) == (value is UNSET)


def test_an_error_changes_its_class_only():
    error = MoonshotError("a", field="b", value=1, hint="c").within("d")
    usage = UsageError.of(error)
    assert isinstance(usage, UsageError) and str(usage) == str(error) == "d: b=1: a; c"


def test_naming_prepends_the_layer():
    with pytest.raises(MoonshotError, match="^a: b: c$"), error_context("a.weight"), error_context("b"):
        require(False, "c")


def test_choices():
    check_choice("recover", None, ("a", "b"), optional=True)
    with pytest.raises(MoonshotError, match='recover=3: use "a" or "b", or None'):
        check_choice("recover", 3, ("a", "b"), optional=True)


def test_values_are_cut_but_paths_are_not():
    assert len(truncated_repr("x" * 500)) == 80 and len(truncated_repr(Path("x" * 500))) == 502
    assert truncated_repr(10**5000) == "a int"
