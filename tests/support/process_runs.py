"""Results of programs that run in several processes, and their comparison."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SUPPORT = Path(__file__).parent
ROOT = SUPPORT.parents[1]
DIED = "rank 1 failed: its process has died (killed, or out of memory)"


def environment():
    path = os.pathsep.join([str(ROOT), str(SUPPORT), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def found_by(program, folder):
    """Run a program; returns (size, rank) or (name, rank) → the result of each process, and its stderr."""
    command = [sys.executable, str(SUPPORT / program), str(folder)]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=500)
    assert ended.returncode == 0, ended.stderr[-4000:]
    results = {}
    for path in folder.glob("*.pt"):
        name, size, rank = path.stem.split("-")
        results[int(size) if name == "done" else name, int(rank)] = torch.load(path, weights_only=False)
    return results, ended.stderr


def assert_same(actual, expected):
    assert actual["weights"].keys() == expected["weights"].keys()
    assert all(torch.equal(actual["weights"][name], tensor) for name, tensor in expected["weights"].items())
    assert actual["said"] == expected["said"]


def assert_alike(actual, expected):
    """Equal masks, and weights equal up to rounding."""
    assert actual["weights"].keys() == expected["weights"].keys()
    for key, tensor in expected["weights"].items():
        assert torch.equal(actual["weights"][key] == 0, tensor == 0), key
        torch.testing.assert_close(actual["weights"][key], tensor, rtol=1e-3, atol=2e-5)


def close(value, other):
    """Compare nested values: numbers approximately, all others exactly."""
    if isinstance(value, dict):
        return value.keys() == other.keys() and all(close(value[key], other[key]) for key in value)
    if isinstance(value, list | tuple):
        return len(value) == len(other) and all(map(close, value, other))
    return value == other or (isinstance(value, float) and value == pytest.approx(other, rel=1e-3, abs=1e-6))
