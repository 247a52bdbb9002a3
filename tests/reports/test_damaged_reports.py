"""The values of a report, replaced by hostile ones: a `MoonshotError` of one line, or a report that works."""

import copy
import json
import math
import random

import pytest
import yaml
from checkpoints import pruned
from invalid_inputs import one_line

from optimum_moonshot import MoonshotError, PruneReport, SweepReport, convert, verify
from optimum_moonshot.checkpoint.card import Facts, render
from optimum_moonshot.checkpoint.measuring import record
from optimum_moonshot.evaluation.metrics import Perplexity
from optimum_moonshot.reports.plots import plot_report
from optimum_moonshot.sweep.report import save_all

HOSTILE = [
    None, True, 0, -1, 3, 2**63, 10**400, 1e308, -1e308, 5e-324, float("nan"), float("inf"), "", "$\\frac{$", "x$",
    "a\nb\x00", "\ud800", "9:9" * 2000, [], [0, 0], [[]], ["x", 1], {}, {"": []}, {"a\nb": 1},
]  # fmt: skip
CANDIDATE = {"allowed": ["blocks"], "removed": {"blocks": 1}, "loss": 0.1, "cost": 5}
# Parts that few runs have.
RARE = {
    "compaction": {"parameters": [10, 5], "config": {"w": [4, 3]}, "zeros": {"x": "y"}},
    "recovery": [{"name": "model.layers.0", "loss_before": 0.2, "loss_after": 0.1, "steps": 2, "seconds": 1.0}],
    "rotation": {
        "spaces": {"a": [1, 16]}, "refused": {"b": "why"}, "objective_before": 0.5, "objective_learned": 0.4,
        "objective_after": 0.4, "steps": 3, "seconds": 1.0, "weighted": "fisher", "untied_bytes": 5, "notes": ["n"],
        "permuted": {"p": 2}, "scales": {"s": 2.0},
    },
    "shrink": {
        "unit": "parameters", "budget": 5, "dense": 10, "chosen": CANDIDATE, "blocks": [1], "widths": {"n": [4, 3]},
        "considered": [CANDIDATE], "measured": {"m": 0.1}, "parameters": [10, 5], "bytes": [40, 20],
        "refused": {"x": "y"}, "hidden_size": [16, 8], "batch_shape": [1, 1], "seconds": [1.0, 0.5],
    },
}  # fmt: skip
ENTRY = {"pattern": "unstructured", "sparsity": 0.5, "lam": 1.0, "metric": 2.0, "loss": 0.1, "seconds": 1.0}
SWEEP = {
    "solver": "wanda", "metric": "loss", "maximize": False, "dense": 1.0, "config": {"seed": 0}, "calibration": None,
    "entries": [ENTRY, {**ENTRY, "lam": 0.5}, {**ENTRY, "sparsity": 0.6}, {**ENTRY, "lam": 0.5, "sparsity": 0.6}],
    "seconds": {"total": 1.0}, "versions": {},
}  # fmt: skip


def paths(values, at=()):
    """The paths of all values, of lists those of the first entry."""
    yield at
    entries = values.items() if isinstance(values, dict) else enumerate(values[:1] if isinstance(values, list) else [])
    for key, value in entries:
        yield from paths(value, (*at, key))


def replaced(values, at, value):
    if not at:
        return value
    changed = copy.copy(values)
    changed[at[0]] = replaced(changed[at[0]], at[1:], value)
    return changed


def mutations(values, seed, count):
    return random.Random(seed).sample([(at, value) for at in paths(values) for value in HOSTILE], count)


def holds(call, at, value):
    """Whether a call succeeds; only a `MoonshotError` may be the reason if not."""
    try:
        call()
    except MoonshotError as error:
        assert one_line(error), (at, value)
        return False
    except Exception as error:
        pytest.fail(f"{at} = {value!r:.40}: {type(error).__name__}: {error}")
    return True


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder, and the values of its report with those that few runs have."""
    folder = tmp_path_factory.mktemp("report") / "saved"
    pruner = pruned(pattern="2:4", bits=4, quant_group=64, targets=["down_proj"])
    pruner.report.record_evaluation("text", 3.0, 4.0)
    pruner.save_pretrained(folder)
    values = json.loads((folder / "moonshot_report.json").read_text())
    values["layers"][0] |= {"experts": {"removed": [1], "losses": {"reap": 0.1, "osscar": 0.2}}, "loss": 0.1}
    values["layers"][0] |= {"expert_targets": [0.4, 0.6], "notes": ["a note"]}
    values["calibration"] = {"source": "c4", "num_samples": 4, "sequence_length": 12, "digest": "0" * 64}
    return folder, values


def check_report(saved, folder, seed, count):
    facts, good = Facts.read(saved[0], "name", "dense"), {**saved[1], **RARE}
    PruneReport.from_dict(good)
    for number, (at, value) in enumerate(mutations(good, seed, count)):
        path = folder / "report.json"
        path.write_text(json.dumps(replaced(good, at, value)))
        if not holds(lambda path=path: PruneReport.load(path), at, value):
            continue
        report = PruneReport.load(path)
        for show in (
            report.table,
            report.__repr__,
            report.to_dict,
            lambda r=report: render(r, facts),
        ):
            assert holds(show, at, value), (at, value)
        if report.shrink is not None:
            assert holds(report.shrink.table, at, value)
        if at[:1] == ("layers",) and number % 8 == 0:
            assert holds(lambda r=report: plot_report(r).savefig(folder / "plot.png"), at, value)


def check_folder(saved, folder, seed, count):
    """`verify` names the damage or finds none, `convert` and `record` work or refuse it."""
    source, good = saved
    before = (source / "moonshot_report.json").read_text()
    for at, value in mutations(good, seed, count):
        (source / "moonshot_report.json").write_text(json.dumps(replaced(good, at, value)))
        assert holds(lambda: verify(source).table(), at, value)
        if holds(lambda: convert(source, folder / "out", "packed"), at, value):
            assert holds(lambda: record(folder / "out", Perplexity(3.0, "text", 1, 8, 7)), at, value)
    (source / "moonshot_report.json").write_text(before)


def check_card(saved, folder, seed, count):
    """As `check_folder`, of the YAML of the model card."""
    path = saved[0] / "README.md"
    before = path.read_text(encoding="utf-8")
    _, header, text = before.split("---\n", 2)
    for at, value in mutations(yaml.safe_load(header), seed, count):
        changed = yaml.safe_dump(replaced(yaml.safe_load(header), at, value), allow_unicode=False)
        path.write_text(f"---\n{changed}---\n{text}", encoding="utf-8")
        assert holds(lambda: verify(saved[0]).table(), at, value)
        assert holds(lambda: convert(saved[0], folder / "out", "packed"), at, value)
        assert holds(lambda: record(folder / "out", Perplexity(3.0, "text", 1, 8, 7)), at, value)
    path.write_text(before, encoding="utf-8")


def check_sweep(folder, seed, count):
    for at, value in mutations(SWEEP, seed, count):
        (folder / "sweep.json").write_text(json.dumps(replaced(SWEEP, at, value)))
        if holds(lambda: SweepReport.load(folder), at, value):
            report = SweepReport.load(folder)
            for show in (report.table, report.__repr__, report.to_dict):
                assert holds(show, at, value)
            assert holds(lambda r=report: save_all([r, r], folder / "out"), at, value)


def test_a_hostile_value_in_a_report(saved, tmp_path):
    check_report(saved, tmp_path, 0, 100)
    check_folder(saved, tmp_path, 1, 3)
    check_card(saved, tmp_path, 5, 3)
    check_sweep(tmp_path, 2, 3)


@pytest.mark.parametrize("budget", [math.nan, math.inf])
def test_a_card_shows_a_target_that_is_no_number(saved, budget):
    report = PruneReport.from_dict(replaced({**saved[1], **RARE}, ("shrink", "budget"), budget))
    assert f"parameters={budget}" in render(report, Facts.read(saved[0], "name", "dense")).content


@pytest.mark.slow
def test_many_hostile_values_in_a_report(saved, tmp_path):
    check_report(saved, tmp_path, 7, 1500)
    check_folder(saved, tmp_path, 3, 40)
    check_card(saved, tmp_path, 6, 40)
    check_sweep(tmp_path, 4, 30)


@pytest.mark.parametrize(
    "field, value",
    [("shape", [0, 0]), ("sparsity", 1e308), ("sparsity", float("nan")), ("seconds", float("nan")), ("lam", -1)],
)
def test_the_field_is_named(saved, tmp_path, field, value):
    values = json.loads(json.dumps(saved[1]))
    values["layers"][0][field] = value
    (tmp_path / "moonshot_report.json").write_text(json.dumps(values))
    with pytest.raises(
        MoonshotError, match=rf"moonshot_report\.json is damaged: .*\(layers\[0\]\.{field}.*must be from"
    ):
        PruneReport.load(tmp_path)


def test_a_layers_name_is_drawn_as_it_is(saved, tmp_path):
    values = json.loads(json.dumps(saved[1]))
    for name in ("$\\frac{$", "a.0.$x^$", "\ud800", "x" * 5000):
        values["layers"][0]["name"] = name
        plot_report(PruneReport.from_dict(values)).savefig(tmp_path / "plot.png")
