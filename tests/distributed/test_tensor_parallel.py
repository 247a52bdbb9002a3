"""transformers' tensor parallelism: dense checkpoints of pruned models are sharded, packed ones are refused."""

import subprocess
import sys

import pytest
import torch
from checkpoints import pruned
from process_runs import SUPPORT, environment

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The logits without processes, and the results of each process."""
    folder = tmp_path_factory.mktemp("parallel")
    pruner = pruned()
    for name in ("dense", "packed"):
        pruner.save_pretrained(folder / name, format=name)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [str(SUPPORT / "tensor_parallel.py"), str(folder)]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=300)
    assert ended.returncode == 0, ended.stderr[-4000:]
    with torch.no_grad():
        expected = pruner.model(torch.arange(3, 15)[None]).logits
    return expected, [torch.load(folder / f"{rank}.pt") for rank in range(2)]


def test_a_dense_checkpoint_is_sharded(results):
    expected, processes = results
    assert all(torch.allclose(process["dense"], expected, atol=1e-5) for process in processes)


def test_packed_weights_are_refused(results):
    for process in results[1]:
        for name in ("packed", "kept packed", "packed after loading"):
            assert process[name] == (
                "tp_plan: packed weights, and models to prune, cannot be sharded between processes; convert the "
                "checkpoint to the dense format, or use vLLM"
            )
