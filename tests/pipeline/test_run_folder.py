"""The run folder has one writer, detects damage, keeps foreign files and is removed after the save."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from llama_runs import assert_same, weights
from models import make, token_batches

from optimum_moonshot import MoonshotConfig, MoonshotError, MoonshotPruner
from optimum_moonshot.pipeline.run_folder import LAYERS, RunFolder

ROOT = Path(__file__).resolve().parents[2]
TENSORS = {"layer": torch.arange(6.0).view(2, 3)}
# Locks a folder until stdin is closed.
HOLD = """
import sys
from optimum_moonshot.pipeline.run_folder import RunFolder
folder = RunFolder(sys.argv[1], "resume_dir")
folder.open({"the run": {"name": "other"}})
print("locked", flush=True)
sys.stdin.read()
"""


def opened(path, name="a run"):
    folder = RunFolder(path, "resume_dir")
    return folder, folder.open({"the run": {"name": name}})


def pruner(**changes):
    settings = dict(pattern="2:4", lam=1.0, num_samples=6, sequence_length=12, batch_size=2)
    return MoonshotPruner(make("llama"), MoonshotConfig(**{**settings, **changes}))


def prune(folder, **changes):
    finished = pruner(**changes)
    finished.prune(token_batches(), progress=False, resume_dir=folder)
    return finished


def test_a_reopened_folder_has_the_saved_results(tmp_path):
    folder, resumed = opened(tmp_path / "run")
    assert resumed is None
    folder.save(LAYERS, "layer", TENSORS, {"name": "layer"})
    folder.release()
    folder, resumed = opened(tmp_path / "run")
    ((path, report, tensors),) = folder.saved(LAYERS)
    assert resumed and report == {"name": "layer"} and torch.equal(tensors["layer"], TENSORS["layer"])
    folder.release()
    folder, resumed = opened(tmp_path / "run", "another")
    assert resumed is False and not list(folder.saved(LAYERS)) and not path.exists()
    folder.release()
    folder, resumed = opened(tmp_path / "run")  # set aside until the other run is done
    assert resumed and torch.equal(next(folder.saved(LAYERS))[2]["layer"], TENSORS["layer"])
    folder.release()
    folder, resumed = opened(tmp_path / "run", "another")
    assert resumed is True and not list(folder.saved(LAYERS))
    folder.discard()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "no report", "other report", "other shape", "other name"])
def test_a_damaged_result_is_removed(tmp_path, damage):
    folder, _ = opened(tmp_path)
    path = folder.save(LAYERS, "layer", TENSORS, {"name": "layer"})
    content = bytearray(path.read_bytes())
    if damage == "other name":
        path = path.rename(path.with_name("another.safetensors"))
    if damage == "flip":
        content[-3] ^= 4
    elif damage == "cut":
        content = content[:-5]
    elif damage == "empty":
        content = b""
    elif damage == "other report":
        content = content.replace(b"layer", b"lager", 1)
    elif damage == "other shape":
        content = content.replace(b"[2,3]", b"[3,2]")
    elif damage == "no report":
        content = content.replace(b'"report"', b'"rapport'[:7] + b'"', 1)
    path.write_bytes(content)
    assert [report for _, report, _ in folder.saved(LAYERS)] == [None]
    assert not path.exists()
    folder.discard()


@pytest.mark.parametrize(
    "change", [dict(seed=3), dict(lam=0.9), dict(pattern="1:4"), dict(solver="magnitude")], ids=str
)
def test_a_result_of_another_run_is_not_taken(tmp_path, change):
    """Its checksum is valid, and so are its layer and its shape: only the run differs."""
    expected = prune(None).model.state_dict()
    prune(tmp_path / "run")
    prune(tmp_path / "other", **change)
    names = [f"model.layers.{block}.mlp.up_proj.safetensors" for block in (0, 2)]
    for name in names:
        (tmp_path / "other" / LAYERS / name).replace(tmp_path / "run" / LAYERS / name)
    again = prune(tmp_path / "run")
    assert any("2 damaged results" in note for note in again.report.notes)
    assert_same(again.model, expected)


@pytest.mark.parametrize("padded", [False, True])
def test_a_run_resumes_with_another_batch_size(tmp_path, padded):
    """As after an out-of-memory error."""
    torch.manual_seed(0)
    texts = [{"input_ids": torch.randint(3, 90, (1, 12 - (index % 5 if padded else 0)))} for index in range(6)]
    lengths = [len(each["input_ids"][0]) for each in texts]
    ids = torch.stack(
        [torch.nn.functional.pad(each["input_ids"][0], (0, 12 - len(each["input_ids"][0]))) for each in texts]
    )
    together = {"input_ids": ids}
    if padded:
        together["attention_mask"] = (torch.arange(12) < torch.tensor(lengths)[:, None]).long()
    first = pruner(batch_size=6)
    first.prune([together], progress=False, resume_dir=tmp_path / "run")
    again = pruner(batch_size=1)
    report = again.prune(texts if padded else [together], progress=False, resume_dir=tmp_path / "run")
    assert any("21 layers were reused" in note for note in report.notes)
    assert_same(again.model, weights(first.model))


def test_a_folder_in_place_of_a_file_is_named(tmp_path):
    prune(tmp_path / "run")
    path = tmp_path / "run" / LAYERS / "model.layers.0.mlp.up_proj.safetensors"
    path.unlink()
    path.mkdir()
    before = weights(make("llama"))
    late = pruner()
    with pytest.raises(MoonshotError, match=r"resume_dir=.*up_proj\.safetensors is not a file.*remove the folder"):
        late.prune(token_batches(), progress=False, resume_dir=tmp_path / "run")
    assert_same(late.model, before)
    folder, _ = opened(tmp_path / "run")  # the lock was released
    folder.release()


def test_a_damaged_result_is_recomputed(tmp_path):
    expected = prune(None).model.state_dict()
    prune(tmp_path / "run")
    files = sorted((tmp_path / "run" / LAYERS).glob("*"))
    content = bytearray(files[3].read_bytes())
    content[-1] ^= 64
    files[3].write_bytes(content)
    repaired = prune(tmp_path / "run")
    assert any("1 damaged results" in note for note in repaired.report.notes)
    assert any("20 layers were reused" in note for note in repaired.report.notes)
    assert_same(repaired.model, expected)


def test_a_folder_has_one_writer_at_a_time(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", HOLD, str(tmp_path / "run")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as holder:
        assert holder.stdout.readline() == "locked\n"
        before = weights(make("llama"))
        late = pruner()
        with pytest.raises(MoonshotError, match="resume_dir=.*another run writes there"):
            late.prune(token_batches(), progress=False, resume_dir=tmp_path / "run")
        assert_same(late.model, before)
        holder.kill()  # a dead process holds no lock
        holder.wait()
    assert prune(tmp_path / "run").report.sparsity == 0.5


def test_a_run_resumes_after_a_kill_while_writing_the_manifest(tmp_path):
    (tmp_path / "run").mkdir()
    for name in ("run.json.partial", "run.lock"):
        (tmp_path / "run" / name).write_text("{")
    assert prune(tmp_path / "run").report.sparsity == 0.5
    (tmp_path / "run" / "run.json.partial").write_text("{")
    prune(tmp_path / "run").save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "run").exists()


def test_partial_results_of_a_killed_run_are_removed(tmp_path):
    """safetensors writes to a random name and renames the file at the end."""
    expected = prune(None).model.state_dict()
    prune(tmp_path / "run")
    partial = [tmp_path / "run" / LAYERS / name for name in (".tmpBTSjPq", "model.layers.0.mlp.up_proj.partial")]
    for path in partial:
        path.write_text("half")
    again = prune(tmp_path / "run")
    assert not any(path.exists() for path in partial)
    assert_same(again.model, expected)
    partial[0].write_text("half")
    again.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "run").exists()


def test_foreign_files_are_kept(tmp_path):
    folder = tmp_path / "run"
    finished = prune(folder)
    for path in (folder / "foreign.txt", folder / LAYERS / "foreign.txt"):
        path.write_text("content")
    finished.save_pretrained(tmp_path / "saved")
    assert {path.relative_to(folder).as_posix() for path in folder.rglob("*")} == {
        "foreign.txt", "layers", "layers/foreign.txt",
    }  # fmt: skip


def test_a_link_to_a_folder_is_accepted(tmp_path):
    (tmp_path / "real").mkdir()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "real")
    finished = prune(link)
    assert finished.report.sparsity == 0.5 and list((tmp_path / "real" / LAYERS).glob("*"))
    finished.save_pretrained(tmp_path / "saved")
    assert link.is_symlink() and not list((tmp_path / "real").iterdir())


def test_a_dangling_link_is_named(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    with pytest.raises(MoonshotError, match="resume_dir=.*link to a folder that does not exist"):
        prune(tmp_path / "link")


@pytest.mark.parametrize("content", ["", "[1]", '{"parts"', "\x00"])
def test_a_broken_manifest_is_named(tmp_path, content):
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(MoonshotError, match=r"resume_dir=.*run\.json is damaged.*remove the folder"):
        prune(tmp_path)


def test_a_failed_save_keeps_the_results(tmp_path, monkeypatch):
    finished, folder = prune(tmp_path / "run"), tmp_path / "run"
    (tmp_path / "file").write_text("")
    with pytest.raises(MoonshotError, match="file"):
        finished.save_pretrained(tmp_path / "file")
    again = prune(folder)
    assert any("21 layers were reused" in note for note in again.report.notes)
    again.save_pretrained(tmp_path / "saved")
    assert not folder.exists()


@pytest.mark.parametrize("weight", ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"])
def test_a_run_does_not_resume_after_a_weight_outside_of_its_layers_changed(weight, tmp_path):
    """Half of the results would be those of another model."""
    first = prune(tmp_path / "run")
    changed = pruner()
    changed.model.get_parameter(weight).data.mul_(1.01)
    report = changed.prune(token_batches(), progress=False, resume_dir=tmp_path / "run")
    note = f"an unfinished run was set aside until this one is done: the model differs in {weight}"
    assert note in report.notes and not any("reused" in each for each in report.notes)
    again = prune(tmp_path / "run")  # with the first weights: all results are still there
    assert any("21 layers were reused" in each for each in again.report.notes)
    assert_same(again.model, weights(first.model))
    again.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "run").exists()


def test_a_save_keeps_the_results_of_a_later_run(tmp_path):
    first, folder = prune(tmp_path / "run"), tmp_path / "run"
    second = prune(folder, damping=0.02)
    assert any("set aside" in note and "in damping" in note for note in second.report.notes)
    first.save_pretrained(tmp_path / "first")
    assert len(list((folder / LAYERS).glob("*"))) == 21
    second.save_pretrained(tmp_path / "second")
    assert not folder.exists()


def test_a_sweep_keeps_its_results_until_the_choice_is_saved(tmp_path):
    sweeping, work = pruner(), tmp_path / "work"
    report = sweeping.sweep(token_batches(), lambdas=[1.0], sparsities=None, work_dir=work, progress=False)
    sweeping.choose(report.entries[0])
    assert len(list(work.rglob("*.safetensors"))) == 21
    sweeping.save_pretrained(tmp_path / "saved")
    assert not list(work.rglob("*"))
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["moonshot"]["sparsity"] == 0.5


def test_a_rotation_reports_that_results_were_set_aside(tmp_path):
    def rotate(model):
        rotator = MoonshotPruner(model, MoonshotConfig(pattern="2:4", rotation_steps=2, num_samples=6))
        return rotator.rotate(token_batches(), progress=False, resume_dir=tmp_path / "run").notes

    assert not any("set aside" in note for note in rotate(make("llama")))
    changed = make("llama")
    changed.model.norm.weight.data.mul_(1.01)
    assert any("set aside until this one is done: the model differs in model.norm.weight" in n for n in rotate(changed))


def test_what_a_kill_leaves_of_nested_runs_is_removed(tmp_path):
    """A process may be killed between the manifest and the lock, or before the manifest is complete."""
    top = tmp_path / "work"
    for name in ("one", "narrowed/two", "narrowed/deeper/three"):
        folder, _ = opened(top / name)
        folder.save(LAYERS, "layer", TENSORS, {"name": "layer"})
        folder.release()
    for name, left in (("killed", "run.lock"), ("narrowed/killed", "run.json.partial")):
        (top / name).mkdir()
        (top / name / left).touch()
    (top / "foreign").mkdir()
    (top / "other").mkdir()
    (top / "other" / "mine.txt").write_text("mine")
    RunFolder.remove_all(top)
    assert sorted(path.relative_to(top).as_posix() for path in top.rglob("*")) == ["foreign", "other", "other/mine.txt"]
    RunFolder.remove_all(top / "foreign")
    assert not (top / "foreign").exists()
