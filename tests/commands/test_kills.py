"""Kills at random moments and at file operations, a few of each command; `tests/support/kills.py` runs hundreds."""

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
ROOT = TESTS.parents[1]


FEW = ("prune", "recover", "sweep", "convert to packed", "save, dense")
LATER = ("rotate", "prune, rotated", "prune, quantized", "distill, quantized", "shrink", "reduce width")


def run(tmp_path, *options):
    """In a separate process: a process with threads must not fork."""
    path = tmp_path / "results.json"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, TESTS / "kills.py", *options, "--json", path]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert path.is_file(), done.stderr
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("kinds", [FEW, LATER], ids=["prune", "rotate and shrink"])
def test_a_killed_command_gives_the_same_files_when_rerun(tmp_path, kinds):
    results = run(tmp_path, "--kills", "1", "--operations", "1", "--meetings", "0", "--commands", *kinds)
    assert tuple(results) == kinds
    for counts in (how for kind in results.values() for how in kind.values()):
        assert counts["wrong"] == [] and counts["kills"] >= 1 and counts["identical"] == counts["tries"] > 0


def test_one_of_two_concurrent_writers_is_refused(tmp_path):
    results = run(tmp_path, "--meetings", "1", "--commands")
    assert len(results) == len(MEETINGS)
    for counts in (kind["two writers"] for kind in results.values()):
        assert counts["wrong"] == [] and sum(counts["refused"].values()) == counts["meetings"] == 1


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


def test_a_killed_lock_holder_blocks_no_other_and_a_hang_shows_its_traceback(tmp_path):
    environment = {**os.environ, "PYTHONPATH": f"{TESTS}:{ROOT}"}
    command = [sys.executable, "-c", LOCKED, tmp_path / "work"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    killed, count, hung = ast.literal_eval(done.stdout)
    assert (killed, count) == ("killed", 0)
    assert hung.startswith("no end after 6 s: ") and "in take_and_wait" in hung


def test_the_guide_has_the_figures_of_the_result_files():
    """The figures come from the result files, which contain no failures."""
    results = ROOT / "benchmarks" / "results"
    kills = json.loads((results / "kills.json").read_text(encoding="utf-8"))
    damage = json.loads((results / "damage.json").read_text(encoding="utf-8"))
    assert not any(how["wrong"] for kind in kills.values() for how in kind.values())
    tries = [how for kind in KINDS for how in kills[kind].values()]
    assert all(how["identical"] == how["tries"] for how in tries)
    assert all(kills[kind]["random moments"]["kills"] >= 20 for kind in KINDS)
    assert not any("WRONG" in verdict for counts in damage.values() for verdict in counts)
    meetings = sum(kills[f"{first}, and {second}"]["two writers"]["meetings"] for first, second in MEETINGS)
    ranks = json.loads((results / "rank_kills.json").read_text(encoding="utf-8"))
    assert ranks["kills"] >= 30 and not ranks["wrong"]
    guide = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    figures = [f"{sum(how['kills'] for how in tries)} kills in {sum(how['tries'] for how in tries)} tries"]
    figures += [f"{counts['damages']:,} damages" for counts in damage.values()] + [f"{meetings} meetings"]
    figures += [f"{ranks['kills']} kills: "]
    figures += [f"{_count(damage['packed'], 'refused'):,} refused, {_count(damage['packed'], 'same weights'):,} with"]
    figures += [f"{damage['dense']['load_pruned: other weights']} loaded with other"]
    figures += _plan_figures(json.loads((results / "plan.json").read_text(encoding="utf-8"))["results"])
    figures += _reload_figures(json.loads((results / "reloads.json").read_text(encoding="utf-8"))["results"])
    assert [words for words in figures if words not in guide] == []


def _plan_figures(cases):
    """Memory and time of the plans of one model, against those of the runs."""
    ratios = [case["ratio"] for name, case in cases.items() if name.startswith("llama")]
    for quantity, bound, title in (("bytes", 0.2, "memory within 20%"), ("seconds", 0.5, "time within 50%")):
        values = [ratio[quantity] for ratio in ratios]
        within = sum(abs(value - 1) <= bound for value in values)
        yield f"{title} in {within} of {len(values)} "
        yield f"({min(values):.2f} to {max(values):.2f})"
    yield f"[all {len(cases)}]"


def _reload_figures(families):
    """Tiny models of all families: saved in two formats and loaded with the same outputs, or not made."""
    tries = [result for family in families for result in family["settings"].values()]
    saves = [result[format] for result in tries for format in ("dense", "packed") if format in result]
    assert all(saved == {"difference": 0} for saved in saves)
    pruned = sum("dense" in result for result in tries)
    yield f"[{len(families)} families]"
    yield f"{pruned:,} pruned models, {len(saves):,} saves"
    yield f"other {len(tries) - pruned} cases"


def _count(counts, verdict):
    return sum(number for outcome, number in counts.items() if outcome.endswith(verdict))
