"""Files of fused experts: verification, packing expert by expert, and loading with any placement."""

import copy

import pytest
import torch
import transformers as hf
from checkpoints import tensors
from models import token_batches
from packed_experts import packed_names
from safetensors import safe_open
from safetensors.torch import save_file
from tiny_mixtures import experts, family, mixtral, prune, same

from optimum_moonshot import MoonshotConfig, MoonshotError, MoonshotPruner, convert, load_pruned
from optimum_moonshot.checkpoint.verification import verify
from optimum_moonshot.model.calls import run_model


@pytest.mark.parametrize("name", ["gpt_oss", "qwen3_moe"])
def test_changed_experts_fail_verification(name, tmp_path):
    """Removed weights that are no longer zero in a dense checkpoint, fused or expert by expert."""
    model = family(name)
    prune(model, sparsity=0.5, lam=1.0).save_pretrained(tmp_path)
    assert verify(tmp_path) and same(load_pruned(tmp_path), model)
    with torch.no_grad():
        experts(model)[0].parameter.fill_(1)
    model.save_pretrained(tmp_path)
    with pytest.raises(MoonshotError, match=r"experts.gate_up_proj: it has 0 zeros, its report says"):
        load_pruned(tmp_path)
    assert not verify(tmp_path)


def test_experts_are_packed_one_by_one(tmp_path):
    """In many files, so that the experts of one layer are in several."""
    model = mixtral().bfloat16()
    pruner = MoonshotPruner(model, MoonshotConfig(solver="magnitude", sparsity=0.5))
    pruner.prune(progress=False)
    with torch.no_grad():
        for layer in experts(model):
            layer.parameter[1:3] = 1
    pruner.save_pretrained(tmp_path / "packed", format="packed", max_shard_size="4KB")
    assert len(list((tmp_path / "packed").glob("*.safetensors"))) > 5
    packed = packed_names(tmp_path / "packed")
    for block in range(2):
        for expert in range(4):
            name = f"model.layers.{block}.block_sparse_moe.experts.{expert}.w3.weight"
            assert (name in packed) == (expert in (0, 3)) == (name not in tensors(tmp_path / "packed"))
    auto = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
    in_memory = load_pruned(tmp_path / "packed", runtime="packed")
    assert same(auto, model) and same(in_memory.dequantize(), model)
    wide = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "packed", dtype=torch.float32, device_map="cpu")
    assert same(wide, copy.deepcopy(model).float())
    device_map = {"model.layers.1": "disk", "model.layers.0": "cpu", "model.embed_tokens": "cpu", "lm_head": "cpu"}
    device_map |= {"model.norm": "cpu", "model.rotary_emb": "cpu"}
    offloaded = hf.AutoModelForCausalLM.from_pretrained(
        tmp_path / "packed", device_map=device_map, offload_folder=tmp_path / "offloaded"
    )
    with torch.no_grad():
        assert torch.equal(run_model(offloaded, token_batches()[0]).logits, run_model(model, token_batches()[0]).logits)
    assert same(hf.AutoModel.from_pretrained(tmp_path / "packed"), model.model)
    for folder, source, format in (("dense", "packed", "dense"), ("again", "dense", "packed")):
        convert(tmp_path / source, tmp_path / folder, format)
    assert same(hf.AutoModelForCausalLM.from_pretrained(tmp_path / "dense"), model)
    assert packed_names(tmp_path / "again") == packed
    auto.save_pretrained(tmp_path / "saved")
    assert tensors(tmp_path / "saved").keys() == tensors(tmp_path / "dense").keys()


def test_an_expert_that_is_no_longer_n_of_m_is_named(tmp_path):
    model = mixtral()
    pruner = prune(model, pattern="2:4", lam=1.0)
    with torch.no_grad():
        model.model.layers[1].mlp.experts.gate_up_proj[2, 24, 4:8] = 1
    name = r"^model\.layers\.1\.block_sparse_moe\.experts\.2\.w3: it is not 2:4: 4 of 4 weights from row 0, input 4 on"
    with pytest.raises(MoonshotError, match=name):
        pruner.save_pretrained(tmp_path, format="packed")


def test_a_missing_tensor_names_its_expert(tmp_path):
    prune(mixtral(), pattern="2:4", lam=1.0).save_pretrained(tmp_path, format="packed")
    (path,) = tmp_path.glob("*.safetensors")
    with safe_open(path, "pt") as file:
        metadata, stored = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    lost = "model.layers.0.block_sparse_moe.experts.3.w1.weight_meta"
    save_file({name: tensor for name, tensor in stored.items() if name != lost}, path, metadata)
    with pytest.raises(MoonshotError, match=r"experts\.3\.w1: .*weight_meta.* is missing"):
        hf.AutoModelForCausalLM.from_pretrained(tmp_path)
