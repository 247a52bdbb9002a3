"""A smaller hidden size: exact where the stream has no more directions, stock, and measured without a new model."""

import pytest
import torch
import transformers as hf
from models import GROUPED
from test_rotation import build

from optimum_moonshot import MoonshotConfig, MoonshotPruner
from optimum_moonshot.errors import MoonshotError
from optimum_moonshot.model.calls import frozen, run_model
from optimum_moonshot.model.losses import loss_gradient
from optimum_moonshot.model.structured_groups import probe_inputs
from optimum_moonshot.shrink.hidden_size import cut_stream
from optimum_moonshot.shrink.stream import observe_stream

# Norms compute in float32 for any dtype, so that results agree up to its rounding.
CLOSE = dict(rtol=1e-4, atol=1e-4)
SUPPORTED = ["llama", "llama-tied-biased", "mistral-sliding", "qwen2", "qwen3", "phi3", "mixtral", "granite"]


def samples(model, count=4, length=12, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [{"input_ids": torch.randint(3, model.config.vocab_size, (count, length), generator=generator)}]


@torch.no_grad()
def logits(model, batch):
    return model.eval()(**batch).logits


@torch.no_grad()
def flatten(model, rank):
    """Remove all but `rank` random directions from everything that a model writes to its residual stream."""
    width = model.config.hidden_size
    basis = torch.linalg.qr(torch.randn(width, rank, dtype=torch.float64, generator=torch.Generator().manual_seed(3)))
    projection = (basis.Q @ basis.Q.T).to(model.dtype)
    stream = observe_stream(model, samples(model), lam=1.0)
    for parameter, axis in {(place.at.parameter, place.at.axis) for place in stream.space.places if place.writes}:
        parameter.copy_((parameter.movedim(axis, -1) @ projection).movedim(-1, axis))
    return model


@pytest.mark.parametrize("name", SUPPORTED)
def test_a_stream_of_fewer_directions_loses_nothing(name):
    model = build(name) if name != "mixtral" else build(name).float()  # torch's grouped products lack float64
    before = {key: value.clone() for key, value in model.state_dict().items()}
    whole, reduction = cut_stream(observe_stream(model, samples(model)), model.config.hidden_size)
    batch = samples(model, seed=1)[0]
    torch.testing.assert_close(logits(whole, batch), logits(model, batch), **CLOSE)
    assert reduction.parameters[0] == reduction.parameters[1] and reduction.variance == pytest.approx(0, abs=1e-6)
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key])
    assert all(parameter.grad is None for parameter in model.parameters())
    model = flatten(model, model.config.hidden_size // 2)
    small, reduction = cut_stream(observe_stream(model, samples(model)), model.config.hidden_size // 2)
    torch.testing.assert_close(logits(small, batch), logits(model, batch), **CLOSE)
    assert reduction.variance == pytest.approx(0, abs=1e-6)
    assert small.config.hidden_size == model.config.hidden_size // 2


def test_the_model_without_directions_computes_what_the_smaller_one_does(tmp_path):
    model = build("llama-tied-biased").float()
    stream, batch = observe_stream(model, samples(model)), samples(model, seed=1)[0]
    size = model.config.hidden_size // 2
    small, reduction = cut_stream(stream, size)
    with stream.narrowed(size):
        expected = logits(model, batch)
    assert not torch.allclose(expected, logits(model, batch), rtol=1e-2)
    torch.testing.assert_close(logits(small, batch), expected, rtol=1e-3, atol=1e-4)
    assert 0 < reduction.variance < 1 and reduction.to_dict()["hidden_size"] == [2 * size, size]
    small.save_pretrained(tmp_path)
    loaded = hf.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert loaded.num_parameters() == reduction.parameters[1]
    torch.testing.assert_close(logits(loaded, batch), logits(small, batch), rtol=0, atol=0)


def test_statistics_are_sums_over_tokens_without_padding():
    model = build("llama")
    (batch,) = samples(model)
    stream = observe_stream(model, [batch], lam=0.0)
    padded = torch.nn.functional.pad(batch["input_ids"], (0, 3), value=5)
    mask = torch.nn.functional.pad(torch.ones_like(batch["input_ids"]), (0, 3))
    again = observe_stream(model, [{"input_ids": padded, "attention_mask": mask}], lam=0.0)
    norms = {id(norm.norm.module): norm for norm in again.moments}
    seen = {}
    hooks = [
        norm.norm.module.register_forward_hook(lambda *call, norm=norm: seen.update({norm: call[2]}))
        for norm in stream.moments
    ]
    with frozen(model):
        model.get_input_embeddings().weight.requires_grad_(True)
        output = run_model(model, batch)
        start, gradient, _ = loss_gradient(model, output, batch)
        gradients = torch.autograd.grad(start, list(seen.values()), gradient)
    for hook in hooks:
        hook.remove()
    for (norm, output), delta in zip(seen.items(), gradients, strict=True):
        values = output.detach() / norm.norm.gain
        other = norms[id(norm.norm.module)]
        for sums, rows in ((stream.moments, values), (stream.fisher, delta * norm.norm.gain)):
            rows = rows.flatten(0, -2)
            expected = rows.T @ rows
            torch.testing.assert_close(sums[norm], expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
        for sums, others in ((stream.moments, again.moments), (stream.fisher, again.fisher)):
            torch.testing.assert_close(sums[norm], others[other], rtol=0, atol=1e-5 * float(sums[norm].abs().max()))


@torch.no_grad()
def test_importance_is_the_weighted_geometric_mean_of_variance_and_fisher_loss():
    model = build("llama")
    stream = observe_stream(model, samples(model), lam=1.0)
    size = model.config.hidden_size
    generator = torch.Generator().manual_seed(0)
    variance, fisher = (torch.rand(size, dtype=torch.float64, generator=generator) + 0.1 for _ in range(2))
    basis = torch.linalg.qr(torch.randn(size, size, dtype=torch.float64, generator=generator)).Q
    stream.moments = dict.fromkeys(stream.moments, (basis * variance) @ basis.T)
    stream.fisher = dict.fromkeys(stream.moments, (basis * fisher) @ basis.T)
    for lam in (0.0, 0.3, 1.0):
        stream.lam = lam
        expected = (variance / variance.sum()) ** lam * (fisher / fisher.sum()) ** (1 - lam)
        torch.testing.assert_close(stream.eigen()[0], expected.sort(descending=True).values)
        leading = basis[:, expected.argsort(descending=True)[:5]]
        kept = stream.directions(5)
        torch.testing.assert_close(kept @ kept.T, leading @ leading.T)


@pytest.mark.parametrize(
    ("name", "why"),
    [("opt", "layer norms"), ("gemma2", "has a fixed basis"), ("gemma", "does not compute"), ("olmo", "layer norms")],
)
def test_other_streams_are_refused(name, why):
    model = build(name)
    with pytest.raises(MoonshotError, match=why):
        cut_stream(observe_stream(model, samples(model)), model.config.hidden_size // 2)


def test_widths_that_the_configuration_refuses_are_named():
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED))
    stream = observe_stream(model, samples(model), lam=1.0)
    for size in (0, model.config.hidden_size + 4, 1.5):
        with pytest.raises(MoonshotError, match="hidden_size"):
            cut_stream(stream, size)
    with pytest.raises(MoonshotError, match="has no setting for it"):
        cut_stream(stream, model.config.hidden_size - 1)
    with pytest.raises(MoonshotError, match="no calibration data"):
        observe_stream(model, [], probe_inputs(model))


def test_a_narrower_model_can_be_pruned_but_not_the_reverse():
    model = build("llama").float()
    pruner = MoonshotPruner(model, MoonshotConfig(solver="magnitude", sparsity=0.5, num_samples=4))
    with pytest.raises(MoonshotError, match="give some"):
        pruner.reduce_width(8)
    assert pruner.reduce_width(8, samples(model)).hidden_size == (16, 8)
    assert pruner.model is not model and model.config.hidden_size == 16 and pruner.model.config.hidden_size == 8
    pruner.prune(progress=False)
    with pytest.raises(MoonshotError, match="pruned already"):
        pruner.reduce_width(4, samples(model))
