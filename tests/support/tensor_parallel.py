"""The program of `test_tensor_parallel.py`: loads the folders of its arguments by tensor parallelism, in two processes.

Writes a file for each process with the result of every folder: logits, or the error.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from optimum_moonshot import MoonshotError, MoonshotPrunedCheckpoint


def load(folder, **options):
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto", **options)
    except MoonshotError as error:
        return str(error)
    with torch.no_grad():
        return model(torch.arange(3, 15)[None]).logits


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    results = {
        "dense": load(folder / "dense"),
        "packed": load(folder / "packed"),
        "kept packed": load(folder / "packed", quantization_config=MoonshotPrunedCheckpoint(runtime="packed")),
        "packed after loading": load(folder / "dense", quantization_config=MoonshotPrunedCheckpoint(runtime="packed")),
    }
    torch.save(results, folder / f"{dist.get_rank()}.pt")
    dist.destroy_process_group()
