"""Any number of processes gives the results of one; a process that fails ends all, and finished layers are kept."""

import json
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from models import make, token_batches
from process_reports import assert_as_one_process
from process_runs import DIED, ROOT, assert_alike, assert_same, environment, found_by
from ranks import CASES, COMMANDS, DEMO, FEW

from optimum_moonshot import MoonshotError
from optimum_moonshot.calibration.accumulators import InputStatistic
from optimum_moonshot.calibration.observer import Observer, merge_statistics
from optimum_moonshot.calibration.storage import Storage
from optimum_moonshot.data.batches import batch_size, samples_between
from optimum_moonshot.distributed.ranks import Ranks
from optimum_moonshot.distributed.sharing import Merger, assign
from optimum_moonshot.model.layers import find_structure
from optimum_moonshot.pipeline.inputs import Prepared

pytestmark = pytest.mark.slow

BFLOAT16 = ("bfloat16", "bfloat16, gradients alone")
SEVERAL = [(2, name) for name in CASES if name not in BFLOAT16] + [(4, name) for name in FEW if name not in BFLOAT16]
FAILED = "rank 1 failed: no more of model.layers.2."
UNDER_CALIBRATED = "experts, some starved"
# Notes that depend on memory: with several processes each has smaller caches, and more memory for statistics.
OF_MEMORY = {
    "rounds": None,
    "memories that differ": None,
    "chunks of rows": "row chunks to save memory",
    "experts in parts": "its experts solved in",
}


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """The results of `found_by`, and "folder" → the output folder of the processes."""
    folder = tmp_path_factory.mktemp("ranks")
    results, stderr = found_by("ranks.py", folder)
    expected = {(size, rank) for size in (1, 2, 4) for rank in range(size)} | {
        ("dying", 0),
        ("breaking", 0),
        ("absent", 0),
    }
    expected |= {(name, rank) for name in COMMANDS for rank in range(2)}
    assert results.keys() == expected, stderr
    return {**results, "folder": folder}


@pytest.mark.parametrize(("size", "name"), SEVERAL)
def test_several_processes_give_the_results_of_one(done, size, name):
    shared, notes = assert_as_one_process(done[size, 0][name], done[1, 0][name], name not in OF_MEMORY)
    assert shared.startswith(f"{size} processes shared the samples and the layers")
    note = OF_MEMORY.get(name)
    assert note is None or all(any(note in line for line in lines) for lines in notes)


@pytest.mark.parametrize("size", [2, 4])
def test_masks_in_bfloat16_are_those_of_one_process(done, size):
    """Weights may differ by the rounding of the Gram matrices' sums, which have another order."""
    shared, single = (done[number, 0]["bfloat16"]["weights"] for number in (size, 1))
    assert all(torch.equal(shared[name] == 0, tensor == 0) for name, tensor in single.items())


@pytest.mark.parametrize("size", [2, 4])
def test_gradients_in_bfloat16_are_those_of_one_process(done, size):
    """At λ = 0 nothing is summed over the samples in another order: the weights are equal bit for bit."""
    shared, single = (done[number, 0]["bfloat16, gradients alone"] for number in (size, 1))
    assert all(torch.equal(shared["weights"][name], tensor) for name, tensor in single["weights"].items())
    idle = "; 2 without samples: lower batch_size" if size == 4 else ""
    assert shared["said"]["notes"][-1] == f"{size} processes shared the samples and the layers{idle}"


def test_some_experts_are_under_calibrated(done):
    assert any(
        "experts" in note and "read fewer than" in note for note in done[1, 0][UNDER_CALIBRATED]["said"]["notes"]
    )


@pytest.mark.parametrize(("size", "name"), SEVERAL)
def test_all_processes_have_the_same_model(done, size, name):
    for rank in range(1, size):
        assert_same(done[size, rank][name], done[size, 0][name])


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_run_is_reproducible(done, size):
    assert_same(done[size, 0]["again"], done[size, 0]["sparsegpt"])


def test_a_failure_is_reported_by_all_processes(done):
    assert [done[2, rank]["failure"].partition(": ")[0] for rank in range(2)] == ["RankFailed", "Deadly"]
    assert FAILED in done[2, 0]["failure"]


def test_a_run_after_a_failure_is_unaffected(done):
    assert_same(done[2, 0]["after the failure"], done[2, 0]["sparsegpt"])


def test_more_processes_resume_the_run_of_fewer(done):
    resumed, kept = done[4, 0]["resumed"], done[2, 0]["files"]
    assert 14 <= len(kept) < 21  # two blocks of three, and the layers of the last one that the first process solved
    notes = resumed["said"]["notes"]
    assert notes[0] == f"{len(kept)} layers were reused from an interrupted run"
    for rank in range(1, 4):
        assert_same(done[4, rank]["resumed"], resumed)
    assert_alike(resumed, done[1, 0]["six samples"])


@pytest.mark.parametrize("name", ["pass", "solver", "moving on", "experts", "recovery"])
def test_a_process_out_of_memory_blocks_no_other(done, name):
    case = {"experts": "more processes than experts", "recovery": "recovery"}.get(name, "sparsegpt")
    result, other = (done[2, rank]["crowded"][name] for rank in range(2))
    assert_same(result, other)
    for key, tensor in done[1, 0][case]["weights"].items():
        assert torch.equal(result["weights"][key] == 0, tensor == 0), key
        torch.testing.assert_close(result["weights"][key], tensor, rtol=1e-2, atol=1e-3)
    notes = [note for note in result["said"]["notes"] if "out of memory on cpu " in note]
    alone = {"solver": "rank 1: ", "recovery": "rank 0: "}.get(name, "")
    assert any(note.startswith(f"{alone}out of memory") for note in notes)
    assert len(notes) == len({note.partition("out of memory")[2] for note in notes})


def test_a_process_always_out_of_memory_ends_all(done):
    for rank in range(2):
        assert "out of device memory: lower max_memory" in done[2, rank]["crowded"]["always"]


def test_the_error_names_the_dead_process(done):
    assert done["dying", 0] == {"killed": f"RankFailed: {DIED}"}


def test_the_error_names_the_process_that_died_in_a_transfer(done):
    assert done["breaking", 0] == {"broken": f"RankFailed: {DIED}"}


def test_the_error_names_the_process_that_died_before_its_call(done):
    assert done["absent", 0] == {"absent": "RankFailed: rank 1 failed: its process has died before this call"}


@pytest.mark.parametrize(
    "case, difference",
    [
        ("differing", "the configuration of rank {} differs from that of rank {} in sparsity"),
        ("differing norm", "the model of rank {} differs from that of rank {} in model.norm.weight"),
        ("differing calls", "the call of rank {} differs from that of rank {} in the method"),
        ("differing loss", "the model's function of rank {} differs from that of rank {} in losses"),
    ],
)
def test_processes_that_differ_are_an_error_in_both(case, difference, done):
    assert difference.format(0, 1) in done[2, 0][case]
    assert "differs from that of rank" in done[2, 1][case] and difference.rpartition(" ")[2] in done[2, 1][case]


def test_a_run_beside_a_save_is_an_error_in_both(done):
    for rank in range(2):
        assert "in the same order in all processes" in done[2, rank]["differing kinds"]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("count", [1, 5, 6])
def test_samples_are_divided_in_order(size, count):
    batches = [{"input_ids": torch.arange(10 * first, 10 * first + 2)[:, None]} for first in range(3)][: -(-count // 2)]
    batches[-1] = {"input_ids": batches[-1]["input_ids"][: count - 2 * (len(batches) - 1)]}
    parts = [Ranks(rank, size).shard(count) for rank in range(size)]
    assert [sample for part in parts for sample in part] == list(range(count))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    divided = [samples_between(batches, part.start, part.stop) for part in parts]
    assert [sum(map(batch_size, shard)) for shard in divided] == list(map(len, parts))
    samples = torch.cat([batch["input_ids"] for shard in divided for batch in shard])
    assert torch.equal(samples, torch.cat([batch["input_ids"] for batch in batches]))


@pytest.mark.parametrize("largest", [None, 3])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_processes_share_the_batches_of_one(size, largest):
    """Batches have the same samples whatever the number of processes, also after an out-of-memory error."""
    data = SimpleNamespace(batches=token_batches(19, size=4))

    def prepared(rank, size):
        ranks, samples = Ranks(rank, size), SimpleNamespace(size=largest)
        return Prepared(SimpleNamespace(ranks=ranks), None, data, None, SimpleNamespace(ranks=ranks, samples=samples))

    single, several = prepared(0, 1), [prepared(rank, size) for rank in range(size)]
    batches = [batch["input_ids"] for each in several for batch in each.batches]
    assert len(batches) == len(single.batches)
    assert all(torch.equal(batch, other["input_ids"]) for batch, other in zip(batches, single.batches, strict=True))
    assert sum(each.local_samples for each in several) == single.local_samples == 19


class Counted(InputStatistic):
    """A statistic of a user without support for several processes."""

    def add(self, inputs, groups):
        pass

    def result(self):
        return None


def test_a_statistic_that_cannot_be_merged_is_refused():
    model = make("llama")
    (layer,) = find_structure(model, ["layers.1.mlp.up_proj"]).layers()
    storage = Storage(torch.device("cpu"))
    with Observer([layer], False, set(), 2, storage, extra=(Counted,), local_samples=1) as observer:
        observer.begin(0, 1, None)
        model(token_batches(1)[0]["input_ids"])
        observer.end()
    with pytest.raises(MoonshotError, match="Counted: it has no `sums`"):
        merge_statistics(observer, Merger(Ranks(0, 2)))


def test_layers_are_divided_by_their_cost():
    costs = [1.0, 1.0, 4.0, 3.0, 1.0]
    owners = assign(costs, 2)
    assert [sum(cost for cost, owner in zip(costs, owners, strict=True) if owner == rank) for rank in (0, 1)] == [5, 5]
    assert assign([1.0], 4) == [0]


def test_a_command_writes_and_prints_once(done):
    first, other = (done["sweep", rank] for rank in range(2))
    assert first["status"] == other["status"] == 0, first["err"]
    assert "written     " in first["out"] and "saved       " in first["out"] and other["out"] == ""
    assert (done["folder"] / "sweep" / "model" / "model.safetensors").is_file()
    assert not (done["folder"] / "sweep.partial").exists()


def test_a_command_that_fails_prints_one_error(done):
    assert [done["fails", rank]["status"] for rank in range(2)] == [1, 1]
    lines = [line for rank in range(2) for line in done["fails", rank]["err"].splitlines()]
    errors = [line for line in lines if line.startswith("error: ")]
    assert len(errors) == 1 and re.match(r"error: rank \d failed: --targets", errors[0])


def test_a_command_for_one_process_refuses_several(done):
    assert [done["convert", rank]["status"] for rank in range(2)] == [2, 2]
    assert done["convert", 0]["err"].startswith("error: 2 processes: this command runs in one; ")
    assert done["convert", 1]["err"] == ""


def test_a_launcher_that_ends_all_processes_with_the_first_shows_the_error(tmp_path):
    """The first process is the slowest: it starts late, and torchrun looks at the processes every 0.1 s."""
    (tmp_path / "late.py").write_text(
        "import os, time\n"
        "time.sleep(1.5 if os.environ['RANK'] == '0' else 0)\n"
        "from optimum_moonshot.__main__ import main\n"
        f"main(['shrink', {str(DEMO)!r}, '--output', 'out', '--parameters', '0.5'])\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "late.py"]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment(), cwd=tmp_path)
    assert ended.returncode
    assert ended.stderr.count("error: 2 processes: this command runs in one; start it without torchrun") == 1


def test_the_guide_has_the_figures_of_the_benchmark():
    results = json.loads((ROOT / "benchmarks" / "results" / "ranks.json").read_text(encoding="utf-8"))["results"]
    guide = (ROOT / "docs" / "big-models.md").read_text(encoding="utf-8")
    for row in results["rows"]:
        one = next(each for each in results["rows"] if each["run"] == row["run"] and each["processes"] == 1)
        more = row["processor_seconds"] / one["processor_seconds"] - 1
        overhead = "" if row is one else f"{more:.0%}"
        figures = f"{row['seconds']:.1f} | {row['processor_seconds']:.1f} | {overhead}"
        assert f"| {row['run']} | {row['processes']} | {figures} |".replace("|  |", "| |") in guide
        alike = 0.99998 if row["run"].startswith("obc") else 0.99999  # a tie changes the later choices of OBC
        assert row["share_of_the_mask_that_is_the_first"] > alike


def test_torchrun(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "optimum_moonshot", "prune", str(DEMO), "--output", str(tmp_path / "out"), "--device", "cpu"]
    command += ["--calibration", str(DEMO / "calibration.txt"), "--num-samples", "3", "--sequence-length", "32"]
    command += ["--pattern", "2:4", "--solver", "wanda"]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment(), cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert ended.stdout.count("sparsity    0.5000 over 28 layers") == 1
    assert len(re.findall("^saved", ended.stdout, re.MULTILINE)) == 1
    assert (tmp_path / "out" / "model.safetensors").is_file()
    assert not (tmp_path / "out.partial").exists()
