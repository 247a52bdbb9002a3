"""Recovery of blocks that lost neurons, heads or experts: all parameters of a block, or the pruned matrices alone.

    python benchmarks/whole_blocks.py --seeds 0      # about 40 minutes of one core; measured cells are not repeated
    python benchmarks/whole_blocks.py --show         # the table of the existing results

Each cell is one run of the product from the dense model in float32: held-out perplexity, processor seconds with one
thread, and the parameters of the smaller model. "2:4" has no changed structure: its recovery trains matrices alone, and
norms and biases in the step of that name.
"""

import time
from pathlib import Path

from cells import add_options, gather, mean_error, run_cells
from common import RESULTS, parser
from transformers import AutoModelForCausalLM, AutoTokenizer

from optimum_moonshot import MoonshotConfig, MoonshotPruner, perplexity
from optimum_moonshot.recover import blockwise

DEMO = Path(__file__).parents[1] / "examples" / "demo_model"
MIXTURE = Path(__file__).parent / "mixture_model"
STRUCTURED = {"solver": "osscar", "pattern": "structured"}
NEURONS = {**STRUCTURED, "targets": ["down_proj"]}
SETTINGS = {
    "0.4 of the neurons": {**NEURONS, "sparsity": 0.4},
    "0.3 of neurons and heads": {**STRUCTURED, "sparsity": 0.3},
    "1/4 of the experts": {"solver": "osscar", "pattern": "experts", "sparsity": 0.25},
    "2:4": {"pattern": "2:4"},
}
MATRICES, VECTORS = "block-wise, pruned matrices alone", "block-wise, with norms and biases"
# Step → the recovery, and which parameters of a block train besides the pruned matrices, None as the product does.
STEPS = {
    "pruned": (None, None),
    MATRICES: ("blockwise", lambda module: {}),
    "block-wise": ("blockwise", None),
    "gradual": ("gradual", None),
    VECTORS: ("blockwise", lambda module: {name: each for name, each in module.named_parameters() if each.ndim == 1}),
}
LAMBDAS = (1.0, 0.5)


def cells(options) -> list[tuple[int, str, str, float]]:
    """(seed, setting, step, λ), in the order of the seeds."""
    return [
        (seed, setting, step, lam)
        for seed in options.seeds
        for setting in options.settings
        for lam in (options.lambdas if setting == "0.3 of neurons and heads" else LAMBDAS[:1])
        for step in options.steps
        if step in applicable(setting)
    ]


def applicable(setting: str) -> tuple[str, ...]:
    if setting == "2:4":
        return "pruned", "block-wise", VECTORS
    return ("pruned", "block-wise") if "experts" in setting else ("pruned", MATRICES, "block-wise", "gradual")


def quality(model, tokenizer) -> float:
    return perplexity(model, tokenizer, str(DEMO / "heldout.txt"), sequence_length=256).value


def load(setting: str):
    folder = MIXTURE if "experts" in setting else DEMO
    return AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval(), AutoTokenizer.from_pretrained(DEMO)


def measure(seed: int, setting: str, step: str, lam: float) -> dict:
    """Run one cell."""
    model, tokenizer = load(setting)
    recover, trains = STEPS[step]
    fields = {**SETTINGS[setting], "lam": lam, "seed": seed, "num_samples": 128, "sequence_length": 256}
    pruner = MoonshotPruner(model, MoonshotConfig(**fields, recover=recover), tokenizer)
    product = blockwise.trainable, blockwise.changes_structure
    try:
        if trains is not None:
            blockwise.trainable, blockwise.changes_structure = trains, lambda patterns: True
        started = time.process_time()
        report = pruner.prune(str(DEMO / "calibration.txt"), progress=False)
        seconds = time.process_time() - started
    finally:
        blockwise.trainable, blockwise.changes_structure = product
    if "neurons" in setting:
        pruner.compact()
    return {
        "perplexity": quality(pruner.model, tokenizer),
        "seconds": seconds,
        "parameters": pruner.model.num_parameters(),
        "losses": [[block.loss_before, block.loss_after, block.steps] for block in report.recovery],
    }


def table(results: dict) -> str:
    """Markdown: perplexity, mean ± standard error over the seeds."""
    columns = [(setting, lam) for setting in SETTINGS for lam in LAMBDAS if gather(results, setting, "pruned", lam)]
    lines = ["| | " + " | ".join(f"{setting}, λ = {lam:g}" for setting, lam in columns) + " |"]
    lines.append("|---|" + "---:|" * len(columns))
    for step in STEPS:
        values = [mean_error(gather(results, setting, step, lam)) for setting, lam in columns]
        if any(values):
            lines.append(f"| {step} | " + " | ".join(values) + " |")
    return "\n".join(lines)


def main() -> None:
    arguments = parser(__doc__)
    add_options(arguments, STEPS, LAMBDAS)
    arguments.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    options = arguments.parse_args()
    dense = lambda: {name: quality(*load(name)) for name in ("2:4", "1/4 of the experts")}  # noqa: E731
    path = RESULTS / "whole_blocks.json"
    print(table(run_cells(path, cells(options), lambda cell: measure(*cell), dense, options)))


if __name__ == "__main__":
    main()
