"""Kills at random moments and at file operations, a few of each command; `tests/support/kills.py` tries hundreds."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from kills import KINDS, MEETINGS

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parents[1] / "support"
ROOT = TESTS.parent


FEW = ("prune", "recover", "sweep", "convert to packed", "save, dense")


def run(tmp_path, *options):
    """In a process of its own: it forks, which one with threads must not."""
    path = tmp_path / "results.json"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, TESTS / "kills.py", *options, "--json", path]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert path.is_file(), done.stderr
    return json.loads(path.read_text(encoding="utf-8"))


def test_a_killed_command_gives_the_same_files_when_it_is_repeated(tmp_path):
    results = run(tmp_path, "--kills", "1", "--operations", "1", "--meetings", "0", "--commands", *FEW)
    assert tuple(results) == FEW
    for found in (how for kind in results.values() for how in kind.values()):
        assert found["wrong"] == [] and found["kills"] >= 1 and found["identical"] == found["tries"] > 0


def test_of_two_commands_that_write_to_one_folder_one_is_refused(tmp_path):
    results = run(tmp_path, "--meetings", "1", "--commands")
    assert len(results) == len(MEETINGS)
    for found in (kind["two writers"] for kind in results.values()):
        assert found["wrong"] == [] and sum(found["refused"].values()) == found["meetings"] == 1


LOCKED = """
import sys, time
from pathlib import Path
from tqdm.auto import tqdm
import kills

kills.share_nothing()
kills.LONGEST = 6
def take_and_wait():
    tqdm.get_lock().acquire()
    time.sleep(60)
folder = Path(sys.argv[1])
killed = kills.Child(take_and_wait, folder).end(moment=0.5)
other = kills.Child(lambda: tqdm.get_lock().acquire(), folder).end()
print([killed, other, kills.Child(take_and_wait, folder).end()])
"""


def test_who_is_killed_with_the_lock_of_the_bars_stops_no_other_and_who_hangs_says_where(tmp_path):
    environment = {**os.environ, "PYTHONPATH": f"{TESTS}:{ROOT}"}
    command = [sys.executable, "-c", LOCKED, tmp_path / "work"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    killed, count, hung = ast.literal_eval(done.stdout)
    assert (killed, count) == ("killed", 0)
    assert hung.startswith("no end after 6 s: ") and "in take_and_wait" in hung


def test_the_guide_has_the_figures_of_the_programs():
    """Of the files that they wrote; nothing was wrong in those."""
    results = ROOT / "benchmarks" / "results"
    found = json.loads((results / "kills.json").read_text(encoding="utf-8"))
    damage = json.loads((results / "damage.json").read_text(encoding="utf-8"))
    assert not any(how["wrong"] for kind in found.values() for how in kind.values())
    tries = [how for kind in KINDS for how in found[kind].values()]
    assert all(how["identical"] == how["tries"] for how in tries)
    assert all(found[kind]["random moments"]["kills"] >= 20 for kind in KINDS)
    assert not any("WRONG" in verdict for counts in damage.values() for verdict in counts)
    meetings = sum(found[f"{first}, and {second}"]["two writers"]["meetings"] for first, second in MEETINGS)
    guide = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    told = [f"{sum(how['kills'] for how in tries)} kills in {sum(how['tries'] for how in tries)} tries"]
    told += [f"{counts['damages']:,} damages" for counts in damage.values()] + [f"{meetings} meetings"]
    told += [f"{_count(damage['packed'], 'refused'):,} refused, {_count(damage['packed'], 'same weights'):,} with"]
    told += [f"{damage['dense']['load_pruned: other weights']} loaded with other"]
    assert [words for words in told if words not in guide] == []


def _count(counts, verdict):
    return sum(number for found, number in counts.items() if found.endswith(verdict))
