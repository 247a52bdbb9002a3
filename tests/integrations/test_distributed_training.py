"""All cases with two processes on the CPU in one launch: starting them takes longer than the training."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parents[1] / "support"


@pytest.mark.slow
def test_two_processes(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [str(HERE / "distributed_training.py"), str(tmp_path)]
    path = os.pathsep.join([str(HERE.parents[1]), str(HERE), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    assert all((tmp_path / f"done-{rank}").exists() for rank in range(2)), done.stdout[-4000:]
