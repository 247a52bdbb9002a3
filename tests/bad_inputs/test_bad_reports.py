"""Damaged reports and manifests: one line that names the file and the field."""

import json

import pytest
from command_line import DEMO, failure
from invalid_inputs import one_line

from optimum_moonshot import MoonshotError, SweepReport
from optimum_moonshot.evaluation.report import EvalReport
from optimum_moonshot.pipeline.run_folder import RunFolder
from optimum_moonshot.reports.prune_report import PruneReport

REPORTS = [
    ("config", None), ("layers", None), ("layers", []), ("layers", [5]), ("skipped", "x"), ("skipped", {"a": 1}),
    ("calibration", "x"), ("seconds", "x"), ("seconds", {"total": "1"}), ("seconds", [1]), ("peak_memory", "x"),
    ("peak_memory", 1.5), ("versions", {"torch": 2}), ("notes", 5), ("notes", "x"), ("notes", [1]),
    ("evaluations", {"a": 1}), ("evaluations", {"a": {"pruned": 1.0}}),
    ("evaluations", {"a": {"pruned": "1", "dense": 1}}),
    ("recovery", [{"name": "x"}]), ("compaction", {"a": 1}), ("compaction", []), ("extra", 1),
]  # fmt: skip
LAYERS = [
    ("name", None), ("shape", [1]), ("shape", "x"), ("shape", [1, 2, 3]), ("shape", [1.5, 2]), ("lam", "x"),
    ("sparsity", None), ("sparsity", True), ("sparsity", "0.5"), ("reconstruction", [1]), ("fisher", {}), ("loss", "x"),
    ("damping", None), ("seconds", None), ("peak_memory", "x"), ("notes", [1]), ("target_sparsity", [1]), ("extra", 1),
]  # fmt: skip


def read(kind, path, values):
    path.write_text(json.dumps(values), encoding="utf-8")
    return kind.load(path)


@pytest.mark.parametrize("field, value", REPORTS)
def test_fields_of_a_report(tmp_path, pruned, field, value):
    good, path = json.loads(json.dumps(pruned.report.to_dict())), tmp_path / "report.json"
    assert read(PruneReport, path, good).to_dict() == pruned.report.to_dict()
    with pytest.raises(
        MoonshotError, match=rf"report\.json is damaged: it is not the report of a run \({field}"
    ) as error:
        read(PruneReport, path, {**good, field: value})
    assert one_line(error.value)


@pytest.mark.parametrize("field, value", LAYERS)
def test_fields_of_a_layers_report(tmp_path, pruned, field, value):
    good, path = json.loads(json.dumps(pruned.report.to_dict())), tmp_path / "report.json"
    layers = [{**good["layers"][0], field: value}, *good["layers"][1:]]
    with pytest.raises(MoonshotError, match=rf"it is not the report of a run \(layers\[0\]\.{field}"):
        read(PruneReport, path, {**good, "layers": layers})


def test_fields_that_are_missing(tmp_path, pruned):
    good, path = json.loads(json.dumps(pruned.report.to_dict())), tmp_path / "report.json"
    for field in ("config", "layers", "skipped", "calibration", "seconds", "peak_memory", "versions"):
        with pytest.raises(MoonshotError, match=rf"\({field} is missing\)"):
            read(PruneReport, path, {name: value for name, value in good.items() if name != field})
    for field in ("name", "shape", "lam", "sparsity"):
        layer = {name: value for name, value in good["layers"][0].items() if name != field}
        with pytest.raises(MoonshotError, match=rf"\(layers\[0\]\.{field} is missing\)"):
            read(PruneReport, path, {**good, "layers": [layer]})


SWEEP = {
    "solver": "wanda", "metric": "loss", "maximize": False, "dense": 1.0, "config": {"seed": 0}, "calibration": None,
    "entries": [{"pattern": "2:4", "sparsity": 0.5, "lam": 1.0, "metric": 2.0, "loss": 0.1, "seconds": 1.0}],
    "seconds": {"total": 1.0}, "versions": {},
}  # fmt: skip


SWEEPS = [
    ("solver", 5), ("maximize", 1), ("dense", "x"), ("entries", None), ("entries", [5]), ("entries", [{}]),
    ("entries", [{**SWEEP["entries"][0], "lam": "x"}]), ("seconds", 1), ("extra", 1),
]  # fmt: skip


@pytest.mark.parametrize("field, value", SWEEPS)
def test_fields_of_a_sweeps_report(tmp_path, field, value):
    path = tmp_path / "sweep.json"
    assert read(SweepReport, path, {**SWEEP, "dense": None}).entries
    with pytest.raises(MoonshotError, match=rf"sweep\.json is damaged: it is not the report of a sweep \({field}"):
        read(SweepReport, path, {**SWEEP, field: value})


EVALUATIONS = [
    [], 5, {}, {"perplexity": {"a": 1.0}}, {"perplexity": {"a": "x"}, "measured_on": {"a": {}}},
    {"accuracy": {"a": None}, "measured_on": {"a": {"images": 1}}}, {"zero_shot": {"accuracy": {"a": 1.0}}},
    {"zero_shot": {"accuracy": {"a": "x"}, "stderr": {}, "num_fewshot": 0, "limit": None, "versions": {}}},
    {"agreement": {"a": 1.0}}, {"agreement": {"a": 1.0}, "measured_on": {"a": {"neighbours": "x"}}},
]  # fmt: skip


@pytest.mark.parametrize("values", EVALUATIONS)
def test_results_of_an_evaluation(tmp_path, values):
    with pytest.raises(MoonshotError, match=r"result\.json contains no results of an evaluation"):
        read(EvalReport, tmp_path / "result.json", values)


@pytest.mark.parametrize("kind", [PruneReport, SweepReport])
def test_missing_and_binary_reports(tmp_path, kind):
    with pytest.raises(MoonshotError, match=r"nothing\.json is not a file"):
        kind.load(tmp_path / "nothing.json")
    with pytest.raises(MoonshotError, match="is not a file"):
        kind.load(tmp_path)
    with pytest.raises(MoonshotError, match="path=5: give a path"):
        kind.load(5)
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(MoonshotError, match=r"binary\.json is damaged"):
        kind.load(tmp_path / "binary.json")


def test_a_broken_manifest_is_named_as_an_option(tmp_path, capsys):
    argv = ["prune", DEMO, "--output", tmp_path / "out", "--solver", "magnitude", "--pattern", "2:4", "--device", "cpu"]
    folder = RunFolder(tmp_path / "out.partial" / "run", "resume_dir")
    folder.open({"the run": {"name": "theirs"}})
    folder.release()
    (tmp_path / "out.partial" / "command.json").write_text("{}")
    for content in ("", "[1]", '{"parts"', "\x00"):
        (tmp_path / "out.partial" / "run" / "run.json").write_text(content)
        status, lines = failure(capsys, *argv)
        assert status == 1 and lines[-1].startswith(f"error: --output {tmp_path / 'out'}: ")
        assert "run.json is damaged" in lines[-1] and "remove the folder to start again" in lines[-1]
