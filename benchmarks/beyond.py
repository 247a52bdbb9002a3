"""Ablation of the steps beyond the paper: Fisher allocation ("shares"), learned rotation ("basis"), ALPS, recovery.

    python benchmarks/beyond.py                   # everything, hours; cells in the results file are not repeated
    python benchmarks/beyond.py --settings 0.8 --seeds 0  # one column of the table, one seed
    python benchmarks/beyond.py --model benchmarks/opt_model --name beyond-opt   # a second language model
    python benchmarks/beyond.py --show                    # the table and the plot of the existing results

Each cell is one run of the product: pruning (and recovery) from the dense model in float32, held-out perplexity, and
processor seconds with one thread, which other load affects little. The file is written after every cell, so an
interrupted benchmark resumes.
"""

import math
import statistics
import time
from functools import partial
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from cells import add_options, gather, least, mean_error, run_cells
from common import RESULTS, parser
from transformers import AutoModelForCausalLM, AutoTokenizer

from optimum_moonshot import MoonshotConfig, MoonshotPruner, perplexity

ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / "examples" / "demo_model"
SETTINGS = {
    **{share: {"sparsity": float(share)} for share in ("0.5", "0.6", "0.7", "0.8")},
    **{pattern: {"pattern": pattern} for pattern in ("2:4", "4:8")},
}
WIDER = {pattern: {"pattern": pattern} for pattern in ("8:16", "16:32")}  # only if named on the command line
SHARES, BASIS, ALPS = {"allocation": "fisher"}, {"rotation": "learned"}, {"solver": "alps"}
DISTILLED = {"recover": "distill", "recover_steps": 40}
STEPS = {
    "SparseGPT": {},
    "shares": SHARES,
    "basis": BASIS,
    "ALPS": ALPS,
    "basis, shares": {**BASIS, **SHARES},
    "ALPS, basis, shares": {**ALPS, **BASIS, **SHARES},
    "block-wise recovery": {"recover": "blockwise"},
    "gradual recovery": {"recover": "gradual"},
    "ALPS, basis, shares, gradual": {**ALPS, **BASIS, **SHARES, "recover": "gradual"},
    "ALPS, basis, shares, distill": {**ALPS, **BASIS, **SHARES, **DISTILLED},
    "recovered": {**ALPS, **SHARES, "fisher": "shared", **DISTILLED},
}
# Not for n:m: the sparsity is the same in every layer, and stages of recovery gain nothing.
UNSTRUCTURED = ("shares", "basis, shares", "gradual recovery")
LAMBDAS = (1.0, 0.5)


def cells(options) -> list[tuple[int, str, str, float]]:
    """(seed, setting, step, λ), in the order of the seeds."""
    return [
        (seed, setting, step, lam)
        for seed in options.seeds
        for setting in options.settings
        for step in options.steps
        for lam in options.lambdas
        if ":" not in setting or step not in UNSTRUCTURED
    ]


def measure(model_folder: str, seed: int, setting: str, step: str, lam: float) -> dict:
    """Run one cell; returns perplexity and seconds."""
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    fields = dict(STEPS[step])
    if ":" in setting:
        fields.pop("allocation", None)
        fields |= {"recover": "blockwise"} if fields.get("recover") == "gradual" else {}
    config = MoonshotConfig(**SETTINGS[setting], **fields, lam=lam, seed=seed, num_samples=128, sequence_length=256)
    started = time.process_time()
    report = MoonshotPruner(model, config, tokenizer).prune(str(DEMO / "calibration.txt"), progress=False)
    seconds = time.process_time() - started
    value = perplexity(model, tokenizer, str(DEMO / "heldout.txt"), sequence_length=256).value
    return {"perplexity": value, "seconds": seconds, "sparsity": report.sparsity}


def dense_perplexity(model_folder: str) -> float:
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    return perplexity(model, tokenizer, str(DEMO / "heldout.txt"), sequence_length=256).value


def table(results: dict) -> str:
    """Markdown: perplexity, mean ± standard error over the seeds, and seconds of one core at 0.8."""
    lines = [
        "| step | λ | " + " | ".join(SETTINGS) + " | seconds, one core |",
        "|---|---|" + "---:|" * (len(SETTINGS) + 1),
    ]
    for step in STEPS:
        for lam in LAMBDAS:
            values = [mean_error(gather(results, setting, step, lam)) for setting in SETTINGS]
            if any(values):
                seconds = gather(results, "0.8", step, lam, "seconds")
                cost = f"{statistics.fmean(seconds):.0f}" if seconds else ""
                lines.append(f"| {step} | {lam:g} | " + " | ".join([*values, cost]) + " |")
    return "\n".join(lines)


def picture(results: dict, path: Path) -> None:
    """Plot the excess loss over the dense model by step: one group of bars per setting."""
    settings = [setting for setting in SETTINGS if gather(results, setting, "SparseGPT", 1.0)]
    figure, axes = plt.subplots(figsize=(9, 3.8), layout="constrained")
    colours = plt.get_cmap("viridis")([i / (len(STEPS) - 1) for i in range(len(STEPS))])
    width = 0.8 / len(STEPS)
    for k, (step, colour) in enumerate(zip(STEPS, colours, strict=True)):
        for i, setting in enumerate(settings):
            best = least(results, setting, step, LAMBDAS)
            if best is not None:
                height = math.log(best / results["dense"])
                shown = step in axes.get_legend_handles_labels()[1]
                axes.bar(i + (k - (len(STEPS) - 1) / 2) * width, height, width, color=colour, label="_" * shown + step)
    axes.set(xticks=range(len(settings)), xticklabels=settings, ylabel="loss above the dense model's, nats")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=150, metadata={"Software": None})


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--model", default=str(DEMO))
    arguments.add_argument("--name", default="beyond-llama", help="of the files in results/")
    arguments.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=[*SETTINGS, *WIDER])
    add_options(arguments, STEPS, LAMBDAS)
    options = arguments.parse_args()
    torch.set_num_threads(1)
    path = RESULTS / f"{options.name}.json"
    dense = partial(dense_perplexity, options.model)
    results = run_cells(path, cells(options), lambda cell: measure(options.model, *cell), dense, options)
    print(table(results))
    picture(results, path.with_suffix(".png"))


if __name__ == "__main__":
    main()
