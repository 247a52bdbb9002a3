"""The tables of the guides about real models, from the results of real.py: choices by goal, methods, quantized models.

Usage: python benchmarks/choices.py

writes the tables into docs/choosing.md and docs/quantize.md: run it after every run of real.py.
"""

from pathlib import Path

from common import read
from real import cells_of, figures, markdown, quantized_markdown

DOCS = Path(__file__).parents[1] / "docs"
MODELS = {"SmolLM2": "real-SmolLM2-135M-Instruct", "Gemma": "real-gemma-3-270m"}  # name in the guide → results
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
    "a quarter of the bytes": ("recipe(0.5, bits=4)", "0.5 and 4 bits, fast", "[quantize](quantize.md)"),
    "half of the weights removed": ('recipe(0.5, "recovered")', "0.5, recovered", "[recipes](#recipes)"),
    "2:4, for hardware that computes with it": ('recipe("2:4", "recovered")', "2:4, recovered", "[recipes](#recipes)"),
    "a smaller dense model, for any runtime": ("pruner.shrink(parameters=0.9)", "shrink 0.9", "[shrink](smaller.md)"),
}


def table() -> str:
    """The table in Markdown."""
    measured = cells_of(read(MODELS["SmolLM2"]))
    dense = figures(measured["dense"])
    lines = [f"| goal | setting | {' | '.join(dense)} | guide |", f"|---|---|{'---:|' * len(dense)}---|"]
    lines.append(f"| the dense model | | {' | '.join(dense.values())} | |")
    for goal, (code, setting, guide) in TABLE.items():
        lines.append(f"| {goal} | `{code}` | {' | '.join(figures(measured[setting]).values())} | {guide} |")
    return "\n".join(lines)


def marked(name: str) -> tuple[str, str]:
    """The comments before and after the tables of a model."""
    return f"<!-- {name} -->\n", f"\n<!-- end of {name} -->"


def marked_tables() -> dict[tuple[str, str], str]:
    """Guide, model → the tables between its comments."""
    results = {name: read(file) for name, file in MODELS.items()}
    choosing = {("choosing.md", name): markdown(of_model) for name, of_model in results.items()}
    return choosing | {("quantize.md", name): quantized_markdown(of_model) for name, of_model in results.items()}


def write() -> None:
    """Replace the tables of the guides."""
    guide = DOCS / "choosing.md"
    choices = table()
    before, head, rest = guide.read_text(encoding="utf-8").partition(choices.partition("\n")[0])
    assert head, "the guide has no table of choices"
    guide.write_text(before + choices + "\n\n" + rest.partition("\n\n")[2], encoding="utf-8")
    for (page, name), tables in marked_tables().items():
        begin, end = marked(name)
        before, rest = (DOCS / page).read_text(encoding="utf-8").split(begin)
        (DOCS / page).write_text(before + begin + tables + end + rest.split(end)[1], encoding="utf-8")


if __name__ == "__main__":
    write()
