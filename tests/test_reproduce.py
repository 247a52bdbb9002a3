"""The paper's tables on the shipped model with a few short samples: every table runs and has its rows."""

import functools
import itertools
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from models import make

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
    options = ["--model", DEMO, "--calibration", DEMO / "calibration.txt", "--datasets", heldout]
    options += ["--tasks", "none", "--samples", 4, "--sequence-length", 32, "--lambdas", 0.5, 1.0, *more]
    return reproduce_paper.main([str(part) for part in ["--table", name, *options]])


def test_the_main_table_compares_the_baseline_with_the_selected_lambda(table, tmp_path, capsys):
    output = tmp_path / "table.json"
    rows = table("llama", "--seeds", 0, 1, "--only", "2:4, wanda", "--output", output)
    assert list(rows) == ["Dense", "2:4, Wanda", "2:4, MOONSHOT-Wanda"]
    baseline, ours = rows["2:4, Wanda"], rows["2:4, MOONSHOT-Wanda"]
    assert baseline.lambdas == (1.0, 1.0) and set(ours.lambdas) <= {0.5, 1.0} and baseline.values["heldout.txt"].error
    dense = rows["Dense"].values["heldout.txt"].value
    assert dense < min(row.values["heldout.txt"].value for row in (baseline, ours))
    document = json.loads(output.read_text())
    assert [row["method"] for row in document["table"]] == ["", "Wanda", "MOONSHOT-Wanda"]
    assert document["versions"]["torch"] and document["table"][2]["values"]["heldout.txt"]["value"] > 0
    printed = capsys.readouterr().out
    assert "| Sparsity | Method | heldout.txt | λ |" in printed and "| 2:4 | Wanda | " in printed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "more", "rows"),
    [
        ("16", [0.6], [f"{s}, Wanda, λ = {lam}" for s in ("0.6", "2:4") for lam in ("0.5", "1")]),
        ("1", [0.6, "--only", "0.6, wanda"], [f"0.6, Wanda, λ = {lam}" for lam in (0, 1)]),
        ("6", [0.6, "--only", "0.6"], [f"0.6, Wanda++, λ = {lam}" for lam in ("0.5", "1")]),
        ("4", [0.6, "--only", "0.6, wanda"], [f"0.6, Wanda, λ = {lam}" for lam in ("0.5", "1")]),
        ("8", [0.6, "--only", "wanda"], ["0.6, Wanda", "0.6, MOONSHOT-Wanda", "0.6, MOONSHOT (all)-Wanda"]),
        (
            "sparsity",
            [0.5, 0.6, "--only", "6, wanda", "5, wanda"],
            [f"{s}, {name}" for s in (0.5, 0.6) for name in ("Wanda", "MOONSHOT-Wanda")],
        ),
    ],
)
def test_other_tables_have_their_rows(table, name, more, rows):
    results = table(name, "--seeds", 0, "--sparsities", *more)
    assert list(results) == ([] if name == "4" else ["Dense"]) + rows
    assert name not in ("4", "6") or all(row.values["seconds"].value > 0 for row in results.values() if row.method)


def test_sparsities_share_a_calibration(table, monkeypatch):
    calls, real = [], reproduce_paper.MoonshotPruner.sweep

    def sweep(self, *arguments, **options):
        calls.append(options["sparsities"])
        return real(self, *arguments, **options)

    monkeypatch.setattr(reproduce_paper.MoonshotPruner, "sweep", sweep)
    rows = table("sparsity", "--seeds", 0, "--only", "5, wanda", "7, wanda", "--sparsities", 0.5, 0.7)
    assert calls == [[0.5, 0.7]]
    assert rows["0.7, Wanda"].values["heldout.txt"].value > rows["0.5, Wanda"].values["heldout.txt"].value


def test_image_models_are_compared_with_the_fisher_loss_alone_by_cap(tmp_path, capsys):
    transformers, image = pytest.importorskip("transformers"), pytest.importorskip("PIL.Image")
    model = make("deit")
    model.config.id2label, model.config.label2id = {n: f"c{n}" for n in range(5)}, {f"c{n}": n for n in range(5)}
    model.save_pretrained(tmp_path / "deit")
    transformers.ViTImageProcessorPil(size={"height": 16, "width": 16}).save_pretrained(tmp_path / "deit")
    for label, number in itertools.product(range(5), range(2)):
        folder = tmp_path / "photos" / f"c{label}"
        folder.mkdir(parents=True, exist_ok=True)
        image.new("RGB", (16, 16), (40 * label, 99 * number, 7)).save(folder / f"{number}.png")
    options = ["--model", tmp_path / "deit", "--calibration", tmp_path / "photos", "--datasets", tmp_path / "photos"]
    options = [*options, "--samples", 4, "--seeds", 0, "--lambdas", 0, 0.5, "--only", "0.7, CAP"]
    rows = reproduce_paper.main([str(part) for part in ["--table", "2", *options]])
    assert list(rows) == ["Dense", "0.7, CAP", "0.7, MOONSHOT-CAP"] and rows["0.7, CAP"].lambdas == (0.0,)
    timed = reproduce_paper.main([str(part) for part in ["--table", "4", *options[:-1], "0.6, CAP"]])
    assert list(timed) == ["0.5 to 0.9, CAP, λ = 0", "0.5 to 0.9, CAP, λ = 0.5"]
    assert "win rate" not in capsys.readouterr().out
    with pytest.raises(SystemExit, match="for language models"):
        reproduce_paper.main([str(part) for part in ["--table", "3", *options]])


@pytest.mark.parametrize(
    ("name", "more", "words"),
    [
        ("2", [], "for vision models"),
        ("3", ["--only", "nothing"], "none of 0.1"),
        ("3", ["--lambdas", 0.5], "--lambdas: add 1, the baseline"),
    ],
)
def test_invalid_options_are_rejected_before_measuring(table, name, more, words, monkeypatch):
    monkeypatch.setattr(reproduce_paper, "perplexity", None)
    with pytest.raises(SystemExit, match=words):
        table(name, *more)


def test_every_number_of_the_paper_names_its_settings():
    of_kind = {number: kind for kind, numbers in reproduce_paper.KINDS.items() for number in numbers}
    for number in (str(n) for n in range(1, 20) if n != 7):  # 7 lists the number of rows pruned at a time
        kind = of_kind.get(number, "language")
        settings = reproduce_paper.all_settings(reproduce_paper.TABLES[number], kind, None)
        solver = reproduce_paper.SOLVER_OF.get(number)
        assert [setting for setting in settings if solver in (None, setting.solver)]


def test_win_rates_halve_ties(tmp_path):
    bench = SimpleNamespace(tasks=SimpleNamespace(names=["a", "b"]), kind="language")
    ours, theirs = {"a": 2.0, "b": 1.0}, {"a": 1.0, "b": 1.0}
    assert reproduce_paper.Bench.win_rate(bench, ours, theirs) == {"win rate": 75}
    assert reproduce_paper.Bench.win_rate(bench, theirs, ours) == {"win rate": 25}
