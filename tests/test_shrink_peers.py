"""The peers of benchmarks/shrink_methods.py: exact models of their budget, since a wrong peer compares with nothing."""

import copy
import math

import pytest
import shrink_peers
import torch
from shrink_distill import distill
from shrink_peers import Moments, Shape
from transformers import LlamaConfig, LlamaForCausalLM


@pytest.fixture
def model():
    """Heads and neurons of unlike scale, so that scores differ."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=4,
        head_dim=4, vocab_size=40, tie_word_embeddings=True, initializer_range=0.15,
    )  # fmt: skip
    model = LlamaForCausalLM(config).double().eval()
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.data.uniform_(0.5, 1.5)
    return model


@pytest.fixture
def batches():
    return [{"input_ids": torch.randint(40, (4, 12), generator=torch.Generator().manual_seed(1))}]


@torch.no_grad()
def logits(model, batches):
    return model(**batches[0]).logits


def budget(model, share):
    return int(share * model.num_parameters())


def removed(dense, small):
    """(layer that reads, its removed columns) of every block: columns of `small` are found in `dense`."""
    for before, after in zip(dense.model.layers, small.model.layers, strict=True):
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            wide, narrow = (each.get_submodule(name).weight.data for each in (before, after))
            kept = (wide.T[:, None] == narrow.T[None]).all(-1).any(1)
            assert kept.sum() == narrow.shape[1]
            yield before.get_submodule(name), ~kept


@pytest.mark.parametrize("with_heads", [True, False])
def test_magnitude_equals_the_dense_model_with_zeroed_columns(model, batches, with_heads):
    small = shrink_peers.magnitude(model, batches, budget(model, 0.7), with_heads)
    step = 3 * Shape.of(model).neuron_cost  # a neuron of every block
    assert 0 <= budget(model, 0.7) - small.num_parameters() < step
    assert small.config.num_key_value_heads == (3 if with_heads else 4)
    zeroed = copy.deepcopy(model)
    for (layer, gone), _ in zip(removed(zeroed, small), range(6), strict=True):
        layer.weight.data[:, gone] = 0
    torch.testing.assert_close(logits(small, batches), logits(zeroed, batches))


@pytest.mark.parametrize("uniform", [True, False])
def test_flap_replaces_removed_inputs_by_their_means(model, batches, uniform):
    small = shrink_peers.flap(model, batches, budget(model, 0.7), True, uniform)
    assert (
        0 <= budget(model, 0.7) - small.num_parameters() < 3 * Shape.of(model).neuron_cost + Shape.of(model).head_cost
    )
    moments = [(layer, gone, Moments(layer)) for layer, gone in removed(model, small)]
    logits(model, batches)
    for layer, gone, each in moments:
        each.handle.remove()
        replace = lambda _, inputs, gone=gone, mean=each.mean: (torch.where(gone, mean, inputs[0]),)  # noqa: E731
        layer.register_forward_pre_hook(replace)
    torch.testing.assert_close(logits(small, batches), logits(model, batches))


def test_flap_of_one_width_is_a_stock_model(model, batches, tmp_path):
    small = shrink_peers.flap(model, batches, budget(model, 0.7), False, True)
    small.save_pretrained(tmp_path)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float64).eval()
    assert loaded.num_parameters() == small.num_parameters()
    torch.testing.assert_close(logits(loaded, batches), logits(small, batches))


def test_short_gpt_removes_the_blocks_that_change_their_input_least(model, batches):
    for index, scale in enumerate((1.0, 1e-3, 0.5)):
        for linear in (model.model.layers[index].self_attn.o_proj, model.model.layers[index].mlp.down_proj):
            linear.weight.data *= scale
    small = shrink_peers.short_gpt(model, batches, budget(model, 0.8))
    assert len(small.model.layers) == 2 and small.num_parameters() <= budget(model, 0.8)
    model.model.layers[1].self_attn.o_proj.weight.data.zero_()
    model.model.layers[1].mlp.down_proj.weight.data.zero_()
    torch.testing.assert_close(logits(small, batches), logits(model, batches))


def test_slice_gpt_of_the_whole_width_computes_the_dense_model(model, batches):
    whole = shrink_peers.slice_gpt(model, batches, 2 * model.num_parameters())
    assert whole.config.hidden_size == 32
    torch.testing.assert_close(logits(whole, batches), logits(model, batches), rtol=1e-4, atol=1e-4)  # RMSNorm's ε
    small = shrink_peers.slice_gpt(model, batches, model.num_parameters())
    assert small.config.hidden_size == 24 and small.num_parameters() <= model.num_parameters()


def test_distillation_never_ends_with_a_larger_heldout_divergence(model, batches, monkeypatch):
    monkeypatch.setattr("shrink_distill.STEPS", 10)
    ids = torch.randint(40, (32, 12), generator=torch.Generator().manual_seed(2))
    held = ids[-4:]
    student = shrink_peers.magnitude(model, batches, budget(model, 0.7), True)

    def divergence(each):
        targets, scores = logits(model, [{"input_ids": held}]), logits(each, [{"input_ids": held}])
        targets, scores = targets.log_softmax(-1), scores.log_softmax(-1)
        return float((targets.exp() * (targets - scores)).sum(-1).mean())

    before = divergence(student)
    distill(student, model, [{"input_ids": ids}], seed=0)
    assert divergence(student) < before and not student.training and math.isfinite(before)
