"""A run on a device that is out of memory completes with smaller pieces, the same masks, and a note in the report."""

import pytest
import transformers as hf
from failing_calls import FailingCalls
from llama_runs import weights
from memory_failures import (
    MESSAGE,
    PLACES,
    SETTINGS,
    assert_clean,
    assert_same_bits,
    assert_same_masks,
    memory_notes,
    out_of_memory_at,
    prune,
    pruner,
    settings,
    skip_garbage_collection,  # noqa: F401
    two_layer_model,
    undisturbed,
)
from models import token_batches

from optimum_moonshot import MoonshotConfig, MoonshotError, MoonshotPruner, PruneReport
from optimum_moonshot.devices import is_out_of_memory
from optimum_moonshot.prune import layers as solving


@pytest.mark.parametrize(
    ("name", "place", "at"),
    [
        ("sparsegpt", "forward", {3}),
        ("sparsegpt", "backward", {4, 5}),
        ("sparsegpt", "head", {1}),
        ("sparsegpt", "Gram", {0, 20}),
        ("sparsegpt", "gradients", {0, 9}),
        ("sparsegpt", "allocation", {2, 40}),
        ("sparsegpt", "solver", {0, 1, 5}),
        ("sparsegpt", "slices", {0, 1, 2, 3}),
        ("λ = 1", "forward", {4}),
        ("λ = 1", "Gram", {0, 1, 13, 14}),
        ("λ = 1", "solver", {6, 7}),
        ("n:m", "gradients", {5}),
        ("wanda", "gradients", {6}),
        ("wanda, λ = 1", "squares", {3}),
        ("obc", "ranking", {0, 3, 4}),
        ("obc, λ = 1", "Gram", {2}),
        ("cap", "gradients", {0, 1, 2, 3}),
        ("osscar", "slices", {0, 1}),
        ("osscar", "gradients", {1}),
        ("alps", "solver", {2, 3}),
        ("recompute", "forward", {3, 12}),
        ("recompute, λ = 1", "Gram", {9}),
        ("fisher", "curve", {1, 2}),
        ("fisher", "gradients", {4}),
        ("owl", "squares", {4}),
        ("recovery", "tuning", {5, 50}),
        ("recovery", "allocation", {45}),
        ("gradual", "Gram", {60}),
        ("rotation", "rotation", {1}),
        ("experts", "Gram", {0, 1, 2, 9}),
        ("experts", "solver", {3}),
        ("whole experts", "mixture", {3}),
    ],
)
def test_a_run_completes_with_the_same_masks(monkeypatch, name, place, at):
    expected = undisturbed(name)
    failing = out_of_memory_at(monkeypatch, PLACES[place], at)
    pruned, report = prune(**settings(name))
    assert failing.raised == len(at)
    assert_same_masks(pruned, expected)
    notes = memory_notes(report)
    assert notes and all(note in report.table() for note in notes)
    assert PruneReport.from_dict(report.to_dict()).notes == report.notes


@pytest.mark.parametrize(
    ("name", "place", "most"),
    [
        ("sparsegpt", "forward", 8),
        ("sparsegpt", "backward", 12),
        ("sparsegpt", "Gram", 12),
        ("n:m", "solver", 28),
        ("sparsegpt", "allocation", 8),
        ("cap", "gradients", 16),
        ("recompute", "Gram", 12),
        ("fisher", "curve", 28),
        ("owl", "squares", 8),
        ("recovery", "tuning", 8),
        ("experts", "gradients", 16),
        ("whole experts", "mixture", 8),
        ("rotation", "rotation", 8),
        ("rotation", "learning", 2),
        ("orders", "order", 2),
    ],
)
def test_a_run_that_cannot_complete_leaves_the_model_unchanged(monkeypatch, name, place, most):
    options = settings(name)
    model = options["model"]
    before = weights(model)
    failing = out_of_memory_at(monkeypatch, PLACES[place], None)
    with pytest.raises(MoonshotError) as error:
        prune(**options)
    hint = ", or set rotation_rows" if "rotation" in SETTINGS[name] else ""
    assert str(error.value) == MESSAGE.replace(" (", f"{hint} (") and error.value.__suppress_context__
    assert 2 <= failing.raised == failing.calls <= most
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert_same_bits(after, before)
    assert_clean(model)


def test_a_run_without_data_completes(monkeypatch):
    def magnitude():
        instance = pruner(solver="magnitude", lam=None)
        report = instance.prune(progress=False)
        return weights(instance.model), report

    expected, _ = magnitude()
    with monkeypatch.context() as patch:
        failing = out_of_memory_at(patch, PLACES["solver"], {2, 3})  # the first retry fails too
        pruned, report = magnitude()
    assert failing.raised == 2
    assert_same_bits(pruned, expected)
    note = memory_notes(report)[0]
    assert "out of memory on cpu 2 times, first at model.layers.0.self_attn.v_proj: tried again" in note
    out_of_memory_at(monkeypatch, PLACES["solver"], None)
    with pytest.raises(MoonshotError, match="out of device memory"):
        magnitude()


def test_a_sweep_completes_with_the_same_metrics(monkeypatch):
    def sweep():
        swept = pruner()
        report = swept.sweep(token_batches(), lambdas=[0.5, 1.0], patterns=["unstructured", "2:4"], progress=False)
        assert_clean(swept.model)
        return [entry.metric for entry in report.entries], report, swept

    expected, *_ = sweep()
    solver = out_of_memory_at(monkeypatch, PLACES["solver"], {1, 2, 3})
    sums = out_of_memory_at(monkeypatch, PLACES["gradients"], {8})
    losses = out_of_memory_at(monkeypatch, PLACES["loss"], {4})
    metrics, report, swept = sweep()
    assert (solver.raised, sums.raised, losses.raised) == (3, 1, 1)
    assert metrics == pytest.approx(expected, rel=1e-3)
    notes = memory_notes(swept.choose(report.best(pattern="2:4")))
    assert any("tried again" in note for note in notes) and any("batches halved" in note for note in notes)
    assert_clean(swept.model)


def test_a_sparsity_path_completes_with_the_same_masks(monkeypatch):
    results = []
    for at in (set(), {0, 1}):
        with monkeypatch.context() as patch:
            failing = out_of_memory_at(patch, PLACES["ranking"], at)
            instance = pruner(solver="cap", targets=["layers.1.mlp.up_proj"])
            report = instance.prune_path(token_batches(), [0.5, 0.75], progress=False).apply(0.75)
        assert failing.raised == len(at) and bool(memory_notes(report)) == bool(at)
        results.append(weights(instance.model))
    assert_same_masks(*results)


def test_a_killed_run_resumes_after_it(monkeypatch, tmp_path):
    with monkeypatch.context() as patch:
        out_of_memory_at(patch, PLACES["Gram"], {0, 9})
        FailingCalls(patch, (solving, "prune_layer"), {9}, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            prune(resume_dir=tmp_path / "run")
    out_of_memory_at(monkeypatch, PLACES["backward"], {2})
    pruned, report = prune(resume_dir=tmp_path / "run")
    assert report.notes[0] == "9 layers were reused from an interrupted run" and memory_notes(report)
    assert_same_masks(pruned, undisturbed("sparsegpt"))


@pytest.mark.parametrize("lam", [0.9, 1.0])
def test_a_run_with_offloaded_blocks_completes(monkeypatch, tmp_path, lam):
    two_layer_model("llama").save_pretrained(tmp_path / "dense")
    results = []
    for name, at in (("undisturbed", set()), ("disturbed", {2, 9})):
        config = MoonshotConfig(pattern="2:4", num_samples=6, batch_size=2, lam=lam, fisher="rows")
        instance = MoonshotPruner.from_pretrained(tmp_path / "dense", config, offload="disk")
        with monkeypatch.context() as patch:
            failing = out_of_memory_at(patch, PLACES["forward"], at)
            report = instance.prune(token_batches(), progress=False)
        assert failing.raised == len(at) and bool(memory_notes(report)) == bool(at)
        instance.save_pretrained(tmp_path / name)
        results.append(hf.LlamaForCausalLM.from_pretrained(tmp_path / name).state_dict())
    assert_same_masks(*results)


OTHER_ERRORS = (
    RuntimeError("[enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    MemoryError("Unable to allocate 8 GiB"),
)


@pytest.mark.parametrize("error", OTHER_ERRORS, ids=["torch", "cuBLAS", "Python"])
def test_memory_errors_of_other_libraries_are_recognised(monkeypatch, error):
    assert is_out_of_memory(error) and not is_out_of_memory(RuntimeError("shapes cannot be multiplied"))
    expected = undisturbed("λ = 1")
    # In the model's forward, where an error for wrong shapes must not replace it.
    failing = out_of_memory_at(monkeypatch, (hf.LlamaForCausalLM, "forward"), {2}, error)
    pruned, report = prune(lam=1.0)
    assert failing.raised == 1 and memory_notes(report)
    assert_same_masks(pruned, expected)


def test_other_errors_are_not_retried(monkeypatch):
    failing = out_of_memory_at(monkeypatch, PLACES["forward"], None, RuntimeError("shapes cannot be multiplied"))
    with pytest.raises(RuntimeError, match="shapes cannot"):
        prune()
    assert failing.raised == 1
