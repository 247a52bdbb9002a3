"""Zero-shot accuracy through lm-eval, on a custom task over a local file."""

import dataclasses
import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from zeroshot_tasks import TASK

from optimum_moonshot import MoonshotConfig, MoonshotError, MoonshotPruner, PruneReport
from optimum_moonshot.evaluation import zeroshot
from optimum_moonshot.evaluation.zeroshot import PAPER_TASKS, ZeroShot, zero_shot

pytest.importorskip("lm_eval")
DEMO = Path(__file__).resolve().parents[2] / "examples" / "demo_model"


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(DEMO)


@pytest.fixture
def model():
    return AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).train()


@pytest.fixture
def task(tmp_path):
    def write(metric="acc", documents=12):
        rows = [{"question": "abc" * (n % 3 + 1), "choices": ["de", "fg"], "answer": n % 2} for n in range(documents)]
        data = tmp_path / "letters.jsonl"
        data.write_text("\n".join(json.dumps(row) for row in rows))
        path = tmp_path / "letters.yaml"
        path.write_text(TASK.format(data=data, metric=metric))
        return path

    return write


def result(**accuracy):
    return ZeroShot(accuracy, dict.fromkeys(accuracy), 0, None, {})


def expected_accuracy(model, tokenizer, documents=12):
    """The accuracy of the choice with the larger log-likelihood, one token at a time."""
    correct = 0
    for n in range(documents):
        context = tokenizer.encode("abc" * (n % 3 + 1))
        scores = []
        for choice in (" de", " fg"):
            whole = tokenizer.encode("abc" * (n % 3 + 1) + choice)
            with torch.no_grad():
                logits = model(torch.tensor([whole])).logits[0].log_softmax(-1)
            positions = range(len(context), len(whole))
            scores.append(sum(float(logits[position - 1, whole[position]]) for position in positions))
        correct += int((scores[1] > scores[0]) == bool(n % 2))
    return correct / documents


def test_accuracy_is_that_of_the_likelier_choice(task, tokenizer, model):
    state = torch.get_rng_state()
    measured = zero_shot(model, tokenizer, [str(task())], batch_size=3)
    assert measured.accuracy == {"letters": pytest.approx(expected_accuracy(model.eval(), tokenizer))}
    assert torch.equal(torch.get_rng_state(), state)
    assert measured.versions["lm_eval"] and 0 <= measured.mean <= 1


def test_the_model_keeps_its_mode(task, tokenizer, model):
    zero_shot(model, tokenizer, [str(task())], limit=2)
    assert all(module.training for module in model.modules())


def test_results_survive_json(tmp_path):
    original = result(a=0.25, b=0.5)
    for values in (original.to_dict(), {"zero_shot": original.to_dict()}):
        (tmp_path / "result.json").write_text(json.dumps(values))
        assert ZeroShot.load(tmp_path / "result.json") == original


def test_win_rate_counts_tasks_and_halves_ties():
    assert result(a=0.3, b=0.5, c=0.1, d=0.9).win_rate(result(a=0.2, b=0.5, c=0.2, d=0.8)) == 2.5 / 4
    assert result(a=0.3).win_rate(result(a=0.3)) == 0.5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tasks": []}, r"tasks=\[\]: give a list"),
        ({"tasks": None}, "tasks=None: give a list"),
        ({"tasks": [3]}, "3 is neither a name nor a path"),
        ({"tasks": ["missing.yaml"]}, "missing.yaml: no such file"),
        ({"batch_size": 0}, "batch_size"),
        ({"limit": 0}, "limit"),
        ({"tokenizer": None}, "tokenizer"),
    ],
)
def test_mistakes_are_named(arguments, message, tokenizer, model):
    arguments = {"tokenizer": tokenizer, "tasks": ["piqa"], **arguments}
    with pytest.raises(MoonshotError, match=message):
        zero_shot(model, **arguments)


def test_an_unknown_task_is_named(tokenizer, model, monkeypatch):
    import lm_eval.tasks

    few = functools.partial(lm_eval.tasks.TaskManager, include_defaults=False)  # the whole list takes seconds to read
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", lambda include_path, include_defaults: few(include_path=None))
    with pytest.raises(MoonshotError, match="no_such_task"):
        zero_shot(model, tokenizer, ["no_such_task"])


def test_a_mistake_in_a_tasks_file_is_named(task, tokenizer, model):
    path = task()
    path.write_text(path.read_text().replace("{{question}}", "{{nothing.there}}"))
    with pytest.raises(MoonshotError, match="letters cannot be measured .*'nothing' is undefined"):
        zero_shot(model, tokenizer, [path])
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(MoonshotError, match="has no task name"):
        zero_shot(model, tokenizer, [path])


def test_paper_names_the_seven_tasks():
    assert zeroshot._names("paper") == zeroshot._names(["paper"]) == (list(PAPER_TASKS), [])
    assert len(PAPER_TASKS) == 7
    with pytest.raises(MoonshotError, match="duplicates"):
        zeroshot._names(["paper", "piqa"])


@pytest.mark.parametrize("progress", [False, True])
def test_progress_is_shown_on_request(progress, task, tokenizer, model, capfd, monkeypatch):
    monkeypatch.setattr("optimum_moonshot.evaluation.zeroshot.bars_are_wanted", lambda: True)  # as in a terminal
    zero_shot(model, tokenizer, task(), limit=2, progress=progress)
    assert ("loglikelihood requests" in capfd.readouterr().err) == progress


def test_a_report_records_the_tasks_and_their_mean():
    report, settings = PruneReport({}, [], {}, None, {}, 0, {}, 1), {"num_fewshot": 0, "limit": None}
    report.record(result(a=0.5, b=0.25), dense=result(a=0.75, b=0.75))
    assert report.evaluations["a"] == {"metric": "accuracy", "settings": settings, "dense": 0.75, "pruned": 0.5}
    mean = report.evaluations["mean of 2 zero-shot tasks"]
    assert (mean["dense"], mean["pruned"]) == (0.75, 0.375)
    report.record(result(a=0.25))  # the dense value is kept
    assert (report.evaluations["a"]["dense"], report.evaluations["a"]["pruned"]) == (0.75, 0.25)
    report.record(dataclasses.replace(result(a=0.25), limit=5))  # unless it was measured otherwise
    assert report.evaluations["a"]["dense"] is None
    with pytest.raises(MoonshotError, match="a: dense accuracy with .*'limit': None.*'limit': 5"):
        report.record(dataclasses.replace(result(a=0.25), limit=5), dense=result(a=0.5))


def test_a_task_without_accuracy_is_an_error(task, tokenizer, model):
    with pytest.raises(MoonshotError, match="letters has no accuracy"):
        zero_shot(model, tokenizer, [str(task(metric="brier_score"))])


def test_results_on_other_tasks_are_not_compared():
    with pytest.raises(MoonshotError, match="tasks"):
        result(a=0.1).win_rate(result(b=0.1))
    with pytest.raises(MoonshotError, match="one was measured with limit=None, the other with 5"):
        result(a=0.1).win_rate(ZeroShot({"a": 0.1}, {"a": None}, 0, 5, {}))


@pytest.mark.parametrize("text", ["not json", "[]", "{}"])
def test_an_invalid_baseline_is_named(tmp_path, text):
    (tmp_path / "result.json").write_text(text)
    with pytest.raises(MoonshotError, match="baseline"):
        ZeroShot.load(tmp_path / "result.json")


@pytest.mark.slow
def test_the_harness_itself_reads_a_packed_checkpoint(task, tokenizer, tmp_path):
    """In a separate process, after one import of this package."""
    pruner = MoonshotPruner.from_pretrained(DEMO, MoonshotConfig(solver="magnitude", pattern="2:4"), dtype="float32")
    pruner.prune(progress=False)
    packed, path = tmp_path / "packed", task()
    pruner.save_pretrained(packed, format="packed")
    code = "import optimum_moonshot; from lm_eval.__main__ import cli_evaluate; cli_evaluate()"
    options = ["--model", "hf", "--model_args", f"pretrained={packed},dtype=float32", "--tasks", path]
    options += ["--device", "cpu", "--batch_size", "3", "--output_path", tmp_path / "results.json"]
    environment = {**os.environ, "PYTHONPATH": str(DEMO.parents[1]), "HF_HUB_OFFLINE": "1"}
    run = subprocess.run([sys.executable, "-c", code, *options], capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr[-2000:]
    (written,) = tmp_path.glob("results*.json")
    accuracy = json.loads(written.read_text())["results"]["letters"]["acc,none"]
    assert accuracy == pytest.approx(expected_accuracy(pruner.model.eval(), tokenizer))
