"""Kills at random moments and at file operations, a few of each command; `python tests/kills.py` tries hundreds."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from kills import KINDS, MEETINGS

TESTS = Path(__file__).parent


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """A process of its own: it forks, which one with threads must not."""
    path = tmp_path_factory.mktemp("kills") / "results.json"
    environment = {**os.environ, "PYTHONPATH": str(TESTS.parent), "OMP_NUM_THREADS": "1"}
    few = ["--kills", "2", "--operations", "3", "--meetings", "1", "--json", path]
    run = subprocess.run([sys.executable, TESTS / "kills.py", *few], capture_output=True, text=True, env=environment)
    assert path.is_file(), run.stderr
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["random moments", "file operations"])
def test_a_killed_command_gives_the_same_files_when_it_is_repeated(results, kind, how):
    found = results[kind][how]
    assert found["wrong"] == []
    assert found["kills"] >= 2 and found["identical"] == found["tries"] > 0


@pytest.mark.parametrize(("first", "second"), MEETINGS)
def test_of_two_commands_that_write_to_one_folder_one_is_refused(results, first, second):
    found = results[f"{first}, and {second}"]["two writers"]
    assert found["wrong"] == [] and found["meetings"] == sum(found["refused"].values()) == 1


def test_what_was_tried_often():
    """The figures in the guide are those of the file that the program wrote, and nothing was wrong in it."""
    results = json.loads((TESTS.parent / "benchmarks" / "results" / "kills.json").read_text(encoding="utf-8"))
    tries = [how for kind in KINDS for how in results[kind].values()]
    assert not any(how["wrong"] for kind in results.values() for how in kind.values())
    guide = (TESTS.parent / "docs" / "reliability.md").read_text(encoding="utf-8")
    assert f"{sum(how['kills'] for how in tries)} kills" in guide
    assert all(results[kind]["random moments"]["kills"] >= 20 for kind in KINDS)
    assert all(how["identical"] == how["tries"] for how in tries)
