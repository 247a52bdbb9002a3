"""`moonshot eval`: one JSON file for all metrics, comparison with a baseline, and the record in the saved model."""

import json
import math
from pathlib import Path

import pytest
from command_line import DEMO, failure
from models import image_batches, make
from zeroshot_tasks import TASK

from optimum_moonshot import MoonshotConfig, MoonshotError, MoonshotPruner, accuracy, convert, perplexity
from optimum_moonshot.__main__ import main
from optimum_moonshot.checkpoint.measuring import record
from optimum_moonshot.commands import evaluate
from optimum_moonshot.evaluation.metrics import Accuracy, Perplexity
from optimum_moonshot.evaluation.report import EvalReport
from optimum_moonshot.evaluation.zeroshot import ZeroShot

SHORT = ["--sequence-length", "64", "--device", "cpu"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder with text, two zero-shot tasks and a pruned model."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "held.txt").write_text((DEMO / "heldout.txt").read_text(encoding="utf-8")[:8000], encoding="utf-8")
    for name, documents in (("letters", 6), ("words", 5)):
        rows = [{"question": "abc" * (n % 3 + 1), "choices": ["de", "fg"], "answer": n % 2} for n in range(documents)]
        (folder / f"{name}.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
        text = TASK.format(data=folder / f"{name}.jsonl", metric="acc").replace("letters\n", f"{name}\n", 1)
        (folder / f"{name}.yaml").write_text(text)
    save(folder / "pruned")
    return folder


def save(folder):
    pruner = MoonshotPruner.from_pretrained(DEMO, MoonshotConfig(solver="magnitude", sparsity=0.5))
    pruner.prune(progress=False)
    pruner.save_pretrained(folder)


def run(*argv):
    main([str(part) for part in ("eval", *argv)])


def read(folder):
    return json.loads((folder / "moonshot_report.json").read_text(encoding="utf-8"))["evaluations"]


def test_all_results_are_written_to_one_file_and_to_the_saved_model(data, tmp_path, capsys):
    pytest.importorskip("lm_eval")
    dense, ours, model = tmp_path / "dense.json", tmp_path / "ours.json", tmp_path / "pruned"
    save(model)
    what = ["--dataset", data / "held.txt", "--tasks", data / "letters.yaml", data / "words.yaml", *SHORT]
    run(DEMO, *what, "--output", dense)
    run(model, *what, "--output", ours, "--baseline", dense, "--dense", dense, "--record")
    printed, (before, after) = capsys.readouterr().out, map(EvalReport.load, (dense, ours))
    document = json.loads(ours.read_text(encoding="utf-8"))
    assert document["perplexity"] == {str(data / "held.txt"): after.of("held.txt").value}
    assert document["versions"]["lm_eval"] and document["versions"]["torch"]
    assert document["measured_on"][str(data / "held.txt")]["sequence_length"] == 64
    assert document["win_rate"] == after.zero_shot.win_rate(before.zero_shot)
    assert f"win rate    {document['win_rate']:.2%} against" in printed
    assert f"(baseline {before.of('held.txt').value:.3f})" in printed
    entries, expected = read(model), after.measurements()
    assert set(entries) == set(expected) == {"held.txt", "letters", "words", "mean of 2 zero-shot tasks"}
    for name, entry in entries.items():
        assert (entry["dense"], entry["pruned"]) == (before.measurements()[name].value, expected[name].value)
    card = (model / "README.md").read_text(encoding="utf-8")
    assert card.count("## Evaluation") == 1 and "| accuracy on letters | " in card
    heldout = entries["held.txt"]
    assert f"| perplexity on held.txt | {heldout['dense']:.2f} | {heldout['pruned']:.2f} |" in card
    assert "perplexity, before pruning" in card and str(tmp_path) not in card


def test_predictions_are_compared_with_those_of_the_dense_model(data, tmp_path, capsys):
    model, result = tmp_path / "pruned", tmp_path / "result.json"
    save(model)
    what = ["--dataset", data / "held.txt", *SHORT, "--limit", 3]
    run(DEMO, *what, "--output", tmp_path / "dense.json")
    capsys.readouterr()
    run(model, *what, "--against", DEMO, "--output", result, "--record")
    printed, dense = capsys.readouterr().out, EvalReport.load(tmp_path / "dense.json").of("held.txt")
    measured = EvalReport.load(result).of("held.txt")
    assert measured.dense == pytest.approx(dense.value) and measured.kl > 0 and 0 < measured.agreement < 1
    assert f"perplexity  {measured.value:.3f} on {data / 'held.txt'} (dense {dense.value:.3f})" in printed
    assert f"KL divergence {measured.kl:.4f} on" in printed and f"same top token {measured.agreement:.2%} on" in printed
    entries = read(model)
    assert entries["held.txt"]["dense"] == pytest.approx(dense.value)
    assert entries["held.txt (KL divergence)"]["pruned"] == pytest.approx(measured.kl)
    assert "| KL divergence on held.txt |" in (model / "README.md").read_text(encoding="utf-8")


def test_json_on_standard_output(data, capsys):
    run(DEMO, "--dataset", data / "held.txt", *SHORT, "--limit", 3, "--json")
    report = EvalReport.from_dict(json.loads(capsys.readouterr().out))
    assert report.of(data / "held.txt").windows == 3 and report.zero_shot is None


@pytest.fixture
def runtimes(monkeypatch):
    """The runtime of each layer in every model that a command measures."""
    seen, make_metric = [], evaluate.make_metric

    def watch(model, *options):
        seen.append(getattr(model, "moonshot_runtime", None))
        return make_metric(model, *options)

    monkeypatch.setattr(evaluate, "make_metric", watch)
    return seen


@pytest.mark.parametrize("format", ["dense", "packed"])
def test_a_pruned_model_is_measured_in_each_runtime(data, tmp_path, capsys, runtimes, format):
    model = data / "pruned"
    if format == "packed":
        convert(model, model := tmp_path / "packed", "packed")
    values = []
    for runtime in ("dense", "packed", "auto"):
        run(model, "--dataset", data / "held.txt", *SHORT, "--limit", 3, "--json", "--runtime", runtime)
        values.append(EvalReport.from_dict(json.loads(capsys.readouterr().out)).of(data / "held.txt").value)
    assert values[1:] == pytest.approx([values[0]] * 2, rel=1e-3)
    dense, packed, auto = runtimes
    assert dense is None and packed.keys() == auto.keys()
    assert sum(what.startswith("packed: requested") for what in packed.values()) > len(packed) / 2
    assert all(what.startswith("dense: ") for what in auto.values())  # they are too small to be faster


@pytest.mark.parametrize("runtime", ["auto", "packed"])
def test_only_a_pruned_model_has_a_runtime(data, capsys, runtime):
    status, lines = failure(capsys, "eval", DEMO, "--dataset", data / "held.txt", *SHORT, "--runtime", runtime)
    assert status == 2 and lines[-1].endswith(f"--runtime {runtime}: {DEMO} is not pruned; leave the option out")


def test_earlier_results_are_written_when_a_later_one_fails(data, tmp_path, capsys):
    (tmp_path / "empty.txt").write_text("x")
    argv = [DEMO, "--dataset", data / "held.txt", tmp_path / "empty.txt", *SHORT, "--output", tmp_path / "out.json"]
    status, lines = failure(capsys, "eval", *argv)
    assert status == 1 and "fewer than --sequence-length 64" in lines[-1]
    assert list(EvalReport.load(tmp_path / "out.json").perplexity) == [str(data / "held.txt")]


@pytest.mark.parametrize(
    "argv, words",
    [
        ([], "give --dataset or --tasks"),
        (["--limit", "0"], "--limit 0"),
        (["--num-fewshot", "-1"], "--num-fewshot -1"),
        (["--dataset", "HELD", "--dense", "OTHER"], "--dense: only for --record"),
        (["--dataset", "HELD", "--output", "nowhere/out.json"], "--output nowhere/out.json"),
        (["--dataset", "HELD", "--baseline", "missing.json"], "--baseline: missing.json contains no results"),
        (["--dataset", "HELD", "--baseline", "OTHER"], "it has none of the results to measure"),
        (["--dataset", "HELD", "--record"], "has no moonshot_report.json"),
        (["--tasks", "YAML", "--baseline", "OTHER"], "one is of the tasks piqa, the other of letters"),
        (["--tasks", "missing.yaml"], "--tasks: missing.yaml: no such file"),
        (["--tasks", "YAML", "YAML"], "--tasks: duplicates"),
    ],
)
def test_invalid_options_are_rejected_before_loading(data, tmp_path, capsys, argv, words):
    if "--tasks" in argv:
        pytest.importorskip("lm_eval")
    other = EvalReport("m", {}, {}, ZeroShot({"piqa": 0.5}, {"piqa": None}, 0, None, {}))
    other.save(tmp_path / "other.json")
    names = {"HELD": data / "held.txt", "YAML": data / "letters.yaml", "OTHER": tmp_path / "other.json"}
    status, lines = failure(capsys, "eval", "no/such/model", *(names.get(part, part) for part in argv))
    assert status == 2 and words in lines[-1]


def test_incomparable_windows_are_rejected_before_measuring(data, tmp_path, capsys):
    EvalReport("m", {"held.txt": Perplexity(30.0, "held.txt", 9, 32, 9 * 31)}).save(tmp_path / "other.json")
    argv = [data / "pruned", "--dataset", data / "held.txt", *SHORT, "--baseline", tmp_path / "other.json"]
    status, lines = failure(capsys, "eval", *argv)
    assert status == 2 and "; use --sequence-length 32" in lines[-1]


def test_a_different_number_of_windows_is_reported(data, tmp_path, capsys):
    EvalReport("m", {"held.txt": Perplexity(30.0, "held.txt", 9, 64, 9 * 63)}).save(tmp_path / "other.json")
    run(data / "pruned", "--dataset", data / "held.txt", *SHORT, "--limit", 2, "--baseline", tmp_path / "other.json")
    assert "(baseline 30.000, measured in another way)" in capsys.readouterr().out


def test_recording_keeps_the_users_text(data, tmp_path):
    save(tmp_path / "mine")
    card = tmp_path / "mine" / "README.md"
    card.write_text(card.read_text(encoding="utf-8").replace("## Sparsity", "My own words.\n\n## Sparsity"))
    for value in (20.0, 30.0):  # added, then replaced
        assert record(tmp_path / "mine", Perplexity(value, "/some/where/text.txt", 3, 64, 189))
        written = card.read_text(encoding="utf-8")
        assert f"| perplexity on text.txt |  | {value:.2f} |" in written and "/some/where" not in written
        assert written.count("## Evaluation") == 1 and "My own words." in written
        assert written.index("## Evaluation") < written.index("## Size and cost")
    assert "20.00" not in written and written.count("# Card of the dense model") == 1
    card.write_text("# Not ours")
    assert not record(tmp_path / "mine", Perplexity(40.0, "text.txt", 3, 64, 189))
    assert card.read_text() == "# Not ours" and read(tmp_path / "mine")["text.txt"]["pruned"] == 40.0
    with pytest.raises(MoonshotError, match="has no moonshot_report.json"):
        record(tmp_path, Perplexity(40.0, "text.txt", 3, 64, 189))


def test_accuracies_on_images_are_recorded(tmp_path):
    pruner = MoonshotPruner(make("resnet"), MoonshotConfig(solver="magnitude", sparsity=0.5))
    before = accuracy(pruner.model, image_batches())
    pruner.prune(progress=False).record(accuracy(pruner.model, image_batches()), before)
    pruner.save_pretrained(tmp_path)
    assert record(tmp_path, Accuracy(0.25, "photos", 6))
    entries = read(tmp_path)
    assert entries["list of 3 items"]["dense"] == before.value and entries["photos"]["pruned"] == 0.25
    assert "| accuracy on photos |  | 0.25 |" in (tmp_path / "README.md").read_text(encoding="utf-8")


def test_reports_survive_json(tmp_path):
    report = EvalReport("m", {"a.txt": Perplexity(math.inf, "a.txt", 3, 8, 21)}, {"b": Accuracy(0.5, "b", 4)})
    report.add(ZeroShot({"piqa": 0.5}, {"piqa": None}, 0, None, {"lm_eval": "1"}))
    report.save(tmp_path / "out.json", win_rate=None)
    assert EvalReport.load(tmp_path / "out.json") == report and report.versions["lm_eval"] == "1"
    (tmp_path / "alone.json").write_text(json.dumps(report.zero_shot.to_dict()))
    assert EvalReport.load(tmp_path / "alone.json").zero_shot == report.zero_shot
    for text in ("{}", "[]", "no", '{"perplexity": {"a": 3}}', '{"zero_shot": {"accuracy": {}}}'):
        (tmp_path / "wrong.json").write_text(text)
        with pytest.raises(MoonshotError, match="contains no results"):
            EvalReport.load(tmp_path / "wrong.json")
    with pytest.raises(MoonshotError, match="output="):
        report.save(Path("no", "such", "folder.json"))


def test_a_perplexity_is_recorded_by_python(tokenizer):
    pruner = MoonshotPruner(make("llama"), MoonshotConfig(solver="magnitude", sparsity=0.5), tokenizer)
    before = perplexity(pruner.model, tokenizer, ["some text " * 20])
    report = pruner.prune(progress=False)
    report.record(perplexity(pruner.model, tokenizer, ["some text " * 20]), before)
    assert report.evaluations["list of 1 strings"]["dense"] == before.value
    assert "list of 1 strings: dense" in report.table()
