"""The contents of the source distribution and the wheel, and the README on a package index."""

import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from optimum_moonshot.kernels.library import Library

ROOT = Path(__file__).resolve().parents[1]
SETUP = runpy.run_path(str(ROOT / "setup.py"))
BUILD = "from setuptools import build_meta; build_meta.build_{}('dist')"
# In the repository, but not part of the sources.
LEFT_BEHIND = shutil.ignore_patterns(
    ".git", ".venv*", "*.egg-info", "build", "dist", "outputs", "site", "__pycache__", ".*_cache", "*.so"
)
COMPILER = shutil.which((sysconfig.get_config_var("CC") or "cc").split()[0])
LIBRARY = "optimum_moonshot/kernels/libmoonshot.so"


def build(folder, what, **environment):
    command, settings = [sys.executable, "-c", BUILD.format(what)], {**os.environ, **environment}
    subprocess.run(command, cwd=folder, env=settings, check=True, capture_output=True, timeout=300)
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
    """The wheel built from the source distribution, path → content."""
    with zipfile.ZipFile(build(source, "wheel")) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def files(folder, *parts):
    """The relative paths of the files in these parts of a folder."""
    paths = [path for part in parts for path in [folder / part, *(folder / part).rglob("*")] if path.is_file()]
    made = lambda path: "__pycache__" in path.parts or path.suffix == ".so"  # noqa: E731
    return {path.relative_to(folder).as_posix() for path in paths if not made(path)}


def test_the_source_distribution_has_tests_docs_and_examples(source):
    parts = ["benchmarks", "docs", "examples", "optimum_moonshot", "tests", "README.md", "CONTRIBUTING.md", "Makefile"]
    parts += ["CHANGELOG.md", "LICENSE", "constraints.txt", "constraints-oldest.txt", "constraints-vllm.txt"]
    parts += ["mkdocs.yml", "pyproject.toml", "ruff.toml", "setup.cfg"]
    assert files(source, *parts) == files(ROOT, *parts)
    assert {"tests/test_distribution.py", "examples/demo_model/model.safetensors"} < files(source, *parts)
    assert files(source, "tests/golden")
    assert {"optimum_moonshot/kernels/library.c", "optimum_moonshot/kernels/rows.h"} < files(source, *parts)
    assert not (source / LIBRARY).exists()


@pytest.mark.release
def test_the_wheel_has_the_package_and_its_data(wheel):
    named = {name for name in files(ROOT, "optimum_moonshot") if "/register/" not in name}
    modules = {name for name in named if not name.endswith((".c", ".h"))}
    templates = ("card_template.md", "rotated_card_template.md")
    data = {"optimum_moonshot/py.typed", *(f"optimum_moonshot/checkpoint/{name}" for name in templates)}
    command = {"optimum/commands/register/register_moonshot.py"}
    assert data < modules
    library = {LIBRARY} if COMPILER else set()
    assert {name for name in wheel if ".dist-info/" not in name} == modules | command | library
    assert "optimum/__init__.py" not in wheel  # it belongs to another distribution


@pytest.mark.release
@pytest.mark.skipif(COMPILER is None, reason="no C compiler")
def test_the_wheel_fits_every_python_and_its_library_is_complete(wheel, tmp_path):
    (name,) = (name for name in wheel if name.endswith("/WHEEL"))
    tag = Parser().parsestr(wheel[name].decode())["Tag"]
    assert tag.startswith("py3-none-") and not tag.endswith("any")
    path = tmp_path / "libmoonshot.so"
    path.write_bytes(wheel[LIBRARY])
    assert "portable" in Library(path).instruction_sets
    subprocess.run([sys.executable, ROOT / ".ci" / "check-kernels", path, "portable"], check=True, timeout=60)
    # Of glibc, every manylinux tag since 2014 has these.
    versions = re.findall(rb"GLIBC_(\d+)\.(\d+)", wheel[LIBRARY])
    assert all((int(major), int(minor)) <= (2, 17) for major, minor in versions)


def test_no_kernel_is_compiled_for_the_building_processor_alone():
    flags = [flag for table in SETUP["MACHINES"].values() for flags in table.values() for flag in flags]
    assert flags and "native" not in " ".join(flags)
    sources = {path.name for path in (ROOT / SETUP["KERNELS"]).glob("*.c")}
    assert all(set(table) <= sources for table in SETUP["MACHINES"].values())


@pytest.mark.release
@pytest.mark.skipif(COMPILER is None, reason="no C compiler")
def test_an_old_compiler_leaves_instruction_sets_out_unless_the_build_is_complete(source, tmp_path):
    """A compiler without AMX: the wheel lacks it with a warning, and a wheel for an index is not built."""
    compiler = tmp_path / "cc"
    compiler.write_text(f'#!/bin/sh\ncase "$*" in *-mamx*|*dotprod*) exit 1;; esac\nexec {COMPILER} "$@"\n')
    compiler.chmod(0o755)
    folder = shutil.copytree(source, tmp_path / "source", ignore=LEFT_BEHIND)
    command = [sys.executable, "-c", BUILD.format("wheel")]
    settings = {**os.environ, "CC": str(compiler)}
    made = subprocess.run(command, cwd=folder, env=settings, capture_output=True, text=True, timeout=300)
    assert made.returncode == 0 and "is left empty: the compiler does not support" in made.stdout + made.stderr
    with zipfile.ZipFile(next((folder / "dist").iterdir())) as archive:
        assert LIBRARY in archive.namelist()
    shutil.rmtree(folder / "build")
    settings["MOONSHOT_BUILD"] = "complete"
    assert subprocess.run(command, cwd=folder, env=settings, capture_output=True, timeout=300).returncode


@pytest.mark.release
def test_without_a_compiler_the_wheel_lacks_the_library_alone(source, wheel):
    shutil.rmtree(source / "dist")
    shutil.rmtree(source / "build")
    with zipfile.ZipFile(build(source, "wheel", CC="no-such-compiler")) as archive:
        assert set(archive.namelist()) == {name for name in wheel if name != LIBRARY}


@pytest.mark.release
def test_the_index_page_has_no_dead_links(wheel):
    (name,) = (name for name in wheel if name.endswith("METADATA"))
    metadata = Parser().parsestr(wheel[name].decode())
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
