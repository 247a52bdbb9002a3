"""No tensor is left on the host: runs on a device that refuses to mix give what they give there."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).with_name("other_device_cases.py")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found():
    """What every case gave: the process knows a device that others must not."""
    done = subprocess.run([sys.executable, str(CASES)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return {row["case"]: row for row in map(json.loads, done.stdout.splitlines())}


def names():
    """The cases, without importing what registers the device."""
    text = CASES.read_text(encoding="utf-8")
    listed = text[text.index("RUNS = {") : text.index("\n}\n")]
    return ["mixed", "one matrix", "sweep", *(line.split('"')[1] for line in listed.splitlines()[1:])]


@pytest.mark.parametrize("name", names())
def test_a_run_on_another_device(name, found):
    row = found.pop(name)
    assert "error" not in row, row["error"]
    assert row["zeros"] == 0 and row["worst"] < 1e-4


def test_every_case_was_looked_at(found):
    assert not found
