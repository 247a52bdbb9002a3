"""A sweep equals separate runs, reports the measured metric and keeps the model dense until a variant is chosen."""

import csv
import dataclasses
import math

import pytest
import torch
from llama_runs import assert_same, weights
from models import make, token_batches

from optimum_moonshot import MoonshotConfig, MoonshotError, MoonshotPruner
from optimum_moonshot.sweep import run as sweep_module
from optimum_moonshot.sweep.report import (
    SweepEntry,
    SweepReport,
    choice,
    means,
    plot_by_lambda,
    plot_by_sparsity,
    save_all,
    table,
)

LAMBDAS = (0.5, 1.0)


def config(**changes):
    return MoonshotConfig(**{"sparsity": 0.5, "num_samples": 6, "sequence_length": 12, "batch_size": 2, **changes})


def sweep(model=None, changes=None, **arguments):
    pruner = MoonshotPruner(model or make("llama"), config(**(changes or {})))
    return pruner, pruner.sweep(token_batches(), **{"lambdas": LAMBDAS, "progress": False, **arguments})


@pytest.mark.parametrize("solver", ["sparsegpt", "wanda"])
def test_every_variant_equals_a_separate_run(solver):
    pruner, report = sweep(changes={"solver": solver}, sparsities=[0.5, 0.75], patterns=["unstructured", "2:4"])
    assert len(report.entries) == 2 * (2 + 1)
    for entry in report.entries:
        alone = MoonshotPruner(
            make("llama"),
            config(solver=solver, pattern=entry.pattern, sparsity=entry.sparsity, lam=entry.lam, recompute=False),
        )
        alone.prune(token_batches(), progress=False)
        variant = pruner._sweep.solved.variants[report.entries.index(entry)]
        for layer in variant.selection.layers:
            expected = alone.model.get_submodule(layer.name).weight
            torch.testing.assert_close(variant.store.weight(layer), expected, rtol=1e-4, atol=1e-6)
        losses = [layer.loss for layer in alone.report.layers]
        assert entry.loss == pytest.approx(sum(losses) / len(losses), rel=1e-3)


def test_calibration_perplexity_is_the_perplexity_of_the_calibration_windows():
    pruner, report = sweep()
    assert report.metric == "calibration perplexity"
    batches = token_batches()

    def perplexity(model):
        total = 0.0
        for batch in batches:
            for ids in batch["input_ids"]:
                with torch.no_grad():
                    total += model(input_ids=ids[None], labels=ids[None]).loss.item()
        return math.exp(total / 6)

    pruner.model.eval()
    assert report.dense == pytest.approx(perplexity(pruner.model), rel=1e-5)
    best = report.best()
    pruner.choose(best)
    assert best.metric == pytest.approx(perplexity(pruner.model), rel=1e-5)


@pytest.mark.parametrize(("lambdas", "passes"), [([0.5, 1.0], 2), ([1.0], 2)])
def test_the_dense_perplexity_is_measured_in_the_backward_passes(lambdas, passes, monkeypatch):
    """At λ = 1 alone there are no backward passes, and it requires a separate pass."""
    seen = []
    measured = sweep_module.mean_loss
    monkeypatch.setattr(sweep_module, "mean_loss", lambda prepared: seen.append(prepared) or measured(prepared))
    pruner, report = sweep(lambdas=lambdas)
    assert len(seen) == passes
    pruner.model.eval()
    with torch.no_grad():
        assert report.dense == pytest.approx(math.exp(measured(seen[0])), rel=1e-6)


def test_the_model_stays_dense_until_a_variant_is_chosen(tmp_path):
    model = make("llama").train()
    before = weights(model)
    pruner, report = sweep(model)
    assert_same(model, before)
    assert model.training
    with pytest.raises(MoonshotError, match="not pruned yet"):
        pruner.save_pretrained(tmp_path)
    chosen = report.entries[0]
    assert pruner.choose(chosen).config["lam"] == chosen.lam
    assert pruner.report.sparsity == pytest.approx(0.5, abs=0.01)
    pruner.save_pretrained(tmp_path / "out")
    with pytest.raises(MoonshotError, match="sweep"):
        pruner.choose(chosen)


def test_variants_are_applied_within_a_context():
    pruner, report = sweep()
    before = weights(pruner.model)
    for entry in report.entries:
        with pruner.applied(entry) as model:
            assert (model.model.layers[0].mlp.up_proj.weight == 0).float().mean() == pytest.approx(0.5, abs=0.01)
        assert_same(pruner.model, before)
    with pytest.raises(MoonshotError, match="not of this sweep"), pruner.applied(dataclasses.replace(entry, lam=0.3)):
        pass


def test_a_function_can_be_the_metric():
    seen = []

    def zero_fraction(model):
        assert not model.training and not torch.is_grad_enabled()
        seen.append(float((model.model.layers[0].mlp.up_proj.weight == 0).float().mean()))
        return seen[-1]

    _, report = sweep(lambdas=[1.0], sparsities=[0.25, 0.75], metric=zero_fraction, maximize=True)
    assert [entry.metric for entry in report.entries] == seen[1:] and report.dense == seen[0] == 0
    assert seen[1:] == pytest.approx([0.25, 0.75], abs=0.01)
    assert report.metric == "zero fraction"


def test_an_interrupted_sweep_resumes(tmp_path, monkeypatch):
    from optimum_moonshot.solvers.sparsegpt import SparseGPT

    _, expected = sweep()
    real, countdown = SparseGPT.solve, [9]

    def solve(self, *arguments):
        countdown[0] -= 1
        if countdown[0] < 0:
            raise KeyboardInterrupt
        return real(self, *arguments)

    monkeypatch.setattr(SparseGPT, "solve", solve)
    model = make("llama")
    before = weights(model)
    with pytest.raises(KeyboardInterrupt):
        sweep(model, work_dir=tmp_path / "work")
    assert_same(model, before)
    calls = []
    monkeypatch.setattr(SparseGPT, "solve", lambda self, *arguments: calls.append(1) or real(self, *arguments))
    pruner, report = sweep(model, work_dir=tmp_path / "work")
    assert len(calls) == len(LAMBDAS) * len(pruner._sweep.solved.prepared.selection.layers) - 9
    assert [entry.metric for entry in report.entries] == pytest.approx([e.metric for e in expected.entries], rel=1e-6)
    pruner.choose(report.best())
    pruner.save_pretrained(tmp_path / "saved")
    assert not any((tmp_path / "work").iterdir())


@pytest.mark.parametrize("place", ["solve", "measure"])
def test_a_failure_restores_the_model(place, monkeypatch):
    model = make("llama").train()
    before = weights(model)

    def fail(*_):
        raise KeyError("boom")

    if place == "solve":
        monkeypatch.setattr("optimum_moonshot.solvers.sparsegpt.SparseGPT.solve", fail)
    calls = iter([lambda model: 1.0, fail])
    metric = "calibration" if place == "solve" else lambda model: next(calls)(model)
    with pytest.raises(KeyError):
        sweep(model, metric=metric)
    assert_same(model, before)
    assert model.training
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lambdas": []}, "lambdas"),
        ({"lambdas": [0.5, 0.5]}, "twice"),
        ({"lambdas": [1.5]}, "lam=1.5"),
        ({"lambdas": [None]}, r"lambdas=\[None\]: give numbers"),
        ({"lambdas": [[0.5]]}, "give a list of numbers"),
        ({"maximize": "yes"}, "maximize='yes'"),
        ({"metric": lambda model: None}, "metric: it returned None; let it return a number"),
        ({"metric": lambda model: torch.ones(2)}, "metric: it returned tensor"),
        ({"work_dir": 3}, "work_dir=3"),
        ({"sparsities": 0.5}, "sparsities"),
        ({"patterns": "2:4"}, "patterns"),
        ({"patterns": ["2:4", "7:5"]}, "7:5"),
        ({"metric": "accuracy"}, "metric"),
        ({"changes": {"recover": "blockwise"}}, "recover"),
        ({"changes": {"recompute": True}}, "recompute"),
    ],
)
def test_mistakes_are_named(arguments, message):
    with pytest.raises(MoonshotError, match=message):
        sweep(**arguments)


def test_a_sweep_needs_data():
    with pytest.raises(MoonshotError, match="calibration"):
        MoonshotPruner(make("llama"), config(solver="magnitude")).sweep(None, progress=False)


def report(seed=0, maximize=False, lambdas=(0.0, 0.5, 1.0), sparsities=(0.5, 0.7)):
    entries = [
        SweepEntry("unstructured", s, lam, 10 * s + (lam - 0.5) ** 2 + 0.1 * seed, 0.1, 1.0)
        for s in sparsities
        for lam in lambdas
    ]
    return SweepReport("wanda", "perplexity", maximize, 4.0, entries, {"seed": seed}, None, {"total": 1.0}, {})


def test_layers_without_the_fisher_loss_are_solved_once(monkeypatch):
    from optimum_moonshot.solvers.sparsegpt import SparseGPT

    calls, real = [], SparseGPT.solve
    monkeypatch.setattr(SparseGPT, "solve", lambda self, *arguments: calls.append(1) or real(self, *arguments))
    pruner, report = sweep(changes={"fisher_layers": "attention"}, lambdas=[0.0, 0.5, 1.0])
    assert len(calls) == 3 * (4 * 3 + 3)  # decoder layers · (four attention layers per λ, three others)
    monkeypatch.undo()
    for entry, variant in zip(report.entries, pruner._sweep.solved.variants, strict=True):
        alone = MoonshotPruner(make("llama"), config(fisher_layers="attention", lam=entry.lam, recompute=False))
        alone.prune(token_batches(), progress=False)
        for layer, expected in zip(variant.selection.layers, alone.report.layers, strict=True):
            stored = variant.store.reports[layer.name]
            assert (stored.lam, stored.loss) == (expected.lam, pytest.approx(expected.loss, rel=1e-3))
    variants = pruner._sweep.solved.variants
    total = sum(variant.solving for variant in variants)
    assert total == pytest.approx(sum(r.seconds for each in variants for r in each.store.reports.values()))


@pytest.mark.parametrize(("allocation", "function"), [("alpha", "tail_exponent"), ("owl", "outlier_share")])
def test_scores_that_do_not_depend_on_lambda_are_computed_once(allocation, function, monkeypatch):
    from optimum_moonshot.allocate import block_scores as module

    calls, real = [], getattr(module, function)
    monkeypatch.setattr(module, function, lambda *arguments: calls.append(1) or real(*arguments))
    pruner, report = sweep(changes={"allocation": allocation}, sparsities=[0.5, 0.7])
    assert len(calls) == (len(pruner._sweep.solved.prepared.selection.layers) if allocation == "alpha" else 3)
    for entry, variant in zip(report.entries, pruner._sweep.solved.variants, strict=True):
        settings = dict(allocation=allocation, sparsity=entry.sparsity, lam=entry.lam, recompute=False)
        alone = MoonshotPruner(make("llama"), config(**settings))
        alone.prune(token_batches(), progress=False)
        targets = [variant.pattern_of(layer).sparsity for layer in variant.selection.layers]
        assert [layer.target_sparsity for layer in alone.report.layers] == targets
        assert alone.report.notes == variant.notes


def test_notes_equal_those_of_a_separate_run():
    changes = {"solver": "osscar", "pattern": "structured"}
    pruner, report = sweep(changes=changes, sparsities=[0.01, 0.5], lambdas=[1.0])
    for entry, variant in zip(report.entries, pruner._sweep.solved.variants, strict=True):
        alone = MoonshotPruner(make("llama"), config(**changes, sparsity=entry.sparsity, lam=1.0))
        assert alone.prune(token_batches(), progress=False).notes == variant.notes
    assert any("keep all columns" in note for note in pruner._sweep.solved.variants[0].notes)
    assert not any("keep all columns" in note for note in pruner._sweep.solved.variants[1].notes)


def test_choosing_while_a_variant_is_applied_is_refused():
    pruner, report = sweep()
    with pytest.raises(MoonshotError, match="call choose after the block"), pruner.applied(report.entries[0]):
        pruner.choose(report.entries[1])
    pruner.choose(report.entries[1])


def test_a_metric_without_a_name_is_called_a_metric():
    assert sweep(metric=lambda model: 1.0, lambdas=[1.0])[1].metric == "metric"


def test_an_unusable_folder_is_named_by_its_argument(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(MoonshotError, match="work_dir="):
        sweep(work_dir=tmp_path / "file")


def test_the_best_variant_has_the_smallest_or_the_largest_metric():
    assert report().best(sparsity=0.7).lam == 0.5
    assert report(maximize=True).best(sparsity=0.7).lam == 1.0  # 0 and 1 tie: the larger λ
    with pytest.raises(MoonshotError, match="best of what"):
        report().best()
    with pytest.raises(MoonshotError, match="the sweep has"):
        report().best(pattern="2:4")


def with_metrics(report, metrics):
    """The report with other metrics at these indices of its entries."""
    entries = [dataclasses.replace(e, metric=metrics.get(n, e.metric)) for n, e in enumerate(report.entries)]
    return dataclasses.replace(report, entries=entries)


def test_a_metric_that_is_not_finite_is_never_the_best(tmp_path):
    broken = with_metrics(report(), {0: math.nan, 3: math.inf, 4: math.nan})
    assert broken.best(sparsity=0.5).lam == choice([broken], "unstructured", 0.5) == 0.5
    assert broken.best(sparsity=0.7).lam == choice([broken], "unstructured", 0.7) == 1.0
    assert "nan*" not in broken.table() and broken.table().count("*") == 3  # two marks and the legend
    broken.save(tmp_path)
    text = (tmp_path / "sweep.json").read_text()
    assert "NaN" not in text and "Infinity" not in text
    again = SweepReport.load(tmp_path)
    assert math.isnan(again.entries[0].metric) and again.entries[1] == broken.entries[1]
    nothing = with_metrics(report(sparsities=(0.5,)), dict.fromkeys(range(3), math.nan))
    assert choice([nothing], "unstructured", 0.5) is None and nothing.table().count("*") == 1
    nothing.save(tmp_path / "nothing")
    with pytest.raises(MoonshotError, match="NaN for every"):
        nothing.best()


def drawn(monkeypatch, function, reports):
    """The figure that the plot function saves."""
    figures = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda self, path, dpi: figures.append(self))
    function(reports, "unused.png")
    return figures[0]


def test_the_plot_by_lambda_has_lines_marks_and_changes(monkeypatch):
    reports = [report(0), report(1)]
    figure = drawn(monkeypatch, plot_by_lambda, reports)
    left, right = figure.axes
    metrics = means(reports)
    for number, sparsity in enumerate((0.5, 0.7)):
        line = left.containers[number]
        assert list(line[0].get_ydata()) == [metrics["unstructured", sparsity, lam].value for lam in (0.0, 0.5, 1.0)]
        change = [100 * (r.entries[3 * number + 1].metric / r.entries[3 * number + 2].metric - 1) for r in reports]
        assert right.containers[number][0].get_ydata()[1] == pytest.approx(sum(change) / 2)
    ends = {
        tuple(point)
        for marks in left.collections
        if hasattr(marks, "get_offsets")
        for point in marks.get_offsets().tolist()
    }
    assert {(lam, metrics["unstructured", 0.5, lam].value) for lam in (0.0, 1.0)} <= ends
    assert left.get_ylabel() == "perplexity" and "λ" in left.get_xlabel() and "%" in right.get_ylabel()
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["one objective", "best λ", "0.5", "0.7"]
    assert len(drawn(monkeypatch, plot_by_lambda, [report(sparsities=(0.5,))]).axes) == 1  # a single panel


@pytest.mark.parametrize(("solver", "single"), [("wanda", 1.0), ("cap", 0.0)])
def test_the_plot_by_sparsity_compares_with_the_single_objective(monkeypatch, solver, single):
    one = dataclasses.replace(report(), solver=solver)
    left, right = drawn(monkeypatch, plot_by_sparsity, [one]).axes
    baseline, best = (list(line[0].get_ydata()) for line in left.containers)
    metrics = means([one])
    assert baseline == [metrics["unstructured", s, single].value for s in (0.5, 0.7)]
    assert best == [metrics["unstructured", s, 0.5].value for s in (0.5, 0.7)]
    assert all(value < 0 for value in right.containers[1][0].get_ydata())
    assert [text.get_text() for text in right.texts] == ["λ=0.5", "λ=0.5"]
    without = dataclasses.replace(one, entries=[e for e in one.entries if e.lam == 0.5])
    assert len(drawn(monkeypatch, plot_by_sparsity, [without]).axes) == 1


def test_a_metric_that_is_not_finite_is_marked_in_the_plot(monkeypatch):
    broken = with_metrics(report(), {0: math.inf, 3: math.nan})
    names = [text.get_text() for text in drawn(monkeypatch, plot_by_lambda, [broken]).legends[0].get_texts()]
    assert names.count("not finite") == 1


def test_seeds_give_means_and_standard_errors():
    metric = means([report(0), report(1), report(2)])["unstructured", 0.5, 0.5]
    assert metric.value == pytest.approx(5.1) and metric.error == pytest.approx(0.1 / math.sqrt(3))
    assert choice([report(0), report(1)], "unstructured", 0.5) == 0.5
    assert "5.1 ± 0.058*" in table([report(0), report(1), report(2)])
    with pytest.raises(MoonshotError, match="reports"):
        means([report(), report(lambdas=(0.0, 1.0))])


def test_reports_are_saved_and_loaded(tmp_path):
    report().save(tmp_path)
    assert SweepReport.load(tmp_path) == report()
    with open(tmp_path / "sweep.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 6 and float(rows[0]["metric"]) == report().entries[0].metric and rows[0]["seed"] == "0"
    save_all([report(0), report(1)], tmp_path / "both")
    for name in ("metric_by_lambda.png", "metric_by_sparsity.png"):
        assert (tmp_path / "both" / name).stat().st_size > 10_000
