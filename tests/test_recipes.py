"""Recipes: named settings that the measurements recommend."""

import argparse
import dataclasses

import pytest

from optimum_moonshot import MoonshotConfig, MoonshotError
from optimum_moonshot.__main__ import main
from optimum_moonshot.commands.common import add_method_options, make_config
from optimum_moonshot.options import RECIPES


def test_the_papers_recipe_is_the_default_configuration_with_terms_of_the_rows():
    assert MoonshotConfig.recipe("2:4", "paper") == MoonshotConfig(pattern="2:4", fisher="rows")
    assert MoonshotConfig.recipe(0.7, budget="paper") == MoonshotConfig(sparsity=0.7, fisher="rows")


def test_settings_of_each_recipe():
    config = MoonshotConfig.recipe(0.8)
    assert config == MoonshotConfig.recipe(0.8, "fast")
    assert (config.solver, config.fisher, config.rotation, config.allocation) == ("alps", "shared", None, "fisher")
    config = MoonshotConfig.recipe("2:4", "fast")
    assert (config.pattern, config.lam, config.fisher, config.rotation) == ("2:4", 0.9, "shared", None)
    assert config.allocation == "uniform"
    config = MoonshotConfig.recipe(0.8, "one-shot")
    assert (config.solver, config.sparsity, config.lam) == ("alps", 0.8, 0.5)
    assert (config.rotation, config.allocation, config.recover) == ("learned", "fisher", None)
    config = MoonshotConfig.recipe("2:4", "one-shot")
    assert (config.pattern, config.lam, config.rotation, config.recover) == ("2:4", 1.0, "learned", None)
    assert config.allocation == "uniform"
    for pattern, lam in ((0.8, 0.5), ("2:4", 1.0)):
        config, trained = MoonshotConfig.recipe(pattern, "fast"), MoonshotConfig.recipe(pattern, "recovered")
        assert trained == dataclasses.replace(config, lam=lam, recover="distill", recover_steps=40)


@pytest.mark.parametrize("budget", RECIPES)
def test_every_recipe_allocates_a_mixture_of_n_m(budget):
    config = MoonshotConfig.recipe("n:4", budget, sparsity=0.5)
    assert (config.pattern, config.sparsity, config.allocation) == ("n:4", 0.5, "fisher")


@pytest.mark.parametrize("size", [{"bits_per_weight": 3.1}, {"target_bytes": "71MB"}])
def test_a_size_takes_the_place_of_a_sparsity(size):
    config = MoonshotConfig.recipe(bits=4, **size)
    options = {"solver": "alps", "lam": 0.5, "fisher": "shared", "allocation": "fisher"}
    assert config == MoonshotConfig(bits=4, **size, **options) == MoonshotConfig.recipe(0, bits=4, **size)
    for pattern in (0.5, "2:4"):
        with pytest.raises(MoonshotError, match="determines the sparsity of each matrix"):
            MoonshotConfig.recipe(pattern, **size)
    with pytest.raises(MoonshotError, match=r"only allocation='fisher' divides \w+=.* among the matrices"):
        MoonshotConfig.recipe(budget="paper", **size)
    with pytest.raises(MoonshotError, match="no recipe of None"):
        MoonshotConfig.recipe(**dict.fromkeys(size))


def test_explicit_fields_override_the_recipe():
    config = MoonshotConfig.recipe(0.6, "one-shot", lam=1, rotation=None, num_samples=16)
    assert (config.lam, config.rotation, config.num_samples, config.allocation) == (1, None, 16, "fisher")


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((0.5, "best"), 'budget=\'best\': use "paper" or "fast" or "one-shot" or "recovered"'),
        ((None,), 'no recipe of None; give a sparsity such as 0.7, "n:m"'),
        ((True,), "no recipe of True; give a sparsity"),
        ((1.5,), "sparsity=1.5"),
        (("structured",), "sparsity=None"),
        (("5:4",), "pattern='5:4'"),
    ],
)
def test_unknown_recipes_are_refused(arguments, message):
    with pytest.raises(MoonshotError) as error:
        MoonshotConfig.recipe(*arguments)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_structured_pruning_has_no_recipe():
    with pytest.raises(MoonshotError, match="no recipe of 'structured'; give a sparsity"):
        MoonshotConfig.recipe("structured", sparsity=0.5)


def test_the_command_needs_a_pattern_or_a_sparsity(capsys, tmp_path):
    with pytest.raises(SystemExit) as ended:
        main(["prune", "examples/demo_model", "--recipe", "one-shot", "--output", str(tmp_path / "out")])
    assert ended.value.code == 2
    assert "--recipe one-shot: give a --sparsity, a --pattern 2:4 or a --target-bytes" in capsys.readouterr().err


def test_the_command_takes_a_size():
    parser = argparse.ArgumentParser()
    add_method_options(parser)
    config = make_config(parser.parse_args(["--recipe", "fast", "--target-bytes", "71MB", "--bits", "4"]))
    assert config == MoonshotConfig.recipe(target_bytes="71MB", bits=4)
