"""Recovery of the shipped Llama after pruning: block-wise, gradual, and distillation of the whole model.

    python benchmarks/distill.py                          # everything; measured cells are not repeated
    python benchmarks/distill.py --samples 128 --steps distill --seeds 0
    python benchmarks/distill.py --show                   # the table of the existing results

Each cell is one run of the product in float32 at λ = 1, on windows of 256 tokens of the model's calibration text, and
its held-out perplexity; seconds are those of one core. "0.4 of the neurons" is OSSCAR's, "2:4" SparseGPT's. 400 windows
are the whole text.
"""

import time
from functools import partial

import torch
from beyond import DEMO, dense_perplexity
from cells import add_options, gather, mean_error, run_cells
from common import RESULTS, parser
from transformers import AutoModelForCausalLM, AutoTokenizer

from optimum_moonshot import MoonshotConfig, MoonshotPruner, perplexity

PATTERNS = {
    "0.4 of the neurons": {"solver": "osscar", "pattern": "structured", "sparsity": 0.4, "targets": ["down_proj"]},
    "2:4": {"pattern": "2:4"},
}
SAMPLES = (128, 400)
STEPS = {
    "one shot": {},
    "blockwise": {"recover": "blockwise"},
    "gradual": {"recover": "gradual"},
    "distill": {"recover": "distill"},
    "distill, 150 steps": {"recover": "distill", "recover_steps": 150},
}


def measure(seed: int, setting: str, step: str, lam: float) -> dict:
    """Run one cell; returns perplexity, seconds, steps and parameters that are not zero."""
    pattern, _, samples = setting.rpartition(", ")
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    common = dict(lam=lam, seed=seed, num_samples=int(samples), sequence_length=256)
    config = MoonshotConfig(**common, **PATTERNS[pattern], **STEPS[step])
    started = time.process_time()
    report = MoonshotPruner(model, config, tokenizer).prune(str(DEMO / "calibration.txt"), progress=False)
    seconds = time.process_time() - started
    value = perplexity(model, tokenizer, str(DEMO / "heldout.txt"), sequence_length=256).value
    losses = [[block.loss_before, block.loss_after, block.steps] for block in report.recovery]
    return {"perplexity": value, "seconds": seconds, "recovery": losses}


def table(results: dict) -> str:
    """Markdown: mean perplexity ± standard error, and seconds of the first seed."""
    settings = [f"{pattern}, {samples}" for pattern in PATTERNS for samples in SAMPLES]
    lines = ["| recovery | " + " | ".join(settings) + " |", "|---|" + "---:|" * len(settings)]
    for step in STEPS:
        cells = []
        for setting in settings:
            seconds = gather(results, setting, step, 1.0, "seconds")
            value = mean_error(gather(results, setting, step, 1.0))
            cells.append(f"{value} ({seconds[0]:.0f} s)" if seconds else "")
        lines.append(f"| {step} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    arguments = parser(__doc__)
    add_options(arguments, STEPS, [1.0])
    arguments.add_argument("--samples", nargs="+", type=int, default=SAMPLES)
    arguments.add_argument("--patterns", nargs="+", default=list(PATTERNS), choices=list(PATTERNS))
    options = arguments.parse_args()
    torch.set_num_threads(1)
    cells = [
        (seed, f"{pattern}, {samples}", step, 1.0)
        for seed in options.seeds
        for samples in options.samples
        for pattern in options.patterns
        for step in options.steps
    ]
    dense = partial(dense_perplexity, str(DEMO))
    print(table(run_cells(RESULTS / "distill.json", cells, lambda cell: measure(*cell), dense, options)))


if __name__ == "__main__":
    main()
