"""Shared fixtures. Each test process uses one thread, because threads of parallel processes slow each other down."""

import gc
import importlib
import io
import os
import shutil
import sys
from functools import cache
from pathlib import Path

# Without a GPU, Triton's kernels are interpreted; Triton reads this when torch imports it.
os.environ.setdefault("TRITON_INTERPRET", "0" if shutil.which("nvidia-smi") else "1")

import pytest
import torch
import transformers as hf
from checkpoints import pruned
from matplotlib.figure import Figure

from optimum_moonshot.checkpoint import card
from optimum_moonshot.model.offload import Offloaded
from optimum_moonshot.reports.plots import PLOT_NAME
from optimum_moonshot.solvers import base

torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # inherited by the processes that tests start


def pytest_itemcollected(item):
    if item.get_closest_marker("release") or item.get_closest_marker("real"):
        item.add_marker("slow")


def pytest_collection_finish(session):
    gc.freeze()  # thousands of tests and their modules stay: no collection needs to visit them


@pytest.fixture
def tokenizer():
    """One token per printable character, for the vocabulary of the tiny models."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2, "<mask>": 3, **{chr(32 + i): 4 + i for i in range(92)}}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>", mask_token="<mask>"
    )


@pytest.fixture(autouse=True)
def declared_writes(monkeypatch):
    """Fail if a dropped onloaded weight has changed and its writer did not call `mark_written`."""
    onload, store = Offloaded._onload, Offloaded._store_written

    def bits(slot):
        return slot.table[slot.key].detach().flatten().view(torch.uint8).clone()

    def remember(weights):
        onload(weights)
        weights.bits = [bits(slot) for slot in weights.slots]

    def compare(weights):
        written = {id(slot.table[slot.key]) for slot in weights.slots if (slot.owner, slot.key) in weights.written}
        for slot, before in zip(weights.slots, vars(weights).pop("bits"), strict=True):
            declared = id(slot.table[slot.key]) in written
            interrupted = sys.exc_info()[0] is not None  # maybe before the declaration
            assert declared or interrupted or torch.equal(bits(slot), before), f"{slot.name}: without mark_written"
        store(weights)

    monkeypatch.setattr(Offloaded, "_onload", remember)
    monkeypatch.setattr(Offloaded, "_store_written", compare)


@cache
def picture():
    file = io.BytesIO()
    Figure(figsize=(1, 1)).savefig(file)
    return file.getvalue()


@pytest.fixture(autouse=True)
def quick_pictures(monkeypatch, request):
    """Cards get the same small picture, because drawing one takes most of a tiny model's save, except with `draws`."""
    if request.node.get_closest_marker("draws") is None:

        def save_plot(report, folder):
            path = Path(folder) / PLOT_NAME
            path.write_bytes(picture())
            return path

        monkeypatch.setattr(card, "save_plot", save_plot)


class OnloadCount:
    """The offloaded blocks that are onloaded, and the largest number at once."""

    def __init__(self):
        self.present, self.most = set(), 0


@pytest.fixture
def onloads(monkeypatch):
    """Count the blocks that are onloaded at once."""
    counter, onload, clear = OnloadCount(), Offloaded._onload, Offloaded._clear

    def count_in(weights):
        counter.present.add(id(weights))
        counter.most = max(counter.most, len(counter.present))
        onload(weights)

    def count_out(weights):
        counter.present.discard(id(weights))
        clear(weights)

    monkeypatch.setattr(Offloaded, "_onload", count_in)
    monkeypatch.setattr(Offloaded, "_clear", count_out)
    return counter


@pytest.fixture
def registry(monkeypatch):
    """Unregister the solvers of a test at its end."""
    monkeypatch.setattr(base, "_SOLVERS", dict(base._SOLVERS))


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """A packed 2:4 Llama in bfloat16, in two shards, and its model."""
    folder, pruner = tmp_path_factory.mktemp("packed"), pruned(dtype=torch.bfloat16)
    pruner.save_pretrained(folder, format="packed", max_shard_size="10KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return folder, pruner.model


@pytest.fixture
def packed_copy(packed, tmp_path):
    """A copy of `packed` that tests may damage."""
    return shutil.copytree(packed[0], tmp_path / "copy")


@pytest.fixture
def toy(monkeypatch, registry):
    """The solver of `toy_solver.py`, registered for one test."""
    monkeypatch.delitem(sys.modules, "toy_solver", raising=False)
    yield importlib.import_module("toy_solver")
    del sys.modules["toy_solver"]
