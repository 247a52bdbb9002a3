"""Files of offloaded weights that change, disappear or are overwritten while the model is in use; temporary folders."""

import gc
import logging
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from models import make, token_batches
from offloaded_models import offloaded

from optimum_moonshot.errors import MoonshotError

IDS = torch.arange(10)[None]


@pytest.fixture
def mixtral(tmp_path):
    make("mixtral").save_pretrained(tmp_path / "dense")
    return tmp_path / "dense"


@pytest.fixture
def llama(tmp_path):
    """A checkpoint with a file for every few weights."""
    make("llama").save_pretrained(tmp_path / "dense", max_shard_size="10KB")
    return tmp_path / "dense"


def replace(path):
    shutil.copy(path, path.with_suffix(".new"))
    os.replace(path.with_suffix(".new"), path)


def overwrite(path):
    content = path.read_bytes()
    path.write_bytes(content[:-4] + b"\0\0\0\0")


def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize("change", [replace, overwrite, truncate, Path.unlink])
def test_files_that_changed_after_loading_are_refused(change, llama, tmp_path):
    pruner = offloaded(llama)
    expected = pruner.model(IDS).logits
    shutil.copytree(llama, tmp_path / "before")
    change(sorted(llama.glob("*.safetensors"))[2])
    message = "is gone" if change is Path.unlink else "has changed"
    with pytest.raises(MoonshotError, match=rf"safetensors {message} since the model was loaded.*load the model again"):
        pruner.prune(token_batches(), progress=False)
    assert pruner.report is None
    if change is not replace:  # the same bytes in a new file
        again = offloaded(tmp_path / "before")
        assert torch.equal(again.model(IDS).logits, expected)


def test_offloaded_loads_do_not_warn_of_the_meta_device(llama, caplog):
    offloaded(llama)
    assert "meta device" not in caplog.text
    assert not logging.getLogger("accelerate.big_modeling").filters


def test_a_file_that_cannot_be_read_is_named(llama, monkeypatch):
    pruner = offloaded(llama)

    def broken(*_, **__):
        raise OSError("input/output error")

    monkeypatch.setattr("accelerate.utils.offload.safe_open", broken)
    with pytest.raises(MoonshotError, match=r"weight cannot be read: input/output error; load the model again"):
        pruner.prune(token_batches(), progress=False)


def test_an_offloaded_model_is_not_saved_over_its_source(llama, tmp_path):
    pruner = offloaded(llama)
    pruner.prune(token_batches(), progress=False)
    before = {path.name: path.read_bytes() for path in llama.iterdir()}
    (tmp_path / "link").symlink_to(llama)
    for place in (llama, tmp_path / "link"):
        for format in ("dense", "packed"):
            with pytest.raises(MoonshotError, match="directory=.*weights.* are read from there; give another"):
                pruner.save_pretrained(place, format=format)
    assert {path.name: path.read_bytes() for path in llama.iterdir()} == before
    pruner.save_pretrained(tmp_path / "pruned")


KILLED = """
import os, signal, sys
sys.path[:0] = sys.argv[3:]
from offloaded_models import offloaded
pruner = offloaded(sys.argv[1], offload_dir=sys.argv[2])
print("loaded", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_next_run_deletes_the_folder_of_a_killed_one_and_no_other(mixtral, tmp_path):
    cache = tmp_path / "cache"
    living = offloaded(mixtral, offload_dir=str(cache))
    mine = set(cache.glob("moonshot-offload-*"))
    paths = [str(Path(__file__).parents[1] / "support"), str(Path(__file__).parents[2])]
    done = subprocess.run([sys.executable, "-c", KILLED, str(mixtral), str(cache), *paths], capture_output=True)
    assert done.returncode == -signal.SIGKILL and b"loaded" in done.stdout, done.stderr.decode()[-2000:]
    assert len(set(cache.glob("moonshot-offload-*"))) == 2
    another = offloaded(mixtral, offload_dir=str(cache))
    left = set(cache.glob("moonshot-offload-*"))
    assert len(left) == 2 and mine < left
    assert torch.equal(living.model(IDS).logits, another.model(IDS).logits)
    del living, another
    gc.collect()
    assert not list(cache.iterdir())
