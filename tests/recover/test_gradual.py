"""Gradual recovery prunes blocks in stages while it tunes them: final patterns, literal version, interruptions."""

import dataclasses
import math
from functools import partial

import pytest
import torch
from marks import slow
from models import image_batches, make, token_batches
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
from reference_recovery import recover_gradually

from optimum_moonshot import MoonshotPruner, PruneReport
from optimum_moonshot.model.layers import find_structure
from optimum_moonshot.objective.patterns import NM, Structured, Unstructured
from optimum_moonshot.pipeline.partition import Part
from optimum_moonshot.recover import blockwise, tuning
from optimum_moonshot.recover.blockwise import STAGES, StagePruning, stage_patterns
from optimum_moonshot.recover.student import StudentBlock
from optimum_moonshot.recover.tuning import Optimizer, Tuner, split_heldout

SETTINGS = {"recover": "gradual", "recover_steps": 20, "recover_lr": 0.01}
config, prune = partial(recovery_config, **SETTINGS), partial(prune_and_recover, **SETTINGS)
FRACTIONS = [1 - (5 / 6) ** 3, 19 / 27, 7 / 8, 26 / 27, 215 / 216, 1]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (Unstructured(0.8), [Unstructured(0.8 * fraction) for fraction in FRACTIONS]),
        (Unstructured(0.3, exact=True), [Unstructured(0.3 * fraction, exact=True) for fraction in FRACTIONS]),
        (Unstructured(0.0), [Unstructured(0.0)] * 6),
        (NM(2, 4), [NM(3, 4)] * 2 + [NM(2, 4)] * 4),
        (NM(4, 4), [NM(4, 4)] * 6),
        (NM(1, 2), [NM(2, 2)] + [NM(1, 2)] * 5),
        (NM(4, 16), [NM(n, 16) for n in (11, 8, 6, 4, 4, 4)]),
        (Structured(0.5, 4), [Structured(0.5 * fraction, 4) for fraction in FRACTIONS]),
    ],
    ids=str,
)
def test_stages_are_increasingly_sparse_and_end_at_the_pattern(pattern, expected):
    stages = stage_patterns(pattern)
    assert stages[-1] == pattern and len(stages) == STAGES
    for stage, wanted in zip(stages, expected, strict=True):
        assert stage.sparsity == pytest.approx(wanted.sparsity)
        assert dataclasses.replace(stage, **{name: 0 for name in vars(stage) if name in ("sparsity", "n")}) == (
            dataclasses.replace(wanted, **{name: 0 for name in vars(wanted) if name in ("sparsity", "n")})
        )


def settle(tuner, steps):
    """Like `Tuner.settle`, but without the losses that could undo the steps."""
    optimizer = Optimizer(tuner.student, tuner.lr)
    for _ in range(steps):
        tuner.step(optimizer, 1.0)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "padded"), [("llama", False), ("llama-tied-biased", True)])
def test_equals_the_literal_version(name, padded, monkeypatch):
    """The evaluations on held-out samples, which could undo steps, are disabled."""
    monkeypatch.setattr(tuning, "EVALUATIONS", 1)
    monkeypatch.setattr(Tuner, "settle", settle)
    real = Tuner.loss
    monkeypatch.setattr(Tuner, "loss", lambda self: real(self) if self.taken else math.inf)
    batches = literal_batches(padded)
    settings = dict(
        num_samples=LITERAL_SAMPLES, recover_steps=20, recover_lr=0.003, pattern="unstructured", sparsity=0.5
    )
    dense, plain, recovered = make(name), make(name), make(name)
    prune(plain, batches, **{**settings, "recover": None})
    report = prune(recovered, batches, **settings)
    groups, _ = split_heldout([1] * LITERAL_SAMPLES)

    stages = [config(recover=None, pattern="unstructured", sparsity=0.5 * fraction) for fraction in FRACTIONS]
    truth = recover_gradually(
        dense,
        plain,
        blocks_of,
        [[batches[index] for index in group] for group in groups],
        shuffled(len(groups)),
        steps=10,
        lr=0.003,
        stages=lambda parameter: stages,
        batches=batches,
        between=2,
    )
    assert all(block.steps == 20 and not block.notes for block in report.recovery)
    for layer in find_structure(recovered).layers():
        expected = truth.get_submodule(layer.name).weight
        change = (expected - plain.get_submodule(layer.name).weight).norm()
        assert torch.equal(expected == 0, layer.parameter == 0), layer.name
        assert (layer.parameter - expected).norm() < 1e-3 * change, layer.name


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"pattern": "unstructured", "sparsity": 0.7},
        slow({"pattern": "unstructured", "sparsity": 0.7, "allocation": "owl"}),
        slow({"allocation": {"q_proj": 0.3, "mlp": "1:4"}}),
        {"pattern": "unstructured", "sparsity": 0.7, "allocation": "fisher", "lam": 0.9},
        slow({"pattern": "n:4", "sparsity": 0.5, "allocation": "fisher"}),
        {"pattern": "unstructured", "sparsity": 0.7, "solver": "wanda"},
        slow({"pattern": "unstructured", "sparsity": 0.7, "solver": "magnitude", "lam": 0.5}),
        slow({"pattern": "unstructured", "sparsity": 0.7, "solver": "obc"}),
        slow({"solver": "cap", "lam": 0.5}),
        {"pattern": "structured", "sparsity": 0.25, "solver": "osscar", "num_samples": 64},
        slow({"pattern": "structured", "sparsity": 0.25, "solver": "wanda", "group_size": 2}),
        {"recompute": True},
    ],
    ids=str,
)
def test_every_layer_reaches_exactly_its_target(changes):
    plain, dense, model = make("llama"), make("llama"), make("llama")
    batches = token_batches(64)
    before = prune(plain, batches, **{**changes, "recover": None})
    pruner = MoonshotPruner(model, config(**changes))
    report = pruner.prune(batches, progress=False)
    assert [block.name for block in report.recovery] == [block.name for block in find_structure(dense).blocks]
    assert all(block.loss_after <= block.loss_before for block in report.recovery)
    assert_recovered(report)
    patterns = pruner.config.pattern_rules.of(layer.name for layer in report.layers)
    for layer, expected in zip(report.layers, before.layers, strict=True):
        weight = model.get_submodule(layer.name).weight
        assert layer.sparsity == expected.sparsity == int((weight == 0).sum()) / weight.numel(), layer.name
        assert layer.target_sparsity == expected.target_sparsity
        if isinstance(pattern := patterns[layer.name], NM):
            assert ((weight != 0).view(-1, pattern.m).sum(1) == pattern.n).all(), layer.name
    structured = changes.get("pattern") == "structured"
    for key, tensor in model.state_dict().items():
        if key.removesuffix(".weight") not in patterns and not (structured and key.startswith("model.layers.")):
            assert torch.equal(tensor, dense.state_dict()[key]), key
    assert PruneReport.from_dict(report.to_dict()).to_dict() == report.to_dict()
    if structured:
        parameters = pruner.compact().parameters
        assert parameters[1] < parameters[0]


@pytest.mark.slow
def test_recovery_in_a_learned_basis(tmp_path):
    whole, resumed = make("llama"), make("llama")
    options = dict(rotation="learned", rotation_steps=2, num_samples=64)
    report = prune(whole, token_batches(64), **options)
    assert report.rotation is not None and report.sparsity == 0.5
    assert_recovered(report)
    again = prune(resumed, token_batches(64), tmp_path / "run", **options)
    assert same(resumed, state(whole)) and without_seconds(again) == without_seconds(report)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "opt", "mixtral", "bert", "vit"])
def test_recovery_lowers_the_loss_of_other_architectures(name):
    batches = image_batches(SAMPLES) if name == "vit" else token_batches(SAMPLES, padded=name == "bert")
    report = prune(make(name), batches)
    assert_recovered(report)
    assert report.sparsity == 0.5


@pytest.mark.parametrize("dtype", [torch.bfloat16, slow(torch.float16)])
def test_half_precision_models_are_pruned_and_tuned_in_float32(dtype, monkeypatch):
    seen = set()
    original = StudentBlock.prune

    def spy(self, weights):
        original(self, weights)
        seen.update(layer.matrix.dtype for layer in self.layers.values())

    monkeypatch.setattr(StudentBlock, "prune", spy)
    model = make("llama").to(dtype)
    report = prune(model)
    assert seen == {torch.float32} and model.dtype == dtype and report.sparsity == 0.5
    assert_recovered(report)


def test_recovery_changes_the_masks():
    plain, model = make("llama"), make("llama")
    prune(plain, recover=None)
    prune(model)
    layers = [layer.name for layer in find_structure(model).layers()]
    zeros = [[each.get_submodule(name).weight == 0 for each in (plain, model)] for name in layers]
    assert any(not torch.equal(*pair) for pair in zeros)


@pytest.mark.parametrize("rate", [0.9, 0.3])
def test_recovery_never_raises_the_loss_of_a_block(rate):
    report = prune(make("llama"), recover_lr=rate)
    assert all(block.loss_after <= block.loss_before for block in report.recovery)
    assert report.sparsity == 0.5


def test_without_a_gain_the_pruned_weights_are_kept(monkeypatch):
    plain, model = make("llama"), make("llama")
    prune(plain, recover=None)

    def lose_all(self, weights):
        for _, parameter in self.named_parameters():
            parameter.data.zero_()

    monkeypatch.setattr(StudentBlock, "prune", lose_all)
    monkeypatch.setattr(Tuner, "finish", lambda self: [])
    report = prune(model)
    assert same(model, state(plain))
    assert all("no gain: the pruned weights were kept" in block.notes for block in report.recovery)


def test_steps_between_stages_are_undone_if_they_raise_the_loss(monkeypatch):
    losses = iter([1.0, 1.5, 1.0, 0.5])

    class Learner:
        value = 0

        def snapshot(self):
            return self.value

        def restore(self, value):
            self.value = value

    monkeypatch.setattr(tuning, "Optimizer", lambda student, lr: None)
    tuner = Tuner.__new__(Tuner)
    tuner.student, tuner.lr, tuner.loss = Learner(), 0.1, lambda: next(losses)
    tuner.step = lambda optimizer, rate: setattr(tuner.student, "value", tuner.student.value + rate)
    tuner.settle(3)
    assert tuner.student.value == 0
    tuner.settle(4)
    assert tuner.student.value == 4


@pytest.mark.parametrize("sparsity", [0.0, 1.0])
def test_sparsity_zero_and_one(sparsity):
    plain, model = make("llama"), make("llama")
    options = dict(pattern="unstructured", sparsity=sparsity)
    prune(plain, **{**options, "recover": None})
    report = prune(model, **options)
    assert same(model, state(plain)) and report.sparsity == sparsity
    assert [block.loss_after for block in report.recovery] == ([0.0] * 3 if sparsity == 0 else [])


def test_shared_layers_and_blocks_without_layers_are_skipped():
    plain, model = make("llama"), make("llama")
    tie_up_projections(plain, model)
    targets = [r"layers\.[02]\..*proj", "lm_head"]
    prune(plain, recover=None, targets=targets)
    report = prune(model, targets=targets)
    assert [block.name for block in report.recovery] == ["model.layers.0", "model.layers.2"]
    assert any("1 layers outside of the blocks were not recovered" in note for note in report.notes)
    assert_shared_as_pruned(model, plain)
    assert torch.equal(model.lm_head.weight, plain.lm_head.weight)


def test_a_single_block_is_recovered():
    model = make("llama")
    report = prune(model, targets=[r"layers\.1\."])
    assert [block.name for block in report.recovery] == ["model.layers.1"] and report.sparsity == 0.5
    assert report.recovery[0].loss_after < report.recovery[0].loss_before


@pytest.mark.slow
def test_a_layer_without_inputs_after_recovery_keeps_its_pruned_weight(monkeypatch):
    plain, model = make("llama"), make("llama")
    changes = dict(pattern="unstructured", sparsity=0.7, num_samples=64)
    prune(plain, token_batches(64), **changes, recover=None)
    original, name = StagePruning.solve, "model.layers.1.mlp.up_proj"

    def hide(self, layer, statistics):
        (self.skip if layer.name == name else partial(original, self, statistics=statistics))(layer)

    monkeypatch.setattr(StagePruning, "solve", hide)
    report = prune(model, token_batches(64), **changes)
    assert report.recovery[1].loss_after < report.recovery[1].loss_before
    for other in (name, "model.layers.1.mlp.gate_proj"):
        zeros = [each.get_submodule(other).weight == 0 for each in (plain, model)]
        assert torch.equal(*zeros) == (other == name)


@pytest.mark.slow
def test_the_partition_does_not_change_the_result(monkeypatch):
    whole, partitioned = make("llama"), make("llama")
    prune(whole)
    one = lambda self, stage: [Part((layer,), (0,)) for layer in stage.layers if self.lacks(layer)]  # noqa: E731
    monkeypatch.setattr(StagePruning, "partition", one)  # as with little memory
    prune(partitioned)
    assert same(partitioned, state(whole))


@pytest.mark.slow
def test_two_runs_are_bit_identical_and_leave_the_random_state():
    assert_repeatable(prune)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("block", "allocation"),
    [
        slow(0, "uniform"),
        (1, "uniform"),
        slow(2, "uniform"),
        slow(1, "owl"),
        slow(1, "alpha"),
        (1, "fisher"),
    ],
)
def test_an_interrupted_run_resumes_at_its_block(block, allocation, tmp_path, monkeypatch):
    changes = {} if allocation == "uniform" else dict(pattern="unstructured", sparsity=0.5, allocation=allocation)
    whole, resumed = make("llama"), make("llama")
    before = state(whole)
    full = prune(whole, **changes)
    calls = interrupt(monkeypatch, Tuner, "settle", (STAGES - 1) * block + 2)  # after the second stage of a block
    folder = tmp_path / "partial"
    with pytest.raises(KeyboardInterrupt):
        prune(resumed, resume_dir=folder, **changes)
    assert same(resumed, before) and len(list(folder.glob("recovered/*.safetensors"))) == block
    report = prune(resumed, resume_dir=folder, **changes)
    assert len(calls) == (STAGES - 1) * 3 + 2
    assert same(resumed, state(whole)) and without_seconds(report) == without_seconds(full)


def test_a_run_with_another_recovery_is_set_aside(tmp_path):
    prune(make("llama"), resume_dir=tmp_path / "run", recover="blockwise")
    report = prune(make("llama"), resume_dir=tmp_path / "run")
    assert any("was set aside" in note and "configuration differs in recover" in note for note in report.notes)


def test_a_failure_restores_the_model(monkeypatch):
    model = make("llama").train()
    before = state(model)
    interrupt(monkeypatch, blockwise, "solve_parts", STAGES + 2, RuntimeError("broken"))
    with pytest.raises(RuntimeError, match="broken"):
        prune(model)
    assert same(model, before) and all(module.training for module in model.modules())
    assert_no_hooks(model)
