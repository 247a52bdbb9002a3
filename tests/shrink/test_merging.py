"""Merging runs of removed blocks: the layers that take them over, the laws of the fit, and the smaller model."""

import dataclasses
import itertools

import pytest
import torch
import transformers as hf
from llama_runs import assert_same, weights
from models import GROUPED, image_batches, make, spread, token_batches
from test_shrink import BATCHES, CONFIG, logits, shrunk

from optimum_moonshot import MoonshotConfig, MoonshotPruner, PruneReport
from optimum_moonshot.data.batches import spread_samples
from optimum_moonshot.model.calls import first_tensor
from optimum_moonshot.model.depth import remove_blocks
from optimum_moonshot.model.layers import find_blocks, find_structure
from optimum_moonshot.model.losses import Divergence
from optimum_moonshot.pipeline.inputs import prepare
from optimum_moonshot.pipeline.selection import Subject, select
from optimum_moonshot.shrink import trials
from optimum_moonshot.shrink.merging import Merging, best_sets, find_output_layers, measure_runs

# Blocks alone leave: one block has no layer to prune, so that the widths stay.
ALONE = {
    "llama": (["q_proj", "o_proj", "down_proj"], ["layers.1"]),
    "gpt2": (["c_proj"], ["h.1"]),
    "opt": (["out_proj", "fc2"], ["layers.1"]),
    "gemma2": (["o_proj", "down_proj"], ["layers.1"]),
}


def granite():
    """A Llama whose blocks add 0.3 times the outputs of attention and MLP."""
    torch.manual_seed(0)
    return spread(hf.GraniteForCausalLM(hf.GraniteConfig(**GROUPED, residual_multiplier=0.3)))


def merging_of(model, batches=None):
    batches = token_batches() if batches is None else batches
    selection = select(model, MoonshotConfig(sparsity=0.5, num_samples=6, lam=1.0))
    prepared = prepare(Subject(model, progress=False), selection, batches)
    return Merging(prepared, find_output_layers(model, find_structure(model).blocks, batches[0]))


def streams(model, batches):
    """The hidden state behind every block, [tokens, d], without padding."""
    outputs = {index: [] for index in range(len(find_blocks(model)))}
    mask = None

    def keep(index, output):
        outputs[index].append(first_tensor(output)[mask])

    handles = [
        block.register_forward_hook(lambda module, args, output, index=index: keep(index, output))
        for index, (_, block) in enumerate(find_blocks(model))
    ]
    with torch.no_grad():
        for batch in batches:
            mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
            model(**batch)
    for handle in handles:
        handle.remove()
    return {index: torch.cat(values) for index, values in outputs.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("llama", "mlp.down_proj"),
        ("gpt2", "mlp.c_proj"),
        ("opt", "fc2"),
        ("gpt-neox", "mlp.dense_4h_to_h"),
        ("falcon", "mlp.dense_4h_to_h"),
        ("vit", "mlp.fc2"),
        ("gemma2", None),
        ("gemma3", None),
        ("mixtral", None),
        ("bert", None),
        ("albert", None),
    ],
)
def test_the_layers_whose_outputs_blocks_add_to_the_stream(name, layer, dtype):
    """Of parallel attention and MLP the wider one; none behind a norm, of experts, or that blocks share."""
    model = make(name).to(dtype)
    blocks = find_structure(model).blocks
    outputs = find_output_layers(model, blocks, (image_batches() if name == "vit" else token_batches())[0])
    expected = {} if layer is None else {index: f"{blocks[index].name}.{layer}" for index in (0, 1)}
    assert {index: output.layer.name for index, output in outputs.items()} == expected
    assert all(output.scale == pytest.approx(1, abs=1e-4) for output in outputs.values())


def test_a_scaled_residual_has_its_scale():
    model = granite()
    outputs = find_output_layers(model, find_structure(model).blocks, token_batches()[0])
    assert [output.scale for output in outputs.values()] == pytest.approx([0.3, 0.3], rel=1e-4)


@pytest.mark.parametrize("name", ["llama", "llama-tied-biased", "gpt2", "opt"])
def test_the_update_is_the_least_squares_solution(name):
    """Of the augmented system, whose further rows are the ridge, in float64."""
    model, batches = make(name).double(), token_batches(padded=True)
    merging = merging_of(model, batches)
    merging.fit([(0, 2)])
    weight, bias = merging.fitted[0, 2]
    layer, inputs = merging.outputs[0].layer, []
    masks = iter([batch["attention_mask"].bool() for batch in batches])
    handle = layer.module.register_forward_hook(
        lambda _, args, output: inputs.append(args[0].flatten(0, -2)[next(masks).flatten()])
    )
    hidden = streams(model, batches)
    handle.remove()
    rows = torch.cat(inputs)
    width, ridge = rows.shape[1], rows.square().sum() / len(rows)
    rows = rows if bias is None else torch.cat([rows, torch.ones(len(rows), 1, dtype=torch.float64)], 1)
    damping = ridge.sqrt() * torch.eye(width, rows.shape[1], dtype=torch.float64)
    change = torch.cat([hidden[2] - hidden[0], torch.zeros(width, hidden[0].shape[1], dtype=torch.float64)])
    solution = torch.linalg.lstsq(torch.cat([rows, damping]), change, driver="gelsd").solution
    torch.testing.assert_close(weight, layer.matrix + solution[:width].T, atol=1e-8, rtol=1e-6)
    if bias is not None:
        torch.testing.assert_close(bias, layer.module.bias + solution[-1], atol=1e-8, rtol=1e-6)
    assert (bias is None) == (name == "llama")


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", ["llama", "gpt2", "opt", "granite"])
def test_the_error_of_the_stream_is_less_than_that_of_deletion(name, padded):
    model, batches = granite() if name == "granite" else make(name), token_batches(padded=padded)
    merging, hidden = merging_of(model, batches), streams(model, batches)
    for before, last in [(0, 1), (0, 2), (1, 2)]:
        removed = range(before + 1, last + 1)
        with merging.applied(removed):
            merged = streams(model, batches)[last]
        deleted = (hidden[before] - hidden[last]).square().sum()
        assert (merged - hidden[last]).square().sum() < 0.95 * deleted
        assert torch.equal(streams(model, batches)[last], hidden[last])


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt"])
def test_blocks_that_change_nothing_leave_the_layer_before_them(name):
    model = make(name)
    with torch.no_grad():
        for _, block in find_blocks(model)[1:]:
            for parameter in (p for key, p in block.named_parameters() if "norm" not in key and "ln_" not in key):
                parameter.zero_()
    merging = merging_of(model)
    merging.fit([(0, 1), (0, 2)])
    for weight, bias in merging.fitted.values():
        assert torch.equal(weight, merging.outputs[0].layer.matrix)
        assert bias is None or torch.equal(bias, merging.outputs[0].layer.module.bias)


def test_runs_are_merged_into_the_block_before_them():
    config = hf.LlamaConfig(**{**GROUPED, "num_hidden_layers": 8})
    merging = merging_of(spread(hf.LlamaForCausalLM(config)))
    assert merging.runs({2, 3, 5}) == [(1, 3), (4, 5)]
    assert merging.runs({0, 1, 4, 7}) == [(3, 4), (6, 7)]  # no block is before the first
    assert merging.runs(set()) == []


def test_sums_that_exceed_the_memory_take_several_passes(monkeypatch):
    model = make("llama")
    runs = [(0, 1), (0, 2), (1, 2)]
    whole, parts, passes = merging_of(model), merging_of(model), []
    whole.fit(runs)
    parts.most_bytes, collect = 1, Merging._collect
    monkeypatch.setattr(Merging, "_collect", lambda self, now: passes.append(now) or collect(self, now))
    parts.fit(runs)
    assert passes == [[run] for run in runs]
    for run in runs:
        assert torch.equal(parts.fitted[run][0], whole.fitted[run][0])


@pytest.mark.parametrize("name", ["llama-tied-biased", "gpt2"])
def test_a_failure_while_blocks_are_merged_leaves_the_model(name):
    model = make(name)
    before, places = weights(model), {key: p.data_ptr() for key, p in model.named_parameters()}
    merging = merging_of(model)
    with pytest.raises(RuntimeError, match="stop"), merging.applied([1]):
        assert not torch.equal(merging.outputs[0].layer.matrix, before[f"{merging.outputs[0].layer.name}.weight"].T)
        raise RuntimeError("stop")
    assert_same(model, before)
    assert {key: parameter.data_ptr() for key, parameter in model.named_parameters()} == places
    assert not any(module._forward_hooks for module in model.modules())


def alone(name, **changes):
    targets, ignore = ALONE[name]
    return dataclasses.replace(CONFIG, targets=targets, ignore=ignore, **changes)


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt"])
def test_the_merged_model_is_a_stock_model(name, tmp_path):
    model = make(name)
    before = weights(model)
    pruner, report = shrunk(model=model, config=alone(name), parameters=0.85)
    assert_same(model, before)
    assert report.merged == report.blocks and not report.widths and report.hidden_size is None
    assert "merged into" in report.line()
    deleted, _ = remove_blocks(model, report.blocks)
    same = [torch.equal(tensor, deleted.state_dict()[key]) for key, tensor in pruner.model.state_dict().items()]
    assert same.count(False) == (1 if name == "llama" else 2)  # the weight, and its bias
    pruner.save_pretrained(tmp_path)
    loaded = hf.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(loaded), logits(pruner.model))
    assert PruneReport.load(tmp_path).shrink == report
    assert loaded.config.moonshot["shrink"]["merged"] == list(report.merged)


def test_the_predicted_loss_is_the_divergence_of_the_merged_model():
    """With few samples, all of them measure it."""
    model = make("llama")
    pruner, report = shrunk(model=model, config=alone("llama"), parameters=0.85)
    divergence, losses = Divergence(model), []
    with torch.no_grad():
        for batch in BATCHES:
            divergence.remember(model(**batch), batch)
            losses.append(divergence(pruner.model(**batch), batch))
    assert report.chosen.loss == pytest.approx(torch.cat(losses).mean().item(), abs=1e-3)


def test_the_predicted_loss_is_the_increase_of_a_loss_that_the_caller_gives():
    def loss(output, batch):
        return output.logits.square().mean((1, 2))

    model = make("llama")
    pruner = MoonshotPruner(model, alone("llama"))
    report = pruner.shrink(BATCHES, parameters=0.85, loss=loss, progress=False)
    with torch.no_grad():
        after, before = (sum(loss(each(**b), b).mean().item() for b in BATCHES) for each in (pruner.model, model))
    assert report.chosen.loss == pytest.approx(max(0, (after - before) / len(BATCHES)), abs=1e-3)


def test_blocks_behind_a_norm_are_deleted_with_a_note():
    model = make("gemma2")
    pruner, report = shrunk(model=model, config=alone("gemma2"), parameters=0.85)
    assert report.blocks and not report.merged
    assert any("were deleted, not merged: no layer before them adds its output" in note for note in pruner.report.notes)
    assert torch.equal(logits(pruner.model), logits(remove_blocks(model, report.blocks)[0]))


@pytest.mark.slow
def test_a_recovery_reproduces_the_stream_behind_the_merged_blocks():
    """Not that of the blocks before them, which deletion would leave."""
    model = make("llama")
    config = dataclasses.replace(CONFIG, recover="blockwise", recover_steps=8, recover_lr=0.01)
    targets = {"targets": ["o_proj", "down_proj"], "parameters": 0.6}
    config = dataclasses.replace(config, targets=targets.pop("targets"))
    plain, report = shrunk(model=model, config=dataclasses.replace(config, recover=None), **targets)
    pruner, _ = shrunk(model=model, config=config, **targets)
    assert report.merged
    hidden, small = streams(model, BATCHES[-1:]), streams(plain.model, BATCHES[-1:])
    first = next(index for index in range(3) if index not in report.blocks)
    last = max(last for last in range(first, 3) if set(range(first + 1, last + 1)) <= set(report.merged))
    target, output = (values.view(2, 12, -1)[-1] for values in (hidden[last], small[0]))
    error = ((output - target).square().sum(-1) / target.square().sum(-1)).mean().item()
    assert pruner.report.recovery[0].loss_before == pytest.approx(error, rel=1e-3)


def test_the_set_of_least_loss_is_that_of_a_complete_search():
    generator = torch.Generator().manual_seed(0)
    runs = [(before, before + length) for before in range(7) for length in (1, 2, 3) if before + length < 8]
    losses = {run: float(torch.rand(1, generator=generator)) for run in runs}
    best: dict[int, float] = {}
    for count in range(1, 5):
        for chosen in itertools.combinations(runs, count):
            apart = all(after[0] > before[1] for before, after in itertools.pairwise(sorted(chosen)))
            total = sum(last - before for before, last in chosen)
            if apart and total <= 4:
                best[total] = min(best.get(total, 9.0), sum(losses[run] for run in chosen))
    sets = best_sets(losses, 4)
    assert sets.keys() == best.keys() == {1, 2, 3, 4}
    for count, blocks in sets.items():
        assert len(blocks) == count
        splits = [0] + [i for i in range(1, count) if blocks[i] != blocks[i - 1] + 1] + [count]
        total = sum(losses[blocks[a] - 1, blocks[b - 1]] for a, b in itertools.pairwise(splits))
        assert total == pytest.approx(best[count])


def test_few_runs_are_measured():
    possible = {(before, before + length) for before in range(29) for length in (1, 2, 3, 4) if before + length < 30}
    levels = []

    def measure(run, runs):
        assert run in runs and {last - before for before, last in runs} == {run[1] - run[0]}
        levels.append(run[1] - run[0])
        return (run[1] - run[0]) * 1.0 / (1 + run[0])

    measured = measure_runs(possible, 10, measure)
    assert len(measured) == len(levels) <= 60 and levels == sorted(levels)
    assert {run for run in measured if run[1] - run[0] == 1} == {run for run in possible if run[1] - run[0] == 1}
    assert (25, 28) in measured and (0, 2) not in measured
    assert all(run[1] - run[0] == 1 for run in measure_runs(possible, 1, lambda *_: -1.0))


def test_longer_runs_are_not_measured_once_several_short_ones_lose_less():
    possible = {(before, before + length) for before in range(9) for length in (1, 2, 3, 4) if before + length < 10}
    losses = measure_runs(possible, 4, lambda run, _: float((run[1] - run[0]) ** 2))
    assert max(last - before for before, last in losses) == 2  # of 4, where two runs of 1 lose 2


def test_a_repeated_run_measures_no_run_again(monkeypatch, tmp_path):
    shrunk(config=alone("llama"), parameters=0.85, resume_dir=tmp_path)

    def fail(*args, **kwargs):
        raise AssertionError("measured again")

    monkeypatch.setattr(trials, "mean_loss", fail)
    pruner, report = shrunk(config=alone("llama"), parameters=0.85, resume_dir=tmp_path)
    assert report.merged and pruner.model.num_parameters() == report.parameters[1]


def test_runs_are_compared_on_other_samples_than_those_of_their_fit():
    batches = [{"x": torch.arange(5 * start, 5 * start + 5)} for start in range(8)]
    compared, fitted = (
        torch.cat([batch["x"] for batch in spread_samples(batches, *sizes)]).tolist() for sizes in ((4,), (16, 4))
    )
    assert compared == [0, 10, 20, 30] and len(fitted) == 16 and not {*compared} & {*fitted}
    assert sum(len(batch["x"]) for batch in spread_samples(batches[:1], 16, 4)) == 1
    assert sum(len(batch["x"]) for batch in spread_samples(batches[:1], 16, 5)) == 5  # there are no others
