"""Predicted and measured loss of removing whole blocks, from the models of this repository.

    python benchmarks/blocks.py                        # results/blocks.json
    python benchmarks/blocks.py --models examples/demo_model

Every set of one, two or three blocks is skipped in turn, and the held-out perplexity measured. The predictions are
computed on calibration windows of each seed: block influence (ShortGPT, the sum over a set), the mixture of
reconstruction error and Fisher loss by λ, and the calibration loss without each block (`BlockLosses`: the sum over a
set, or the loss of the summed changes). Compared are the rank correlation (Spearman) with the measured loss within the
sets of one size, and the perplexity of the set that each criterion removes.
"""

import json
import statistics
import time
from itertools import combinations
from pathlib import Path

import torch
from block_losses import BlockLosses
from common import RESULTS, write
from quality import DEMO, demo_parser
from scipy.stats import spearmanr
from transformers import AutoModelForCausalLM, AutoTokenizer

from optimum_moonshot import MoonshotConfig
from optimum_moonshot.evaluation.metrics import perplexity
from optimum_moonshot.model.depth import skipping
from optimum_moonshot.model.layers import find_blocks
from optimum_moonshot.pipeline.inputs import prepare
from optimum_moonshot.pipeline.selection import Subject, select
from optimum_moonshot.shrink.blocks import BlockScores, score_blocks

ROOT = Path(__file__).parents[1]
MODELS = ("examples/demo_model", "benchmarks/opt_model", "benchmarks/mixture_model")
LAMBDAS = (0.0, 0.5, 0.9, 1.0)


def criteria(scores: BlockScores, losses: BlockLosses) -> dict:
    """Name → predicted loss of a set of blocks."""
    by_lam = {f"λ = {lam:g}": lambda blocks, lam=lam: scores.predict(blocks, lam) for lam in LAMBDAS}
    alone = scores.fisher.diagonal()
    return {
        "block influence": lambda blocks: float(scores.influence[list(blocks)].sum()),
        **by_lam,
        "λ = 0, without interactions": lambda blocks: float(alone[list(blocks)].sum()),
        "measured alone": lambda blocks: float(losses.losses[list(blocks)].sum()),
        "measured, summed before the head": losses.predict,
    }


def measured(model, tokenizer, sets, options) -> dict[tuple[int, ...], float]:
    """Held-out perplexity without each set of blocks."""
    modules = [module for _, module in find_blocks(model)]
    results = {}
    for blocks in sets:
        with skipping(modules[block] for block in blocks):
            result = perplexity(
                model, tokenizer, str(DEMO / "heldout.txt"), sequence_length=options.tokens, max_windows=options.windows
            )
        results[blocks] = result.value
    return results


def one_model(name: str, options) -> dict:
    model = AutoModelForCausalLM.from_pretrained(ROOT / name, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    count = len(find_blocks(model))
    sets = [each for size in range(min(4, count)) for each in combinations(range(count), size)]
    if options.reuse:
        stored = json.loads((RESULTS / f"{options.name}.json").read_text())["results"]["models"][name]["perplexity"]
        losses = {tuple(json.loads(blocks)): value for blocks, value in stored.items()}
    else:
        losses = measured(model, tokenizer, sets, options)
    runs = []
    for seed in range(options.seeds):
        config = MoonshotConfig(sparsity=0.5, seed=seed, num_samples=options.samples, sequence_length=options.tokens)
        started = time.perf_counter()
        prepared = prepare(
            Subject(model, tokenizer, progress=False), select(model, config), str(DEMO / "calibration.txt")
        )
        scores = score_blocks(prepared)
        seconds = {"scores": time.perf_counter() - started}
        started = time.perf_counter()
        alone = BlockLosses(prepared)
        seconds["losses"] = time.perf_counter() - started
        runs.append(compare(scores, alone, losses) | {"seconds": seconds})
    show(name, losses, runs)
    return {"perplexity": {str(list(blocks)): value for blocks, value in losses.items()}, "seeds": runs}


def compare(scores: BlockScores, alone: BlockLosses, losses: dict[tuple[int, ...], float]) -> dict:
    results: dict = {"influence": scores.influence.tolist(), "reconstruction": scores.reconstruction.tolist()}
    results |= {
        "fisher": scores.fisher.tolist(),
        "losses": alone.losses.tolist(),
        "predicted": {},
        "correlation": {},
        "removed": {},
    }
    for name, predict in criteria(scores, alone).items():
        predicted = {blocks: predict(blocks) for blocks in losses if blocks}
        results["predicted"][name] = {str(list(blocks)): value for blocks, value in predicted.items()}
        for size in sorted({len(blocks) for blocks in predicted}):
            sets = [blocks for blocks in predicted if len(blocks) == size]
            rank = spearmanr([predicted[each] for each in sets], [losses[each] for each in sets]).statistic
            best = min(sets, key=predicted.__getitem__)
            results["correlation"].setdefault(name, {})[size] = float(rank)
            results["removed"].setdefault(name, {})[size] = {"blocks": best, "perplexity": losses[best]}
    return results


def show(name: str, losses: dict, runs: list[dict]) -> None:
    sizes = sorted({len(blocks) for blocks in losses} - {0})
    print(f"{name}: dense {losses[()]:.2f}; least", *(min(v for k, v in losses.items() if len(k) == s) for s in sizes))
    for criterion in runs[0]["correlation"]:
        cells = []
        for size in sizes:
            mean = lambda field: statistics.mean(field(run) for run in runs)  # noqa: E731
            rank = mean(lambda run, size=size: run["correlation"][criterion][size])  # noqa: B023
            value = mean(lambda run, size=size: run["removed"][criterion][size]["perplexity"])  # noqa: B023
            cells.append(f"{rank:6.2f} {value:9.2f} {runs[0]['removed'][criterion][size]['blocks']}")
        print(f"  {criterion:33}", *cells)


def main() -> None:
    arguments = demo_parser(__doc__, "blocks")
    arguments.add_argument("--models", nargs="+", default=list(MODELS))
    arguments.add_argument("--windows", type=int, default=100, help="held-out windows")
    arguments.add_argument("--reuse", action="store_true", help="take the perplexities from the file of results")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    write(
        options.name, {"options": vars(options), "models": {name: one_model(name, options) for name in options.models}}
    )


if __name__ == "__main__":
    main()
