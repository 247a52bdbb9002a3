"""Expert removal from a model whose decoder layers are on disk equals that in memory."""

import pytest
import torch
import transformers as hf
from expert_removal import FAMILIES, model_of, settled
from marks import slow_but
from models import make, token_batches
from offloaded_models import assert_equal, offloaded, settings

from optimum_moonshot import MoonshotPruner
from optimum_moonshot.model.layers import find_blocks
from optimum_moonshot.model.offload import Offloaded

REMOVED = {"pattern": "experts", "solver": "reap", "sparsity": 0.25, "lam": 0.5}


@pytest.mark.parametrize("name", slow_but({"mixtral"}, FAMILIES))
def test_experts_are_removed_from_layers_on_disk(name, tmp_path, onloads):
    ids, dense, outputs = torch.arange(10)[None], tmp_path / "dense", []
    settled(model_of(name)).save_pretrained(dense)
    for place in (None, "disk"):
        pruner = MoonshotPruner.from_pretrained(dense, settings(**REMOVED), offload=place)
        pruner.prune(token_batches(), progress=False)
        pruner.save_pretrained(tmp_path / str(place))
        loaded = hf.AutoModelForCausalLM.from_pretrained(tmp_path / str(place))
        outputs.append((pruner.model(ids, use_cache=False).logits, loaded(ids, use_cache=False).logits))
    assert all(torch.equal(logits, outputs[0][0]) for logits in (*outputs[0], *outputs[1]))
    assert_equal(tmp_path / "disk", tmp_path / "None")
    assert onloads.most == 1 and all(p.is_meta for _, block in find_blocks(pruner.model) for p in block.parameters())


def test_a_failed_removal_on_disk_restores_all_experts(tmp_path, monkeypatch):
    ids = torch.arange(10)[None]
    make("mixtral").save_pretrained(tmp_path)
    pruner = offloaded(tmp_path, **REMOVED)
    before, count = pruner.model(ids, use_cache=False).logits, pruner.model.config.num_local_experts
    calls, store = [], Offloaded._store

    def fail(*arguments):
        if len(calls) == 4:  # in the second layer
            raise OSError("the disk is full")
        calls.append(arguments)
        return store(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Offloaded, "_store", fail)
        with pytest.raises(OSError, match="the disk is full"):
            pruner.prune(token_batches(), progress=False)
    assert torch.equal(pruner.model(ids, use_cache=False).logits, before)
    assert pruner.model.config.num_local_experts == count
    assert {len(block.mlp.experts.down_proj) for _, block in find_blocks(pruner.model)} == {count}
