"""The connections of a run: a death while they are made, and a process that comes late to a transfer."""

import re
import socket
import subprocess
import sys

import pytest
from process_runs import DIED, environment

pytestmark = pytest.mark.slow

PROGRAM = """
import os, sys, time
from datetime import timedelta
import torch
import torch.distributed as dist
from optimum_moonshot.distributed import ranks as module
from optimum_moonshot.distributed.ranks import processes

rank, dying, address = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", address, rank=rank, world_size=2)
module.CONNECTING = timedelta(seconds=2)
if rank == dying:
    dist.new_group = lambda **options: os._exit(0)
try:
    with processes() as ranks:
        whole = torch.zeros(2)
        time.sleep(3 * rank)
        ranks.gather_rows(torch.ones(1), whole, [1, 1])
        time.sleep(3 * rank)
        ranks.barrier()
        print("gathered", whole.tolist())
except module.RankFailed as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("dying", "expected"),
    [(None, r"gathered \[1.0, 1.0\]"), (1, re.escape(DIED)), (0, "rank 0 failed: it has ended, and .* store with it")],
)
def test_processes_that_die_while_they_connect_or_come_late(dying, expected):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    programs = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), str(-1 if dying is None else dying), address],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment(),
        )
        for rank in range(2)
    ]
    outputs = [program.communicate(timeout=120)[0] for program in programs]
    for rank, output in enumerate(outputs):
        assert re.match(expected, output) if rank != dying else output == "", outputs
