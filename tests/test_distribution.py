"""What a source distribution and a wheel hold, and what a package index shows of the README."""

import runpy
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SETUP = runpy.run_path(str(ROOT / "setup.py"))
BUILD = "from setuptools import build_meta; build_meta.build_{}('dist')"
# Beside the sources in the repository, but not of them.
LEFT_BEHIND = shutil.ignore_patterns(
    ".git", ".venv*", "*.egg-info", "build", "dist", "outputs", "site", "__pycache__", ".*_cache"
)


def build(folder, what):
    subprocess.run([sys.executable, "-c", BUILD.format(what)], cwd=folder, check=True, capture_output=True, timeout=100)
    (made,) = (folder / "dist").iterdir()
    return made


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """The unpacked source distribution."""
    folder = tmp_path_factory.mktemp("dist")
    made = build(shutil.copytree(ROOT, folder / "repository", ignore=LEFT_BEHIND), "sdist")
    with tarfile.open(made) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    return unpacked


@pytest.fixture(scope="module")
def wheel(source):
    """The wheel that the source distribution gives."""
    with zipfile.ZipFile(build(source, "wheel")) as archive:
        return {name: archive.read(name).decode() for name in archive.namelist()}


def files(folder, *parts):
    """Of some parts of a folder, by their paths in it."""
    found = [path for part in parts for path in [folder / part, *(folder / part).rglob("*")] if path.is_file()]
    return {path.relative_to(folder).as_posix() for path in found if "__pycache__" not in path.parts}


def test_the_source_distribution_has_tests_docs_and_examples(source):
    parts = ["benchmarks", "docs", "examples", "optimum_moonshot", "tests", "README.md", "CONTRIBUTING.md", "Makefile"]
    parts += ["CHANGELOG.md", "LICENSE", "constraints.txt", "constraints-oldest.txt", "constraints-vllm.txt"]
    parts += ["mkdocs.yml", "pyproject.toml", "ruff.toml", "setup.cfg"]
    assert files(source, *parts) == files(ROOT, *parts)
    assert {"tests/test_distribution.py", "examples/demo_model/model.safetensors"} < files(source, *parts)
    assert files(source, "tests/golden")


def test_the_wheel_has_the_package_and_what_it_reads(wheel):
    modules = {name for name in files(ROOT, "optimum_moonshot") if "/register/" not in name}
    data = {"optimum_moonshot/py.typed", "optimum_moonshot/checkpoint/card_template.md"}
    command = {"optimum/commands/register/register_moonshot.py"}
    assert data < modules
    assert {name for name in wheel if ".dist-info/" not in name} == modules | command
    assert "optimum/__init__.py" not in wheel  # it belongs to another distribution


def test_the_index_shows_a_page_without_links_that_lead_nowhere(wheel):
    (name,) = (name for name in wheel if name.endswith("METADATA"))
    metadata = Parser().parsestr(wheel[name])
    page = metadata.get_payload()
    assert metadata["Description-Content-Type"] == "text/markdown" and page.startswith("# optimum-moonshot")
    assert page == SETUP["index_page"]((ROOT / "README.md").read_text(encoding="utf-8"), SETUP["repository"]())
    assert "](docs/" not in page and "](CONTRIBUTING" not in page and "](https://arxiv.org/" in page


def test_links_of_the_readme_become_absolute_once_the_repository_is_known():
    show = SETUP["index_page"]
    readme = "![A plot](docs/plot.png) [guide](docs/guide.md#part), [top](#top), [paper](https://arxiv.org/abs/1)"
    assert show(readme, None) == " guide, [top](#top), [paper](https://arxiv.org/abs/1)"
    assert show(readme, "https://forge.example/me/it/") == (
        "![A plot](https://forge.example/me/it/raw/main/docs/plot.png) "
        "[guide](https://forge.example/me/it/blob/main/docs/guide.md#part), [top](#top), "
        "[paper](https://arxiv.org/abs/1)"
    )
