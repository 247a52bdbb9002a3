"""The paper's tables on the shipped model, with few and short samples: every table runs and has its rows."""

import functools
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / "examples" / "demo_model"
sys.path.insert(0, str(ROOT / "examples"))

import reproduce_paper  # noqa: E402


@pytest.fixture
def table(tmp_path):
    short = tmp_path / "heldout.txt"
    short.write_text((DEMO / "heldout.txt").read_text()[:4000])
    return functools.partial(run, short)


def run(heldout, name, *more):
    given = ["--model", DEMO, "--calibration", DEMO / "calibration.txt", "--datasets", heldout]
    given += ["--tasks", "none", "--samples", 4, "--sequence-length", 32, "--lambdas", 0.5, 1.0, *more]
    return reproduce_paper.main([str(part) for part in ["--table", name, *given]])


def test_the_main_table_compares_the_baseline_with_the_selected_lambda(table, tmp_path, capsys):
    output = tmp_path / "table.json"
    found = table("llama", "--seeds", 0, 1, "--only", "2:4, wanda", "--output", output)
    assert list(found) == ["dense", "2:4, wanda: baseline", "2:4, wanda: MOONSHOT"]
    baseline, ours = found["2:4, wanda: baseline"], found["2:4, wanda: MOONSHOT"]
    assert baseline["λ"] == (1.0, 0.0) and baseline["heldout.txt"].error > 0
    assert found["dense"]["heldout.txt"].value < min(baseline["heldout.txt"].value, ours["heldout.txt"].value)
    assert json.loads(output.read_text())["table"]["2:4, wanda: MOONSHOT"]["heldout.txt"]["value"] > 0
    assert "| 2:4, wanda: baseline | " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("lambda", ["0.6, wanda: λ = 0.5", "0.6, wanda: λ = 1"]),
        ("recompute", [f"0.6, wanda{plus}: λ = {lam}" for plus in ("", " ++") for lam in ("0.5", "1")]),
        ("8", [f"0.6, wanda ({which}): λ = {lam}" for which in ("attention", "all") for lam in ("0.9", "1")]),
    ],
)
def test_other_tables_have_their_rows(table, name, rows):
    assert list(table(name, "--seeds", 0, "--only", "0.6, wanda")) == ["dense", *rows]


def test_sparsities_are_rows(table):
    found = table("sparsity", "--seeds", 0, "--only", "0.6, wanda", "--sparsities", 0.5, 0.7)
    assert list(found) == ["dense", *(f"{s}, wanda: {who}" for s in (0.5, 0.7) for who in ("baseline", "MOONSHOT"))]


def test_win_rates_halve_ties():
    ours, theirs = {"a": 2.0, "b": 1.0}, {"a": 1.0, "b": 1.0}
    assert reproduce_paper.win_rate(ours, theirs, ["a", "b"]) == 75
    assert reproduce_paper.win_rate(theirs, ours, ["a", "b"]) == 25
