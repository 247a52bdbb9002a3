"""Real models at the settings of a user: quality against the dense model, CPU seconds in forward passes, memory, bytes.

    python benchmarks/real.py .venv/real/SmolLM2-135M-Instruct --calibration valid.txt --test test.txt
    python benchmarks/real.py … --settings "2:4, ALPS" "2:4, fast" --seeds 0 1 2 --minutes 60
    python benchmarks/real.py … --show                # tables of the results so far

`make .venv/.real` installs the models, and the tests in tests/real dequantize them to folders. The texts are those of
WikiText-2: validation calibrates, test judges. Every cell (setting, seed) runs in a process of its own with one thread,
and is not repeated; the results are in results/real-MODEL.json. A "pass" is the CPU seconds of one forward pass of the
model, in float32 and without its head, over as many tokens as a cell calibrates on.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from common import RESULTS, machine, peak_above, versions
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from optimum_moonshot import MoonshotConfig, MoonshotPruner, perplexity
from optimum_moonshot.reports.tables import text_table

PATTERNS = {name: {"pattern": name} for name in ("2:4", "4:8", "6:8", "8:16")}
PATTERNS |= {str(sparsity): {"sparsity": sparsity} for sparsity in (0.5, 0.6, 0.7)}
METHODS = {
    "magnitude": {"solver": "magnitude"},
    "Wanda": {"solver": "wanda", "lam": 1},
    "SparseGPT": {"solver": "sparsegpt", "lam": 1},
    "SparseGPT, shared": {"solver": "sparsegpt", "lam": 0.9, "fisher": "shared"},
    "SparseGPT, rows": {"solver": "sparsegpt", "lam": 0.9, "fisher": "rows"},
    "ALPS": {"solver": "alps", "lam": 1},
    "ALPS, shared": {"solver": "alps", "lam": 0.9, "fisher": "shared"},
    "fast": {"recipe": "fast"},
    "one-shot": {"recipe": "one-shot"},
    "recovered": {"recipe": "recovered"},
}
# Setting → fields of the configuration, or a target of `shrink`.
SETTINGS = {f"{pattern}, {name}": {**PATTERNS[pattern], **METHODS[name]} for pattern in PATTERNS for name in METHODS}
SETTINGS |= {f"{bits} bits, {name}": {"bits": bits, **METHODS[name]} for bits in (4, 3) for name in METHODS}
SETTINGS |= {f"2:4 and 4 bits, {name}": {"pattern": "2:4", "bits": 4, **METHODS[name]} for name in METHODS}
SETTINGS |= {f"shrink {share}": {"parameters": share} for share in (0.9, 0.75)}
PASS = "one pass"
DEFAULTS = ("2:4, SparseGPT", "2:4, SparseGPT, shared", "2:4, ALPS", "2:4, ALPS, shared")


def configuration(fields: dict, seed: int, samples: int, length: int) -> MoonshotConfig:
    common = {"num_samples": samples, "sequence_length": length, "seed": seed}
    if "parameters" in fields:
        return MoonshotConfig(solver="osscar", pattern="structured", sparsity=0.0, **common)
    fields = dict(fields)
    if "recipe" in fields:
        budget = fields.pop("recipe")
        pattern = fields.pop("pattern", None) or fields.pop("sparsity")
        return MoonshotConfig.recipe(pattern, budget, **fields, **common)
    return MoonshotConfig(**fields, **common)


@torch.no_grad()
def one_pass(model: str, options: argparse.Namespace) -> dict:
    """A forward pass over random tokens, in this process."""
    dense = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    ids = torch.randint(10, 1000, (options.samples, options.length), generator=torch.Generator().manual_seed(0))
    started = time.process_time()
    for batch in ids.split(8):
        dense.base_model(input_ids=batch, use_cache=False)
    return {"seconds": time.process_time() - started}


def measure(model: str, setting: str, seed: int, options: argparse.Namespace) -> dict:
    """One cell, in this process."""
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    if setting == PASS:
        return one_pass(model, options)
    fields = SETTINGS[setting]
    config = configuration(fields, seed, options.samples, options.length)
    dtype = getattr(torch, options.dtype)
    pruner = MoonshotPruner.from_pretrained(model, config, dtype=dtype)
    dense = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    def run() -> None:
        if "parameters" in fields:
            pruner.shrink(options.calibration, parameters=fields["parameters"], progress=False)
        else:
            data = None if fields.get("solver") == "magnitude" else options.calibration
            pruner.prune(data, progress=False)

    started = time.process_time()
    peak = peak_above(run)
    seconds = time.process_time() - started
    sizes = {"max_windows": options.windows, "sequence_length": 1024, "batch_size": 1, "against": dense}
    result = perplexity(pruner.model.float(), pruner.tokenizer, options.test, **sizes)
    return {
        "perplexity": result.value,
        "dense": result.dense,
        "kl": result.kl,
        "agreement": result.agreement,
        "seconds": seconds,
        "phases": pruner.report.seconds,
        "peak_above_loaded": peak,
        "parameters": pruner.model.num_parameters(),
    }


def cell(model: str, setting: str, seed: int, options: argparse.Namespace) -> dict:
    """One cell, in a process of its own."""
    arguments = [sys.executable, __file__, model, "--one", setting, "--seeds", str(seed)]
    for name in ("calibration", "test", "samples", "length", "windows", "dtype"):
        arguments += [f"--{name}", str(getattr(options, name))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(arguments, capture_output=True, text=True, env=environment)
    if run.returncode:
        sys.exit(run.stderr)
    return json.loads(run.stdout.splitlines()[-1])


def tables(results: dict) -> str:
    """Mean and standard error over the seeds, of every setting that was measured."""
    rows, by_setting = [], {}
    for row in results["cells"]:
        by_setting.setdefault((row["setting"], row["samples"], row["length"]), []).append(row)
    passes = {key[1:]: cells[0]["seconds"] for key, cells in by_setting.items() if key[0] == PASS}
    for (setting, samples, length), cells in by_setting.items():
        if setting == PASS:
            continue
        values = [f"{samples} × {length}"]
        for key, digits in (("perplexity", 2), ("kl", 4), ("agreement", 4)):
            numbers = [each[key] for each in cells]
            error = f" ± {statistics.stdev(numbers) / len(numbers) ** 0.5:.{digits}f}" if len(numbers) > 1 else ""
            values.append(f"{statistics.fmean(numbers):.{digits}f}{error}")
        seconds = statistics.fmean(each["seconds"] for each in cells)
        peak = max(each["peak_above_loaded"] for each in cells) / 1e6
        rows.append([setting, *values, f"{seconds:.0f}", f"{seconds / passes[samples, length]:.1f}", f"{peak:.0f}"])
    header = ["setting", "tokens", "perplexity", "KL", "top-1", "CPU s", "passes", "MB above the model"]
    return text_table(header, rows, 160)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--calibration", required=True)
    parser.add_argument("--test", required=True)
    parser.add_argument("--settings", nargs="+", default=list(DEFAULTS), choices=SETTINGS, metavar="SETTING")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--windows", type=int, default=12)
    parser.add_argument("--dtype", default="bfloat16", help="of the model that is pruned; it is judged in float32")
    parser.add_argument("--minutes", type=float, help="begin no cell after so long")
    parser.add_argument("--show", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.model, options.one, options.seeds[0], options)))
        return
    path = RESULTS / f"real-{Path(options.model).name}.json"
    results = {"machine": machine(), "versions": versions("torch", "transformers"), "cells": []}
    results = json.loads(path.read_text()) if path.exists() else results
    keys, started = ("setting", "seed", "samples", "length", "dtype"), time.perf_counter()
    measured = {tuple(row[key] for key in keys) for row in results["cells"]}
    for seed in options.seeds:
        for setting in (PASS, *options.settings):
            key = (setting, seed, options.samples, options.length, options.dtype)
            key = (PASS, 0, *key[2:4], "float32") if setting == PASS else key
            late = options.minutes and time.perf_counter() - started > 60 * options.minutes
            if options.show or late or key in measured:
                continue
            row = cell(options.model, setting, seed, options)
            results["cells"].append({**dict(zip(keys, key, strict=True)), **row})
            path.write_text(json.dumps(results, indent=1) + "\n")
            print(*key, {name: round(value, 3) for name, value in row.items() if name != "phases"}, flush=True)
    print(tables(results))


if __name__ == "__main__":
    main()
