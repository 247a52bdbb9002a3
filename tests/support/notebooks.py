"""Runs the notebook of examples/ without Jupyter, with small sizes and local data."""

import json
from pathlib import Path

import pages
import pytest

from optimum_moonshot.data import sources

PATH = Path(__file__).parents[2] / "examples" / "smollm2.ipynb"
SETTINGS = 'solver, samples, length, steps, windows = "alps", 64, 256, 40, 20'  # in the notebook


def cells() -> list[str]:
    """The sources of the code cells; the notebook is of nbformat 4.5 and stored without outputs."""
    notebook = json.loads(PATH.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5) and notebook["metadata"]["kernelspec"]
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for cell in notebook["cells"]:
        extra = {"execution_count", "outputs"} if cell in code else set()
        assert cell.keys() == {"cell_type", "id", "metadata", "source"} | extra
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    return ["".join(cell["source"]) for cell in code]


def run(folder: Path, monkeypatch: pytest.MonkeyPatch, *settings: str | int) -> dict:
    """Run the cells in `folder`, where the model's name is a folder; returns their names and values.

    Args:
        folder: the working directory, with the model in HuggingFaceTB/SmolLM2-135M-Instruct.
        monkeypatch: pytest's fixture.
        settings: solver, samples, tokens of a window, training steps, and windows of an evaluation.
    """
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sources, "load_dataset", pages.load_dataset)
    monkeypatch.setattr("datasets.load_dataset", pages.load_dataset)
    sources_of_cells, namespace = cells(), {"__name__": "notebook"}
    assert sum(SETTINGS in source for source in sources_of_cells) == 1
    for source in sources_of_cells:
        smaller = source.replace(SETTINGS, f"solver, samples, length, steps, windows = {settings!r}")
        exec(compile(smaller, PATH.name, "exec"), namespace)
    return namespace
