"""Gain of the channel permutation after a learned rotation, for n:m.

    python benchmarks/neuron_order.py                     # cells in the results file are not repeated
    python benchmarks/neuron_order.py --patterns 2:4 --seeds 0
    python benchmarks/neuron_order.py --show              # the table of the existing results

The rotation is learned once per pattern and seed. The model is then pruned twice with each λ, with permuted channels
and in the original order: held-out perplexity of the shipped Llama by SparseGPT.
"""

import copy
import json
import statistics
from pathlib import Path

import torch
from beyond import DEMO
from common import RESULTS, machine, parser
from transformers import AutoModelForCausalLM, AutoTokenizer

from optimum_moonshot import MoonshotConfig, MoonshotPruner, perplexity
from optimum_moonshot.model.layers import find_structure
from optimum_moonshot.model.structured_groups import probe_inputs
from optimum_moonshot.rotate import run as rotating
from optimum_moonshot.rotate.basis import Basis
from optimum_moonshot.rotate.spaces import find_all_spaces

WAYS = ("as they were", "in the order found")
CALIBRATION = {"num_samples": 128, "sequence_length": 256}


def rotated(pattern: str, seed: int) -> tuple[torch.nn.Module, torch.nn.Module, dict]:
    """The rotated model in the original and the permuted channel order, and the objective."""
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()
    config = MoonshotConfig(pattern=pattern, lam=1.0, rotation="learned", seed=seed, **CALIBRATION)
    learned, captured = rotating.rotations, {}
    rotating.rotations = lambda *arguments: captured.setdefault("changes", learned(*arguments))
    try:
        report = MoonshotPruner(model, config, AutoTokenizer.from_pretrained(DEMO)).rotate(
            str(DEMO / "calibration.txt"), progress=False
        )
    finally:
        rotating.rotations = learned
    back = {space.name: change.argsort(-1) for space, change in captured["changes"].items() if space.permuted}
    before = copy.deepcopy(model)
    structure = find_structure(before)
    spaces, _ = find_all_spaces(before, probe_inputs(before), True, [layer.name for layer in structure.layers()])
    basis = Basis(before, structure.blocks, [space for space in spaces if space.name in back])
    basis.keep()
    basis.write({space: back[space.name] for space in basis.spaces})
    names = ("objective_before", "objective_learned", "objective_after", "seconds")
    return before, model, {name: getattr(report, name) for name in names}


def measure(model: torch.nn.Module, pattern: str, seed: int, lam: float) -> float:
    """Held-out perplexity of a pruned copy of a model."""
    model, tokenizer = copy.deepcopy(model), AutoTokenizer.from_pretrained(DEMO)
    config = MoonshotConfig(pattern=pattern, lam=lam, seed=seed, **CALIBRATION)
    MoonshotPruner(model, config, tokenizer).prune(str(DEMO / "calibration.txt"), progress=False)
    return perplexity(model, tokenizer, str(DEMO / "heldout.txt"), sequence_length=256).value


def table(cells: list[dict]) -> str:
    """Markdown: means over the seeds."""
    lines = ["| pattern | λ | neurons " + " | neurons ".join(WAYS) + " | seeds |", "|---|---|---:|---:|---:|"]
    for pattern in dict.fromkeys(cell["pattern"] for cell in cells):
        of = [cell for cell in cells if cell["pattern"] == pattern]
        for lam in of[0]["perplexity"]:
            values = [[cell["perplexity"][lam][way] for cell in of] for way in WAYS]
            means = " | ".join(f"{statistics.fmean(each):.2f}" for each in values)
            lines.append(f"| {pattern} | {lam} | {means} | {len(of)} |")
    return "\n".join(lines)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--patterns", nargs="+", default=["2:4", "4:8"])
    arguments.add_argument("--lambdas", nargs="+", type=float, default=[1.0, 0.9])
    arguments.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    arguments.add_argument("--show", action="store_true")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    path: Path = RESULTS / "neuron_order.json"
    results = json.loads(path.read_text()) if path.exists() else {"machine": machine(), "cells": []}
    measured = {(cell["pattern"], cell["seed"]) for cell in results["cells"]}
    for seed in options.seeds:
        for pattern in options.patterns:
            if options.show or (pattern, seed) in measured:
                continue
            *models, objective = rotated(pattern, seed)
            values = {
                f"{lam:g}": {way: measure(model, pattern, seed, lam) for way, model in zip(WAYS, models, strict=True)}
                for lam in options.lambdas
            }
            results["cells"].append({"pattern": pattern, "seed": seed, **objective, "perplexity": values})
            path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
            print(results["cells"][-1], flush=True)
    print(table(results["cells"]))


if __name__ == "__main__":
    main()
