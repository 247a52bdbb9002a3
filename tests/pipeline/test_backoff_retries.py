"""Retries after a lack of memory: equal bits, memory released before the retry, and smaller batches and slices."""

import pytest
import torch
import transformers as hf
from memory_failures import (
    ERROR,
    PLACES,
    assert_same_bits,
    assert_same_masks,
    memory_notes,
    out_of_memory_at,
    prune,
    settings,
    skip_garbage_collection,  # noqa: F401
    undisturbed,
)
from models import GROUPED, spread

from optimum_moonshot.calibration.storage import Storage
from optimum_moonshot.objective import linalg, patterns
from optimum_moonshot.pipeline import backoff, walk
from optimum_moonshot.pipeline.backoff import Backoff
from optimum_moonshot.recover import tuning


def test_rounds_and_slices_change_no_bit(monkeypatch):
    monkeypatch.setattr(backoff, "SMALL", 2**60)  # all batches count as large: only rounds and slices are halved
    for name, place, at in (("sparsegpt", "gradients", {0, 1}), ("λ = 1", "Gram", {0})):
        expected = undisturbed(name)
        with monkeypatch.context() as patch:
            failing = out_of_memory_at(patch, PLACES[place], at)
            pruned, report = prune(**settings(name))
        assert failing.raised == len(at) and len(memory_notes(report)) == 1
        assert "statistics collected in one pass halved, from" in memory_notes(report)[0]
        assert_same_bits(pruned, expected)
    with monkeypatch.context() as patch:
        out_of_memory_at(patch, PLACES["slices"], {3, 4})
        pruned, report = prune()
    assert "2 times, first at model.layers.1.self_attn.o_proj: rows solved at once halved" in memory_notes(report)[0]
    assert_same_masks(pruned, undisturbed("sparsegpt"))


def test_statistics_of_a_layer_are_collected_in_slices(monkeypatch):
    monkeypatch.setattr(backoff, "SMALL", 2**60)
    expected = undisturbed("cap")
    out_of_memory_at(monkeypatch, PLACES["gradients"], {0, 1, 2, 3})
    pruned, report = prune(**settings("cap"))
    assert any("4 times" in note and "statistics collected in one pass halved" in note for note in memory_notes(report))
    assert any("row chunks to save memory" in note for note in report.notes)
    assert_same_masks(pruned, expected)


def deep_llama(layers):
    torch.manual_seed(0)
    return spread(hf.LlamaForCausalLM(hf.LlamaConfig(**{**GROUPED, "num_hidden_layers": layers})))


def watch_blocks(monkeypatch, fails):
    """The samples in each call of a block by a walk, of which `fails` (number of the call, samples) run out."""
    seen, original = [], walk.join_hidden

    def join_hidden(hidden, call):
        seen.append(len(hidden))
        if fails(len(seen) - 1, len(hidden)):
            raise type(ERROR)(*ERROR.args)
        return original(hidden, call)

    monkeypatch.setattr(walk, "join_hidden", join_hidden)
    return seen


@pytest.mark.parametrize("lam", [1.0, 0.5])
def test_the_block_after_a_shortage_has_batches_of_the_first_size(monkeypatch, lam):
    """And no block before it is run again."""
    before = [2] * 12 if lam < 1 else []  # the forward pass before the blocks are visited
    seen = watch_blocks(monkeypatch, lambda call, samples: call == len(before) + 3)
    settings = dict(lam=lam, pattern="2:4", recompute=False)
    pruned, report = prune(deep_llama(4), **settings)
    assert seen == [*before, 2, 2, 2, 2, *[1] * 6, *[2] * 6][: len(seen)] and len(seen) >= len(before) + 13
    (note,) = memory_notes(report)
    assert note.endswith("batches halved, which changes results by rounding, from 2 samples to 1, and later 2 again")
    monkeypatch.undo()
    assert_same_masks(pruned, prune(deep_llama(4), **settings)[0])


@pytest.mark.parametrize("lam", [1.0, 0.5])
def test_a_lasting_shortage_costs_few_failures(monkeypatch, lam):
    """Larger batches are tried after 1, 2, 4, … blocks; the bits are those of small batches from the start."""
    seen = watch_blocks(monkeypatch, lambda _, samples: samples > 1)
    pruned, report = prune(deep_llama(12), lam=lam, pattern="2:4")
    assert sum(samples > 1 for samples in seen) == 4
    assert memory_notes(report)[0].endswith("from 2 samples to 1")
    monkeypatch.undo()
    expected, _ = prune(deep_llama(12), lam=lam, pattern="2:4", batch_size=1)
    assert_same_bits(pruned, expected)


def test_a_lever_grows_up_to_its_first_size():
    lever, sizes = backoff.Lever("halved", "samples"), []
    for present in (8, 4, 2):
        lever.halve("here", present, present // 2)
    for _ in range(4):
        sizes.append(lever.size)
        lever.grow()
    assert sizes == [1, 2, 4, None] and lever.patience == 1
    lever.halve("there", 8, 4)  # some blocks later
    assert (lever.size, lever.patience) == (4, 1)
    lever.grow()
    lever.halve("there", 8, 4)  # as soon as it has grown
    assert (lever.size, lever.patience) == (4, 2)
    assert (
        lever.describe(torch.device("cpu"))
        == "out of memory on cpu 5 times, first at here: halved, from 8 samples to 1"
    )


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
def test_a_failed_call_is_released_before_its_retry(monkeypatch, name, place, at):
    remaining, storages, original = [], [], Backoff.__init__

    def remember(self, *args):
        original(self, *args)
        storages.append(self.storage)

    def released(_):
        remaining.append(storages[0].used[storages[0].device] - storages[0].cached)

    monkeypatch.setattr(Backoff, "__init__", remember)
    monkeypatch.setattr(backoff, "release_unused", released)
    failing = out_of_memory_at(monkeypatch, PLACES[place], at)
    prune(**settings(name))
    assert failing.raised == len(at) and remaining
    solves = 2 if place == "solver" else 0  # a repeated solve reuses its statistics
    assert all(remaining[:solves]) and remaining[solves:] and not any(remaining[solves:])


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
def test_a_repeated_step_of_a_rotation_changes_no_bit(monkeypatch, tmp_path, name, place, at):
    expected = undisturbed(name)
    failing = out_of_memory_at(monkeypatch, PLACES[place], at)
    pruned, report = prune(**settings(name))
    assert failing.raised == 1
    assert_same_bits(pruned, expected)
    assert memory_notes(report) == ["out of memory on cpu once at the rotation: tried again with what was free then"]
    failing.calls, failing.at = 0, {min(at), min(at) + 1}
    offloaded, report = prune(**settings(name), offload_dir=str(tmp_path))
    assert failing.raised == 3
    assert_same_bits(offloaded, expected)
    spill, retry = memory_notes(report)
    assert (
        "at the rotation: its cached inputs moved off the device, from " in spill
        and spill.endswith(" to 0 bytes")
        and "again" in retry
    )


def test_the_size_that_is_halved(tmp_path):
    """Statistics that fill the device, then samples, other statistics, caches, and nothing: one more attempt."""
    trying = Backoff(Storage(torch.device("cpu"), 800, str(tmp_path), free={torch.device("cpu"): 10_000}))
    four, one = ([{"input_ids": torch.zeros(size, 2, dtype=torch.int64)}] for size in (4, 1))
    trying.cached, trying.failure = 40, "CUDA out of memory"
    assert trying.shrink("here", four, (400, 200)) == "rows" and trying.storage.most == 400
    assert trying.shrink("here", four, (100, 60)) == "samples" and trying.samples.size == 2
    assert trying.shrink("here", one, (100, 60)) == "rows" and trying.rows.size == 60
    trying.in_solver = True  # where fewer samples would not help
    assert trying.shrink("here", four, (100, 60)) == "rows"
    assert trying.shrink("here", four) == "caches" and trying.storage.caches == 20
    trying.cached = 0
    assert trying.shrink("here", four) == "again"
    with pytest.raises(torch.OutOfMemoryError):
        trying.shrink("here", four)


def test_a_retry_spills_half_of_the_caches(tmp_path):
    storage = Storage(torch.device("cpu"), 1000, str(tmp_path), free={torch.device("cpu"): 10_000})
    kept, trying, attempts = storage.put(torch.ones(100), "a cache"), Backoff(storage), []

    def work():
        attempts.append(storage.caches)
        if len(attempts) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return storage.put(torch.ones(60), "another")

    assert torch.equal(trying.with_smaller_batches("here", work, list), kept[:60]) and attempts == [None, 200]
    change = "caches on the device halved, from 400 bytes to 200 bytes"
    trying.share()
    assert trying.notes == [f"out of memory on cpu once at here: {change}", "0.00 GiB of caches went to disk"]
    assert (storage.cached, storage.spilled) == (400, 240)
    statistics = storage.zeros((100,), torch.float32, "statistics")  # statistics may remain on the device
    assert (storage.used[storage.device], storage.spilled) == (800, 240) and not statistics.any()
    del kept
    assert (storage.cached, storage.used[storage.device]) == (0, 400)


def test_a_run_whose_caches_are_spilled_has_the_same_masks(monkeypatch, tmp_path):
    monkeypatch.setattr(backoff, "SMALL", 2**60)
    failing = out_of_memory_at(monkeypatch, PLACES["forward"], {1})  # of the second batch, when the first one is done
    out_of_memory_at(monkeypatch, PLACES["Gram"], {0, 1, 2, 3, 4})
    pruned, report = prune(lam=1.0, offload_dir=str(tmp_path))
    assert failing.raised == 1 and any("caches on the device halved" in note for note in memory_notes(report))
    assert any("of caches went to disk" in note for note in report.notes)
    assert_same_masks(pruned, undisturbed("λ = 1"))


def test_slices_respect_their_limit():
    limit = linalg.SliceLimit()
    with linalg.limited(limit):
        assert linalg.slices_within(slice(2, 10), 8, 32) == linalg.split_range(2, 10, 4)
        assert linalg.slices_within(slice(2, 4), 8, 1) == linalg.split_range(2, 4, 1)
    assert limit.largest == 32
    limit = linalg.SliceLimit(20)
    with linalg.limited(limit):
        assert linalg.slices_within(slice(2, 10), 8, 32) == linalg.split_range(2, 10, 2)
        assert linalg.slices_within(slice(0, 1), 8, 32) == [slice(0, 1)]
    assert limit.largest == 16
    assert linalg.slices_within(slice(2, 10), 8, 32) == linalg.split_range(2, 10, 4)


def test_a_selection_is_not_a_slice_of_a_solver():
    limit = linalg.SliceLimit(1)
    with linalg.limited(limit):
        keep = patterns.NM(1, 2).keep(torch.tensor([[1.0, 2.0, 4.0, 3.0]]))
    assert keep.tolist() == [[False, True, True, False]] and limit.largest == 0


@pytest.mark.parametrize("samples", [None, 1, 2, 3, 5])
@pytest.mark.parametrize("sizes", [[2] * 8, [5, 3, 5, 1], [8, 8, 4]])
def test_smaller_batches_keep_the_samples_of_each_optimizer_step(sizes, samples):
    def samples_of(sizes, groups):
        ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
        return [[sample for i in group for sample in range(ends[i] - sizes[i], ends[i])] for group in groups]

    parts = [min(samples or size, size - start) for size in sizes for start in range(0, size, samples or size)]
    steps, heldout = tuning.split_heldout(sizes)
    split, split_heldout = tuning.divide_parts(sizes, parts)
    assert samples_of(parts, [*split, split_heldout]) == samples_of(sizes, [*steps, heldout])
