"""Smaller dense models at 0.9, 0.75 and 0.6 of the parameters: this package and one-shot peers, recovered or not.

    python benchmarks/shrink_methods.py demo                 # the shipped Llama; resumable, cells are not repeated
    python benchmarks/shrink_methods.py heads mixture        # benchmarks/heads_model, benchmarks/mixture_model
    python benchmarks/shrink_methods.py demo --recoveries block-wise distilled --seeds 0 --minutes 30
    python benchmarks/shrink_methods.py mixture --methods "REAP of llm-compressor"   # in an environment with it
    python benchmarks/shrink_methods.py demo --show          # tables and picture of the existing results

Every cell starts from the dense model in float32 and the same 128 × 256 calibration tokens by seed, and ends with a
model of at most so many parameters (the mixture: the nearest number of experts; whole blocks: as few as suffice).
"one-shot" stops there. "block-wise" is `recover="blockwise"`, for this package's cells, and "own-distilled"
`recover="distill"`, for those of `shrink`. "distilled" trains all parameters end to end on the calibration tokens
towards the dense model's logits, the same for every method.
Tokens per second of a forward pass (8 × 256 tokens) and of greedy generation (64 tokens) are those of the processor
time of one thread, which other processes change less than the elapsed time. So are the seconds of a cell, about 4 of
which are its evaluation.
"""

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from cells import Cell, add_options, gather, mean_error, run_cells
from common import RESULTS, parser
from shrink_distill import distill
from shrink_peers import Batches, flap, magnitude, short_gpt, slice_gpt
from shrink_picture import picture
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging

from optimum_moonshot import MoonshotConfig, MoonshotPruner, perplexity
from optimum_moonshot.data.text import load_calibration

HERE = Path(__file__).parent
DEMO = HERE.parent / "examples" / "demo_model"
MODELS = {"demo": DEMO, "heads": HERE / "heads_model", "mixture": HERE / "mixture_model"}
SHARES = {"0.9": 0.9, "0.75": 0.75, "0.6": 0.6}
RECOVERIES = ("one-shot", "block-wise", "distilled", "own-distilled")
RECOVER = {"block-wise": "blockwise", "own-distilled": "distill"}  # recovery → `recover` of this package
LAMBDAS = (1.0, 0.5)
LENGTH, SAMPLES = 256, 128
FORWARD, PROMPT, NEW, REPEATS = 8, 64, 64, 3  # sequences of a forward pass; tokens of generation; medians of so many
PEERS: dict[str, Callable[[PreTrainedModel, Batches, int], PreTrainedModel]] = {
    "magnitude, neurons": functools.partial(magnitude, with_heads=False),
    "magnitude": functools.partial(magnitude, with_heads=True),
    "FLAP uniform, neurons": functools.partial(flap, with_heads=False, uniform=True),
    "FLAP uniform": functools.partial(flap, with_heads=True, uniform=True),
    "FLAP global, neurons": functools.partial(flap, with_heads=False, uniform=False),
    "FLAP global": functools.partial(flap, with_heads=True, uniform=False),
    "ShortGPT": short_gpt,
    "SliceGPT": slice_gpt,
}
OWN = "shrink"
EXPERTS = {"frequency": "frequency", "REAP": "reap", "OSSCAR": "osscar"}  # method → solver
LLM_COMPRESSOR = "REAP of llm-compressor"
TWO_OBJECTIVES = (OWN, "OSSCAR")  # this package's


def methods(name: str) -> list[str]:
    return [*EXPERTS, LLM_COMPRESSOR, OWN] if name == "mixture" else [*PEERS, OWN]


def cells(name: str, options: argparse.Namespace) -> list[Cell]:
    """One-shot before recovered, and all methods of a seed before the next; λ and seeds where a method has them."""
    return [
        (seed, share, f"{method}, {recovery}", lam)
        for recovery in options.recoveries
        for seed in options.seeds
        for method in options.methods or [each for each in methods(name) if each != LLM_COMPRESSOR]
        if method in methods(name) and (seed == options.seeds[0] or not method.startswith("magnitude"))
        for share in options.steps
        for lam in (options.lambdas if method in TWO_OBJECTIVES else LAMBDAS[:1])
        if recovery not in RECOVER or method in (TWO_OBJECTIVES if recovery == "block-wise" else (OWN,))
    ]


def load(name: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(MODELS[name], dtype=torch.float32).eval()


def quality(model: PreTrainedModel) -> dict:
    """Held-out perplexity, parameters, and tokens per second."""
    text, tokenizer = str(DEMO / "heldout.txt"), AutoTokenizer.from_pretrained(DEMO)
    value = perplexity(model, tokenizer, text, sequence_length=LENGTH).value
    return {"perplexity": value, "parameters": model.num_parameters(), **rates(model)}


@torch.no_grad()
def rates(model: PreTrainedModel) -> dict[str, float]:
    ids = torch.randint(3, 1000, (FORWARD, LENGTH), generator=torch.Generator().manual_seed(0))

    def generate() -> None:
        model.generate(ids[:1, :PROMPT], max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, pad_token_id=0)

    runs = {"forward": (lambda: model(ids, use_cache=False), ids.numel()), "generation": (generate, NEW)}
    return {
        kind: tokens / statistics.median(_seconds(call) for _ in range(REPEATS))
        for kind, (call, tokens) in runs.items()
    }


def _seconds(call: Callable[[], object]) -> float:
    started = time.process_time()
    call()
    return time.process_time() - started


def share_of_experts(model: PreTrainedModel, share: float) -> float:
    """The fraction of the experts whose removal leaves the nearest number of parameters."""
    config = model.config
    cost = config.num_hidden_layers * config.hidden_size * (3 * config.moe_intermediate_size + 1)  # with the router's
    return round((1 - share) * model.num_parameters() / cost) / config.num_experts


def llm_compressor(model: PreTrainedModel, batches: Batches, share: float) -> PreTrainedModel:
    """As many experts fewer by llm-compressor's REAP, which runs each block with the inputs of the pruned ones."""
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.pruning.reap import REAPPruningModifier

    ids = torch.cat([batch["input_ids"] for batch in batches])
    data = Dataset.from_dict({"input_ids": ids.tolist(), "attention_mask": torch.ones_like(ids).tolist()})
    recipe = [REAPPruningModifier(sparsity=share_of_experts(model, share) + 1e-6)]  # it rounds the number down
    sizes = {"num_calibration_samples": len(ids), "max_seq_length": LENGTH}
    oneshot(model=model, dataset=data, recipe=recipe, moe_calibrate_all_experts=False, **sizes)
    return model


def shrink_own(model: PreTrainedModel, method: str, share: float, shared: dict) -> PreTrainedModel:
    """By this package; `shared` are fields of the configuration."""
    tokenizer, text = AutoTokenizer.from_pretrained(DEMO), str(DEMO / "calibration.txt")
    if method == OWN:
        config = MoonshotConfig(solver="osscar", pattern="structured", sparsity=0, **shared)
        pruner = MoonshotPruner(model, config, tokenizer)
        pruner.shrink(text, parameters=share, progress=False)
    else:
        gone = share_of_experts(model, share)
        config = MoonshotConfig(solver=EXPERTS[method], pattern="experts", sparsity=gone, **shared)
        pruner = MoonshotPruner(model, config, tokenizer)
        pruner.prune(text, progress=False)
    return pruner.model


def measure(name: str, cell: Cell) -> dict:
    """Run one cell."""
    seed, setting, step, lam = cell
    method, _, recovery = step.rpartition(", ")
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    data = load_calibration(
        str(DEMO / "calibration.txt"), tokenizer, num_samples=SAMPLES, sequence_length=LENGTH, seed=seed
    )
    dense, share, started = load(name), SHARES[setting], time.process_time()
    if method in PEERS:
        small = PEERS[method](dense, data.batches, int(share * dense.num_parameters()))
    elif method == LLM_COMPRESSOR:
        small = llm_compressor(load(name), data.batches, share)
    else:
        recover = RECOVER.get(recovery)
        shared = {"lam": lam, "seed": seed, "num_samples": SAMPLES, "sequence_length": LENGTH, "recover": recover}
        small = shrink_own(load(name), method, share, shared)
    if recovery == "distilled":
        distill(small, dense, data.batches, seed)
    return {**quality(small.eval()), "seconds": time.process_time() - started}


def table(results: dict, name: str) -> str:
    """Markdown: perplexity, mean ± standard error over the seeds; of the smallest, parameters, speed and seconds."""
    head = [*SHARES, "parameters", "forward", "generation", "seconds"]
    lines = ["| | λ | " + " | ".join(head) + " |", "|---|---|" + "---:|" * len(head)]
    for recovery in RECOVERIES:
        for method in methods(name):
            for lam in LAMBDAS:
                step = f"{method}, {recovery}"
                values = [mean_error(gather(results, share, step, lam)) for share in SHARES]
                if any(values):
                    lines.append(f"| {step} | {lam:g} | " + " | ".join([*values, *_costs(results, step, lam)]) + " |")
    return "\n".join(lines)


def _costs(results: dict, step: str, lam: float) -> list[str]:
    """At the smallest share measured, relative to the dense model; seconds are the mean of all."""
    cells_of = functools.partial(gather, results, step=step, lam=lam)
    share = next(share for share in reversed(SHARES) if cells_of(share))
    ratios = [
        statistics.fmean(cells_of(share, key=key)) / results["dense"][key]
        for key in ("parameters", "forward", "generation")
    ]
    seconds = statistics.fmean(each for share in SHARES for each in cells_of(share, key="seconds"))
    return [f"{ratios[0]:.3f}", f"{ratios[1]:.2f}×", f"{ratios[2]:.2f}×", f"{seconds:.0f}"]


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("models", nargs="+", choices=MODELS)
    arguments.add_argument("--recoveries", nargs="+", default=list(RECOVERIES), choices=RECOVERIES)
    named = [*PEERS, OWN, *EXPERTS, LLM_COMPRESSOR]
    arguments.add_argument("--methods", nargs="+", choices=named, help="without it all but llm-compressor's")
    add_options(arguments, SHARES, LAMBDAS)
    options = arguments.parse_args()
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    for name in options.models:
        path = RESULTS / f"shrink-{name}.json"
        dense = lambda name=name: quality(load(name))  # noqa: E731
        results = run_cells(path, cells(name, options), functools.partial(measure, name), dense, options)
        print(f"{name}, dense {results['dense']['perplexity']:.2f}\n\n{table(results, name)}\n")
        picture(results, methods(name), path.with_suffix(".png"))


if __name__ == "__main__":
    main()
