"""The choices that docs/choosing.md compares on SmolLM2-135M, from the results of real.py.

Usage: python benchmarks/choices.py

prints the table and writes it into the guide: run it after every run of real.py.
"""

from pathlib import Path

from common import read
from real import cells_of, columns

GUIDE = Path(__file__).parents[1] / "docs" / "choosing.md"
MODEL = "real-SmolLM2-135M-Instruct"
# Goal → setting in Python, setting of real.py, guide; at most six.
TABLE = {
    "half of the bytes, the same answers": (
        'MoonshotConfig(solver="magnitude", bits=8)',
        "8 bits, magnitude",
        "[quantize](quantize.md)",
    ),
    "a third of the bytes, with the least loss": (
        'MoonshotConfig(solver="alps", lam=1, bits=4)',
        "4 bits, ALPS",
        "[quantize](quantize.md)",
    ),
    "a quarter of the bytes": (
        'MoonshotConfig(solver="alps", lam=1, bits=3)',
        "3 bits, ALPS",
        "[quantize](quantize.md)",
    ),
    "half of the weights removed": ('recipe(0.5, "recovered")', "0.5, recovered", "[recipes](#recipes)"),
    "2:4, for hardware that computes with it": ('recipe("2:4", "recovered")', "2:4, recovered", "[recipes](#recipes)"),
    "a smaller dense model, for any runtime": ("pruner.shrink(parameters=0.9)", "shrink 0.9", "[shrink](smaller.md)"),
}


def table() -> str:
    """The table in Markdown."""
    measured = cells_of(read(MODEL))
    lines = ["| goal | setting | perplexity | KL | same token | MB | tokens/s | CPU s | guide |"]
    lines.append("|---|---|---:|---:|---:|---:|---:|---:|---|")
    dense = " | ".join(columns(measured["dense"]))
    lines.append(f"| the dense model | | {dense} | |")
    for goal, (code, setting, guide) in TABLE.items():
        lines.append(f"| {goal} | `{code}` | {' | '.join(columns(measured[setting]))} | {guide} |")
    return "\n".join(lines)


def write(rows: str) -> None:
    """Replace the table of the guide."""
    header = rows.partition("\n")[0]
    before, _, rest = GUIDE.read_text(encoding="utf-8").partition(header)
    GUIDE.write_text(before + rows + "\n\n" + rest.partition("\n\n")[2], encoding="utf-8")


if __name__ == "__main__":
    print(table())
    write(table())
