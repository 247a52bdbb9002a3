"""Perplexity of packed models whose products round their inputs to 8 bits, beside the same models without rounding.

    python benchmarks/rounded_inputs.py       # three settings, 2 minutes of one core

Each model is the shipped Llama in float32, pruned and quantized by SparseGPT at λ = 1 with groups of 128, on 128
samples of 256 tokens, seed 0, as in quantized.py. `inputs="int8"` rounds the inputs of every packed layer for each
token and group of inputs; `inputs="float"` does not.
"""

import time
from pathlib import Path

import torch
from beyond import DEMO, dense_perplexity
from common import parser, write
from quantized import configuration
from transformers import AutoModelForCausalLM, AutoTokenizer

from optimum_moonshot import MoonshotPruner, perplexity
from optimum_moonshot.kernels.library import find_library
from optimum_moonshot.packing import INPUTS

SETTINGS = ("dense, 4", "2:4, 8", "2:4, 4")


def measure(model_folder: str | Path, setting: str, seed: int) -> dict:
    """Held-out perplexity by the rounding of the inputs, and unpacked; the number of packed layers; seconds."""
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    tokenizer, config = AutoTokenizer.from_pretrained(DEMO), configuration(setting, "SparseGPT", 1.0, seed)
    pruner, started = MoonshotPruner(model, config, tokenizer), time.process_time()
    pruner.prune(str(DEMO / "calibration.txt"), progress=False)
    seconds = {"prune": time.process_time() - started}
    row: dict = {"setting": setting, "seed": seed, "perplexity": {}, "seconds": seconds}
    for name in ("dense", *INPUTS):
        chosen = pruner.to_runtime("dense") if name == "dense" else pruner.to_runtime("packed", inputs=name)
        row["packed"] = sum(entry.startswith("packed") for entry in chosen.values())
        started = time.process_time()
        value = perplexity(model, tokenizer, str(DEMO / "heldout.txt"), sequence_length=256).value
        row["perplexity"][name], seconds[name] = value, time.process_time() - started
    return row


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--model", default=str(DEMO))
    arguments.add_argument("--name", default="rounded-inputs", help="of the file in results/")
    arguments.add_argument("--seed", type=int, default=0)
    options = arguments.parse_args()
    torch.set_num_threads(1)
    library = find_library()
    if library is None:
        raise SystemExit("the package was installed without a C compiler: no inputs are rounded")
    cells: list[dict] = []
    results = {"instruction_set": library.instruction_set, "dense": dense_perplexity(options.model), "cells": cells}
    print("| setting | " + " | ".join(("dense weights", *INPUTS)) + " |\n|---|---:|---:|---:|")
    for setting in SETTINGS:
        row = measure(options.model, setting, options.seed)
        cells.append(row)
        print(f"| {setting} | " + " | ".join(f"{value:.3f}" for value in row["perplexity"].values()) + " |", flush=True)
    write(options.name, results)


if __name__ == "__main__":
    main()
