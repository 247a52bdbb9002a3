"""Number and length of the calibration windows: quality against the dense model on several texts and window lengths.

    python benchmarks/windows.py .venv/real/SmolLM2-135M-Instruct --calibration valid.txt --judge test.txt novel.txt
    python benchmarks/windows.py … --show    # means over the seeds of the results so far

SparseGPT to 2:4 at λ = 1, the model in bfloat16, by one thread. Each text judges by its first 4,096 tokens or, after
the first text, 3,072, in windows of 1,024 and of 256. Cells are not repeated; they are in results/windows.json.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from cells import mean_error
from common import RESULTS, machine, versions
from transformers import AutoModelForCausalLM, AutoTokenizer

from optimum_moonshot import MoonshotConfig, MoonshotPruner, perplexity
from optimum_moonshot.reports.tables import text_table

WINDOWS = ((16, 1024), (32, 512), (64, 256), (128, 128), (64, 512), (128, 256), (128, 512), (256, 256))
JUDGED, TOKENS = (1024, 256), (4096, 3072)
KEYS = ("calibration", "samples", "length", "seed")  # of a cell


def measure(options: argparse.Namespace, samples: int, length: int, seed: int, dense: torch.nn.Module) -> dict:
    """CPU seconds of pruning; by text and length of its windows, perplexity and KL divergence."""
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    pruned = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16)
    sizes = {"num_samples": samples, "sequence_length": length, "seed": seed}
    started = time.process_time()
    config = MoonshotConfig(solver="sparsegpt", pattern="2:4", lam=1, **sizes)
    MoonshotPruner(pruned, config, tokenizer).prune(options.calibration, progress=False)
    row = {"calibration": Path(options.calibration).stem, "samples": samples, "length": length, "seed": seed}
    row["seconds"] = time.process_time() - started
    pruned.float()
    for number, text in enumerate(options.judge):
        for judged in JUDGED:
            windows = TOKENS[min(number, 1)] // judged
            result = perplexity(
                pruned, tokenizer, text, max_windows=windows, sequence_length=judged, batch_size=1, against=dense
            )
            row[f"{Path(text).stem}, {judged}"] = {"perplexity": result.value, "kl": result.kl}
    return row


def table(cells: list[dict]) -> str:
    """Mean and standard error of the KL divergence over the seeds."""
    names, by_windows = [name for name in cells[0] if isinstance(cells[0][name], dict)], {}
    for cell in cells:
        by_windows.setdefault((cell["calibration"], f"{cell['samples']} × {cell['length']}"), []).append(cell)
    rows = []
    for key, seeds in by_windows.items():
        values = [mean_error([cell[name]["kl"] for cell in seeds], 3) for name in names]
        rows.append([*key, str(len(seeds)), *values, f"{min(cell['seconds'] for cell in seeds):.0f}"])
    return text_table(["calibrated on", "windows", "seeds", *names, "CPU s"], rows, 200)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--calibration", required=True)
    parser.add_argument("--judge", nargs="+", required=True)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--lengths", nargs="+", type=int, help="measure windows of these lengths alone")
    parser.add_argument("--show", action="store_true", help="print the results so far")
    options = parser.parse_args()
    torch.set_num_threads(1)
    path = RESULTS / "windows.json"
    results = {"machine": machine(), "versions": versions("torch", "transformers"), "cells": []}
    results = json.loads(path.read_text()) if path.exists() else results
    measured = {tuple(cell[key] for key in KEYS) for cell in results["cells"]}
    windows = [sizes for sizes in WINDOWS if not options.lengths or sizes[1] in options.lengths]
    wanted = [(Path(options.calibration).stem, *sizes, seed) for seed in options.seeds for sizes in windows]
    missing = [key for key in wanted if key not in measured]
    if options.show or not missing:
        print(table(results["cells"]))
        return
    dense = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    for _, samples, length, seed in missing:
        results["cells"].append(measure(options, samples, length, seed, dense))
        path.write_text(json.dumps(results, indent=1) + "\n")
        print(results["cells"][-1], flush=True)
    print(table(results["cells"]))


if __name__ == "__main__":
    main()
