"""Distillation trains a whole copy of the model: zeros, ties and grids stay, the loss never rises, runs resume."""

import re
from functools import partial

import pytest
import torch
from marks import slow
from models import image_batches, make, token_batches
from offloaded_models import offloaded
from recovery_runs import SAMPLES, assert_no_hooks, assert_repeatable, config, interrupt, same, state, without_seconds
from recovery_runs import prune as prune_and_recover
from test_grid_recovery import assert_on_grid
from torch import nn

from optimum_moonshot import MoonshotError, MoonshotPruner
from optimum_moonshot.calibration.storage import Storage
from optimum_moonshot.model.calls import run_model
from optimum_moonshot.model.layers import find_structure
from optimum_moonshot.objective.patterns import NM
from optimum_moonshot.recover import tuning
from optimum_moonshot.recover.distill import Distillation
from optimum_moonshot.recover.run import Placement, TrainingBytes
from optimum_moonshot.recover.student import StudentModel
from optimum_moonshot.recover.teacher import Teacher, counted
from optimum_moonshot.recover.tuning import Optimizer
from optimum_moonshot.reports.prune_report import MODEL

SETTINGS = {"recover": "distill", "recover_steps": 10, "recover_lr": 0.01}
prune = partial(prune_and_recover, **SETTINGS)


def divergence(dense, model, batch):
    """KL(dense ‖ model) over the tokens without padding, summed, by float64 logits of torch's modules."""
    dense, model = (each.double()(**batch).logits for each in (dense, model))
    terms = nn.functional.kl_div(model.log_softmax(-1), dense.log_softmax(-1), log_target=True, reduction="none")
    return (terms.sum(-1) * batch.get("attention_mask", torch.ones(terms.shape[:-1]))).sum()


def heldout(batches):
    return batches[-1]  # 2 of 16 samples, in batches of 2


@pytest.mark.parametrize("name", ["llama", "llama-tied-biased", "opt", "gpt2", "gemma2", "mixtral", "bert", "vit"])
def test_all_parameters_train_and_zeros_stay(name):
    batches = image_batches(SAMPLES) if name == "vit" else token_batches(SAMPLES)
    dense, plain, model = make(name), make(name), make(name)
    prune(plain, batches, recover=None)
    report = prune(model, batches, recover_lr=0.01 if name == "bert" else 0.003, recover_steps=20)
    (block,) = report.recovery
    assert block.name == MODEL and block.loss_after < block.loss_before and "distilled: loss" in report.table()
    pruned = {layer.weight_name for layer in find_structure(dense).layers()}
    reached = 0
    for key, tensor in model.named_parameters():
        before = plain.get_parameter(key)
        if key in pruned:
            assert torch.equal(tensor == 0, before == 0), key
        reached += not torch.equal(tensor, before)
    assert reached > 0.8 * len(list(model.parameters()))
    before, after = dict(dense.named_buffers()), dict(model.named_buffers())
    assert all(torch.equal(after[key], tensor) for key, tensor in before.items())
    assert [len(set(map(id, each.parameters()))) for each in (model, dense)] == [len(list(dense.parameters()))] * 2


@pytest.mark.parametrize(("name", "padded"), [("llama", False), ("gpt2", True), ("gemma2", True)])
def test_the_losses_are_those_of_the_models(name, padded):
    batches = token_batches(SAMPLES, padded=padded)
    dense, plain, model = make(name), make(name), make(name)
    prune(plain, batches, recover=None)
    (block,) = prune(model, batches).recovery
    batch = heldout(batches)
    tokens = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).sum()
    with torch.no_grad():
        expected = [float(divergence(dense, each, batch) / tokens) for each in (plain, model)]
    assert [block.loss_before, block.loss_after] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(("name", "padded"), [("llama", True), ("gemma2", False), ("vit", False)])
def test_the_gradient_of_the_divergence(name, padded, monkeypatch):
    monkeypatch.setattr("optimum_moonshot.recover.teacher.CHUNK", 500)
    batch = image_batches(2)[0] if name == "vit" else token_batches(2, padded=padded)[0]
    batch = {key: value for key, value in batch.items() if key != "labels"}
    dense, student = make(name), make(name)
    nn.utils.vector_to_parameters(
        nn.utils.parameters_to_vector(student.parameters()) * 0.9 + 0.01, student.parameters()
    )
    teacher = Teacher(dense, Storage(torch.device("cpu")))
    cache, weights = teacher.record(batch)
    assert (teacher.head is not None) == (name == "llama")  # gemma2 caps its logits
    logits = run_model(student, batch).logits
    total, gradient = teacher.divergence(logits, cache, weights)
    exact = logits.detach().double().requires_grad_()
    targets = dense(**batch).logits.double().log_softmax(-1)
    terms = nn.functional.kl_div(exact.log_softmax(-1), targets, log_target=True, reduction="none").sum(-1)
    mask = batch.get("attention_mask")
    expected = (terms if mask is None else terms * mask).sum()
    expected.backward()
    assert total == pytest.approx(expected.item(), rel=1e-5)
    torch.testing.assert_close(gradient, exact.grad.float(), rtol=1e-4, atol=1e-6)


def test_a_step_is_adams():
    """One step of the student equals Adam in float64 on a plain module, whose gradients of zeros are zero."""
    dense, plain = make("llama"), make("llama")
    prune(plain, recover=None)
    layers = list(find_structure(plain).layers())
    student = StudentModel(
        dense, [(layer, layer.matrix) for layer in layers], {layer.name: NM(2, 4) for layer in layers}
    )
    batch = token_batches(2)[0]
    optimizer, reference = Optimizer(student, 0.01), plain.double()
    names, initial = {layer.weight_name for layer in layers}, state(reference)
    groups = []
    for name, parameter in reference.named_parameters():
        kept = parameter.detach()[parameter != 0] if name in names else parameter.detach()
        groups.append({"params": [parameter], "lr": 0.005 * float(kept.square().mean().sqrt())})
    adam = torch.optim.Adam(groups, betas=(0.9, 0.95))
    teacher = Teacher(dense, Storage(torch.device("cpu")))
    cache, weights = teacher.record(batch)
    for _ in range(2):
        logits = student.module(**batch).logits
        logits.backward(teacher.divergence(logits, cache, weights)[1])
        optimizer.step(0.5)
        adam.zero_grad()
        divergence(make("llama"), reference, batch).backward()
        for layer in find_structure(reference).layers():
            layer.parameter.grad.mul_(layer.parameter != 0)
        adam.step()
    for name, parameter in reference.named_parameters():
        change = (parameter - initial[name]).norm()
        assert (student.masters[name].value - parameter).norm() < 0.1 * change, name  # signs of rounding errors differ


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models_have_masters_in_float32(dtype, monkeypatch):
    students = []
    original = Distillation._train
    monkeypatch.setattr(Distillation, "_train", lambda self: students.append(self.student) or original(self))
    model, plain = make("llama-tied-biased").to(dtype), make("llama-tied-biased").to(dtype)
    prune(plain, recover=None)
    (block,) = prune(model).recovery
    assert block.loss_after < block.loss_before and {each.dtype for each in model.parameters()} == {dtype}
    passes = torch.float32 if dtype == torch.float16 else dtype
    for master in students[0].masters.values():
        assert master.value.dtype == torch.float32 and master.used.dtype == passes
        assert torch.equal(master.used, master.value.to(dtype).to(passes))
    for layer in find_structure(model).layers():
        assert torch.equal(layer.parameter == 0, plain.get_submodule(layer.name).weight == 0)
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pattern", [{}, {"pattern": "unstructured", "sparsity": 0.0}])
def test_quantized_survivors_stay_on_their_grid(pattern, dtype):
    plain, model = make("llama").to(dtype), make("llama").to(dtype)
    changes = {"bits": 4, "quant_group": 64, **pattern}
    prune(plain, recover=None, **changes)
    (block,) = prune(model, recover_steps=20, **changes).recovery
    assert block.loss_after < block.loss_before
    assert_on_grid(model, 4)
    for layer in find_structure(model).layers():
        zeros = plain.get_submodule(layer.name).weight == 0
        assert not pattern or not torch.equal(layer.parameter, plain.get_submodule(layer.name).weight)
        assert pattern or not layer.parameter[zeros].any()


def test_dead_neurons_stay_dead():
    plain, pruner = make("llama"), MoonshotPruner(make("llama"), prune_config())
    prune(plain, recover=None, **STRUCTURED)
    report = pruner.prune(token_batches(SAMPLES), progress=False)
    assert report.recovery[0].loss_after < report.recovery[0].loss_before
    for layer in report.layers:
        weights = (each.get_submodule(layer.name).weight for each in (pruner.model, plain))
        assert torch.equal(*((weight == 0).all(0) for weight in weights))
    assert not torch.equal(
        pruner.model.model.layers[0].mlp.gate_proj.weight, plain.model.layers[0].mlp.gate_proj.weight
    )
    batch = token_batches(2)[0]
    before = pruner.model(**batch).logits
    sizes = pruner.compact().parameters
    assert sizes[1] < sizes[0]
    torch.testing.assert_close(pruner.model(**batch).logits, before, rtol=1e-3, atol=1e-4)


STRUCTURED = {"solver": "osscar", "pattern": "structured", "sparsity": 0.25}


def prune_config():
    from recovery_runs import config

    return config(**{**SETTINGS, **STRUCTURED, "recover_lr": 0.001})


def test_two_runs_are_bit_identical_and_leave_the_random_state():
    assert_repeatable(prune)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"bits": 4, "quant_group": 64}, {"recover_lr": 0.9}], ids=str)
@pytest.mark.parametrize("call", [slow(1), 5, slow(8)])
def test_an_interrupted_run_continues_bit_for_bit(changes, call, tmp_path, monkeypatch):
    whole, resumed = make("llama").bfloat16(), make("llama").bfloat16()
    before = state(whole)
    changes = {"recover_steps": 12, **changes}
    monkeypatch.setattr(tuning, "EVALUATIONS", 4)
    full = prune(whole, **changes)
    calls = interrupt(monkeypatch, Optimizer, "step", call)
    with pytest.raises(KeyboardInterrupt):
        prune(resumed, resume_dir=tmp_path / "run", **changes)
    assert same(resumed, before)
    taken = (call - 1) // 3 * 3
    report = prune(resumed, resume_dir=tmp_path / "run", **changes)
    assert len(calls) == call + 12 - taken
    note = f"{taken} steps of the distillation were reused from an interrupted run"
    assert (note in report.notes) == (taken > 0)
    assert same(resumed, state(whole)) and without_seconds(report) == without_seconds(full)


def test_a_model_with_transposed_weights_continues(tmp_path, monkeypatch):
    whole, resumed = make("gpt2").bfloat16(), make("gpt2").bfloat16()
    prune(whole, recover_steps=4)
    interrupt(monkeypatch, Optimizer, "step", 3)
    with pytest.raises(KeyboardInterrupt):
        prune(resumed, resume_dir=tmp_path / "run", recover_steps=4)
    prune(resumed, resume_dir=tmp_path / "run", recover_steps=4)
    assert same(resumed, state(whole))


def test_a_finished_distillation_is_not_repeated(tmp_path, monkeypatch):
    whole, resumed = make("llama"), make("llama")
    prune(whole)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupt(patch, MoonshotPruner, "_reported", 1)
        patch.setattr("optimum_moonshot.pipeline.variant.Variant.commit", raise_interrupt)
        prune(resumed, resume_dir=tmp_path / "run")
    monkeypatch.setattr(Optimizer, "step", lambda *_: pytest.fail("trained again"))
    prune(resumed, resume_dir=tmp_path / "run")
    assert same(resumed, state(whole))


def raise_interrupt(*_):
    raise KeyboardInterrupt


def test_a_failure_leaves_the_model(monkeypatch):
    model = make("llama").train()
    before, trainable = state(model), [parameter.requires_grad for parameter in model.parameters()]
    interrupt(monkeypatch, torch.Tensor, "backward", 5)
    with pytest.raises(KeyboardInterrupt):
        prune(model)
    assert same(model, before) and all(module.training for module in model.modules())
    assert [parameter.requires_grad for parameter in model.parameters()] == trainable
    assert all(parameter.grad is None for parameter in model.parameters())
    assert_no_hooks(model)


def test_a_learning_rate_that_raises_the_loss_is_lowered():
    (block,) = prune(make("llama"), recover_lr=0.9, recover_steps=40).recovery
    (note,) = (note for note in block.notes if "learning rate" in note)
    assert block.loss_after < block.loss_before
    assert re.fullmatch(
        r"the learning rate was lowered to 0\.(27|081|024): recover_lr=0\.9 raised the divergence", note
    )
    (block,) = prune(make("llama"), recover_steps=40).recovery
    assert not any("learning rate" in note for note in block.notes)


def test_the_loss_never_rises():
    plain, model = make("llama"), make("llama")
    prune(plain, recover=None)
    (block,) = prune(model, recover_lr=0.9, recover_steps=1).recovery
    assert block.loss_after == block.loss_before and "no gain: the pruned weights were kept" in block.notes
    assert same(model, state(plain))


def test_training_stops_early():
    (block,) = prune(make("llama"), recover_steps=200, recover_lr=0.05).recovery
    assert block.steps < 200 and f"stopped after {block.steps} of 200 steps" in block.notes


@pytest.mark.parametrize("rotation", [None, slow("learned")])
def test_an_offloaded_model_gives_the_same_weights(rotation, tmp_path):
    make("llama-tied-biased").save_pretrained(tmp_path / "dense")
    changes = {**SETTINGS, "lam": 1.0, "num_samples": 8, "rotation": rotation, "rotation_steps": 2}
    on_disk = offloaded(tmp_path / "dense", **changes)
    in_memory = MoonshotPruner.from_pretrained(tmp_path / "dense", on_disk.config)
    for pruner, folder in ((in_memory, "a"), (on_disk, "b")):
        report = pruner.prune(token_batches(8), progress=False)
        assert report.recovery[0].loss_after < report.recovery[0].loss_before
        pruner.save_pretrained(tmp_path / folder)
    reports = [without_seconds(pruner.report) for pruner in (in_memory, on_disk)]
    assert reports[0] == reports[1]
    weights = [MoonshotPruner.from_pretrained(tmp_path / folder, on_disk.config).model for folder in ("a", "b")]
    assert same(weights[0], state(weights[1]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_optimizer_state_in_host_memory_changes_no_bit(dtype, monkeypatch):
    plain, model = make("llama").to(dtype), make("llama").to(dtype)
    prune(plain)
    note = "the distillation's optimizer state was in host memory: …"
    monkeypatch.setattr(Placement, "within", lambda *_: Placement(True, True, note))
    report = prune(model)
    assert same(model, state(plain)) and note in report.notes


def test_without_memory_for_the_whole_model_blocks_are_recovered(monkeypatch):
    plain, model = make("llama"), make("llama")
    prune(plain, recover="blockwise")
    monkeypatch.setattr(TrainingBytes, "of", lambda *_: TrainingBytes(2**50, 2**51, 2**52, 2**53))
    report = prune(model)
    assert same(model, state(plain)) and len(report.recovery) == 3
    assert any(note.startswith("recovered block by block instead of distilled: end-to-end") for note in report.notes)


GPU, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.mark.parametrize(
    ("device", "free", "host", "trains", "on_host"),
    [
        (CPU, 70, 70, True, False),
        (CPU, 69, 69, False, False),
        (GPU, 60, 10, True, False),
        (GPU, 59, 60, True, True),
        (GPU, 10, 60, True, True),
        (GPU, 10, 59, False, False),
        (GPU, 9, 99, False, False),
    ],
)
def test_the_place_of_training(device, free, host, trains, on_host):
    placement = Placement.choose(TrainingBytes(copy=10, state=50, best=10, host=60), device, free, host)
    assert (placement.trains, placement.on_host) == (trains, on_host)
    assert bool(placement.note) == (not trains or on_host)


def test_recomputed_activations_change_no_bit(monkeypatch):
    plain, model = make("llama"), make("llama")
    prune(plain, num_samples=8)
    monkeypatch.setattr(Distillation, "_activations", lambda *_: 2**60)
    report = prune(model, num_samples=8)
    assert any(note.startswith("activations were computed again in backward passes") for note in report.notes)
    assert same(model, state(plain)) or closest(model, plain) < 1e-4


@pytest.mark.parametrize("call", [1, 6, 30])
def test_a_pass_out_of_memory_is_repeated_with_smaller_batches(call, monkeypatch):
    plain, model = make("llama"), make("llama")
    prune(plain)
    original, calls = Teacher.divergence, []

    def fail_once(self, *arguments):
        calls.append(None)
        if len(calls) == call:
            raise torch.OutOfMemoryError("out of memory")
        return original(self, *arguments)

    monkeypatch.setattr(Teacher, "divergence", fail_once)
    report = prune(model)
    assert any("at distillation: batches halved" in note for note in report.notes)
    assert closest(model, plain) < 1e-4


def test_activations_are_recomputed_where_single_samples_do_not_fit(monkeypatch):
    plain, model = make("llama"), make("llama")
    prune(plain)
    original, failed = Teacher.divergence, []

    def fail(self, *arguments):
        if len(failed) < 3:
            failed.append(None)
            raise torch.OutOfMemoryError("out of memory")
        return original(self, *arguments)

    monkeypatch.setattr(Teacher, "divergence", fail)
    report = prune(model)
    assert any("computed again in backward passes: a sample's did not fit" in note for note in report.notes)
    assert closest(model, plain) < 1e-4


def closest(model, other):
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return max(float((first - second).detach().abs().max()) for first, second in pairs)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_samples": 1}, "num_samples=1: recovery holds a fraction"),
        ({"data": "none"}, "calibration=None: recover='distill' needs data"),
    ],
)
def test_unsupported_runs_are_refused_before_any_work(changes, message, monkeypatch):
    monkeypatch.setattr("optimum_moonshot.prune.run.prune_layers", lambda *_: pytest.fail("work was done"))
    model = make("llama")
    before = state(model)
    from recovery_runs import config

    data = None if changes.pop("data", None) else token_batches(SAMPLES)
    solver = {"solver": "magnitude"} if data is None else {}
    with pytest.raises(MoonshotError, match=message):
        MoonshotPruner(model, config(**SETTINGS, **solver, **changes)).prune(data, progress=False)
    assert same(model, before)


def test_padding_that_logits_do_not_show_is_an_error():
    with pytest.raises(MoonshotError, match=r"logits of shape \[2, 7, 5\] do not show"):
        counted(token_batches(2, padded=True)[0], torch.zeros(2, 7, 5))


def test_memory_for_the_training_is_counted():
    model = make("llama")
    count = sum(parameter.numel() for parameter in model.parameters())
    plain, rounding = config(), config(bits=4)
    assert TrainingBytes.of(model, plain) == TrainingBytes(4 * count, 12 * count, 4 * count, 20 * count)
    assert TrainingBytes.of(model.bfloat16(), plain) == TrainingBytes(2 * count, 16 * count, 4 * count, 20 * count)
    assert TrainingBytes.of(model.half(), rounding) == TrainingBytes(4 * count, 16 * count, 4 * count, 20 * count)
