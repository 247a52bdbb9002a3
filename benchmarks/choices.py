"""The choices that docs/choosing.md compares, from the JSON in results/: quality, bytes, speed and time.

Usage: python benchmarks/choices.py

prints the table and writes it into the guide: run it after every benchmark that it reads. Quality and bits per weight
are those of the shipped Llama (beyond.py, quantized.py), speeds those of a random Llama of the shape of 1B (generate.py
--quantized): the shipped one is too small for its speed to depend on its weights.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from cells import gather

RESULTS = Path(__file__).parent / "results"
GUIDE = Path(__file__).parents[1] / "docs" / "choosing.md"
DENSE_BITS = 16
RECOVERED = "all, recovered"
ONE_SHOT = "ALPS, basis, shares"


def read(name: str) -> dict:
    """The results of one benchmark."""
    content = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return content.get("results", content)


@dataclass(frozen=True)
class Choice:
    """A setting of the pruned model, and the step and λ of its cell in results/."""

    setting: str  # "2:4" or "0.6", or "2:4, 4" with the bits of its survivors; "dense, 4" removes nothing
    step: str
    lam: float = 1.0

    def mean(self, key: str) -> float:
        """The mean over the seeds: perplexity, seconds of one core."""
        name = "quantized-llama" if "," in self.setting else "beyond-llama"
        cell = (self.setting, self.step, self.lam)
        rows = [row for row in read(name)["cells"] if (row["setting"], row["step"], row["lam"]) == cell]
        return fmean(row[key] for row in rows)

    @property
    def bits(self) -> float:
        """Bits per weight of the pruned layers in a 16-bit checkpoint; in 16 bits the mask determines them."""
        if "," in self.setting:
            return self.mean("bits")
        return Choice(f"{self.setting}, {DENSE_BITS}", "SparseGPT").mean("bits")

    @property
    def speed(self) -> float | None:
        """Tokens per second relative to dense, on one thread; None if not measured."""
        pattern, _, bits = self.setting.partition(", ")
        name = {"dense": f"int{bits}"}.get(pattern, f"{pattern} int{bits}" if bits else pattern)
        runs = {run["setting"]: run for run in read("quantized_generate")["runs"] if run["threads"] == 1}
        return runs[name]["tokens_per_second"] / runs["dense"]["tokens_per_second"] if name in runs else None


# goal → setting in Python, choice, guide; at most six, with the one for a dense model.
TABLE = {
    "4× smaller with the least loss (dense, 4 bits)": (
        "MoonshotConfig(bits=4)",
        Choice("dense, 4", "SparseGPT"),
        "[quantize](quantize.md)",
    ),
    "fewer than 3 bits per weight": (
        'recipe(0.6, "recovered", bits=4)',
        Choice("0.6, 4", "recovered"),
        "[quantize](quantize.md)",
    ),
    "about 2 bits per weight": (
        'recipe(0.8, "recovered", bits=4)',
        Choice("0.8, 4", "recovered"),
        "[quantize](quantize.md)",
    ),
    "2:4 in 16 bits, without training": (
        'recipe("2:4", "one-shot")',
        Choice("2:4", ONE_SHOT),
        "[recipes](#recipes)",
    ),
    "high sparsity in 16 bits": (
        'recipe(0.8, "recovered")',
        Choice("0.8", RECOVERED),
        "[recover](recover.md)",
    ),
}


def table() -> str:
    """The table in Markdown, with the last row on models that are smaller and dense."""
    names = ("goal", "setting", "perplexity", "bits per weight", "speed", "seconds", "guide")
    lines = [f"| {' | '.join(names)} |", "|---|---|---:|---:|---:|---:|---|"]
    for goal, (setting, choice, guide) in TABLE.items():
        quality, seconds = f"{choice.mean('perplexity'):.1f}", f"{choice.mean('seconds'):.0f}"
        figures = f"{quality} | {choice.bits:.2f} | {choice.speed:.1f} | {seconds}"
        lines.append(f"| {goal} | `{setting}` | {figures} | {guide} |")
    smaller = gather(read("shrink-demo"), "0.75", "shrink, one-shot", 1.0)
    seconds = fmean(gather(read("shrink-demo"), "0.75", "shrink, one-shot", 1.0, "seconds"))
    lines.append(
        f"| a smaller dense model, for any runtime | `pruner.shrink(parameters=0.75)` | {fmean(smaller):.1f} | "
        f"{0.75 * DENSE_BITS:.2f} | | {seconds:.0f} | [shrink](smaller.md) |"
    )
    return "\n".join(lines)


def write(rows: str) -> None:
    """Replace the table of the guide."""
    header = rows.partition("\n")[0]
    before, _, rest = GUIDE.read_text(encoding="utf-8").partition(header)
    GUIDE.write_text(before + rows + "\n\n" + rest.partition("\n\n")[2], encoding="utf-8")


if __name__ == "__main__":
    print(table())
    write(table())
