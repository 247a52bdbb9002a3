"""Files of offloaded weights that change, disappear or are overwritten while the model is in use; temporary folders."""

import gc
import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from changed_files import overwrite
from models import make, spread, token_batches
from offloaded_models import offloaded

from optimum_moonshot.errors import MoonshotError
from optimum_moonshot.model.layers import find_blocks, weights_of

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


@pytest.fixture(scope="module", params=["llama", pytest.param("llama-tied-biased", marks=pytest.mark.release)])
def files(request, tmp_path_factory):
    """A checkpoint in which the embeddings have a file of their own, and the decoder layers another."""
    folder = tmp_path_factory.mktemp("files")
    config = make(request.param).config
    config.vocab_size = 960
    torch.manual_seed(0)
    spread(transformers.LlamaForCausalLM(config)).save_pretrained(folder, max_shard_size="60KB")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("offload", ["", "disk"])
def test_files_that_changed_after_loading_are_refused_or_make_no_difference(offload, files):
    script = str(Path(__file__).parents[1] / "support" / "changed_files.py")
    arguments = [sys.executable, script, str(files), *([offload] if offload else [])]
    paths = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(arguments, capture_output=True, text=True, env={**os.environ, **paths})
    assert done.returncode == 0, done.stderr[-2000:]
    outcomes = json.loads(done.stdout)
    expected = outcomes[0]["results"]
    refused = {outcome["file"] for outcome in outcomes if outcome["results"] == ["refused", "refused"]}
    for outcome in outcomes:
        refuse = outcome["file"] in refused and outcome["change"] != "none"
        assert outcome["exit"] == 0 and outcome["results"] == (["refused"] * 2 if refuse else expected), outcome
    weights = json.loads((files / "model.safetensors.index.json").read_text())["weight_map"]
    assert refused == ({file for name, file in weights.items() if ".layers." in name} if offload else set())
    assert weights["model.embed_tokens.weight"] not in refused


def test_a_file_that_is_overwritten_inside_the_context_leaves_the_weights(llama):
    pruner = offloaded(llama)
    _, module = find_blocks(pruner.model)[1]
    with weights_of(pruner.model, module).onloaded():
        before = {name: tensor.clone() for name, tensor in module.named_parameters()}
        for path in llama.glob("*.safetensors"):
            overwrite(path)
        assert all(tensor.any() and torch.equal(tensor, before[name]) for name, tensor in module.named_parameters())


def test_tied_weights_of_accelerate_have_the_addresses_of_the_copies(tmp_path):
    make("llama-tied-biased").save_pretrained(tmp_path / "dense")
    model = offloaded(tmp_path / "dense").model
    assert model.lm_head.weight is model.model.embed_tokens.weight
    tied = model.model.layers[0].mlp.up_proj._hf_hook.tied_params_map
    assert {address: list(places.values())[0] is model.lm_head.weight for address, places in tied.items()} == {
        model.lm_head.weight.data_ptr(): True
    }


@pytest.mark.parametrize("part", ["", "model"])
@pytest.mark.parametrize("runtime", [False, True])
def test_save_pretrained_of_an_offloaded_model_keeps_its_files(llama, tmp_path, part, runtime):
    pruner = offloaded(llama)
    if runtime:
        pruner.prune(token_batches(), progress=False)
        pruner.to_runtime("packed")
    before = {path.name: path.read_bytes() for path in llama.iterdir()}
    model = pruner.model.get_submodule(part)
    with pytest.raises(MoonshotError, match="save_directory=.*weights.* are read from there; give another folder"):
        model.save_pretrained(llama)
    assert {path.name: path.read_bytes() for path in llama.iterdir()} == before
    if not part:  # transformers does not save a part of an offloaded model
        model.save_pretrained(tmp_path / "other")
        loaded = type(model).from_pretrained(tmp_path / "other")
        assert torch.equal(loaded(IDS).logits, model(IDS).logits)


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


@pytest.mark.slow
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
