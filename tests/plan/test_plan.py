"""A plan estimates memory and time by the decisions of the run and has no side effects."""

import argparse
import copy
import json

import pytest
import torch
import transformers as hf
from marks import slow
from models import GROUPED, make, token_batches

from optimum_moonshot import MoonshotConfig, MoonshotError, MoonshotPruner
from optimum_moonshot.calibration.observer import LayerStatistics
from optimum_moonshot.commands.moonshot import add_prune_options
from optimum_moonshot.commands.moonshot import prune as prune_command
from optimum_moonshot.model.layers import find_blocks
from optimum_moonshot.pipeline import loop
from optimum_moonshot.pipeline.selection import select
from optimum_moonshot.plan.memory import TRAINED_BYTES
from optimum_moonshot.plan.rehearsal import Rehearsal
from optimum_moonshot.plan.report import Snapshot, gib, peaks_of
from optimum_moonshot.plan.trials import LiveBytes, try_rows

N_OF_M = dict(pattern="2:4", sparsity=None)
FAST = dict(sparsity=0.5, num_samples=8, batch_size=4, sequence_length=16, fisher="rows")


def llama(**changes):
    torch.manual_seed(0)
    return hf.LlamaForCausalLM(hf.LlamaConfig(**{**GROUPED, **changes})).eval()


def on_meta(**changes):
    return hf.LlamaConfig(**{**GROUPED, **changes}, architectures=["LlamaForCausalLM"])


def planned(config=None, **fields):
    return MoonshotPruner.plan_for(config or on_meta(), MoonshotConfig(**{**FAST, **fields}))


def most(plan, item):
    return max(sum(snapshot.items.get(item, {}).values()) for snapshot in plan.snapshots)


def test_live_bytes_count_live_storages_once():
    with LiveBytes() as live:
        first = torch.zeros(1000)
        view = first.view(10, 100)
        second = first + 1
        del second
        third = torch.zeros(10)
    assert live.now == first.nbytes + third.nbytes
    assert live.peak == 2 * first.nbytes
    assert view.shape == (10, 100)


@pytest.mark.parametrize("lam", [slow(1), 0.5])
@pytest.mark.parametrize("name", ["llama", slow("opt"), "gpt2", "mixtral", slow("qwen3")])
def test_the_planned_peak_matches_the_run(name, lam):
    model, batches = make(name), token_batches(samples=8, length=24)
    config = MoonshotConfig(**{**FAST, "batch_size": 2, "lam": lam})
    pruner = MoonshotPruner(model, config)
    plan = pruner.plan(batches)
    with LiveBytes() as live:
        pruner.prune(batches, progress=False)
    allocator = next(iter(plan.snapshots[0].items.get("allocator", {"cpu": 0}).values()))
    estimate = plan.peaks["cpu"] - allocator
    assert 0.6 * live.peak <= estimate <= 1.7 * live.peak, estimate / live.peak


def test_memory_grows_with_samples_and_widths():
    base = planned(lam=0.5)
    assert most(planned(lam=0.5, num_samples=16), "caches") > 1.9 * most(base, "caches")
    wide = on_meta(hidden_size=32, intermediate_size=48)
    assert most(planned(wide, lam=0.5), "statistics") > 1.9 * most(base, "statistics")
    assert most(planned(lam=1), "caches") < most(base, "caches") / 2
    assert most(planned(lam=0.5, batch_size=1), "activations") < most(base, "activations")
    assert "logits" not in {item for snapshot in planned(lam=1).snapshots for item in snapshot.items}


def test_the_memory_of_statistics_is_measured():
    d, inner, kv, n = 16, 24, 8, 8
    grams = 2 * d * d + d * d + inner * inner  # q, k and v share one, gate and up too
    weights = 2 * d * d + 2 * kv * d + 3 * inner * d
    batches = token_batches(samples=n, length=16, size=4)

    def statistics(**fields):
        plan = MoonshotPruner(llama(), MoonshotConfig(**{**FAST, "solver": "sparsegpt", "lam": 0.5, **fields})).plan(
            batches
        )
        return most(plan, "statistics")

    assert statistics() == pytest.approx(4 * (grams + n * weights), rel=0.02)
    shared = 6 * d * d + inner * inner  # a matrix for every layer, from forward passes of the pruned model
    assert statistics(fisher="shared", **N_OF_M) == pytest.approx(4 * (grams + shared), rel=0.1)


@pytest.mark.parametrize("solver", ["obc", "sparsegpt", "wanda"])
def test_plan_and_run_have_the_same_partition(solver, monkeypatch, tmp_path):
    model, batches = llama(), token_batches(samples=8, length=16, size=4)
    config = MoonshotConfig(**FAST, lam=0.5, solver=solver, max_memory=60_000, offload_dir=str(tmp_path))
    partitions = []
    original = loop.partition

    def record(*arguments):
        parts = original(*arguments)
        sliced = {part.layers[0].name: len(part.slices) for part in parts if part.slices}
        partitions.append((len(parts), sliced))
        return parts

    plan = MoonshotPruner(model, config).plan(batches)
    monkeypatch.setattr(loop, "partition", record)
    report = MoonshotPruner(model, config).prune(batches, progress=False)
    backward = [(block.rounds, block.parts) for block in reversed(plan.blocks)]
    assert partitions == backward
    sliced = {name for block in plan.blocks for name in block.parts}
    assert len(sliced) == sum("row chunks" in note for note in report.notes)


def test_a_plan_has_no_side_effects(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model, batches = llama().train(), token_batches(samples=8, length=16, size=4)
    config = MoonshotConfig(**FAST, lam=0.5, offload_dir=str(tmp_path / "offload"))
    pruner, before = MoonshotPruner(model, config), copy.deepcopy(model.state_dict())
    settings, random = model.config.to_dict(), torch.random.get_rng_state()
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    pruner.plan(batches, resume_dir=tmp_path / "resume")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert model.config.to_dict() == settings and model.training and pruner.report is None
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert hooks == [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    assert torch.equal(torch.random.get_rng_state(), random)
    assert not list(tmp_path.iterdir())


def test_a_plan_with_weights_has_seconds_and_one_without_has_none():
    plan = MoonshotPruner(llama(), MoonshotConfig(**FAST, lam=0.5, recover="blockwise")).plan()
    assert set(plan.seconds) == {"calibration", "solver", "recovery", "saving", "total"}
    assert plan.seconds["total"] == pytest.approx(sum(plan.seconds.values()) / 2)
    assert plan.data["num_samples"] == 8 and plan.data["sequence_length"] == 16
    assert not planned().seconds


@pytest.mark.parametrize(("lam", "fisher", "most"), [(1.0, "rows", 2), (0.5, "shared", 3), (0.5, "rows", 1)])
def test_statistics_behind_pruned_blocks_take_more_passes(lam, fisher, most):
    passes = [planned(lam=lam, fisher=fisher, **fields).blocks[0].passes for fields in ({"recompute": False}, {})]
    assert passes == [1, most]


def test_a_plan_without_weights_has_the_passes_and_places_of_one_with_them():
    config = MoonshotConfig(**FAST, lam=0.5)
    measured, by_shapes = MoonshotPruner(llama(), config).plan(), planned(lam=0.5)
    assert measured.blocks == by_shapes.blocks and measured.peaks.keys() == by_shapes.peaks.keys()
    for item in ("caches", "results", "reading text"):
        assert most(measured, item) == most(by_shapes, item)
    assert most(measured, "statistics") <= 1.1 * most(by_shapes, "statistics")  # by shapes no Gram matrix is shared


def test_gradients_behind_every_pruned_block_take_quadratic_time(monkeypatch):
    def seconds(rehearsal, run, count, samples):
        blocks = len(rehearsal.first(count))
        return 1.0 + (blocks * (blocks + 1) / 2 if run.differentiates else blocks)

    monkeypatch.setattr(Rehearsal, "_timed", seconds)
    batches, model = token_batches(samples=8, length=16, size=4), llama(num_hidden_layers=10)
    config = MoonshotConfig(**{**FAST, "num_samples": 8}, lam=0.5, recompute=True)
    plan = MoonshotPruner(model, config).plan(batches)
    assert plan.seconds["calibration"] == pytest.approx(1 + 55, abs=3)
    assert [block.passes for block in plan.blocks] == [*range(2, 12)]


@pytest.mark.parametrize(("fixed", "row"), [(0, 1e-3), (5, 1e-3), (0.01, 0.1), (0.2, 0)])
def test_the_seconds_of_a_solver_lie_on_a_line(monkeypatch, fixed, row):
    """The time is the solver's alone, and most matrices are solved in part."""
    now, rows = [0.0], []

    def solve(weight, statistics):
        now[0] += fixed + row * len(weight)
        rows.append(len(weight))

    monkeypatch.setattr("optimum_moonshot.plan.trials.clock", lambda device: now[0])
    (layer, *_) = select(llama(), MoonshotConfig(sparsity=0.5)).layers
    statistics = LayerStatistics(torch.eye(16), None, 8)
    trial = try_rows(solve, torch.ones(5000, 16), statistics, torch.device("cpu"), layer)
    assert trial.seconds == pytest.approx(fixed + 5000 * row)
    assert row < 0.1 or max(rows) <= 256


@pytest.mark.parametrize("fields", [{"rotation": "learned"}, {"allocation": "fisher"}, {"recover": "gradual"}])
def test_phases_before_and_after_pruning_have_snapshots(fields):
    plan = planned(lam=0.5, **fields)
    name = {"rotation": "rotation", "allocation": "allocation", "recover": "recovery"}[next(iter(fields))]
    assert name in {snapshot.phase for snapshot in plan.snapshots}


def test_an_overflow_names_the_option_that_fixes_it():
    config = MoonshotConfig(**{**FAST, "num_samples": 64}, lam=0.5)
    plan = MoonshotPruner.plan_for(on_meta(), config, device_memory=120_000, host_memory="1GB")
    assert not plan.fits and plan.device == "cuda"
    assert any("num_samples" in overflow.hint for overflow in plan.overflows)
    small = MoonshotPruner.plan_for(on_meta(), config, device_memory=1000, host_memory="1GB")
    assert small.overflows[0].where == "the model" and "dtype" in small.overflows[0].hint
    assert "DOES NOT FIT" in str(plan)
    plan = MoonshotPruner.plan_for(on_meta(), config, device_memory="1GB", host_memory="1GB")
    assert plan.fits and "fits: besides the model" in str(plan)


def test_results_are_counted_on_the_disk_with_a_folder():
    peaks = MoonshotPruner.plan_for(on_meta(), MoonshotConfig(**FAST), resume_dir="run").peaks
    assert peaks["disk"] > 0 and "disk" not in planned().peaks


def test_caches_that_spill_are_counted_on_the_disk(tmp_path):
    config = MoonshotConfig(**{**FAST, "num_samples": 32}, lam=0.5, max_memory=10_000, offload_dir=str(tmp_path))
    assert MoonshotPruner.plan_for(on_meta(), config).peaks["disk"] > 0
    config = MoonshotConfig(**{**FAST, "num_samples": 32}, lam=0.5, max_memory=10_000)
    assert any("offload_dir" in overflow.hint for overflow in MoonshotPruner.plan_for(on_meta(), config).overflows)


def test_a_run_that_exceeds_the_memory_has_an_overflow_in_its_plan(tmp_path):
    model, batches = llama(), token_batches(samples=8, length=16, size=4)
    pruner = MoonshotPruner(model, MoonshotConfig(**FAST, lam=0.5, max_memory=40_000))
    plan = pruner.plan(batches)
    assert not plan.fits and "offload_dir" in plan.overflows[0].hint
    with pytest.raises(MoonshotError, match="max_memory"):
        pruner.prune(batches, progress=False)


def test_a_plan_is_saved_as_json(tmp_path):
    plan = planned(lam=0.5)
    values = json.loads(plan.save(tmp_path).read_text())
    assert values["peaks"] == plan.peaks and values["fits"] is True
    assert repr(plan).startswith("Plan(cpu ")


def test_peaks_of_keeps_the_peak_of_every_phase():
    small, large = Snapshot("a", "x", {"caches": {"cpu": 1}}), Snapshot("a", "y", {"caches": {"cpu": 3}})
    other = Snapshot("b", "z", {"results": {"disk": 1}})
    assert peaks_of([small, large, other], ["cpu", "disk"]) == (large, other) or large.total("disk") == 0
    assert gib(2**30) == "1.00 GiB" and gib(2**20) == "1.0 MiB"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device_memory": "much"}, "device_memory='much'"),
        ({"host_memory": 0}, "host_memory=0"),
        ({"device_memory": True}, "device_memory=True"),
    ],
)
def test_a_wrong_size_is_refused(options, message):
    with pytest.raises(MoonshotError, match=message):
        MoonshotPruner.plan_for(on_meta(), MoonshotConfig(**FAST), **options)


def test_an_unsupported_plan_is_an_error():
    with pytest.raises(MoonshotError, match="pattern='experts'"):
        MoonshotPruner.plan_for(on_meta(), MoonshotConfig(solver="osscar", pattern="experts", sparsity=0.5))
    with pytest.raises(MoonshotError, match="sequence_length=100"):
        planned(sequence_length=100)


def test_the_command_plans_and_writes_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    on_meta().save_pretrained(tmp_path / "config-only")
    parser = argparse.ArgumentParser()
    add_prune_options(parser)
    arguments = ["config-only", "--output", "out", "--sparsity", "0.5", "--dry-run", "--num-samples", "4"]
    prune_command(parser.parse_args([*arguments, "--device-memory", "1GB"]))
    output = capsys.readouterr().out
    assert "model.layers.0" in output and "without its weights" in output
    llama().save_pretrained(tmp_path / "whole")
    prune_command(parser.parse_args(["whole", *arguments[1:]]))
    assert "total" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config-only", "whole"]
    with pytest.raises(MoonshotError, match="host_memory: only for --dry-run"):
        prune_command(parser.parse_args([*arguments[:5], "--host-memory", "1GB"]))


def test_recovery_of_whole_blocks_counts_all_their_parameters():
    """Training, and results that wait to be written, of all parameters of a block, not only the pruned ones."""
    fields = dict(solver="osscar", pattern="structured", sparsity=0.5, lam=1.0)
    configs = [MoonshotConfig(**{**FAST, **fields, "recover": recover}) for recover in (None, "blockwise")]
    plain, structured = (MoonshotPruner(llama(), config).plan() for config in configs)
    blocks = find_blocks(llama())
    largest = max(sum(each.numel() for each in block.parameters()) for _, block in blocks)
    assert most(structured, "training") == TRAINED_BYTES * largest
    pruned = sum(layer.parameter.nbytes for layer in select(llama(), configs[0]).layers)
    every = sum(each.nbytes for _, block in blocks for each in block.parameters())
    assert most(plain, "results") == pruned and most(structured, "results") == every


@pytest.mark.slow
def test_the_memory_of_a_recovery_counts_the_graph_of_its_training():
    """At λ = 1 calibration has no backward pass; long sequences, so that activations exceed the weights."""
    shape = dict(hidden_size=64, intermediate_size=160, num_attention_heads=4, max_position_embeddings=256)
    config = MoonshotConfig(
        sparsity=0.5, lam=1, recover="blockwise", recover_steps=4, num_samples=32, batch_size=4, sequence_length=256
    )
    pruner = MoonshotPruner(llama(**shape), config)
    batches = token_batches(samples=32, length=256, size=4)
    plan = pruner.plan(batches)
    with LiveBytes() as live:
        pruner.prune(batches, progress=False)
    recovery = max(each.total("cpu") for each in plan.snapshots if each.phase == "recovery")
    assert 2 / 3 < (recovery - most(plan, "allocator")) / live.peak < 4 / 3, (recovery, live.peak)
