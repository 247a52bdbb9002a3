"""λ of OSSCAR by the fraction of neurons and heads that it removes, one-shot.

    python benchmarks/structured_lambdas.py demo         # the shipped Llama: 2 key-value heads
    python benchmarks/structured_lambdas.py heads opt    # heads_model: 4 of 8; opt_model: 4 heads, ReLU
    python benchmarks/structured_lambdas.py demo --show  # the table of the existing results

A seed draws the calibration windows; all λ and fractions use the same statistics. Heads leave with their key-value
head, and a fraction of them rounds: 0.3 of two is one, 0.1 of four is none. Cells in the results file are not repeated.
"""

import argparse
import functools
from pathlib import Path

import torch
from cells import Cell, add_options, gather, mean_error, run_cells
from common import RESULTS, parser
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging

from optimum_moonshot import MoonshotConfig, MoonshotPruner, perplexity
from optimum_moonshot.sweep.report import SweepEntry

LENGTH, SAMPLES = 256, 128
HERE = Path(__file__).parent
DEMO = HERE.parent / "examples" / "demo_model"
MODELS = {"demo": DEMO, "heads": HERE / "heads_model", "opt": HERE / "opt_model"}
SHARES = {"0.1": 0.1, "0.2": 0.2, "0.3": 0.3, "0.5": 0.5}
LAMBDAS = (1.0, 0.9, 0.5, 0.1)
HEADS = (r"\bo(ut)?_proj$",)  # the layers that read heads
SCOPES = ("neurons", "neurons and heads")


def load(name: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(MODELS[name], dtype=torch.float32).eval()


def quality(model: PreTrainedModel) -> float:
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    return perplexity(model, tokenizer, str(DEMO / "heldout.txt"), sequence_length=LENGTH).value


@functools.lru_cache(maxsize=1)
def swept(name: str, seed: int, scope: str) -> dict[tuple[float, float], SweepEntry]:
    """(λ, share) → result, all from one calibration."""
    config = MoonshotConfig(
        solver="osscar", pattern="structured", sparsity=0.1, ignore=HEADS if scope == "neurons" else (),
        seed=seed, num_samples=SAMPLES, sequence_length=LENGTH,
    )  # fmt: skip
    pruner = MoonshotPruner(load(name), config, AutoTokenizer.from_pretrained(DEMO))
    report = pruner.sweep(
        str(DEMO / "calibration.txt"), lambdas=LAMBDAS, sparsities=list(SHARES.values()), metric=quality, progress=False
    )
    return {(entry.lam, entry.sparsity): entry for entry in report.entries}


def measure(name: str, cell: Cell) -> dict:
    """Run one cell."""
    seed, setting, scope, lam = cell
    entry = swept(name, seed, scope)[lam, SHARES[setting]]
    return {"perplexity": entry.metric, "seconds": entry.seconds}


def table(results: dict) -> str:
    """Markdown: perplexity, mean ± standard error over the seeds."""
    lines = ["| | λ | " + " | ".join(SHARES) + " |", "|---|---|" + "---:|" * len(SHARES)]
    for scope in SCOPES:
        for lam in LAMBDAS:
            values = [mean_error(gather(results, share, scope, lam)) for share in SHARES]
            lines += [f"| {scope} | {lam:g} | " + " | ".join(values) + " |"] if any(values) else []
    return "\n".join(lines)


def run(name: str, options: argparse.Namespace) -> None:
    cells = [
        (seed, setting, scope, lam)
        for seed in options.seeds
        for scope in options.steps
        for setting in SHARES
        for lam in options.lambdas
    ]
    path = RESULTS / f"structured_lambdas-{name}.json"
    dense = functools.partial(quality, load(name))
    results = run_cells(path, cells, functools.partial(measure, name), dense, options)
    print(f"{name}, dense {results['dense']:.2f}\n\n{table(results)}\n")


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("models", nargs="+", choices=MODELS)
    add_options(arguments, SCOPES, LAMBDAS)
    options = arguments.parse_args()
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    for name in options.models:
        run(name, options)


if __name__ == "__main__":
    main()
