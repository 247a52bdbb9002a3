"""Models with several stacks of blocks: each is a chain of its own, and what the data do not reach stays dense."""

import pytest
import torch
import transformers as hf
from models import token_batches

from optimum_moonshot import MoonshotConfig, MoonshotError, MoonshotPruner, load_pruned
from optimum_moonshot.data.batches import shorten
from optimum_moonshot.model.calls import frozen
from optimum_moonshot.model.layers import find_structure
from optimum_moonshot.pipeline import model_pipeline
from optimum_moonshot.pipeline.block_sequences import BlockSequences, find_block_sequences

SMALL = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)


def t5():
    config = hf.T5Config(
        vocab_size=96, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, decoder_start_token_id=0
    )
    return hf.T5ForConditionalGeneration(config)


def bart():
    ends = dict(encoder_layers=2, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2)
    sizes = dict(vocab_size=96, d_model=16, encoder_ffn_dim=24, decoder_ffn_dim=24, max_position_embeddings=32)
    return hf.BartForConditionalGeneration(hf.BartConfig(**ends, **sizes))


def llava():
    vision = hf.CLIPVisionConfig(**SMALL, image_size=8, patch_size=4)
    text = hf.LlamaConfig(**SMALL, vocab_size=96, num_key_value_heads=1, max_position_embeddings=64)
    return hf.LlavaForConditionalGeneration(
        hf.LlavaConfig(vision_config=vision, text_config=text, image_token_index=95)
    )


MODELS = {"t5": t5, "bart": bart, "llava": llava}


def made(name):
    torch.manual_seed(0)
    return MODELS[name]().eval()


def batches(name):
    found = token_batches()
    if name == "llava":
        return found
    return [{**batch, "labels": batch["input_ids"].flip(1)} for batch in found]


def prune(name, model=None, **changes):
    config = MoonshotConfig(**{"pattern": "2:4", "num_samples": 6, "batch_size": 2, **changes})
    pruner = MoonshotPruner(model or made(name), config)
    pruner.prune(batches(name), progress=False)
    return pruner


@pytest.mark.parametrize("name, chains, unreached", [("t5", 2, 0), ("bart", 2, 0), ("llava", 1, 2)])
@pytest.mark.parametrize("gradients", [True, False])
def test_stacks_are_chains_of_their_own(name, chains, unreached, gradients):
    model = made(name)
    blocks = find_structure(model).blocks
    with frozen(model):
        found = find_block_sequences(model, blocks, shorten(batches(name)[0]), gradients, None)
    assert len(found.sequential) == chains and not found.non_sequential and len(found.unreached) == unreached


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("lam", [0.5, 1.0])
def test_chains_give_what_the_whole_model_gives(name, lam, monkeypatch):
    solver = dict(solver="wanda", lam=lam)  # whose choice has no ties to break by rounding
    found = prune(name, **solver)
    assert not any("no chain" in note for note in found.report.notes)

    def loose(model, blocks, *arguments):
        return BlockSequences(
            [], tuple(b for b in blocks if "vision" not in b.name), tuple(b for b in blocks if "vision" in b.name)
        )

    monkeypatch.setattr(model_pipeline, "find_block_sequences", loose)
    expected = prune(name, **solver)
    assert any("are no chain" in note and "took 1 passes of the whole model" in note for note in expected.report.notes)
    for layer, other in zip(found.report.layers, expected.report.layers, strict=True):
        assert layer.loss == pytest.approx(other.loss, rel=1e-4)
    for name, tensor in expected.model.state_dict().items():
        torch.testing.assert_close(found.model.state_dict()[name], tensor, rtol=1e-4, atol=1e-5)


def test_a_tower_in_which_nothing_is_pruned_spoils_no_chain():
    found = prune("t5", targets=["decoder"], ignore=["embed"])
    assert not any("no chain" in note for note in found.report.notes)
    assert all(layer.name.startswith("decoder.") for layer in found.report.layers)


@pytest.mark.parametrize("changes", [{}, {"sparsity": 0.5, "pattern": "unstructured", "allocation": "owl"}])
@pytest.mark.parametrize("lam", [0.9, 1.0])
def test_layers_that_the_data_do_not_reach_stay_dense(tmp_path, changes, lam):
    model = made("llava")
    dense = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = prune("llava", model, lam=lam, **changes)
    left = [name for name, reason in found.report.skipped.items() if "no calibration data reached it" in reason]
    assert left and all("vision_tower" in name for name in left)
    for name in left:
        assert torch.equal(found.model.state_dict()[f"{name}.weight"], dense[f"{name}.weight"])
    assert found.report.sparsity == 0.5 and all("language_model" in layer.name for layer in found.report.layers)
    found.save_pretrained(tmp_path, format="packed")
    loaded = load_pruned(tmp_path)
    for name, tensor in found.model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


def test_data_that_reach_nothing_are_an_error():
    with pytest.raises(MoonshotError, match="no calibration data reached any chosen layer"):
        prune("llava", targets=["vision_tower.*fc"])


def test_a_run_that_was_killed_knows_what_is_not_reached(tmp_path, monkeypatch):
    from optimum_moonshot.solvers.sparsegpt import SparseGPT

    expected, real, calls = prune("llava").model.state_dict(), SparseGPT.solve, []

    def die(self, *arguments):
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return real(self, *arguments)

    monkeypatch.setattr(SparseGPT, "solve", die)
    config = MoonshotConfig(pattern="2:4", num_samples=6, batch_size=2)
    with pytest.raises(KeyboardInterrupt):
        MoonshotPruner(made("llava"), config).prune(batches("llava"), progress=False, resume_dir=tmp_path)
    again = MoonshotPruner(made("llava"), config)
    again.prune(batches("llava"), progress=False, resume_dir=tmp_path)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in again.model.state_dict().items())
    assert any("reached" in reason for reason in again.report.skipped.values())
