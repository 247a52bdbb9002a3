"""One of two processes is killed at a random moment; `tests/support/rank_kills.py` does so more often."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from process_runs import environment

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).parents[1] / "support" / "rank_kills.py"


def test_the_other_process_ends_and_a_rerun_gives_the_same_bits(tmp_path):
    path = tmp_path / "results.json"
    command = [sys.executable, PROGRAM, "--kills", "10", "--seed", "1", "--json", path]  # two of each run
    done = subprocess.run(command, capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(path.read_text())
    assert results["kills"] == 10 and results["wrong"] == []
