"""Staged files: recovery after a killed save, concurrent saves, the order of the moves."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from optimum_moonshot import MoonshotError
from optimum_moonshot.files import staged

ROOT = Path(__file__).resolve().parents[2]
KILLED = """
import os, signal, sys
from optimum_moonshot.files import staged
with staged("directory", sys.argv[1]) as folder:
    (folder / "model.safetensors").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_the_files_of_a_killed_save_are_removed_by_the_next(tmp_path):
    (tmp_path / "model.safetensors").write_text("old")
    done = subprocess.run([sys.executable, "-c", KILLED, tmp_path], cwd=ROOT)
    assert done.returncode == -signal.SIGKILL and len(names(tmp_path)) == 2
    assert (tmp_path / "model.safetensors").read_text() == "old"
    with staged("directory", tmp_path) as folder:
        assert names(tmp_path) == [folder.name, "model.safetensors"]
        (folder / "model.safetensors").write_text("new")
    assert names(tmp_path) == ["model.safetensors"] and (tmp_path / "model.safetensors").read_text() == "new"


def test_a_concurrent_save_is_not_removed(tmp_path):
    with staged("directory", tmp_path) as first:
        (first / "a").write_text("1")
        with staged("directory", tmp_path) as second:
            assert first.is_dir()
            (second / "b").write_text("2")
    assert names(tmp_path) == ["a", "b"]


def test_two_saves_into_one_folder_are_serialized(tmp_path, monkeypatch):
    """The files of a save move together: the folder never mixes two saves."""
    real, turns = os.replace, []

    def slow(source, target):
        turns.append(Path(source).read_text())
        time.sleep(0.01)
        real(source, target)

    def save(text):
        with staged("directory", tmp_path) as folder:
            for name in ("config.json", "model.safetensors", "tokenizer.json"):
                (folder / name).write_text(text)
            ready.wait()

    monkeypatch.setattr(os, "replace", slow)
    ready = threading.Barrier(4)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(save, "abcd"))
    assert [len(set(turns[start : start + 3])) for start in range(0, 12, 3)] == [1] * 4
    assert {(tmp_path / name).read_text() for name in names(tmp_path)} == {turns[-1]}


def test_a_save_that_is_starting_is_not_abandoned(tmp_path, monkeypatch):
    """Another save starts after the folder of the first is created and before its lock."""
    made, others = tempfile.TemporaryDirectory, []

    def save(text):
        with staged("directory", tmp_path) as folder:
            (folder / f"{text}.txt").write_text(text)

    def disturbed(**options):
        folder = made(**options)
        if not others:
            others.append(threading.Thread(target=save, args=("second",)))
            others[0].start()
            others[0].join(0.3)
        return folder

    monkeypatch.setattr(tempfile, "TemporaryDirectory", disturbed)
    save("first")
    others[0].join()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first.txt", "second.txt"]


def test_an_interrupted_move_cannot_be_loaded(tmp_path, monkeypatch):
    """No error would reveal old weights under a new config.json, or new weights under an old one."""
    for name in ("model.safetensors", "model-00001-of-00002.safetensors", "notes.txt", "config.json"):
        (tmp_path / name).write_text("old")
    moved, unlink = [], Path.unlink

    def unlinked(path, **options):
        assert path.name in ("config.json", ".lock", ".saving-lock") or not (tmp_path / "config.json").exists()
        unlink(path, **options)

    def interrupted(source, target):
        moved.append(target.name)
        assert not (tmp_path / "config.json").exists()
        if len(moved) == 2:
            raise OSError("interrupted")
        os.rename(source, target)

    monkeypatch.setattr(os, "replace", interrupted)
    monkeypatch.setattr(Path, "unlink", unlinked)
    monkeypatch.setattr(Path, "iterdir", lambda folder: sorted(map(folder.joinpath, os.listdir(folder)), reverse=True))
    with pytest.raises(MoonshotError, match="interrupted"), staged("directory", tmp_path) as folder:
        for name in ("config.json", "model.safetensors", "tokenizer.json"):
            (folder / name).write_text("new")
    assert moved == ["model.safetensors", "tokenizer.json"]
    assert names(tmp_path) == ["model.safetensors", "notes.txt"]
