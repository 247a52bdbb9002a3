"""The parts of a release: the version, the citation, the workflow and the container agree with the package."""

import configparser
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from optimum_moonshot import __version__

ROOT = Path(__file__).resolve().parents[1]
WORKFLOW = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8"))
SETTINGS = configparser.ConfigParser()
SETTINGS.read(ROOT / "setup.cfg", encoding="utf-8")


def test_the_changelog_and_the_citation_have_the_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["cff-version"] == "1.2.0" and {"message", "title", "authors", "type"} < set(citation)
    assert citation["version"] == __version__ and citation["license"] == SETTINGS["metadata"]["license"]
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"## {__version__} ({citation['date-released']})\n" in changelog


def test_the_classifiers_are_the_versions_of_python_that_wheels_are_tested_on():
    tomllib = pytest.importorskip("tomllib")
    build = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["cibuildwheel"]["build"]
    first, last = re.fullmatch(r"cp31\[(\d)-(\d)\]-manylinux_\*", build).groups()
    classified = re.findall(r"Python :: (3\.\d+)$", SETTINGS["metadata"]["classifiers"], re.M)
    assert classified == [f"3.1{minor}" for minor in range(int(first), int(last) + 1)]
    assert SETTINGS["options"]["python_requires"] == f">={classified[0]}"
    matrix = WORKFLOW["jobs"]["test"]["strategy"]["matrix"]
    assert matrix["python"] == classified


def test_the_wheels_are_tested_with_the_newest_and_with_the_tested_dependencies():
    job = WORKFLOW["jobs"]["test"]
    matrix = job["strategy"]["matrix"]
    pinned = [{"runner": each, "python": "3.11", "constraints": "-c constraints.txt"} for each in matrix["runner"]]
    assert matrix["constraints"] == [""] and matrix["include"] == pinned
    (install,) = (step["run"] for step in job["steps"] if "pip install" in step.get("run", ""))
    assert install.endswith("${{ matrix.constraints }}")


def test_all_has_the_extras_of_users_that_fit_into_one_environment():
    extras = SETTINGS["options.extras_require"]
    assert extras["all"].strip() == "optimum-moonshot[peft,eval,vision]"
    assert {"peft", "eval", "vision", "vllm"} < set(extras)


USUAL = [name for name in SETTINGS["options.extras_require"] if name != "vllm"]


@pytest.mark.release
@pytest.mark.parametrize(
    ("extras", "constraints"),
    [(USUAL, ["-c", "constraints.txt"]), (["vllm"], [])],  # vLLM requires an older transformers
    ids=["usual", "vllm"],
)
def test_the_extras_resolve(extras, constraints):
    requirement = f".[{','.join(extras)}]"
    command = [sys.executable, "-m", "pip", "install", "--dry-run", requirement, *constraints]
    resolved = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    if re.search("NewConnectionError|NameResolutionError", resolved.stderr):
        pytest.skip("no network")
    assert resolved.returncode == 0, resolved.stderr[-2000:]


def test_nothing_is_published_that_was_not_built_and_tested():
    jobs = WORKFLOW["jobs"]
    needed = {name for job in jobs.values() for name in [job.get("needs", [])] if isinstance(name, str)}
    assert needed < set(jobs) and set(jobs["publish"]["needs"]) == set(jobs) - {"publish"}
    assert jobs["publish"]["permissions"] == {"id-token": "write"}  # trusted publishing, without a password
    assert "startsWith(github.ref, 'refs/tags/')" in jobs["publish"]["if"]
    assert WORKFLOW[True]["push"] == {"tags": ["v*"]}  # YAML 1.1 reads the key `on` as true
    made = {
        step["with"]["name"]
        for job in jobs.values()
        for step in job["steps"]
        if "upload-artifact" in step.get("uses", "")
    }
    (fetched,) = (step["with"]["pattern"] for step in jobs["publish"]["steps"] if "with" in step)
    assert fetched == "dist-*" and all(name.startswith("dist-") for name in made)


def test_the_workflow_runs_files_that_exist():
    commands = " ".join(step.get("run", "") for job in WORKFLOW["jobs"].values() for step in job["steps"])
    named = re.findall(r"(?:tests|\.ci)/[\w./-]*[\w]", commands)
    assert named and all((ROOT / path).exists() for path in named)


def test_the_guide_to_a_release_names_its_parts():
    guide = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("\n## Release\n")[2].partition("\n## ")[0]
    environment = WORKFLOW["jobs"]["publish"]["environment"]
    named = {"release.yml", f"environment `{environment}`", f"`v{__version__}`", "CITATION.cff", "CHANGELOG.md"}
    assert not [name for name in named if name not in guide]
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    (commands,) = re.findall(r"`make ([^`]+)`", guide)
    assert {"test-slow", "check-dist"} < set(commands.split()) <= targets


def test_the_container_runs_the_demo_of_the_makefile():
    lines = (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines()
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    assert lines[-1] == 'CMD ["make", "demo"]' and "demo" in targets
    assert lines.index("ARG PIP_EXTRA_INDEX_URL") < lines.index("RUN make .venv/.installed")  # of torch's CPU build
