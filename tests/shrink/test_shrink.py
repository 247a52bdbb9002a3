"""Shrinking a model to a target: the budget, a stock model with equal outputs, failures, and resumption."""

import copy
import dataclasses
import json
import re
from functools import partial

import pytest
import torch
import transformers as hf
from llama_runs import assert_same, weights
from marks import slow
from models import GROUPED, make, spread, token_batches

from optimum_moonshot import MoonshotConfig, MoonshotError, MoonshotPruner, PruneReport
from optimum_moonshot.commands.moonshot import MoonshotCommand
from optimum_moonshot.model.depth import remove_blocks
from optimum_moonshot.pipeline import calibration_loss
from optimum_moonshot.shrink import costs, hidden, request, trials
from optimum_moonshot.shrink import parts as shrink_parts
from optimum_moonshot.shrink import run as shrink
from optimum_moonshot.shrink.report import ShrinkReport

CONFIG = MoonshotConfig(solver="osscar", pattern="structured", sparsity=0, num_samples=8, batch_size=4)
BATCHES = token_batches(8)


@pytest.fixture
def seconds_by_size(monkeypatch):
    """The latency of a model or block is its number of parameters in microseconds."""

    def seconds(calls, block=None, *_):
        return 1e-6 * sum(each.numel() for each in (block or calls.model).parameters())

    monkeypatch.setattr(costs._Calls, "of_block", seconds)
    monkeypatch.setattr(costs._Calls, "seconds", seconds)


def shrunk(name="llama", config=CONFIG, model=None, **target):
    pruner = MoonshotPruner(make(name) if model is None else model, config)
    return pruner, pruner.shrink(BATCHES, progress=False, **target)


def logits(model):
    with torch.no_grad():
        return model.eval()(**BATCHES[0]).logits


def low_rank(name="llama"):
    """A model whose residual stream has half as many dimensions as its width, so that a narrower one is equal."""
    torch.manual_seed(0)
    model = make(name)
    width = model.config.hidden_size
    basis = torch.linalg.qr(torch.randn(width, width))[0][:, : width // 2]
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.fill_(1)
        model.get_input_embeddings().weight.copy_(model.get_input_embeddings().weight @ basis @ basis.T)
        for block in model.model.layers:
            for module in (block.self_attn.o_proj, block.mlp.down_proj):
                module.weight.copy_(basis @ basis.T @ module.weight)
    return model


def test_the_hidden_size_leaves_where_the_stream_has_directions_to_spare(tmp_path):
    model = low_rank()
    pruner, report = shrunk(model=model, parameters=0.5)
    small = pruner.model
    assert report.hidden_size == (16, 8) and report.parameters[1] == small.num_parameters()
    assert small.num_parameters() <= model.num_parameters() // 2
    torch.testing.assert_close(logits(small), logits(model), atol=1e-3, rtol=1e-3)
    pruner.save_pretrained(tmp_path)
    record = json.loads((tmp_path / "config.json").read_text())
    assert record["moonshot"]["shrink"]["hidden_size"] == [16, 8] and record["hidden_size"] == 8
    assert torch.equal(logits(hf.AutoModelForCausalLM.from_pretrained(tmp_path)), logits(small))
    assert PruneReport.load(tmp_path).shrink == report


@pytest.mark.slow
def test_hidden_size_and_other_parts_leave_together():
    pruner, report = shrunk(model=low_rank(), parameters=0.3)
    assert report.hidden_size == (16, 8) and (report.blocks or any(a < b for b, a in report.widths.values()))
    assert report.parameters[1] == pruner.model.num_parameters() <= 0.3 * report.parameters[0]
    assert report.chosen.allowed[0] == "hidden size" and report.chosen.removed["hidden size"] == 8


@pytest.mark.slow
def test_the_hidden_size_is_a_multiple():
    assert shrunk(model=low_rank(), parameters=0.8, hidden_multiple=8)[1].hidden_size == (16, 8)
    pruner, report = shrunk(model=low_rank(), parameters=0.8, hidden_multiple=12)
    assert report.hidden_size == (16, 12) and pruner.model.config.hidden_size == 12
    _, report = shrunk(model=low_rank(), parameters=0.8, hidden_multiple=32)
    assert report.hidden_size is None and report.refused["hidden size"] == "no multiple of 32 is from 8 to 15"
    with pytest.raises(MoonshotError, match="hidden_multiple=0: use a positive integer"):
        shrunk(parameters=0.8, hidden_multiple=0)


@pytest.mark.parametrize(("name", "share"), [("llama", 0.9), ("llama", 0.6), ("gpt2", 0.7)])
def test_the_budget_is_not_exceeded_and_plain_transformers_loads_an_equal_model(tmp_path, name, share):
    model = make(name)
    before, total = weights(model), model.num_parameters()
    pruner, report = shrunk(model=model, parameters=share)
    assert_same(model, before)
    small = pruner.model
    assert small.num_parameters() == report.parameters[1] <= int(share * total)
    assert report.parameters[0] == total and report.chosen.cost == report.parameters[1]
    pruner.save_pretrained(tmp_path)
    loaded = hf.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(loaded), logits(small))
    assert PruneReport.load(tmp_path).shrink == report
    record = json.loads((tmp_path / "config.json").read_text())["moonshot"]
    assert record["shrink"]["blocks"] == list(report.blocks)
    assert record["compaction"]["parameters"] == list(report.parameters)
    assert "smaller checkpoint" in (tmp_path / "README.md").read_text()


def test_removed_blocks_alone_leave_the_other_weights():
    model = make("llama")
    config = dataclasses.replace(CONFIG, targets=["q_proj", "o_proj", "down_proj"], ignore=["layers.1"])
    pruner, report = shrunk(model=model, config=config, parameters=0.8)
    stay = {"model.layers.*.self_attn.o_proj", "model.layers.*.mlp.down_proj", "hidden size"}
    assert set(report.refused) == stay
    assert report.merged == report.blocks and not report.widths
    expected, _ = remove_blocks(model, report.blocks)
    places = [index for index in range(3) if index not in report.blocks]
    changed = f"model.layers.{places.index(report.blocks[0] - 1)}.mlp.down_proj.weight"
    for key, weight in pruner.model.state_dict().items():
        assert torch.equal(weight, expected.state_dict()[key]) == (key != changed), key
    assert pruner.report.compaction["config"]["num_hidden_layers"] == [3, 2]


def test_bytes_are_those_of_the_weights():
    pruner, report = shrunk(bytes=13_000, model=make("llama").to(torch.bfloat16))
    assert sum(each.nbytes for each in pruner.model.parameters()) == report.bytes[1] <= 13_000


def test_the_predicted_latency_is_that_of_the_smaller_model(seconds_by_size):
    _, report = shrunk(latency=0.7, batch_shape=(1, 8))
    assert report.unit == "seconds" and report.chosen.cost <= report.budget == pytest.approx(0.7 * report.dense)
    assert report.batch_shape == (1, 8)
    assert report.seconds == pytest.approx((1e-6 * report.parameters[0], 1e-6 * report.parameters[1]))
    assert report.chosen.cost == pytest.approx(report.seconds[1])


@pytest.mark.slow
def test_the_hidden_size_leaves_for_a_latency(seconds_by_size):
    pruner, report = shrunk(model=low_rank(), latency=0.4, batch_shape=(1, 8))
    assert report.hidden_size == (16, 8) and report.seconds[1] <= report.budget == pytest.approx(0.4 * report.dense)
    assert report.seconds == pytest.approx((1e-6 * report.parameters[0], 1e-6 * pruner.model.num_parameters()))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", slow("qwen2"), slow("gpt2")])
def test_the_error_of_an_impossible_target_has_the_least_reachable_value(name):
    """Biases of queries, keys and values do not become smaller with the hidden size."""
    with pytest.raises(MoonshotError, match="parameters=0.01: the smallest configuration has") as caught:
        shrunk(name, parameters=0.01)
    least = int(str(caught.value).split(" has ")[1].split(" ")[0].replace(",", ""))
    assert f"{least / make(name).num_parameters():.4f} of the dense model" in str(caught.value)
    assert ("since these cannot be reduced: " in str(caught.value)) == (name == "gpt2")
    _, report = shrunk(name, parameters=least)
    assert report.parameters[1] == least
    with pytest.raises(MoonshotError, match="the smallest configuration"):
        shrunk(name, parameters=least - 1)


@pytest.mark.slow
def test_a_target_out_of_reach_of_the_narrowed_model_is_compared_with_the_dense_one(seconds_by_size, monkeypatch):
    """The latency of a narrowed model may be larger than that of its parts predicted."""
    monkeypatch.setattr(request, "model_latency", lambda *_: 1.0)
    monkeypatch.setattr(shrink, "narrow", partial(slowed, shrink.narrow, monkeypatch))
    with pytest.raises(MoonshotError, match=r"latency=0.4: the smallest configuration has .* ms, (\S+) of") as caught:
        shrunk(model=low_rank(), latency=0.4, batch_shape=(1, 8))
    milliseconds, share = re.findall(r"has (\S+) ms, (\S+) of", str(caught.value))[0]
    assert float(share) > 0.4 and float(milliseconds) == pytest.approx(float(share) * 8.944, rel=1e-3)


def slowed(narrow, monkeypatch, *arguments):
    """Narrow a model, after which every measured latency is that of the dense model."""
    narrowed = narrow(*arguments)
    for name in ("of_block", "seconds"):
        faster = getattr(costs._Calls, name)
        monkeypatch.setattr(costs._Calls, name, lambda *each, faster=faster: 4 * faster(*each))
    return narrowed


def test_latencies_of_another_batch_shape_do_not_serve_a_repeated_run(monkeypatch, tmp_path):
    def seconds(calls, block=None, *_):
        return 1e-6 * sum(each.numel() for each in (block or calls.model).parameters()) * calls.ids.shape[1]

    monkeypatch.setattr(costs._Calls, "of_block", seconds)
    monkeypatch.setattr(costs._Calls, "seconds", seconds)
    for tokens in (8, 32):
        _, report = shrunk(latency=0.7, batch_shape=(1, tokens), resume_dir=tmp_path)
        assert report.dense == pytest.approx(8944e-6 * tokens) and report.seconds[1] <= report.budget
        assert f"seconds, 1x{tokens} tokens on cpu with {torch.get_num_threads()} threads" in report.measured


def test_a_latency_above_the_target_is_noted(seconds_by_size, monkeypatch):
    pruner, report = shrunk("gpt2", latency=0.7, batch_shape=(1, 8))
    assert not any("latency" in note for note in pruner.report.notes)
    monkeypatch.setattr(request, "model_latency", lambda *_: 0.01)
    pruner, report = shrunk("gpt2", latency=0.7, batch_shape=(1, 8))
    (note,) = (note for note in pruner.report.notes if "latency" in note)
    assert f"10 ms, the target {1e3 * report.budget:.4g} ms" in note


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"solver": "sparsegpt", "pattern": "unstructured", "sparsity": 0.5}, "structured"),
        ({"sparsity": 0.5}, "leave it at 0"),
        ({"allocation": {"down_proj": 0.5}}, "allocation"),
    ],
)
def test_configurations_that_are_refused(changes, message):
    with pytest.raises(MoonshotError, match=message):
        shrunk(config=dataclasses.replace(CONFIG, **changes), parameters=0.7)


@pytest.mark.parametrize("place", ["decide", "prune_model", "compact_pruned", "model_latency"])
def test_a_failure_leaves_the_model_and_the_pruner_unchanged(monkeypatch, seconds_by_size, place):
    model = make("llama")
    before, config = weights(model), copy.deepcopy(model.config.to_dict())
    pruner = MoonshotPruner(model, CONFIG)

    def fail(*args, **kwargs):
        raise RuntimeError("stop")

    def refuse(*args, **kwargs):
        raise MoonshotError("the hidden size stays")

    monkeypatch.setattr(hidden, "find_stream", refuse)
    places = {"decide": shrink, "model_latency": request}
    monkeypatch.setattr(places.get(place, shrink_parts), place, fail)
    with pytest.raises(RuntimeError, match="stop"):
        pruner.shrink(BATCHES, latency=0.6, progress=False)
    assert pruner.model is model and pruner.report is None
    assert_same(model, before)
    assert model.config.to_dict() == config


def test_a_repeated_run_resumes_with_the_measurements_for_any_target(monkeypatch, tmp_path):
    _, first = shrunk(parameters=0.7, resume_dir=tmp_path)

    def fail(*args, **kwargs):
        raise AssertionError("measured again")

    monkeypatch.setattr(calibration_loss, "mean_loss", fail)
    monkeypatch.setattr(trials, "mean_loss", fail)
    monkeypatch.setattr(trials, "prune_layers", fail)
    pruner, second = shrunk(parameters=0.7, resume_dir=tmp_path)
    assert dataclasses.replace(second) == first and list(second.measured) == list(first.measured)
    _, other = shrunk(parameters=0.9, resume_dir=tmp_path)
    assert other.chosen.loss <= first.chosen.loss
    pruner.save_pretrained(tmp_path / "saved")
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


@pytest.mark.slow
def test_a_set_of_blocks_that_the_architecture_does_not_allow_is_avoided_with_the_reason(monkeypatch):
    def refuse(*arguments, **options):
        raise MoonshotError("no such configuration")

    monkeypatch.setattr(shrink_parts, "remove_blocks", refuse)
    _, report = shrunk(parameters=0.65)
    assert not report.blocks
    monkeypatch.undo()
    _, allowed = shrunk(parameters=0.65)
    if allowed.blocks:
        assert "no such configuration" in "".join(report.refused.values())


def lfm2():
    """A hybrid whose only attention, in the last block, changes nothing: its removal would lose the least."""
    torch.manual_seed(0)
    kinds = ["conv"] * 3 + ["full_attention"]
    config = hf.Lfm2Config(**{**GROUPED, "hidden_size": 32, "num_hidden_layers": 4}, layer_types=kinds)
    model = spread(hf.Lfm2ForCausalLM(config))
    for module in (model.model.layers[3].self_attn.out_proj, model.model.layers[3].feed_forward.w2):
        torch.nn.init.zeros_(module.weight)
    return model


def test_the_only_attention_of_a_hybrid_stays_and_a_reachable_target_is_reached():
    model = lfm2()
    config = dataclasses.replace(CONFIG, targets=[r"layers\.1\."])  # one width for all blocks, so that all stay
    with pytest.raises(MoonshotError, match="the smallest configuration has") as caught:
        shrunk(model=model, config=config, parameters=0.01)
    least = int(str(caught.value).split(" has ")[1].split(" ")[0].replace(",", ""))
    pruner, report = shrunk(model=model, config=config, parameters=least)
    assert len(report.blocks) == 2 and 3 not in report.blocks and not report.widths
    assert pruner.model.num_parameters() == least
    ids = BATCHES[0]["input_ids"]
    assert pruner.model.generate(ids, max_new_tokens=3, min_new_tokens=3).shape[1] == ids.shape[1] + 3


def test_the_report_is_a_table_and_json():
    _, report = shrunk(parameters=0.7)
    assert ShrinkReport.from_dict(json.loads(json.dumps(report.to_dict()))) == report
    assert min(each.loss for each in report.considered) == pytest.approx(report.chosen.loss)
    assert all(each.cost <= report.budget for each in report.considered)
    assert f"{report.parameters[1]:,} parameters" in report.table()


@pytest.mark.slow
def test_calibration_by_an_iterator_is_read_twice():
    pruner = MoonshotPruner(make("llama"), CONFIG)
    report = pruner.shrink(iter(BATCHES), parameters=0.7, progress=False)
    assert report == shrunk(parameters=0.7)[1]


def test_allocation_by_name_gives_neurons_and_heads_separate_sparsities():
    model = make("llama")
    config = dataclasses.replace(CONFIG, allocation={"down_proj": 0.25, "o_proj": 0.5})
    report = MoonshotPruner(model, config).prune(BATCHES, progress=False)
    assert {layer.name.split(".")[-1]: layer.sparsity for layer in report.layers} == {"o_proj": 0.5, "down_proj": 0.25}
    with pytest.raises(MoonshotError, match="between 0 and 1 with structured"):
        dataclasses.replace(CONFIG, allocation={"down_proj": "2:4"})


def test_the_command_is_registered():
    assert "shrink" in [each.name for each in MoonshotCommand.SUBCOMMANDS]


def test_blocks_that_cannot_be_scored_stay_with_the_reason(monkeypatch):
    def refuse(prepared):
        raise MoonshotError("it maps [2] to [3]")

    monkeypatch.setattr(trials, "score_blocks", refuse)
    _, report = shrunk("gemma2", parameters=0.8)
    assert report.refused["blocks"] == "it maps [2] to [3]" and not report.blocks


@pytest.mark.parametrize(("ignore", "lam"), [("o_proj", 1.0), ("down_proj", 0.5)])
def test_the_default_lambda_has_the_fisher_loss_only_if_heads_leave(ignore, lam):
    config = dataclasses.replace(CONFIG, ignore=[ignore])
    pruner, report = shrunk(config=config, parameters=0.9)
    assert len(report.widths) == 1
    (width,) = report.widths.values()
    expected = lam if width[0] != width[1] else 1.0
    assert {layer.lam for layer in pruner.report.layers} == {expected}
