"""Models with several stacks of blocks: each stack is one sequence, and layers without calibration data stay dense."""

import pytest
import torch
import transformers as hf
from failing_calls import FailingCalls
from llama_runs import weights
from models import token_batches

from optimum_moonshot import MoonshotConfig, MoonshotError, MoonshotPruner, load_pruned
from optimum_moonshot.data.batches import shorten
from optimum_moonshot.model.calls import frozen
from optimum_moonshot.model.layers import find_structure
from optimum_moonshot.pipeline import model_pipeline
from optimum_moonshot.pipeline.block_sequences import BlockSequences, find_block_sequences
from optimum_moonshot.solvers.sparsegpt import SparseGPT

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


def make(name):
    torch.manual_seed(0)
    return MODELS[name]().eval()


def batches(name):
    if name == "llava":
        return token_batches()
    return [{**batch, "labels": batch["input_ids"].flip(1)} for batch in token_batches()]


def prune(name, model=None, **changes):
    config = MoonshotConfig(**{"pattern": "2:4", "num_samples": 6, "batch_size": 2, **changes})
    pruner = MoonshotPruner(model or make(name), config)
    pruner.prune(batches(name), progress=False)
    return pruner


@pytest.mark.parametrize("name, sequential, unreached", [("t5", 2, 0), ("bart", 2, 0), ("llava", 1, 2)])
@pytest.mark.parametrize("gradients", [True, False])
def test_every_stack_is_one_sequence(name, sequential, unreached, gradients):
    model = make(name)
    blocks = find_structure(model).blocks
    with frozen(model):
        sequences = find_block_sequences(model, blocks, shorten(batches(name)[0]), gradients, None)
    assert len(sequences.sequential) == sequential and not sequences.non_sequential
    assert len(sequences.unreached) == unreached


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("lam", [0.5, 1.0])
def test_sequences_give_the_results_of_the_whole_model(name, lam, monkeypatch):
    solver = dict(solver="wanda", lam=lam)  # its scores have no ties that rounding would break
    pruner = prune(name, **solver)
    assert not any("not sequential" in note for note in pruner.report.notes)

    def non_sequential(model, blocks, *arguments):
        return BlockSequences(
            [], tuple(b for b in blocks if "vision" not in b.name), tuple(b for b in blocks if "vision" in b.name)
        )

    monkeypatch.setattr(model_pipeline, "find_block_sequences", non_sequential)
    expected = prune(name, **solver)
    assert any(
        "blocks are not sequential" in note and "took 1 passes of the whole model" in note
        for note in expected.report.notes
    )
    for layer, other in zip(pruner.report.layers, expected.report.layers, strict=True):
        assert layer.loss == pytest.approx(other.loss, rel=1e-4)
    for name, tensor in expected.model.state_dict().items():
        torch.testing.assert_close(pruner.model.state_dict()[name], tensor, rtol=1e-4, atol=1e-5)


def test_a_stack_without_pruned_layers_leaves_the_others_sequential():
    report = prune("t5", targets=["decoder"], ignore=["embed"]).report
    assert not any("not sequential" in note for note in report.notes)
    assert all(layer.name.startswith("decoder.") for layer in report.layers)


@pytest.mark.parametrize("changes", [{}, {"sparsity": 0.5, "pattern": "unstructured", "allocation": "owl"}])
@pytest.mark.parametrize("lam", [0.9, 1.0])
def test_layers_without_calibration_data_stay_dense(tmp_path, changes, lam):
    model = make("llava")
    dense = weights(model)
    pruner = prune("llava", model, lam=lam, **changes)
    unreached = [name for name, reason in pruner.report.skipped.items() if "no calibration data reached it" in reason]
    assert unreached and all("vision_tower" in name for name in unreached)
    for name in unreached:
        assert torch.equal(pruner.model.state_dict()[f"{name}.weight"], dense[f"{name}.weight"])
    assert pruner.report.sparsity == 0.5 and all("language_model" in layer.name for layer in pruner.report.layers)
    pruner.save_pretrained(tmp_path, format="packed")
    loaded = load_pruned(tmp_path)
    for name, tensor in pruner.model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


def test_data_that_reach_no_layer_are_an_error():
    with pytest.raises(MoonshotError, match="no calibration data reached any chosen layer"):
        prune("llava", targets=["vision_tower.*fc"])


def test_a_resumed_run_skips_layers_without_calibration_data(tmp_path, monkeypatch):
    expected = prune("llava").model.state_dict()
    FailingCalls(monkeypatch, (SparseGPT, "solve"), {4}, KeyboardInterrupt())
    config = MoonshotConfig(pattern="2:4", num_samples=6, batch_size=2)
    with pytest.raises(KeyboardInterrupt):
        MoonshotPruner(make("llava"), config).prune(batches("llava"), progress=False, resume_dir=tmp_path)
    again = MoonshotPruner(make("llava"), config)
    again.prune(batches("llava"), progress=False, resume_dir=tmp_path)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in again.model.state_dict().items())
    assert any("reached" in reason for reason in again.report.skipped.values())
