"""Estimates of a plan against the run, by cases of `benchmarks/plan.py`, which has 33 and twice the samples."""

import json
import subprocess
import sys

import pytest
from command_line import ROOT
from process_runs import environment

pytestmark = pytest.mark.release


def measured(what, name):
    """The bytes and the processor seconds of a plan or of a run, each in a process of its own."""
    command = [sys.executable, ROOT / "benchmarks" / "plan.py", what, name, "--samples", "16"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.skipif(sys.platform != "linux", reason="memory is measured on Linux only")
@pytest.mark.parametrize("name", ["llama wanda", "llama osscar", "llama allocated", "llama offloaded"])
def test_memory_within_a_third_and_time_within_a_factor_of_two(name):
    plan, run = measured("--plan", name), measured("--run", name)
    assert 2 / 3 < plan["bytes"] / run["bytes"] < 4 / 3
    assert 0.5 < plan["seconds"] / run["seconds"] < 2
