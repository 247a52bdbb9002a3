"""Runs on a device that refuses operands on the host give the results of the host."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).parents[1] / "support" / "other_device_cases.py"


@pytest.mark.slow
def test_runs_on_another_device():
    # In a separate process, because the simulated device must not be registered in this one.
    done = subprocess.run([sys.executable, str(CASES)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = list(map(json.loads, done.stdout.splitlines()))
    assert len(rows) > 20
    assert [row for row in rows if "error" in row or row["zeros"] or row["worst"] > 1e-4] == []
