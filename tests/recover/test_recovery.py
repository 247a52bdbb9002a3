"""Block-wise recovery changes surviving weights alone, lowers the loss, stops early and resumes."""

from functools import partial
from pathlib import Path

import pytest
import torch
from models import ENCODERS, image_batches, make, token_batches
from recovery_runs import (
    LITERAL_SAMPLES,
    SAMPLES,
    assert_no_hooks,
    assert_recovered,
    assert_repeatable,
    assert_shared_as_pruned,
    blocks_of,
    interrupt,
    literal_batches,
    same,
    shuffled,
    state,
    tie_up_projections,
    without_seconds,
)
from recovery_runs import config as recovery_config
from recovery_runs import prune as prune_and_recover
from reference_recovery import hidden_states, recover, relative_errors

from optimum_moonshot import MoonshotError, MoonshotPruner, PruneReport
from optimum_moonshot.data.batches import batch_size, cut_batches
from optimum_moonshot.model.layers import find_structure
from optimum_moonshot.recover import tuning
from optimum_moonshot.recover.tuning import (
    STEP_SAMPLES,
    BlockTask,
    Tuner,
    divide_parts,
    padding_mask,
    part_size,
    split_heldout,
    step_parts,
)

SETTINGS = {"recover": "blockwise", "recover_steps": 10}
config, prune = partial(recovery_config, **SETTINGS), partial(prune_and_recover, **SETTINGS)


@pytest.mark.parametrize("name", ["llama", "qwen2", "opt", "gpt2", "bloom", "mixtral", "bert", "vit"])
def test_only_surviving_weights_change(name):
    batches = image_batches(SAMPLES) if name == "vit" else token_batches(SAMPLES)
    dense, plain, recovered = make(name), make(name), make(name)
    prune(plain, batches, recover=None)
    report = prune(recovered, batches)
    assert [block.name for block in report.recovery] == [block.name for block in find_structure(dense).blocks]
    pruned = {layer.weight_name for layer in find_structure(dense).layers()}
    changed = 0
    for key, tensor in recovered.state_dict().items():
        if key in pruned:
            before = plain.state_dict()[key]
            assert torch.equal(tensor == 0, before == 0), key
            changed += not torch.equal(tensor, before)
        else:
            assert torch.equal(tensor, dense.state_dict()[key]), key
    assert changed >= len(pruned) // 2
    assert all(block.loss_after <= block.loss_before for block in report.recovery)
    assert_recovered(report)
    assert report.sparsity == 0.5 and PruneReport.from_dict(report.to_dict()).to_dict() == report.to_dict()


@pytest.mark.parametrize(("name", "padded"), [("llama", False), ("gpt2", True)])
def test_equals_the_literal_version(name, padded, monkeypatch):
    monkeypatch.setattr(tuning, "EVALUATIONS", 1)
    batches = literal_batches(padded)
    dense, plain, recovered = make(name), make(name), make(name)
    settings = dict(num_samples=LITERAL_SAMPLES, recover_steps=3, recover_lr=0.01)
    prune(plain, batches, recover=None, **settings)
    report = prune(recovered, batches, **settings)
    groups, heldout = split_heldout([1] * LITERAL_SAMPLES)
    monkeypatch.undo()

    grouped = [[batches[index] for index in group] for group in groups]
    truth = recover(dense, plain, blocks_of, grouped, shuffled(len(groups)), steps=3, lr=0.01)
    assert all(block.loss_after < block.loss_before for block in report.recovery)
    for layer in find_structure(recovered).layers():
        expected = truth.get_submodule(layer.name).weight
        change = (expected - plain.get_submodule(layer.name).weight).norm()
        assert (layer.parameter - expected).norm() < 1e-3 * change, layer.name
    with torch.no_grad():
        for i, block in enumerate(report.recovery):
            errors = []
            for index in heldout:
                targets = hidden_states(dense, [b for b, _ in blocks_of(dense)], batches[index])[1][i]
                outputs = hidden_states(recovered, [b for b, _ in blocks_of(recovered)], batches[index])[1][i]
                errors.append(relative_errors(outputs, targets, batches[index].get("attention_mask")))
            assert torch.cat(errors).mean().item() == pytest.approx(block.loss_after, rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models_are_tuned_in_float32(dtype, monkeypatch):
    seen = set()
    original = BlockTask.error

    def spy(self, index, tensors, widen=False):
        if widen:
            seen.update(tensor.dtype for tensor in tensors.values())
        return original(self, index, tensors, widen)

    monkeypatch.setattr(BlockTask, "error", spy)
    model, plain = make("llama").to(dtype), make("llama").to(dtype)
    prune(plain, recover=None)
    report = prune(model, recover_lr=0.01)
    assert seen == {torch.float32} and model.dtype == dtype
    assert_recovered(report)
    for layer in find_structure(model).layers():
        assert torch.equal(layer.parameter == 0, plain.get_submodule(layer.name).weight == 0)


def test_two_runs_are_bit_identical_and_leave_the_random_state():
    assert_repeatable(prune)


def test_the_batch_size_does_not_change_the_result():
    samples = torch.randint(3, 96, (32, 12), generator=torch.Generator().manual_seed(0))
    models = {}
    for size in (4, 2, 1):
        models[size] = make("llama")
        batches = [{"input_ids": part} for part in samples.split(size)]
        prune(models[size], batches, num_samples=32, batch_size=size, recover_lr=0.01)
    for size in (2, 1):
        for name, tensor in models[size].state_dict().items():
            assert torch.allclose(tensor, models[4].state_dict()[name], atol=2e-4), name


def test_recovery_never_raises_the_loss_of_a_block():
    plain, model = make("llama"), make("llama")
    prune(plain, recover=None)
    report = prune(model, recover_lr=0.9)
    assert all(block.loss_after == block.loss_before for block in report.recovery)
    assert all("no gain: the pruned weights were kept" in block.notes for block in report.recovery)
    assert same(model, state(plain)) and "no gain" in report.table()


@pytest.mark.parametrize("sparsity", [0.0, 1.0])
def test_sparsity_zero_and_one(sparsity):
    plain, model = make("llama"), make("llama")
    options = dict(solver="magnitude", pattern="unstructured", sparsity=sparsity)
    prune(plain, recover=None, **options)
    report = prune(model, **options)
    assert same(model, state(plain)) and report.sparsity == sparsity
    assert all(block.loss_after == block.loss_before for block in report.recovery)
    assert [block.loss_before for block in report.recovery] == ([0.0] * 3 if sparsity == 0 else [])


def test_tuning_stops_early_when_the_held_out_loss_stops_falling():
    report = prune(make("llama"), recover_steps=100, recover_lr=0.2)
    assert any(
        block.steps < 100 and f"stopped after {block.steps} of 100 steps" in block.notes for block in report.recovery
    )


@pytest.mark.parametrize("block", [1, 2])
def test_an_interrupted_run_resumes_at_its_block(block, tmp_path, monkeypatch):
    whole, resumed = make("llama"), make("llama")
    before = state(whole)
    full = prune(whole, lam=0.9)
    calls = interrupt(monkeypatch, Tuner, "finish", block + 1)
    folder = tmp_path / "partial"
    with pytest.raises(KeyboardInterrupt):
        prune(resumed, lam=0.9, resume_dir=folder)
    assert same(resumed, before) and len(list(folder.glob("recovered/*.safetensors"))) == block
    report = prune(resumed, lam=0.9, resume_dir=folder)
    assert len(calls) == 1 + 3
    assert any(f"21 layers, {block} recovered blocks were reused" in note for note in report.notes)
    assert same(resumed, state(whole))
    assert without_seconds(report) == without_seconds(full)


def test_a_failure_restores_the_model(monkeypatch):
    model = make("llama").train()
    before, trainable = state(model), [parameter.requires_grad for parameter in model.parameters()]
    interrupt(monkeypatch, torch.Tensor, "backward", 12)
    with pytest.raises(KeyboardInterrupt):
        prune(model)
    assert same(model, before) and all(module.training for module in model.modules())
    assert [parameter.requires_grad for parameter in model.parameters()] == trainable
    assert all(parameter.grad is None for parameter in model.parameters())
    assert_no_hooks(model)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("albert", {}, "recover='blockwise': it needs pruned layers inside one chain"),
        ("llama", {"targets": ["lm_head"]}, "recover='blockwise': it needs pruned layers inside one chain"),
        ("llama", {"num_samples": 1}, "num_samples=1: recovery holds a fraction"),
    ],
)
def test_unsupported_recovery_is_refused_before_any_work(name, changes, message, monkeypatch):
    solver = "optimum_moonshot.solvers.sparsegpt.SparseGPT.solve"
    monkeypatch.setattr(solver, lambda *args: pytest.fail("work was done"))
    model = make(name)
    before = state(model)
    with pytest.raises(MoonshotError, match=message):
        prune(model, **changes)
    assert same(model, before)


def test_recovery_needs_data():
    with pytest.raises(MoonshotError, match="calibration=None: recover='blockwise' needs data"):
        MoonshotPruner(make("llama"), config(solver="magnitude")).prune()


def test_blocks_without_pruned_layers_are_not_recovered():
    plain, model = make("llama"), make("llama")
    prune(plain, recover=None, targets=[r"layers\.[02]\..*proj", "lm_head"])
    report = prune(model, targets=[r"layers\.[02]\..*proj", "lm_head"])
    assert [block.name for block in report.recovery] == ["model.layers.0", "model.layers.2"]
    assert any("1 layers outside of the blocks were not recovered" in note for note in report.notes)
    assert torch.equal(model.lm_head.weight, plain.lm_head.weight)


def test_a_weight_shared_by_two_blocks_is_not_tuned():
    plain, model = make("llama"), make("llama")
    tie_up_projections(plain, model)
    prune(plain, recover=None)
    prune(model)
    assert_shared_as_pruned(model, plain)
    assert not torch.equal(model.model.layers[0].mlp.gate_proj.weight, plain.model.layers[0].mlp.gate_proj.weight)


def test_padding_that_hidden_states_do_not_show_is_an_error():
    hidden = torch.zeros(24, 16)
    batch = token_batches(2, padded=True)[0]
    with pytest.raises(MoonshotError, match=r"recover: hidden states of shape \[24, 16\] do not show"):
        padding_mask(batch, hidden)


@pytest.mark.parametrize("samples", [2, 3, 7, 8, 15, 16, 17, 64, 128])
def test_every_sample_trains_or_is_held_out(samples):
    size = part_size(samples)
    sizes = [min(size, samples - start) for start in range(0, samples, size)]
    groups, heldout = split_heldout(sizes)
    assert sorted([*heldout, *(index for group in groups for index in group)]) == list(range(len(sizes)))
    assert heldout and groups[0] and heldout == list(range(len(sizes) - len(heldout), len(sizes)))
    kept = sum(sizes[index] for index in heldout)
    assert max(1, samples // 8) <= kept < max(2, samples // 4)
    for group in groups[:-1]:
        assert STEP_SAMPLES <= sum(sizes[index] for index in group) < 2 * STEP_SAMPLES


@pytest.mark.slow
@pytest.mark.parametrize("recover", ["blockwise", "gradual", "distill"])
def test_the_batch_size_changes_the_result_by_rounding_only(recover):
    results = []
    for size in (8, 3, 1):
        model = make("llama")
        report = prune(model, token_batches(24), num_samples=24, recover=recover, recover_steps=3, batch_size=size)
        results.append((report, dict(model.named_parameters())))
    for report, parameters in results[1:]:
        assert [block.steps for block in report.recovery] == [block.steps for block in results[0][0].recovery]
        for name, expected in results[0][1].items():
            assert torch.allclose(parameters[name], expected, atol=1e-4), name


@pytest.mark.parametrize("batches", [[8] * 3, [3] * 8, [5, 3, 16], [1] * 24])
def test_steps_have_the_same_samples_whatever_the_batches(batches):
    parts, data = step_parts(24), [{"input_ids": torch.arange(size)[:, None]} for size in batches]
    pieces = [batch_size(batch) for batch in cut_batches(data, parts)]
    samples = torch.arange(24).split(pieces)
    steps, heldout = divide_parts(parts, pieces)
    assert [torch.cat([samples[piece] for piece in each]).tolist() for each in (*steps, heldout)] == [
        [*range(8)], [*range(8, 16)], [16, 17, 18], [*range(19, 24)],
    ]  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        {"recompute": True},
        {"pattern": "unstructured", "sparsity": 0.5, "allocation": "owl", "lam": 0.9},
        {"pattern": "structured", "sparsity": 0.25, "solver": "wanda"},
    ],
    ids=str,
)
def test_recovery_with_other_options(changes):
    plain, model = make("llama"), make("llama")
    changes = {**changes, "num_samples": 64, "recover_lr": 0.01}
    prune(plain, token_batches(64), recover=None, **changes)
    pruner = MoonshotPruner(model, config(**changes))
    report = pruner.prune(token_batches(64), progress=False)
    assert len(report.recovery) == 3 and not same(model, state(plain))
    for layer in report.layers:
        weights = (each.get_submodule(layer.name).weight for each in (model, plain))
        assert torch.equal(*(weight == 0 for weight in weights)), layer.name
    if changes.get("pattern") == "structured":
        before, after = pruner.compact().parameters
        assert after < before


def test_recovery_lowers_the_loss_of_padded_encoders():
    for name in set(ENCODERS) - {"albert"}:
        report = prune(make(name), token_batches(SAMPLES, padded=True))
        assert_recovered(report)


def test_the_benchmark_returns_the_pruned_and_the_recovered_model(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    import finetune

    monkeypatch.setattr(finetune, "LENGTH", 16)
    choice = dict(sparsity=0.8, lam=1.0, targets=[r"layers\.0\."], recover="blockwise", recover_steps=20)
    pruned, recovered, report = finetune.Bench(64).prune(**choice)
    assert report.recovery[0].loss_after < report.recovery[0].loss_before
    weights = [each.model.layers[0].mlp.up_proj.weight for each in (pruned, recovered)]
    assert torch.equal(*(weight == 0 for weight in weights)) and not torch.equal(*weights)
