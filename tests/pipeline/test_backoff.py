"""A device that is out of memory at any place ends no run: smaller pieces, the same masks, and a note in the report."""

import pytest
import torch
import transformers as hf
from models import GROUPED, make, spread, token_batches

from optimum_moonshot import MoonshotConfig, MoonshotError, MoonshotPruner, PruneReport, devices
from optimum_moonshot.allocation import fisher as fisher_allocation
from optimum_moonshot.calibration.accumulators import Gram, InputSquares
from optimum_moonshot.calibration.mixture_sums import MixtureSums
from optimum_moonshot.calibration.observer import GradientSums
from optimum_moonshot.calibration.storage import Storage
from optimum_moonshot.devices import is_out_of_memory
from optimum_moonshot.objective import row_slices
from optimum_moonshot.pipeline import backoff, calibration_loss
from optimum_moonshot.pipeline import solve as layer_solving
from optimum_moonshot.pipeline import stages as passes
from optimum_moonshot.pipeline.backoff import Backoff
from optimum_moonshot.recovery import tuning
from optimum_moonshot.recovery.student import Task
from optimum_moonshot.rotation import channel_permutation as ordering
from optimum_moonshot.rotation import learning, objective
from optimum_moonshot.runs import layer, rotation_objective
from optimum_moonshot.runs import layers as solving
from optimum_moonshot.solvers.ranked import Ranked

ALL = "out of device memory: lower max_memory, batch_size or num_samples (CUDA out of memory)"


def small(name):
    """A model of two decoder layers."""
    torch.manual_seed(0)
    two = {**GROUPED, "num_hidden_layers": 2}
    if name == "mixtral":
        return spread(hf.MixtralForCausalLM(hf.MixtralConfig(**two, num_local_experts=4)))
    return spread(hf.LlamaForCausalLM(hf.LlamaConfig(**two))) if name == "llama" else make(name)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """All that collecting garbage does here is to take time."""
    monkeypatch.setattr(devices.gc, "collect", lambda: 0)


class Full:
    """Stands before a function: some of its calls find the device full.

    Args:
        at: the numbers of these calls, from 0 on; None is all.
        error: that they raise.
    """

    def __init__(self, monkeypatch, place, at, error=None):
        holder, name = place
        self.own, self.at, self.calls, self.raised = getattr(holder, name), at, 0, 0
        self.error = torch.OutOfMemoryError("CUDA out of memory") if error is None else error
        monkeypatch.setattr(holder, name, lambda *args, **kwargs: self(*args, **kwargs))

    def __call__(self, *args, **kwargs):
        self.calls += 1
        if self.at is None or self.calls - 1 in self.at:
            self.raised += 1
            raise type(self.error)(*self.error.args)  # one that is kept would keep all that failed
        return self.own(*args, **kwargs)


def pruner(model=None, **changes):
    defaults = dict(sparsity=0.5, lam=0.5, num_samples=6, batch_size=2)
    config = {**defaults, **changes}
    if ":" in config.get("pattern", ""):
        del config["sparsity"]
    return MoonshotPruner(small("llama") if model is None else model, MoonshotConfig(**config))


def prune(model=None, data=None, resume_dir=None, **changes):
    """The weights, and the report."""
    done = pruner(model, **changes)
    data = token_batches(done.config.num_samples) if data is None else data
    report = done.prune(data, progress=False, resume_dir=resume_dir)
    assert_clean(done.model)
    return {name: tensor.clone() for name, tensor in done.model.state_dict().items()}, report


def assert_clean(model):
    """As a model is that nothing has been done to."""
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def assert_same_masks(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name] == 0, tensor == 0), name
        torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-4)


def told(report):
    return [note for note in report.notes if note.startswith("out of memory on cpu ")]


PLACES = {
    "forward": (passes, "join_hidden"),
    "backward": (torch.autograd, "backward"),
    "head": (passes, "loss_gradient"),
    "Gram": (Gram, "add"),
    "squares": (InputSquares, "add"),
    "gradients": (GradientSums, "add"),
    "allocation": (Storage, "empty"),
    "solver": (layer, "solve_layer"),
    "slices": (layer_solving, "weight_losses"),
    "ranking": (Ranked, "rank_removals"),
    "curve": (fisher_allocation, "loss_curve"),
    "tuning": (Task, "error"),
    "mixture": (MixtureSums, "add"),
    "rotation": (rotation_objective, "coordinates"),
    "totals": (objective, "scores"),
    "learning": (objective, "removed"),
    "Cayley": (learning, "_orthogonal"),
    "Adam": (learning, "_adam"),
    "order": (ordering, "best_permutation"),
    "loss": (calibration_loss, "sample_losses"),
}
SETTINGS = {
    "sparsegpt": {},
    "λ = 1": {"lam": 1.0},
    "n:m": {"pattern": "2:4", "lam": 0.9, "targets": ["layers.1.mlp"]},
    "wanda": {"solver": "wanda"},
    "wanda, λ = 1": {"solver": "wanda", "lam": 1.0},
    "obc": {"solver": "obc", "targets": ["layers.1"]},
    "obc, λ = 1": {"solver": "obc", "lam": 1.0, "targets": ["layers.1"]},
    "cap": {"solver": "cap", "targets": ["layers.1.mlp.up_proj"]},
    "osscar": {"model": "opt", "solver": "osscar", "pattern": "structured", "sparsity": 0.25},
    "alps": {"solver": "alps", "targets": ["layers.1.mlp"]},
    "recompute": {"recompute": True},
    "recompute, λ = 1": {"recompute": True, "lam": 1.0},
    "fisher": {"allocation": "fisher", "targets": ["layers.1.mlp"]},
    "owl": {"allocation": "owl"},
    "recovery": {"recover": "blockwise", "recover_steps": 4, "num_samples": 16},
    "gradual": {"recover": "gradual", "recover_steps": 10, "num_samples": 16, "lam": 1.0},
    "rotation": {"rotation": "learned", "rotation_steps": 2},
    "orders": {"rotation": "learned", "rotation_steps": 2, "pattern": "2:4"},
    "experts": {"model": "mixtral"},
    "whole experts": {"model": "mixtral", "solver": "osscar", "pattern": "experts", "sparsity": 0.25},
}


def settings(name):
    found = dict(SETTINGS[name])
    model = found.pop("model", "llama")
    data = token_batches(6, size=1) if model == "mixtral" else None
    return {"model": small(model), "data": data, **found}


_UNDISTURBED = {}


def undisturbed(name):
    if name not in _UNDISTURBED:
        _UNDISTURBED[name] = prune(**settings(name))
        assert not told(_UNDISTURBED[name][1])
    return _UNDISTURBED[name][0]


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
def test_a_run_goes_on(monkeypatch, name, place, at):
    expected = undisturbed(name)
    full = Full(monkeypatch, PLACES[place], at)
    found, report = prune(**settings(name))
    assert full.raised == len(at)
    assert_same_masks(found, expected)
    assert told(report) and all(note in report.table() for note in told(report))
    assert PruneReport.from_dict(report.to_dict()).notes == report.notes


def test_rounds_and_slices_change_no_bit(monkeypatch):
    monkeypatch.setattr(backoff, "SMALL", 2**60)  # everything is large: nothing but rounds and slices is halved
    for name, place, at in (("sparsegpt", "gradients", {0, 1}), ("λ = 1", "Gram", {0})):
        expected = undisturbed(name)
        with monkeypatch.context() as patch:
            full = Full(patch, PLACES[place], at)
            found, report = prune(**settings(name))
        assert full.raised == len(at) and len(told(report)) == 1
        assert "statistics gathered at once halved, from" in told(report)[0]
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    with monkeypatch.context() as patch:
        Full(patch, PLACES["slices"], {3, 4})
        found, report = prune()
    assert "2 times, first at model.layers.1.self_attn.o_proj: rows solved at once halved" in told(report)[0]
    assert_same_masks(found, undisturbed("sparsegpt"))


def test_a_smaller_budget_from_the_start_gives_the_same_bits(monkeypatch):
    own, made = Backoff.__init__, []

    def remember(self, *args):
        own(self, *args)
        made.append(self)

    with monkeypatch.context() as patch:
        patch.setattr(Backoff, "__init__", remember)
        Full(patch, PLACES["gradients"], {0, 1, 2, 3})
        found, report = prune(**settings("cap"))
    assert any("rows or experts gathered at once halved" in note for note in told(report))
    assert any("chunks of rows, for the sake of memory" in note for note in report.notes)
    shrunk = made[0]

    def smaller(self, *args):
        own(self, *args)
        self.samples, self.storage.most = shrunk.samples, shrunk.storage.most

    monkeypatch.setattr(Backoff, "__init__", smaller)
    again, _ = prune(**settings("cap"))
    assert shrunk.samples == 1 and all(torch.equal(again[name], tensor) for name, tensor in found.items())


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
def test_where_nothing_helps_the_model_is_as_it_was(monkeypatch, name, place, most):
    given = settings(name)
    before = {key: tensor.clone() for key, tensor in given["model"].state_dict().items()}
    full = Full(monkeypatch, PLACES[place], None)
    with pytest.raises(MoonshotError) as error:
        prune(**given)
    mend = ", or set rotation_rows" if "rotation" in SETTINGS[name] else ""
    assert str(error.value) == ALL.replace(" (", f"{mend} (") and error.value.__suppress_context__
    assert 2 <= full.raised == full.calls <= most
    after = given["model"].state_dict()
    assert before.keys() == after.keys() and all(torch.equal(after[key], before[key]) for key in before)
    assert_clean(given["model"])


@pytest.mark.parametrize(
    ("name", "place", "at"),
    [
        ("sparsegpt", "gradients", {0, 8}),
        ("sparsegpt", "forward", {1}),
        ("sparsegpt", "solver", {3, 4}),
        ("cap", "gradients", {1, 2, 3}),
        ("recovery", "tuning", {2}),
        ("gradual", "Gram", {60}),
    ],
)
def test_what_failed_is_gone_before_it_is_done_again(monkeypatch, name, place, at):
    left, storages, made = [], [], Backoff.__init__

    def made_once(self, *args):
        made(self, *args)
        storages.append(self.storage)

    def released(_):
        left.append(storages[0].used[storages[0].device] - storages[0].cached)

    monkeypatch.setattr(Backoff, "__init__", made_once)
    monkeypatch.setattr(backoff, "release_unused", released)
    full = Full(monkeypatch, PLACES[place], at)
    prune(**settings(name))
    assert full.raised == len(at) and left
    still = 2 if place == "solver" else 0  # which solves again from statistics that are still there
    assert all(left[:still]) and left[still:] and not any(left[still:])


@pytest.mark.parametrize(
    ("name", "place", "at"),
    [
        ("rotation", "totals", {1}),
        ("rotation", "learning", {5}),
        ("rotation", "learning", {16}),
        ("rotation", "Cayley", {2}),
        ("rotation", "Adam", {1}),
        ("orders", "order", {1}),
    ],
)
def test_a_step_of_a_rotation_made_again_changes_no_bit(monkeypatch, tmp_path, name, place, at):
    expected = undisturbed(name)
    full = Full(monkeypatch, PLACES[place], at)
    found, report = prune(**settings(name))
    assert full.raised == 1 and all(torch.equal(found[key], tensor) for key, tensor in expected.items())
    assert told(report) == ["out of memory on cpu once at the rotation: tried again with what was free then"]
    full.calls, full.at = 0, {min(at), min(at) + 1}
    elsewhere, report = prune(**settings(name), offload_dir=str(tmp_path))
    assert full.raised == 3 and all(torch.equal(elsewhere[key], tensor) for key, tensor in expected.items())
    moved, again = told(report)
    assert "at the rotation: what it keeps there, from " in moved and moved.endswith(" to none") and "again" in again


def test_a_run_without_data_goes_on(monkeypatch):
    def magnitude():
        done = pruner(solver="magnitude", lam=None)
        report = done.prune(progress=False)
        return {name: tensor.clone() for name, tensor in done.model.state_dict().items()}, report

    expected, _ = magnitude()
    with monkeypatch.context() as patch:
        full = Full(patch, PLACES["solver"], {2, 3})  # again at once, and then again with what is left
        found, report = magnitude()
    assert full.raised == 2 and all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert "out of memory on cpu 2 times, first at model.layers.0.self_attn.v_proj: tried again" in told(report)[0]
    Full(monkeypatch, PLACES["solver"], None)
    with pytest.raises(MoonshotError, match="out of device memory"):
        magnitude()


def test_a_sweep_goes_on(monkeypatch):
    def swept():
        done = pruner()
        report = done.sweep(token_batches(), lambdas=[0.5, 1.0], patterns=["unstructured", "2:4"], progress=False)
        assert_clean(done.model)
        return [entry.metric for entry in report.entries], report, done

    expected, *_ = swept()
    solver = Full(monkeypatch, PLACES["solver"], {1, 2, 3})
    sums, losses = Full(monkeypatch, PLACES["gradients"], {8}), Full(monkeypatch, PLACES["loss"], {4})
    found, report, done = swept()
    assert (solver.raised, sums.raised, losses.raised) == (3, 1, 1)
    assert found == pytest.approx(expected, rel=1e-3)
    notes = told(done.choose(report.best(pattern="2:4")))
    assert any("tried again" in note for note in notes) and any("batches halved" in note for note in notes)
    assert_clean(done.model)


def test_a_path_goes_on(monkeypatch):
    weights = []
    for at in (set(), {0, 1}):
        with monkeypatch.context() as patch:
            full = Full(patch, PLACES["ranking"], at)
            done = pruner(solver="cap", targets=["layers.1.mlp.up_proj"])
            report = done.prune_path(token_batches(), [0.5, 0.75], progress=False).apply(0.75)
        assert full.raised == len(at) and bool(told(report)) == bool(at)
        weights.append({name: tensor.clone() for name, tensor in done.model.state_dict().items()})
    assert_same_masks(*weights)


def test_a_killed_run_goes_on_after_it(monkeypatch, tmp_path):
    def die(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        Full(patch, PLACES["Gram"], {0, 9})
        killed = Full(patch, (solving, "prune_layer"), {9})
        killed.error = KeyboardInterrupt()
        with pytest.raises(KeyboardInterrupt):
            prune(resume_dir=tmp_path / "run")
    Full(monkeypatch, PLACES["backward"], {2})
    found, report = prune(resume_dir=tmp_path / "run")
    assert report.notes[0] == "9 layers were taken over from an interrupted run" and told(report)
    assert_same_masks(found, undisturbed("sparsegpt"))


@pytest.mark.parametrize("lam", [0.9, 1.0])
def test_blocks_that_are_elsewhere(monkeypatch, tmp_path, lam):
    small("llama").save_pretrained(tmp_path / "dense")
    found = []
    for name, at in (("undisturbed", set()), ("disturbed", {2, 9})):
        config = MoonshotConfig(pattern="2:4", num_samples=6, batch_size=2, lam=lam)
        done = MoonshotPruner.from_pretrained(tmp_path / "dense", config, offload="disk")
        with monkeypatch.context() as patch:
            full = Full(patch, PLACES["forward"], at)
            report = done.prune(token_batches(), progress=False)
        assert full.raised == len(at) and bool(told(report)) == bool(at)
        done.save_pretrained(tmp_path / name)
        found.append(hf.LlamaForCausalLM.from_pretrained(tmp_path / name).state_dict())
    assert_same_masks(*found)


HOST = (
    RuntimeError("[enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    MemoryError("Unable to allocate 8 GiB"),
)


@pytest.mark.parametrize("error", HOST, ids=["torch", "cuBLAS", "Python"])
def test_other_words_for_it(monkeypatch, error):
    assert is_out_of_memory(error) and not is_out_of_memory(RuntimeError("shapes cannot be multiplied"))
    expected = undisturbed("λ = 1")
    full = Full(monkeypatch, (hf.LlamaForCausalLM, "forward"), {2}, error)  # which no message of shapes may hide
    found, report = prune(lam=1.0)
    assert full.raised == 1 and told(report)
    assert_same_masks(found, expected)


def test_other_errors_are_none_of_it(monkeypatch):
    full = Full(monkeypatch, PLACES["forward"], None, RuntimeError("shapes cannot be multiplied"))
    with pytest.raises(RuntimeError, match="shapes cannot"):
        prune()
    assert full.raised == 1


def test_caches_leave_the_device(tmp_path):
    storage = Storage(torch.device("cpu"), 1000, str(tmp_path), free={torch.device("cpu"): 10_000})
    kept, trying, attempts = storage.put(torch.ones(100), "a cache"), Backoff(storage), []

    def work():
        attempts.append(storage.caches)
        if len(attempts) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return storage.put(torch.ones(60), "another")

    assert torch.equal(trying.repeated("here", work, list), kept[:60]) and attempts == [None, 200]
    change = "caches on the device halved, from 400 bytes to 200 bytes"
    trying.share()
    assert trying.notes == [f"out of memory on cpu once at here: {change}"]
    assert (storage.cached, storage.spilled) == (400, 240)
    statistics = storage.zeros((100,), torch.float32, "statistics")  # these still may be there
    assert (storage.used[storage.device], storage.spilled) == (800, 240) and not statistics.any()
    del kept
    assert (storage.cached, storage.used[storage.device]) == (0, 400)


def test_a_run_whose_caches_leave_the_device(monkeypatch, tmp_path):
    monkeypatch.setattr(backoff, "SMALL", 2**60)
    full = Full(monkeypatch, PLACES["forward"], {1})  # of the second batch: the passes have moved on
    Full(monkeypatch, (Gram, "add"), {0, 1, 2, 3, 4})
    found, report = prune(lam=1.0, offload_dir=str(tmp_path))
    assert full.raised == 1 and any("caches on the device halved" in note for note in told(report))
    assert any("of caches went to disk" in note for note in report.notes)
    assert_same_masks(found, undisturbed("λ = 1"))


def test_slices_are_no_larger_than_they_may_be():
    limit = row_slices.SliceLimit()
    assert row_slices.slices_within(slice(2, 10), 8, 32, limit) == row_slices.split_range(2, 10, 4)
    assert row_slices.slices_within(slice(2, 4), 8, 1, limit) == row_slices.split_range(2, 4, 1)
    assert limit.largest == 32
    limit = row_slices.SliceLimit(20)
    assert row_slices.slices_within(slice(2, 10), 8, 32, limit) == row_slices.split_range(2, 10, 2)
    assert row_slices.slices_within(slice(0, 1), 8, 32, limit) == [slice(0, 1)]
    assert limit.largest == 16


@pytest.mark.parametrize("samples", [None, 1, 2, 3, 5])
@pytest.mark.parametrize("sizes", [[2] * 8, [5, 3, 5, 1], [8, 8, 4]])
def test_an_optimizers_steps_have_the_same_samples(sizes, samples):
    def of(sizes, groups):
        ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
        return [[sample for i in group for sample in range(ends[i] - sizes[i], ends[i])] for group in groups]

    parts = [min(samples or size, size - start) for size in sizes for start in range(0, size, samples or size)]
    steps, heldout = tuning.divide(sizes)
    divided, watched = tuning.divide_parts(sizes, samples)
    assert of(parts, [*divided, watched]) == of(sizes, [*steps, heldout])
