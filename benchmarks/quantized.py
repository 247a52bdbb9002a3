"""Perplexity by bits per weight: dense and sparse models with survivors of 16, 8, 4 and 3 bits.

    python benchmarks/quantized.py                      # everything, hours; measured cells are not repeated
    python benchmarks/quantized.py --steps SparseGPT --lambdas 1 --seeds 0    # minutes
    python benchmarks/quantized.py --model benchmarks/opt_model --name quantized-opt
    python benchmarks/quantized.py --show               # the table and the picture of the existing results

Each cell is one run of the product in float32, as in beyond.py. Bits per weight are those of a 16-bit checkpoint with
one scale per 128 inputs. A setting "2.5 bits" is an allocation of sparsity and bits to matrices by that budget. The
package offers no 2 bits: "dense, 2" has the codes -1, 0 and 1 by the same solver, for comparison.
"""

import statistics
import time
from functools import partial
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from beyond import DEMO, dense_perplexity
from cells import add_options, gather, mean_error, run_cells
from common import RESULTS, parser
from transformers import AutoModelForCausalLM, AutoTokenizer

from optimum_moonshot import MoonshotConfig, MoonshotPruner, perplexity
from optimum_moonshot.objective import grid

GROUP, SCALE_BITS = 128, 16
PATTERNS = ("dense", "2:4", "0.5", "0.6", "0.7", "0.8")
BITS = (16, 8, 4, 3)
BUDGETS = ("2 bits", "2.5 bits", "3 bits", "3.5 bits")
SETTINGS = (
    "dense, 2",
    *(f"{pattern}, {bits}" for pattern in PATTERNS for bits in BITS if pattern != "dense" or bits < 16),
    *BUDGETS,
)
STEPS = ("SparseGPT", "one-shot", "gradual")
LAMBDAS = (1.0, 0.9, 0.5)
grid.BITS, grid._FRACTIONS[2] = (8, 4, 3, 2), (0.3, 36)


def configuration(setting: str, step: str, lam: float, seed: int) -> MoonshotConfig | None:
    """The configuration of a cell; None for one that is not measured."""
    common = dict(lam=lam, seed=seed, num_samples=128, sequence_length=256, quant_group=GROUP)
    pattern, _, bits = setting.partition(", ")
    if not bits:
        budget = {"allocation": "fisher", "bits_per_weight": float(pattern.split()[0])}
        return None if step == "gradual" else MoonshotConfig(**common, **budget, **_method(step))
    common["bits"] = None if bits == "16" else int(bits)
    if pattern == "dense":
        recovery = {"recover": "blockwise"} if step == "gradual" else {}
        return MoonshotConfig(**common, **_method(step), **recovery)
    if step == "SparseGPT":
        return MoonshotConfig(**common, **({"pattern": pattern} if ":" in pattern else {"sparsity": float(pattern)}))
    if step == "gradual":
        common["recover"] = "blockwise" if ":" in pattern else "gradual"
    return MoonshotConfig.recipe(pattern if ":" in pattern else float(pattern), "one-shot", **common)


def _method(step: str) -> dict:
    return {} if step == "SparseGPT" else {"rotation": "learned"}


def measure(model_folder: str, seed: int, setting: str, step: str, lam: float) -> dict:
    """Run one cell; returns perplexity, seconds, sparsity and bits per weight."""
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    config = configuration(setting, step, lam, seed)
    started = time.process_time()
    report = MoonshotPruner(model, config, tokenizer).prune(str(DEMO / "calibration.txt"), progress=False)
    seconds = time.process_time() - started
    value = perplexity(model, tokenizer, str(DEMO / "heldout.txt"), sequence_length=256).value
    return {"perplexity": value, "seconds": seconds, "sparsity": report.sparsity, "bits": half_bits(report)}


def half_bits(report) -> float:
    """Bits per weight of a float32 report with values and scales of 16 bits."""
    total = sum(layer.shape[0] * layer.shape[1] for layer in report.layers)
    bits = 0.0
    for layer in report.layers:
        size = layer.shape[0] * layer.shape[1]
        values = (1 - layer.sparsity) * size
        scales = layer.shape[0] * -(-layer.shape[1] // GROUP)
        saved = 16 * values if layer.bits is None else (32 - SCALE_BITS) * scales
        bits += 8 * layer.packed_bytes - saved
    return bits / total


def table(results: dict) -> str:
    """Markdown: mean perplexity ± standard error, with the bits per weight of the first step."""
    columns = [(step, lam) for step in STEPS for lam in LAMBDAS if any_value(results, step, lam)]
    lines = ["| setting | bits per weight | " + " | ".join(f"{step}, λ = {lam:g}" for step, lam in columns) + " |"]
    lines.append("|---|---:|" + "---:|" * len(columns))
    for setting in SETTINGS:
        values = [mean_error(gather(results, setting, *column)) for column in columns]
        bits = [bits for column in columns for bits in gather(results, setting, *column, "bits")]
        if any(values):
            lines.append(f"| {setting} | {bits[0]:.2f} | " + " | ".join(values) + " |")
    return "\n".join(lines)


def any_value(results: dict, step: str, lam: float) -> bool:
    return any((row["step"], row["lam"]) == (step, lam) for row in results["cells"])


def picture(results: dict, path: Path) -> None:
    """Perplexity against bits per weight, a line per sparsity, for the best λ of each step."""
    steps = [step for step in STEPS if any(row["step"] == step for row in results["cells"])]
    figure, panels = plt.subplots(1, len(steps), figsize=(4.5 * len(steps), 3.8), layout="constrained", sharey=True)
    panels = [panels] if len(steps) == 1 else list(panels)
    first, lines = panels[0], {}
    for axes, step in zip(panels, steps, strict=True):
        for number, pattern in enumerate((*PATTERNS, "by budget")):
            names = BUDGETS if pattern == "by budget" else [f"{pattern}, {bits}" for bits in (*BITS, 2)]
            points = sorted(point for name in names for point in best_point(results, name, step))
            if points:
                (line,) = axes.plot(*zip(*points, strict=True), marker="o", markersize=4, color=f"C{number}")
                lines.setdefault(pattern, line)
        axes.axhline(results["dense"], color="black", linewidth=0.8, linestyle="--")
        axes.set(title=step, xlabel="bits per weight", xscale="log", xticks=[2, 3, 4, 6, 8], xlim=(1.4, 10))
        axes.get_xaxis().set_major_formatter("{x:g}")
        axes.minorticks_off()
        axes.spines[["top", "right"]].set_visible(False)
    first.set(ylabel="perplexity", yscale="log", yticks=[33, 35, 40, 50, 60, 80])
    first.get_yaxis().set_major_formatter("{x:g}")
    first.minorticks_off()
    panels[-1].legend(lines.values(), lines, frameon=False, fontsize=8)
    figure.savefig(path, dpi=150, metadata={"Software": None})


def best_point(results: dict, setting: str, step: str) -> list[tuple[float, float]]:
    """Bits per weight and the mean perplexity of the best λ, if measured."""
    values = {lam: gather(results, setting, step, lam) for lam in LAMBDAS}
    means = {lam: statistics.fmean(each) for lam, each in values.items() if each}
    if not means:
        return []
    lam = min(means, key=means.__getitem__)
    return [(statistics.fmean(gather(results, setting, step, lam, "bits")), means[lam])]


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--model", default=str(DEMO))
    arguments.add_argument("--name", default="quantized-llama", help="of the files in results/")
    arguments.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=SETTINGS)
    add_options(arguments, STEPS, LAMBDAS)
    options = arguments.parse_args()
    torch.set_num_threads(1)
    path = RESULTS / f"{options.name}.json"
    selected = [
        (seed, setting, step, lam)
        for seed in options.seeds
        for step in options.steps
        for lam in options.lambdas
        for setting in options.settings
        if configuration(setting, step, lam, seed) is not None
    ]
    dense = partial(dense_perplexity, options.model)
    results = run_cells(path, selected, lambda cell: measure(options.model, *cell), dense, options)
    print(table(results))
    picture(results, path.with_suffix(".png"))


if __name__ == "__main__":
    main()
