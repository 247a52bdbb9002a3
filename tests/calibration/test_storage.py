"""Memory budgets: device first, then disk; freed tensors return their bytes."""

import errno
import gc

import pytest
import torch

from optimum_moonshot import mapped
from optimum_moonshot.calibration.storage import Storage
from optimum_moonshot.errors import MoonshotError

CPU = torch.device("cpu")


def test_memory_is_counted_while_a_tensor_lives():
    storage = Storage(CPU, max_memory=1000)
    tensor = storage.zeros((10, 10), torch.float32, "x")
    assert storage.available() == 600 and not tensor.any()
    del tensor
    gc.collect()
    assert storage.available() == 1000


def test_tensors_beyond_the_budget_are_an_error_or_a_file(tmp_path):
    with pytest.raises(MoonshotError, match="max_memory: y: cache needs .* set offload_dir"):
        Storage(CPU, max_memory=10).empty((100,), torch.float32, "y: cache")
    storage = Storage(CPU, max_memory=10, spill_to=str(tmp_path / "new"))
    source = torch.randn(40, 30, dtype=torch.float64).to(torch.bfloat16)
    kept = storage.put(source, "y")
    assert torch.equal(kept, source) and storage.spilled == 2400 and storage.available() == 10
    assert not list((tmp_path / "new").iterdir())
    kept.add_(1)
    assert torch.equal(kept, source + 1)


@pytest.mark.parametrize("portable", [False, True])
def test_a_full_disk_is_an_error_before_anything_is_written(tmp_path, monkeypatch, portable):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    if portable:
        monkeypatch.delattr(mapped.os, "posix_fallocate")
        monkeypatch.setattr(mapped.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 10}))
    else:
        monkeypatch.setattr(mapped.os, "posix_fallocate", full)
    with pytest.raises(MoonshotError, match="offload_dir=.*no room for z.*No space left"):
        Storage(CPU, max_memory=10, spill_to=str(tmp_path)).empty((100,), torch.float32, "z")
    assert not list(tmp_path.iterdir())
