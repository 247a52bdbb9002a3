"""Displays of reports and pruners: one line, or a text table."""

import dataclasses
import json

import pytest
import torch
from models import make

from optimum_moonshot import MoonshotConfig, MoonshotError, MoonshotPruner
from optimum_moonshot.reports.prune_report import LayerReport, PruneReport
from optimum_moonshot.reports.tables import text_table
from optimum_moonshot.sweep.report import SweepEntry, SweepReport


def make_report(count=3, **changes):
    layers = [
        LayerReport(f"model.layers.{number}.up", (4, 8), 0.9, 0.5, *[0.1] * 6, damping=0.01) for number in range(count)
    ]
    values = dict(skipped={"head": "not selected"}, calibration=None, versions={}, peak_memory=2**30, parameters=96)
    values["config"] = MoonshotConfig(pattern="2:4").to_dict()
    return PruneReport(layers=layers, seconds={"solver": 1.0, "total": 2.5}, **{**values, **changes})


def make_sweep(sparsities=(0.5, 0.7)):
    entries = [
        SweepEntry("unstructured", s, lam, metric, 0.1, 1.0)
        for s in sparsities
        for lam, metric in ((0.5, 12.0), (0.9, 11.0), (1.0, 13.0))
    ]
    return SweepReport("wanda", "calibration perplexity", False, 10.0, entries, {}, None, {"total": 7.0}, {})


def test_a_report_is_one_line():
    assert repr(make_report()) == "PruneReport(3 layers, sparsity 0.5000 (0.5000 of the whole model), loss 0.1, 2.5 s)"
    dataless = make_report()
    dataless.layers = [dataclasses.replace(layer, loss=None) for layer in dataless.layers]
    assert repr(dataless) == "PruneReport(3 layers, sparsity 0.5000 (0.5000 of the whole model), 2.5 s)"
    assert repr(PruneReport({}, [], {}, None, {}, 0, {}, 1)) == "PruneReport(0 layers)"


def test_a_report_shows_the_sparsity_of_the_whole_model():
    report = make_report(parameters=384)  # three layers of 32
    assert report.chosen == 0.25 and report.model_sparsity == 0.125
    assert repr(report) == "PruneReport(3 layers, sparsity 0.5000 (0.1250 of the whole model), loss 0.1, 2.5 s)"
    dense, total = report.table().splitlines()[-2:]
    assert dense == "most of the model stayed dense: 25% of its weights were chosen"
    assert total.startswith("sparsity 0.5000 over 3 layers, 0.1250 of the whole model; ")
    assert "stayed dense" not in make_report(parameters=192).table()
    assert PruneReport({}, [], {}, None, {}, 0, {}, 3).model_sparsity == 0


def test_the_json_has_the_sparsity_of_the_whole_model(tmp_path):
    report = make_report(parameters=384)
    values = json.loads(report.save(tmp_path).read_text())
    assert values["parameters"] == 384 and values["chosen"] == 0.25 and values["model_sparsity"] == 0.125
    assert PruneReport.load(tmp_path) == report


def test_tied_weights_are_counted_once():
    pruner = MoonshotPruner(make("llama-tied-biased"), MoonshotConfig(solver="magnitude", pattern="2:4"))
    report = pruner.prune(progress=False)
    parameters = {id(parameter): parameter for parameter in pruner.model.parameters()}.values()
    assert report.parameters == sum(map(torch.numel, parameters))
    head = pruner.model.lm_head.weight
    assert any(parameter is head for parameter in parameters) and head is pruner.model.get_input_embeddings().weight
    zeros = sum(int((pruner.model.get_submodule(layer.name).weight == 0).sum()) for layer in report.layers)
    assert report.model_sparsity == pytest.approx(zeros / report.parameters, abs=1e-12)


def test_a_report_names_a_mostly_dense_model():
    config = MoonshotConfig(solver="magnitude", pattern="2:4", targets=["self_attn"])
    report = MoonshotPruner(make("mixtral"), config).prune(progress=False)
    assert report.chosen < 0.5 and "most of the model stayed dense" in report.table()


def test_the_loss_is_a_mean_over_the_weights():
    report = make_report(2)
    report.layers = [dataclasses.replace(report.layers[0], shape=(12, 8), loss=0.2), report.layers[1]]
    assert report.loss == pytest.approx((3 * 0.2 + 0.1) / 4)


def test_a_sweep_is_one_line():
    line = "SweepReport(wanda, calibration perplexity, 6 variants, best λ 0.9 at 0.5, 0.9 at 0.7, 7.0 s)"
    assert repr(make_sweep()) == line
    nothing = make_sweep((0.5,))
    nothing.entries = [dataclasses.replace(entry, metric=float("nan")) for entry in nothing.entries]
    assert repr(nothing) == "SweepReport(wanda, calibration perplexity, 3 variants, 7.0 s)"


def test_a_pruner_shows_its_model_and_configuration():
    model = make("llama")
    count = sum(parameter.numel() for parameter in model.parameters())
    expected = f"MoonshotPruner(LlamaForCausalLM, {count:,} parameters, MoonshotConfig(pattern='2:4'))"
    assert repr(MoonshotPruner(model, MoonshotConfig(pattern="2:4"))) == expected


def test_a_table_has_a_row_per_layer():
    lines = make_report().table().splitlines()
    headers = ["layer", "shape", "λ", "sparsity", "L_R mask", "L_R", "L_F mask", "L_F", "damping", "s", "notes"]
    assert [cell.strip() for cell in lines[0].split("  ") if cell.strip()] == headers
    for number, line in enumerate(lines[1:4]):
        assert line.split()[:4] == [f"model.layers.{number}.up", "4×8", "0.9", "0.5000"]
    swept = make_sweep().table().splitlines()
    assert swept[0] == "wanda: calibration perplexity (dense 10), * is the best λ"
    assert swept[1:] == ["  λ  0.5  0.7", "0.5  12   12 ", "0.9  11*  11*", "  1  13   13 "]


def test_cells_are_printed_as_they_are():
    name = "<script>alert('&')</script>"
    report = make_report(1, notes=[name], skipped={name: "<b>"})
    report.layers = [dataclasses.replace(report.layers[0], name=name, notes=("[bold]x[/bold] :smile:", "<i>"))]
    text = report.table(200)
    assert text.count(name) == 3 and f"left dense: {name} (<b>)" in text
    assert "[bold]x[/bold] :smile:; <i>" in " ".join(text.split())


def test_the_table_of_a_long_report_is_complete():
    long = make_report(5000, skipped={f"experts.{number}": "reason" for number in range(5000)})
    assert len(long.table().splitlines()) == 1 + 5000 + 5000 + 1


def test_long_names_wrap_and_other_columns_are_truncated():
    text = text_table(["layer", "n", "notes"], [["a" * 30, "1", "b"]], 20, left=["notes"])
    assert max(map(len, text.splitlines())) <= 20 and text.count("a") == 30 + 1
    assert text_table(["n", "value"], [["a", "b" * 30]], 12).splitlines()[1] == f"a  {'b' * 8}…"
    assert text_table(["n", "value"], [["a", "one two three"]], 12).splitlines()[1:] == ["a    one two", "       three"]


def test_line_breaks_in_a_cell_do_not_break_the_row():
    assert text_table(["layer", "n"], [["a\nb", "1"]], 20).splitlines()[1:] == ["a b    1"]


@pytest.mark.parametrize(
    "content", ["[]", "{}", "{", '{"dense": 1, "entries": [{"lam": 1}]}', '{"dense": 1, "entries": 3}']
)
def test_a_damaged_sweep_is_named(content, tmp_path):
    (tmp_path / "sweep.json").write_text(content)
    with pytest.raises(MoonshotError, match="sweep.json is damaged"):
        SweepReport.load(tmp_path)
