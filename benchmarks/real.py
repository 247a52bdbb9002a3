"""Real models at the settings of a user: quality against the dense model, CPU seconds, memory, bytes, decoding speed.

    python benchmarks/real.py .venv/real/SmolLM2-135M-Instruct --calibration valid.txt --test test.txt
    python benchmarks/real.py … --settings "2:4, ALPS" "2:4, fast" --seeds 0 1 2 --minutes 60
    python benchmarks/real.py … --show                # tables of the results so far
    python benchmarks/real.py … --phases              # seconds of every phase, beside the forward pass
    python benchmarks/real.py … --markdown            # the tables of docs/choosing.md, of 64 × 256 tokens

`make .venv/.real` installs the models, and the tests in tests/real dequantize them to folders. The texts are those of
WikiText-2: validation calibrates, test judges. Every cell (setting, seed) runs in a process of its own with one thread,
and is not repeated; the results are in results/real-MODEL.json. A "pass" is the CPU seconds of one forward pass of the
model, without its head, over as many tokens as a cell calibrates on, in the faster of float32 and bfloat16. Bytes are
those of the packed weights, and tokens per second those of greedy decoding of one sample with these weights.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from cells import mean_error
from common import RESULTS, decoding_rate, machine, peak_above, versions
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from optimum_moonshot import MoonshotConfig, MoonshotPruner, load_pruned, perplexity
from optimum_moonshot.data.text import load_calibration
from optimum_moonshot.reports.tables import text_table
from optimum_moonshot.shrink import run as shrink_run
from optimum_moonshot.shrink.losses import BlockSets

PATTERNS = {name: {"pattern": name} for name in ("2:4", "4:8", "6:8", "8:16")}
PATTERNS |= {str(sparsity): {"sparsity": sparsity} for sparsity in (0.3, 0.4, 0.5, 0.6, 0.7)}
DENSE = {"recompute": False}  # statistics of the dense model
METHODS = {
    "magnitude": {"solver": "magnitude"},
    "Wanda": {"solver": "wanda", "lam": 1},
    "SparseGPT": {"solver": "sparsegpt", "lam": 1},
    "SparseGPT, shared": {"solver": "sparsegpt", "lam": 0.9, "fisher": "shared"},
    "SparseGPT, shared 0.5": {"solver": "sparsegpt", "lam": 0.5, "fisher": "shared"},
    "SparseGPT, rows": {"solver": "sparsegpt", "lam": 0.9, "fisher": "rows"},
    "ALPS": {"solver": "alps", "lam": 1},
    "ALPS, shared": {"solver": "alps", "lam": 0.9, "fisher": "shared"},
    "ALPS, shared 0.5": {"solver": "alps", "lam": 0.5, "fisher": "shared"},
    "fast": {"recipe": "fast"},
    "recovered": {"recipe": "recovered"},
}
ROTATED = {**METHODS["ALPS"], "rotation": "learned"}
METHODS |= {
    "ALPS, rotation": ROTATED,
    "ALPS, rotation, equal weights": {**ROTATED, "rotation_weights": "equal"},
    "ALPS, rotation, all rows": {**ROTATED, "rotation_rows": 2**20, "rotation_steps": 100},
}
METHODS |= {
    f"{name}, {mode}{f' {steps} steps' if steps else ''}": {**METHODS[name], "recover": mode, "recover_steps": steps}
    for name in ("ALPS", "ALPS, shared", "ALPS, rotation")
    for mode in ("blockwise", "gradual", "distill")
    for steps in (None, 40)
}
METHODS |= {f"{name}, dense statistics": {**fields, **DENSE} for name, fields in METHODS.items() if name != "magnitude"}
# peer.py
METHODS |= {f"llm-compressor {name}": {"peer": name} for name in ("SparseGPT", "Wanda")}
# Setting → fields of the configuration, or a target of `shrink`.
SETTINGS = {f"{pattern}, {name}": {**PATTERNS[pattern], **METHODS[name]} for pattern in PATTERNS for name in METHODS}
SETTINGS |= {f"{bits} bits, {name}": {"bits": bits, **METHODS[name]} for bits in (8, 4, 3) for name in METHODS}
SETTINGS |= {
    f"{pattern} and {bits} bits, {name}": {**PATTERNS[pattern], "bits": bits, **METHODS[name]}
    for pattern in PATTERNS
    for bits in (4, 3)
    for name in METHODS
}
SETTINGS |= {
    f"{size} bits per weight, {name}": {"bits_per_weight": size, "allocation": "fisher", **METHODS[name]}
    for size in (3.13, 2.73)
    for name in METHODS
}
SHARES = (0.9, 0.75)  # of the parameters, after `shrink`
SETTINGS |= {f"shrink {share}": {"parameters": share} for share in SHARES}
SETTINGS |= {
    f"shrink {share}, {axis} alone": {"parameters": share, "axis": axis}
    for share in SHARES
    for axis in ("blocks", "neurons", "heads", "hidden size")
}
SETTINGS |= {
    f"shrink {share}, distill 40 steps": {"parameters": share, "recover": "distill", "recover_steps": 40}
    for share in SHARES
}
SETTINGS |= {
    f"{bits} bits, magnitude, embeddings {embeddings}": {
        "bits": bits, "solver": "magnitude", "embedding_bits": embeddings,
    }
    for bits in (8, 4)
    for embeddings in (16, 8, 4)
}  # fmt: skip
SETTINGS["dense"] = {}
# Method of a row in the tables of a page → its settings at a pattern, of which the first that was measured is shown.
METHOD_ROWS = {
    "magnitude": ["magnitude"],
    "Wanda": ["Wanda"],
    "Wanda of llm-compressor": ["llm-compressor Wanda"],
    "SparseGPT": ["SparseGPT"],
    "SparseGPT of llm-compressor": ["llm-compressor SparseGPT"],
    "SparseGPT, λ < 1": ["SparseGPT, shared", "SparseGPT, shared 0.5"],
    "ALPS": ["ALPS"],
    '`"fast"`': ["fast", "ALPS, shared"],
    '`"recovered"`': ["recovered"],
}
COLUMNS = ("2:4", "4:8", "8:16", "0.5", "0.6", "0.7")
PASS = "one pass"
DECODED = 48  # tokens
EXCLUDED = 1e6  # predicted loss of a part that may not be removed
DEFAULTS = ("2:4, SparseGPT", "2:4, SparseGPT, shared", "2:4, ALPS", "2:4, ALPS, shared")


def configuration(fields: dict, sizes: dict) -> MoonshotConfig | None:
    """The configuration of a setting; None for `shrink`, which needs none."""
    if "parameters" in fields:
        return None
    fields = dict(fields)
    if "recipe" in fields:
        budget = fields.pop("recipe")
        pattern = fields.pop("pattern", None) or fields.pop("sparsity", 0.0)
        return MoonshotConfig.recipe(pattern, budget, **fields, **sizes)
    return MoonshotConfig(**fields, **sizes)


@torch.no_grad()
def one_pass(model: str, options: argparse.Namespace) -> dict:
    """A forward pass over random tokens, in this process."""
    ids = torch.randint(10, 1000, (options.samples, options.length), generator=torch.Generator().manual_seed(0))
    seconds = {}
    for dtype in ("float32", "bfloat16"):
        dense = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
        started = time.process_time()
        for batch in ids.split(8):
            dense.base_model(input_ids=batch, use_cache=False)
        seconds[dtype] = time.process_time() - started
    return {"seconds": min(seconds.values()), **seconds}


def measure(model: str, setting: str, seed: int, options: argparse.Namespace) -> dict:
    """One cell, in this process."""
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    if setting == PASS:
        return one_pass(model, options)
    fields = SETTINGS[setting]
    sizes = {"num_samples": options.samples, "sequence_length": options.length, "seed": seed}
    dtype = getattr(torch, options.dtype)
    pruned = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    tokenizer = AutoTokenizer.from_pretrained(model)
    dense = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with tempfile.TemporaryDirectory() as folder:
        if "peer" in fields:
            row = peer(model, fields, sizes, tokenizer, options, folder)
            pruned.load_state_dict(torch.load(f"{folder}/state.pt"))
        elif fields:
            pruner = MoonshotPruner(pruned, configuration(fields, sizes), tokenizer)
            row = prune(pruner, fields, sizes, options)
            pruned = pruner.model
            packed = "parameters" not in fields
            pruner.save_pretrained(folder, format="packed" if packed else None)
            row |= serving(folder, dtype, packed)
        else:
            row = {"seconds": 0.0, "peak_above_loaded": 0, **serving(model, dtype, packed=False)}
    length = min(1024, pruned.config.max_position_embeddings)
    judged = {"max_windows": options.windows, "sequence_length": length, "batch_size": 1, "against": dense}
    result = perplexity(pruned.float(), tokenizer, options.test, **judged)
    quality = {"perplexity": result.value, "dense": result.dense, "kl": result.kl, "agreement": result.agreement}
    return {**quality, **row, "parameters": pruned.num_parameters()}


def prune(pruner: MoonshotPruner, fields: dict, sizes: dict, options: argparse.Namespace) -> dict:
    """Prune or shrink the model of a pruner; returns the cost."""

    fields = dict(fields)
    only = fields.pop("axis", None)

    def run() -> None:
        if "parameters" in fields:
            with shrinking_only(only):
                pruner.shrink(options.calibration, **fields, **sizes, progress=False)
        else:
            data = None if fields.get("solver") == "magnitude" else options.calibration
            pruner.prune(data, progress=False)

    started = time.process_time()
    peak = peak_above(run)
    seconds = time.process_time() - started
    return {"seconds": seconds, "peak_above_loaded": peak, "phases": pruner.report.seconds}


@contextlib.contextmanager
def shrinking_only(axis: str | None) -> Iterator[None]:
    """Let `shrink` remove nothing but one kind of parts, "blocks", "hidden size" or a width; None: anything."""
    measure = shrink_run.measure_parts

    def restricted(*arguments: Any) -> tuple:
        tables, hidden, measured = measure(*arguments)
        losses = []
        for width, loss in zip(tables.widths, tables.losses, strict=True):
            excluded = (0.0, *[EXCLUDED] * (len(loss.losses) - 1))
            losses.append(loss if width.name == axis else dataclasses.replace(loss, losses=excluded))
        sets = tables.sets if axis == "blocks" else BlockSets(((),), (0.0,))
        tables = dataclasses.replace(tables, losses=tuple(losses), sets=sets)
        return tables, hidden if axis == "hidden size" else None, measured

    with mock.patch.object(shrink_run, "measure_parts", measure if axis is None else restricted):
        yield


def peer(model: str, fields: dict, sizes: dict, tokenizer: Any, options: argparse.Namespace, folder: str) -> dict:
    """Prune by llm-compressor, on the windows that this package would draw; returns the cost."""
    data = load_calibration(options.calibration, tokenizer, **sizes)
    torch.save(torch.cat([batch["input_ids"] for batch in data.batches]), f"{folder}/windows.pt")
    pattern, sparsity = fields.get("pattern", "0:0"), fields.get("sparsity", 0.5)
    script = Path(__file__).with_name("peer.py")
    arguments = [model, f"{folder}/windows.pt", fields["peer"], pattern, sparsity, options.dtype, f"{folder}/state.pt"]
    run = subprocess.run([options.peer_python, script, *map(str, arguments)], capture_output=True, text=True)
    if run.returncode:
        sys.exit(run.stderr)
    return json.loads(run.stdout.splitlines()[-1])


@torch.inference_mode()
def serving(folder: str, dtype: torch.dtype, packed: bool) -> dict:
    """Bytes of the weights in a folder, and tokens per second of greedy decoding."""
    if packed:
        loaded = load_pruned(folder, "auto", dtype=dtype)
    else:
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    ids = torch.randint(10, 1000, (1, 8), generator=torch.Generator().manual_seed(0))
    rate = decoding_rate(loaded, DECODED, time.process_time, input_ids=ids, attention_mask=torch.ones_like(ids))
    weights = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
    return {"bytes": weights, "tokens_per_second": rate}


def cell(model: str, setting: str, seed: int, options: argparse.Namespace) -> dict:
    """One cell, in a process of its own."""
    arguments = [sys.executable, __file__, model, "--one", setting, "--seeds", str(seed)]
    for name in ("calibration", "test", "samples", "length", "windows", "dtype", "peer_python"):
        arguments += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
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
            values.append(mean_error([row[key] for row in cells], digits))
        seconds = statistics.fmean(row["seconds"] for row in cells)
        values += [f"{seconds:.0f}", f"{seconds / passes[samples, length]:.1f}"]
        values.append(f"{max(row['peak_above_loaded'] for row in cells) / 1e6:.0f}")
        for key, scale, digits in (("bytes", 1e6, 0), ("tokens_per_second", 1, 1)):
            numbers = [row[key] for row in cells if key in row]
            values.append(f"{statistics.fmean(numbers) / scale:.{digits}f}" if numbers else "–")
        rows.append([setting, *values])
    header = ["setting", "tokens", "perplexity", "KL", "top-1", "CPU s", "passes", "MB above", "MB", "tokens/s"]
    return text_table(header, rows, 200)


def cells_of(results: dict, samples: int = 64, length: int = 256) -> dict[str, list[dict]]:
    """Setting → its measured cells of these calibration windows."""
    by_setting: dict[str, list[dict]] = {}
    for row in results["cells"]:
        if (row["samples"], row["length"]) == (samples, length) and row["setting"] != PASS:
            by_setting.setdefault(row["setting"], []).append(row)
    return by_setting


def figures(cells: list[dict]) -> dict[str, str]:
    """The figures of a setting, formatted, by the heads of their columns.

    Seconds and speed are those of the fastest seed, since other work slows a run down.
    """

    def mean(cells: list[dict], key: str, digits: int, scale: float = 1.0) -> str:
        return mean_error([scale * row[key] for row in cells if key in row], digits)

    least = [min(cells, key=lambda row: row["seconds"])]
    return {
        "perplexity": mean(cells, "perplexity", 0 if least[0]["perplexity"] > 1000 else 1),
        "KL": mean(cells, "kl", 3),
        "same token": f"{100 * statistics.fmean(row['agreement'] for row in cells):.1f}%",
        "MB": mean(least, "bytes", 0, 1e-6),
        "tokens/s": mean(least, "tokens_per_second", 1),
        "CPU s": mean(least, "seconds", 0),
    }


def figures_of_methods(results: dict) -> dict[str, list[dict[str, str]]]:
    """Each measured method → its figures at every pattern, empty where there are none."""
    by_setting, methods = cells_of(results), {}
    for label, names in METHOD_ROWS.items():
        at_patterns = [[cells for name in names if (cells := by_setting.get(f"{at}, {name}"))] for at in COLUMNS]
        if any(at_patterns):
            methods[label] = [figures(cells[0]) if cells else {} for cells in at_patterns]
    return methods


def markdown_table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    rules = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, rules, *rows))


def settings_table(by_setting: dict[str, list[dict]]) -> str:
    """The figures of settings, by ascending KL divergence."""
    columns, rows = list(figures(next(iter(by_setting.values())))), []
    for name, cells in sorted(by_setting.items(), key=lambda item: statistics.fmean(row["kl"] for row in item[1])):
        label = name.replace(", shared 0.5", ", λ = 0.5").replace(", shared", ", λ = 0.9").replace("fast", '`"fast"`')
        label = re.sub(r"^shrink ([0-9.]+)", r"`shrink(parameters=\1)`", label)
        rows.append([label, *figures(cells).values()])
    return markdown_table(["", *columns], rows)


def markdown(results: dict) -> str:
    """The tables of a page: methods by patterns, and every other setting by ascending KL divergence."""
    methods = figures_of_methods(results)
    divergences, predictions = [], []
    for method, at_patterns in methods.items():
        seconds = sorted(int(each["CPU s"]) for each in at_patterns if each)
        spent = f"{seconds[0]} to {seconds[-1]}" if seconds[0] < seconds[-1] else str(seconds[0])
        divergences.append([method, *(each.get("KL", "") for each in at_patterns), spent])
        predictions.append(
            [method, *(f"{each['perplexity']}, {each['same token']}" if each else "" for each in at_patterns)]
        )
    predictions += [[name, *(each.get(name, "") for each in methods["SparseGPT"])] for name in ("MB", "tokens/s")]
    in_methods = {f"{at}, {name}" for at in COLUMNS for names in METHOD_ROWS.values() for name in names}
    elsewhere = re.compile("statistics|alone|rotation|bits")  # in other pages
    others = {
        name: cells
        for name, cells in cells_of(results).items()
        if name not in in_methods and not elsewhere.search(name)
    }
    tables = (
        markdown_table(["KL", *COLUMNS, "CPU s"], divergences),
        markdown_table(["perplexity, same token", *COLUMNS], predictions),
        settings_table(others),
    )
    return "\n\n".join(tables)


def quantized_markdown(results: dict) -> str:
    """The settings that round weights, by ascending KL divergence."""
    by_setting = cells_of(results).items()
    return settings_table({name: cells for name, cells in by_setting if "bits" in name and "statistics" not in name})


def phases(results: dict) -> str:
    """Seconds of every phase of the first seed, and of a forward pass over the same tokens."""
    cells = results["cells"]
    names = list(dict.fromkeys(name for row in cells for name in row.get("phases", ())))
    rows = [
        [f"{row['setting']}, {row['samples']} × {row['length']}"]
        + [f"{row['phases'][name]:.0f}" if name in row["phases"] else "–" for name in names]
        for row in cells
        if "phases" in row and row["seed"] == 0
    ]
    return text_table(["setting", *names], rows, 200)


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
    parser.add_argument("--show", action="store_true", help="print the results so far")
    parser.add_argument("--phases", action="store_true", help="print the seconds of the phases so far")
    parser.add_argument("--markdown", action="store_true", help="print the table of a page")
    parser.add_argument("--peer-python", help="interpreter of an environment with llm-compressor")
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
            key = (PASS, 0, *key[2:4], "fastest") if setting == PASS else key
            late = options.minutes and time.perf_counter() - started > 60 * options.minutes
            if options.show or options.phases or options.markdown or late or key in measured:
                continue
            row = cell(options.model, setting, seed, options)
            results["cells"].append({**dict(zip(keys, key, strict=True)), **row})
            path.write_text(json.dumps(results, indent=1) + "\n")
            print(*key, {name: round(value, 3) for name, value in row.items() if name != "phases"}, flush=True)
    if options.markdown:
        print(markdown(results))
    else:
        print(phases(results) if options.phases else tables(results))


if __name__ == "__main__":
    main()
