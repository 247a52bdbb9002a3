"""Zero-shot accuracy through lm-eval, on a task of our own over a local file."""

import functools
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from optimum_moonshot import MoonshotError
from optimum_moonshot.zeroshot import ZeroShot, zero_shot

pytest.importorskip("lm_eval")
DEMO = Path(__file__).resolve().parents[1] / "examples" / "demo_model"
TASK = """task: letters
dataset_path: json
dataset_kwargs:
  data_files: {data}
test_split: train
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list:
  - metric: {metric}
"""


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
    """By hand: the choice with the larger log-likelihood."""
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
    found = zero_shot(model, tokenizer, [str(task())], batch_size=3)
    assert found.accuracy == {"letters": pytest.approx(expected_accuracy(model.eval(), tokenizer))}
    assert torch.equal(torch.get_rng_state(), state)
    assert found.versions["lm_eval"] and 0 <= found.mean <= 1


def test_the_model_keeps_its_mode(task, tokenizer, model):
    zero_shot(model, tokenizer, [str(task())], limit=2)
    assert all(module.training for module in model.modules())


def test_results_survive_json(tmp_path):
    found = result(a=0.25, b=0.5)
    for values in (found.to_dict(), {"zero_shot": found.to_dict()}):
        (tmp_path / "found.json").write_text(json.dumps(values))
        assert ZeroShot.load(tmp_path / "found.json") == found


def test_win_rate_counts_tasks_and_halves_ties():
    assert result(a=0.3, b=0.5, c=0.1, d=0.9).win_rate(result(a=0.2, b=0.5, c=0.2, d=0.8)) == 2.5 / 4
    assert result(a=0.3).win_rate(result(a=0.3)) == 0.5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tasks": []}, "tasks: none given"),
        ({"tasks": ["missing.yaml"]}, "no file missing.yaml"),
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


def test_a_task_without_accuracy_is_an_error(task, tokenizer, model):
    with pytest.raises(MoonshotError, match="letters has no accuracy"):
        zero_shot(model, tokenizer, [str(task(metric="brier_score"))])


def test_results_on_other_tasks_are_not_compared():
    with pytest.raises(MoonshotError, match="tasks"):
        result(a=0.1).win_rate(result(b=0.1))
    with pytest.raises(MoonshotError, match="limit"):
        result(a=0.1).win_rate(ZeroShot({"a": 0.1}, {"a": None}, 0, 5, {}))


@pytest.mark.parametrize("text", ["not json", "[]", "{}"])
def test_a_baseline_that_is_none_is_named(tmp_path, text):
    (tmp_path / "found.json").write_text(text)
    with pytest.raises(MoonshotError, match="baseline"):
        ZeroShot.load(tmp_path / "found.json")
