"""Models without a head: their pooled output, the Gauss–Newton matrix of its squared change, and runs at λ < 1."""

import copy
import json
import math

import pytest
import torch
import transformers as hf
from models import EDGE, GROUPED, PATCHED, image_batches, token_batches
from sentence_encoders import bert, make, sentence_encoder
from torch import nn

from optimum_moonshot import MoonshotConfig, MoonshotError, MoonshotPruner, prune_weight
from optimum_moonshot.data.batches import sample_digests, split_batches
from optimum_moonshot.model.embeddings import Pooling, find_pooling
from optimum_moonshot.model.losses import OutputLoss, has_head, loss_gradient, pooled_output, random_signs

MEAN = Pooling(("mean",), normalized=True)
SPEECH = dict(
    hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=4, conv_dim=[8, 8],
    conv_kernel=[4, 4], conv_stride=[2, 2], num_feat_extract_layers=2, num_conv_pos_embeddings=4,
    num_conv_pos_embedding_groups=2, **EDGE,
)  # fmt: skip
WHISPER = dict(
    vocab_size=96, num_mel_bins=8, d_model=16, encoder_layers=3, encoder_attention_heads=4, encoder_ffn_dim=24,
    decoder_layers=1, decoder_attention_heads=4, decoder_ffn_dim=24, max_source_positions=10, **EDGE,
)  # fmt: skip


def config(**options):
    return MoonshotConfig(**{"pattern": "2:4", "num_samples": 6, **options})


def prune(model, batches=None, **options):
    pruner = MoonshotPruner(model, config(**options))
    pruner.prune(token_batches() if batches is None else batches, progress=False)
    return pruner


def weights(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def equal(a, b):
    return all(torch.equal(a[name], b[name]) for name in a)


def audio_batches():
    """Speech of unequal length, with attention masks."""
    batches = []
    for i in range(3):
        values, mask = torch.randn(2, 64, generator=torch.Generator().manual_seed(i)), torch.ones(2, 64).long()
        mask[1, 40:] = 0
        batches.append({"input_values": values * mask, "attention_mask": mask})
    return batches


def speech():
    return make(hf.Wav2Vec2Model, hf.Wav2Vec2Config(**SPEECH))


def mel_batches():
    return [{"input_features": torch.randn(2, 8, 20, generator=torch.Generator().manual_seed(i))} for i in range(3)]


def pictures():
    return [{"pixel_values": batch["pixel_values"]} for batch in image_batches()]


FAMILIES = {
    "bert": (bert, lambda: token_batches(padded=True)),
    "llama": (lambda: make(hf.LlamaModel, hf.LlamaConfig(**GROUPED)), lambda: token_batches(padded=True)),
    "vit": (lambda: make(hf.ViTModel, hf.ViTConfig(**PATCHED)), pictures),
    "dinov2": (lambda: make(hf.Dinov2Model, hf.Dinov2Config(**PATCHED)), pictures),
    "dinov2 backbone": (lambda: make(hf.Dinov2Backbone, hf.Dinov2Config(**PATCHED)), pictures),
    "resnet": (
        lambda: make(hf.ResNetModel, hf.ResNetConfig(hidden_sizes=[8, 16], depths=[1, 2], embedding_size=8)),
        pictures,
    ),
    "clip": (
        lambda: make(
            hf.CLIPVisionModelWithProjection,
            hf.CLIPVisionConfig(**{k: v for k, v in PATCHED.items() if k != "num_labels"}, projection_dim=8),
        ),
        pictures,
    ),
    "wav2vec2": (speech, lambda: [{"input_values": batch["input_values"]} for batch in audio_batches()]),
    "whisper": (
        lambda: make(hf.models.whisper.modeling_whisper.WhisperEncoder, hf.WhisperConfig(**WHISPER)),
        mel_batches,
    ),
}


class Last(nn.Module):
    """A matrix on the inputs, in place of a model: hidden states [B, T, D]."""

    def __init__(self, d_in, d_out):
        super().__init__()
        self.linear = nn.Linear(d_in, d_out, bias=False)

    def forward(self, inputs):
        return {"last_hidden_state": self.linear(inputs)}


@pytest.mark.parametrize("pooling", [Pooling(), Pooling(("mean",)), MEAN], ids=str)
def test_the_mean_over_signs_is_the_gauss_newton_matrix(pooling):
    torch.manual_seed(0)
    model, batch, draws = Last(3, 2), {"inputs": torch.randn(1, 4, 3)}, 800
    weight = model.linear.weight

    def output(values):
        return pooling(batch["inputs"] @ values.T, None)[0].flatten()

    jacobian = torch.autograd.functional.jacobian(output, weight.detach()).flatten(1).double()
    exact = jacobian.T @ jacobian
    gradients = []
    for seed in range(draws):
        loss = OutputLoss(model, seed)
        loss.pooling = pooling
        start, gradient, values = loss_gradient(model, model(batch["inputs"]), batch, loss)
        gradients.append(torch.autograd.grad(start, weight, gradient)[0].flatten().double())
        assert values.tolist() == [0.0]
    products = torch.stack([torch.outer(each, each) for each in gradients])
    error = products.std(0) / math.sqrt(draws)
    assert ((products.mean(0) - exact).abs() <= 5 * error + 1e-6).all()
    assert exact.norm() > 0.01


def test_signs_depend_on_the_seed_and_the_content_of_a_sample_alone():
    model, (batch,) = bert(), token_batches(samples=2, padded=True)
    short = {"input_ids": batch["input_ids"][:1, :11]}
    assert batch["attention_mask"][0].sum() == 11

    def gradients(batch, index, seed=0):
        loss, query = OutputLoss(model, seed), model.encoder.layer[0].attention.self.query.weight
        return torch.autograd.grad(loss(model(**batch), batch)[index], query)[0]

    expected = gradients(short, 0)
    assert expected.norm() > 0
    torch.testing.assert_close(gradients(batch, 0), expected)  # other tokens behind it, and another sample
    swapped = {name: tensor.flip(0) for name, tensor in batch.items()}
    torch.testing.assert_close(gradients(swapped, 1), expected)
    other = {**batch, "input_ids": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, 7)}
    torch.testing.assert_close(gradients(other, 0), expected)
    assert not torch.allclose(gradients(short, 0, seed=1), expected)
    signs = random_signs(torch.Size([1000]), "0 a")
    assert signs.abs().eq(1).all() and signs.mean().abs() < 0.2


def test_pooling_is_that_of_sentence_transformers():
    modules = pytest.importorskip("sentence_transformers.models")
    torch.manual_seed(0)
    hidden, mask = torch.randn(3, 5, 4), torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [0, 0, 1, 1, 1]])
    for mode in modules.Pooling.POOLING_MODES:
        features = {"token_embeddings": hidden.clone(), "attention_mask": mask}
        expected = modules.Pooling(4, pooling_mode=mode)(features)["sentence_embedding"]
        pooled, rest = Pooling((mode,))(hidden, mask.bool())
        assert rest is None
        torch.testing.assert_close(pooled, expected)


def test_pooling_by_hand():
    hidden, mask = torch.tensor([[[1.0, 4], [3, 2], [100, 100]]]), torch.tensor([[True, True, False]])
    expected = {
        "cls": [1, 4],
        "max": [3, 4],
        "mean": [2, 3],
        "mean_sqrt_len_tokens": [4 / 2**0.5, 6 / 2**0.5],
        "weightedmean": [7 / 3, 8 / 3],
        "lasttoken": [3, 2],
    }
    for mode, values in expected.items():
        torch.testing.assert_close(Pooling((mode,))(hidden, mask)[0], torch.tensor([values]).float())
    both = Pooling(("cls", "mean"), normalized=True)(hidden, mask)[0]
    torch.testing.assert_close(both, torch.tensor([[1.0, 4, 2, 3]]) / 30**0.5)
    assert Pooling()(hidden, mask)[0] is hidden


def test_pooling_is_read_from_the_checkpoint(tmp_path):
    model = sentence_encoder(tmp_path / "st")
    assert find_pooling(model) == MEAN and str(MEAN) == "mean-pooled, normalized embedding"
    assert find_pooling(bert()) == Pooling()
    written, settings = tmp_path / "st" / "modules.json", tmp_path / "st" / "1_Pooling" / "config.json"
    modules = json.loads(written.read_text())
    settings.write_text('{"pooling_mode_cls_token": true, "pooling_mode_lasttoken": true}')
    assert find_pooling(model).modes == ("cls", "lasttoken")
    settings.write_text('{"pooling_mode": "max", "pooling_mode_cls_token": true}')
    assert find_pooling(model).modes == ("max",)
    written.write_text(json.dumps([*modules[:2], {"type": "sentence_transformers.models.Dense"}, modules[2]]))
    assert find_pooling(model) == Pooling(("max",), False, ("Dense", "Normalize"))
    assert "without the Dense and Normalize" in str(find_pooling(model))
    for text, message in (
        ("[", "cannot be read"),
        ('{"a": 1}', "not a list of modules"),
        ('[{"type": "models.Pooling", "path": "../../x"}]', "names ../../x"),
        ('[{"type": "models.Pooling", "path": "absent"}]', "absent/config.json is missing"),
    ):
        written.write_text(text)
        with pytest.raises(MoonshotError, match=message):
            prune(model, lam=0.5)
        prune(copy.deepcopy(model), lam=1)  # reads none of it
    written.write_text(json.dumps(modules))
    settings.write_text('{"pooling_mode": "median"}')
    with pytest.raises(MoonshotError, match="unknown pooling mode .*median.*; use one of cls"):
        prune(model, lam=0.5)


def test_only_models_of_transformers_without_a_head_have_the_loss():
    derived = type("Mine", (hf.BertForSequenceClassification,), {})
    language = (hf.BertForMaskedLM, hf.GPT2LMHeadModel, hf.T5ForConditionalGeneration)
    assert all(map(has_head, (*language, hf.ViTForImageClassification, derived, Last)))
    bare = (hf.BertModel, hf.LlamaModel, hf.T5EncoderModel, hf.ViTModel, hf.CLIPModel, hf.Wav2Vec2Model)
    assert not any(map(has_head, bare))


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_pruned_by_both_objectives(name):
    build, batches = FAMILIES[name]
    model, other = build(), build()
    report = prune(model, batches(), lam=0.5, solver="wanda").report
    assert report.layers and all(0 < layer.fisher < 1 for layer in report.layers)
    assert "Fisher loss: squared change of the model's output (Gauss–Newton matrix by random signs)" in report.notes
    one = prune(other, split_batches(batches(), 1), lam=0.5, solver="wanda").report
    for layer, alone in zip(report.layers, one.layers, strict=True):
        assert alone.fisher == pytest.approx(layer.fisher, rel=1e-4)


def test_a_run_equals_its_explicit_computation(tmp_path):
    model, batches = sentence_encoder(tmp_path / "st"), token_batches(padded=True)
    name, seed = "encoder.layer.1.intermediate.dense", 3
    layer, inputs = model.get_submodule(name), []
    layer.register_forward_pre_hook(lambda _, args: inputs.append(args[0].detach()))
    gradients, gram = [], torch.zeros(16, 16)
    for sample in split_batches(batches, 1):
        tokens = int(sample["attention_mask"].sum())
        ids = sample["input_ids"][:, :tokens]
        pooled = nn.functional.normalize(model(input_ids=ids).last_hidden_state.mean(1), dim=1)
        signs = random_signs(torch.Size([16]), f"{seed} {sample_digests(sample)[0]}")
        gradients.append(torch.autograd.grad((signs * pooled[0]).sum(), layer.weight)[0])
        gram += inputs[0][0].T @ inputs[0][0]
        inputs.clear()
    layer._forward_pre_hooks.clear()
    for lam in (0, 0.5):
        expected = prune_weight(layer.weight, gram, torch.stack(gradients), config=config(lam=lam))
        pruned = copy.deepcopy(model)
        prune(pruned, batches, lam=lam, seed=seed, fisher="rows")
        torch.testing.assert_close(pruned.get_submodule(name).weight, expected.weight, atol=1e-5, rtol=1e-4)


def test_reconstruction_alone_computes_no_output_loss(tmp_path, monkeypatch):
    expected = prune(bert(), lam=1).model
    monkeypatch.delattr(OutputLoss, "__call__")
    monkeypatch.setattr(OutputLoss, "__call__", lambda *_: pytest.fail("at λ = 1"))
    model = sentence_encoder(tmp_path / "st")
    report = prune(model, lam=1).report
    assert equal(weights(model), weights(expected)) and not any("Fisher" in note for note in report.notes)


def test_equal_seeds_give_equal_models_and_a_given_loss_wins():
    def square(output, batch):
        return output.last_hidden_state.square().mean((1, 2))

    first, again, other, squared = bert(), bert(), bert(), bert()
    prune(first, lam=0.1)
    prune(again, lam=0.1)
    prune(other, lam=0.1, seed=1)
    report = MoonshotPruner(squared, config(lam=0.1)).prune(token_batches(), loss=square, progress=False)
    assert equal(weights(first), weights(again))
    assert not equal(weights(first), weights(other)) and not equal(weights(first), weights(squared))
    assert not any("squared change" in note for note in report.notes)


def test_labels_and_logits_of_a_callers_forward_are_the_cross_entropy():
    model, head = bert(), torch.randn(16, 5, generator=torch.Generator().manual_seed(0))
    batches = [{**batch, "labels": torch.tensor([1, 2])} for batch in token_batches()]

    def forward(model, batch):
        return model(input_ids=batch["input_ids"]).last_hidden_state[:, 0] @ head

    def cross_entropy(output, batch):
        return nn.functional.cross_entropy(output, batch["labels"], reduction="none")

    given = copy.deepcopy(model)
    MoonshotPruner(model, config(lam=0)).prune(batches, forward=forward, progress=False)
    MoonshotPruner(given, config(lam=0)).prune(batches, forward=forward, loss=cross_entropy, progress=False)
    for name, weight in weights(given).items():
        torch.testing.assert_close(model.state_dict()[name], weight)


@torch.no_grad()
def test_padding_of_speech_has_no_influence():
    model, batch = speech(), audio_batches()[0]
    loss, output = OutputLoss(model, 0), model(**batch)
    counted = model._get_feature_vector_attention_mask(14, batch["attention_mask"])
    assert counted.sum(1).tolist() == [14, 8] == [len(values) for _, values in loss._samples(output, batch)]
    loss.remember(output, batch)
    assert loss(output, batch).tolist() == [0, 0]
    output.last_hidden_state[1, 8:] = 1
    assert loss(output, batch).tolist() == [0, 0]
    output.last_hidden_state[1, 7] *= 2
    first, second = loss(output, batch).tolist()
    hidden = model(**batch).last_hidden_state[1, :8].square().sum(1)
    assert first == 0 and second == pytest.approx(float(0.5 * hidden[7] / hidden.sum()))
    with pytest.raises(MoonshotError, match="does not show which of 64 positions are padding; use samples of equal"):
        pooled_output(bert(), output, batch, Pooling())


@torch.no_grad()
def distances(model, dense, batches):
    """Half the relative squared distance of the mean-pooled, normalized outputs, by sample."""
    values = []
    for sample in split_batches(batches, 1):
        outputs = [MEAN(each(**sample).last_hidden_state, None)[0] for each in (model, dense)]
        values.append(float(0.5 * (outputs[0] - outputs[1]).square().sum()))
    return values


@torch.no_grad()
def test_a_sweep_measures_the_distance_to_the_dense_output(tmp_path):
    model, batches = sentence_encoder(tmp_path / "st"), token_batches()
    dense = copy.deepcopy(model)
    for work_dir in (None, tmp_path / "work", tmp_path / "work"):  # the last one resumes
        pruner = MoonshotPruner(model, config())
        report = pruner.sweep(batches, lambdas=[0.5, 1], progress=False, work_dir=work_dir)
        assert report.dense == 0 and report.metric == "calibration loss"
        for entry in report.entries:
            with pruner.applied(entry) as variant:
                changes = distances(variant, dense, batches)
            assert entry.metric == pytest.approx(sum(changes) / len(changes), rel=1e-4) and entry.metric > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("recover", ["distill", "blockwise"])
def test_recovery_comes_closer_to_the_dense_output(tmp_path, recover):
    batches = token_batches(samples=24, padded=True)
    dense, plain, recovered = (sentence_encoder(tmp_path / str(i)) for i in range(3))
    options = dict(num_samples=24, lam=0.5, pattern="unstructured", sparsity=0.7)
    prune(plain, batches, **options)
    report = prune(recovered, batches, **options, recover=recover, recover_steps=40).report
    assert report.recovery and report.recovery[-1].loss_after < report.recovery[-1].loss_before
    far, near = (sum(distances(model, dense, batches)) for model in (plain, recovered))
    assert near < 0.8 * far


@pytest.mark.parametrize("options", [dict(allocation="fisher", sparsity=0.5), dict(bits_per_weight=6)], ids=str)
def test_budgets_are_divided_by_the_output(options):
    model = bert()
    report = prune(model, pattern="unstructured", **{"allocation": "fisher", **options}, lam=1).report
    assert any("squared change" in note for note in report.notes)
    assert len({layer.target_sparsity for layer in report.layers}) > 1


def test_structured_patterns_and_shrink(tmp_path):
    model, batches = sentence_encoder(tmp_path / "st"), token_batches()
    pruner = MoonshotPruner(model, config(solver="osscar", pattern="structured", sparsity=0.0, lam=0.5))
    report = pruner.shrink(batches, parameters=0.9, progress=False)
    assert pruner.model.num_parameters() <= 0.9 * model.num_parameters()
    assert min(report.measured.values()) >= 0 and max(report.measured.values()) > 1e-4
