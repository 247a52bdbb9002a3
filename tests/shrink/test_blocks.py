"""Scores of blocks against autograd on every sample, and the laws of the predicted loss."""

from itertools import combinations

import block_losses
import pytest
import torch
import transformers as hf
from block_losses import BlockLosses
from blockwise_statistics import sample_loss
from models import image_batches, make, spread, token_batches
from offloaded_models import offloaded

from optimum_moonshot import MoonshotConfig, MoonshotError
from optimum_moonshot.model.depth import skipping
from optimum_moonshot.model.layers import find_blocks
from optimum_moonshot.pipeline.inputs import prepare
from optimum_moonshot.pipeline.selection import Subject, select
from optimum_moonshot.shrink.blocks import BlockScores, score_blocks


def scores_of(model, batches):
    selection = select(model, MoonshotConfig(sparsity=0.5, num_samples=6))
    return score_blocks(prepare(Subject(model, progress=False), selection, batches))


def slow_scores(model, batches):
    """One pass per sample, with the outputs f + ε (h - f) of every block and token: S is the gradient at ε = 0."""
    blocks = [module for _, module in find_blocks(model)]
    slopes, cosines, changes, squares = [], [], 0, 0
    for batch in batches:
        for n in range(len(next(iter(batch.values())))):
            single = {name: tensor[n : n + 1] for name, tensor in batch.items()}
            keep = single["attention_mask"].bool() if "attention_mask" in single else slice(None)
            tokens = (
                len(next(iter(single.values()))[0]) if "input_ids" in single else 17
            )  # patches, and the class token
            step = torch.zeros(tokens, len(blocks), requires_grad=True)
            pairs = []

            def mix(index, module, args, output):
                pairs.append((args[0].detach()[keep], output.detach()[keep]))  # noqa: B023
                return output + step[:, index, None] * (args[0] - output)  # noqa: B023

            handles = [
                block.register_forward_hook(lambda *call, i=i, mix=mix: mix(i, *call)) for i, block in enumerate(blocks)
            ]
            sample_loss(model, single, keep[0] if isinstance(keep, torch.Tensor) else None).backward()
            for handle in handles:
                handle.remove()
            slopes.append(step.grad)
            cosines.append(
                torch.stack([torch.cosine_similarity(h, f, dim=-1).flatten() for h, f in pairs])  # [blocks, tokens]
            )
            changes = changes + torch.stack([(f - h).square().sum() for h, f in pairs])
            squares = squares + torch.stack([f.square().sum() for _, f in pairs])
    return BlockScores((), 1 - torch.cat(cosines, 1).mean(1), changes / squares, torch.cat(slopes), len(slopes))


def assert_equal_scores(scores, expected, tolerance=1e-3):
    for name in ("influence", "reconstruction", "fisher"):
        value, reference = getattr(scores, name), getattr(expected, name).double()
        assert (value - reference).norm() <= tolerance * reference.norm(), name


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", ["llama", "opt", "gpt2", "gemma2", "mixtral"])
def test_scores_of_language_models(name, padded):
    model, batches = make(name), token_batches(padded=padded)
    assert_equal_scores(scores_of(model, batches), slow_scores(model, batches))


def test_scores_of_image_models():
    model = make("vit")
    assert_equal_scores(scores_of(model, image_batches()), slow_scores(model, image_batches()))


def test_scores_without_sequential_blocks(monkeypatch):
    """By passes of the whole model, as for blocks that cannot run alone."""
    from optimum_moonshot.pipeline import block_sequences

    model = make("llama")
    expected = scores_of(model, token_batches())
    monkeypatch.setattr(block_sequences, "find_sequence", lambda *arguments: None)
    assert_equal_scores(scores_of(model, token_batches()), expected, 1e-5)


def test_scores_of_an_offloaded_model(tmp_path):
    model = make("llama")
    model.save_pretrained(tmp_path)
    assert_equal_scores(scores_of(offloaded(tmp_path).model, token_batches()), scores_of(model, token_batches()), 1e-5)


def test_the_model_is_unchanged():
    model = make("opt").train()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    scores_of(model, token_batches())
    assert model.training and not any(module._forward_hooks for module in model.modules())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) and parameter.requires_grad and parameter.grad is None


def test_blocks_that_change_the_shape_have_no_score():
    with pytest.raises(MoonshotError, match="cannot be removed"):
        scores_of(make("convnext"), image_batches())


def test_blocks_that_read_other_tokens_do_not_interact():
    """An encoder of 12 tokens and a decoder of 8."""
    torch.manual_seed(0)
    config = hf.BartConfig(
        vocab_size=96,
        d_model=16,
        max_position_embeddings=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
    )
    batches = [{**batch, "labels": batch["input_ids"][:, :8].clone()} for batch in token_batches()]
    scores = scores_of(spread(hf.BartForConditionalGeneration(config)), batches)
    connected = scores.fisher != 0
    assert connected.equal(torch.block_diag(torch.ones(2, 2), torch.ones(2, 2)).bool())
    assert len(scores.slopes) == 6 * (12 + 8)


def random_scores(blocks=7, samples=5):
    generator = torch.Generator().manual_seed(0)
    positive = torch.rand(2, blocks, generator=generator, dtype=torch.float64)
    slopes = torch.randn(samples, blocks, generator=generator, dtype=torch.float64)
    return BlockScores(tuple(map(str, range(blocks))), *positive, slopes, samples)


@pytest.mark.parametrize("lam", [0.0, 0.5, 1.0])
def test_the_predicted_loss_is_a_quadratic(lam):
    """Zero for no block, one for all, never negative, and symmetric; the Fisher part is ½ of a mean square."""
    scores = random_scores()
    everything = range(7)
    assert scores.predict((), lam) == 0 and scores.predict(everything, lam) == pytest.approx(1)
    fisher = scores.fisher
    assert torch.linalg.eigvalsh(fisher).min() >= -1e-12
    for size in range(1, 7):
        for blocks in combinations(everything, size):
            value, members = scores.predict(blocks, lam), list(blocks)
            assert value >= 0 and value == scores.predict(blocks[::-1], lam)
            increase = float(scores.slopes[:, members].sum(1).square().mean()) / 2
            assert float(fisher[members][:, members].sum()) == pytest.approx(increase)
            relative = lam * float(scores.reconstruction[members].sum() / scores.reconstruction.sum())
            assert value == pytest.approx(relative + (1 - lam) * increase / float(fisher.sum()))


@pytest.mark.parametrize("lam", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("count", [1, 3, 6])
def test_the_selected_set_is_the_best(count, lam):
    scores = random_scores()
    best = min(combinations(range(7), count), key=lambda blocks: scores.predict(blocks, lam))
    assert scores.select(count, lam) == best


@pytest.mark.parametrize("count", [0, 7])
def test_one_block_has_to_stay(count):
    with pytest.raises(MoonshotError, match="1 to 6 blocks"):
        random_scores().select(count)


def test_pairs_that_compensate_each_other_are_selected():
    """Two blocks with opposite effects cost nothing together, which no sum of single scores shows."""
    slopes = torch.tensor([[2.0, -2.0, 1.0, 1.0]] * 3, dtype=torch.float64)
    ones = torch.ones(4, dtype=torch.float64)
    assert BlockScores(tuple("abcd"), ones, ones, slopes, 3).select(2) == (0, 1)


def losses_of(model, batches):
    selection = select(model, MoonshotConfig(sparsity=0.5, num_samples=6))
    return BlockLosses(prepare(Subject(model, progress=False), selection, batches))


def mean_loss(model, batches, skipped=()):
    blocks = [module for _, module in find_blocks(model)]
    with torch.no_grad(), skipping(blocks[block] for block in skipped):
        samples = [ids[None] for batch in batches for ids in batch["input_ids"]]
        return float(sum(sample_loss(model, {"input_ids": ids}, None) for ids in samples)) / len(samples)


@pytest.mark.parametrize("name", ["llama", "opt", "gpt2"])
def test_measured_losses_of_single_blocks(name):
    """Exact for one block, and for none; independent of the order."""
    model, batches = make(name), token_batches()
    losses, dense = losses_of(model, batches), mean_loss(model, batches)
    assert losses.dense == pytest.approx(dense, rel=1e-5) and losses.predict(()) == pytest.approx(0, abs=1e-5)
    for block in range(3):
        increase = mean_loss(model, batches, [block]) - dense
        assert float(losses.losses[block]) == pytest.approx(increase, abs=1e-4)
        assert losses.predict([block]) == pytest.approx(increase, abs=1e-4)
    assert losses.predict([0, 2]) == losses.predict([2, 0])


def test_blocks_that_ignore_each_other_have_exact_pairs():
    """Where a block's update does not depend on its input, changes add up exactly in front of the head."""

    class Shift(torch.nn.Linear):
        def forward(self, hidden, **kwargs):
            return hidden + self.weight[0]

    model, batches = make("llama"), token_batches()
    for index in range(3):
        model.model.layers[index].forward = Shift(16, 16).forward
    losses = losses_of(model, batches)
    for blocks in combinations(range(3), 2):
        increase = mean_loss(model, batches, blocks) - mean_loss(model, batches)
        assert losses.predict(blocks) == pytest.approx(increase, abs=1e-4)
    assert losses.select(2) == min(combinations(range(3), 2), key=lambda blocks: mean_loss(model, batches, blocks))


def test_greedy_removal_where_sets_are_many(monkeypatch):
    losses = losses_of(make("llama"), token_batches())
    exact = losses.select(1)
    monkeypatch.setattr(block_losses, "EXACT", 0)
    assert losses.select(1) == exact and set(exact) <= set(losses.select(2))


def test_measured_losses_of_an_offloaded_model(tmp_path):
    model = make("llama")
    model.save_pretrained(tmp_path)
    losses, expected = losses_of(offloaded(tmp_path).model, token_batches()), losses_of(model, token_batches())
    assert torch.allclose(losses.losses, expected.losses, atol=1e-5)
    assert losses.predict([0, 1]) == pytest.approx(expected.predict([0, 1]), abs=1e-5)


@pytest.mark.parametrize("lam", [0.0, 1.0])
@pytest.mark.parametrize("kinds", [({0, 1}, {2, 3, 4, 5}), ({0}, {1, 2}, {3, 4, 5}), ({1, 4}, {3}, {0, 2, 5})])
def test_the_best_set_that_leaves_a_block_of_every_kind(kinds, lam):
    scores = random_scores(6)

    def allowed(blocks):
        return not any(kind <= set(blocks) for kind in kinds)

    for count in range(1, 6):
        sets = [blocks for blocks in combinations(range(6), count) if allowed(blocks)]
        best = min(sets, key=lambda blocks: scores.predict(blocks, lam), default=None)
        assert scores.select_allowed(count, lam, kinds, allowed) == best
    assert scores.select_allowed(2, lam, kinds, lambda blocks: True) == scores.select(2, lam)
    assert 0 not in scores.select(3, lam, stay=[0])
