"""Rotation of families whose trace is unusual: frozen parameters, parts without gradients, spaces of several widths."""

import architectures
import pytest
import torch
import transformers as hf
from marks import slow_but
from models import token_batches
from rotation_runs import pruner
from tiny_configs import tiny_config
from torch import nn

from optimum_moonshot import MoonshotConfig, MoonshotError, MoonshotPruner
from optimum_moonshot.model.layers import find_structure
from optimum_moonshot.rotate.basis import check_same, outputs
from optimum_moonshot.rotate.spaces import RESIDUAL, find_all_spaces
from optimum_moonshot.rotate.trace import _is_sum

SETTINGS = dict(sparsity=0.5, num_samples=4, batch_size=2, rotation="learned", rotation_steps=1)
FROZEN = [  # positions, routers' biases or initial states of these are bare parameters without gradients
    "AfmoeForCausalLM",
    "AudioFlamingo3ForConditionalGeneration",
    "DeiTForImageClassification",
    "Dinov2ForImageClassification",
    "Ernie4_5_MoeForCausalLM",
    "HrmTextForCausalLM",
    "LagunaForCausalLM",
    "MossTranscribeDiarizeForConditionalGeneration",
    "MusicFlamingoForConditionalGeneration",
    "Qwen2AudioForConditionalGeneration",
    "ViTForImageClassification",
    "VoxtralForConditionalGeneration",
]
FAMILIES = {name: (kind, family) for kind, family, name in architectures.families(list(architectures.KINDS))}


def made(name):
    """A tiny model of a class, and two batches."""
    if name not in FAMILIES:
        pytest.skip(f"transformers {hf.__version__} has no {name}")
    kind, family = FAMILIES[name]
    torch.manual_seed(0)
    model = getattr(hf, name)(tiny_config(family, name)).eval()
    return model, architectures.batches(kind, model)


def flags(model):
    return {name: parameter.requires_grad for name, parameter in model.named_parameters()}


def described(model, batch):
    """The spaces of a model, or the reasons why it has none."""
    try:
        spaces, refused = find_all_spaces(model, batch, heads_only=False)
    except MoonshotError as error:
        return str(error)
    return {space.name: (space.count, space.width, len(space.places)) for space in spaces}, refused


@pytest.mark.parametrize("name", slow_but(["AfmoeForCausalLM", "ViTForImageClassification"], FROZEN))
def test_frozen_parameters_change_no_space_and_stay_frozen(name):
    model, (batch, _) = made(name)
    given = flags(model)
    batch = {key: value[:1] for key, value in batch.items()}
    expected = described(model.requires_grad_(True), batch)
    for frozen in (
        {key for key, value in given.items() if not value},
        {key for key in given if "embed" in key},
        set(given),
    ):
        for key, parameter in model.named_parameters():
            parameter.requires_grad_(key not in frozen)
        assert described(model, batch) == expected
        assert {key for key, value in flags(model).items() if not value} == frozen
        assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("frozen", [[], ["embed_tokens"], [""]], ids=["none", "embeddings", "all"])
def test_a_rotation_restores_the_flags_of_parameters_also_after_a_failure(frozen, monkeypatch):
    failing, rotating = pruner("llama-tied-biased"), pruner("llama-tied-biased")
    for each in (failing, rotating):
        for name, parameter in each.model.named_parameters():
            parameter.requires_grad_(not any(part in name for part in frozen))
    before = flags(failing.model)
    monkeypatch.setattr("optimum_moonshot.rotate.run._learn", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        failing.rotate(token_batches(), progress=False)
    monkeypatch.undo()
    assert flags(failing.model) == before
    assert failing.model.lm_head.weight is failing.model.model.embed_tokens.weight
    rotating.rotate(token_batches(), progress=False)
    assert rotating.model.lm_head.weight is not rotating.model.model.embed_tokens.weight
    assert flags(rotating.model) == before | {"lm_head.weight": before["model.embed_tokens.weight"]}


def test_a_sum_is_told_from_a_coincidence_in_16_bits():
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        terms = [torch.randn(2, 8, 16, generator=generator).bfloat16().requires_grad_() for _ in range(6)]
        other = torch.randn(2, 8, 16, generator=generator).bfloat16()
        pairs = [(term, term.detach()) for term in terms]
        assert _is_sum(sum(terms[1:], terms[0]), pairs, generator, trials=8)
        assert not _is_sum(sum(terms[1:], terms[0]) + 3 * other, pairs, generator, trials=8)


def test_convolutions_in_16_bits_are_in_no_space():
    model, (batch, _) = made("MobileViTV2ForImageClassification")
    with pytest.raises(MoonshotError, match="nothing in MobileViTV2ForImageClassification can be rotated"):
        find_all_spaces(model.bfloat16(), {"pixel_values": batch["pixel_values"]}, heads_only=False)


def test_a_model_with_its_own_backward_pass_is_refused_and_stays_the_same():
    model, data = made("ReformerModelWithLMHead")
    before, given = {name: value.clone() for name, value in model.state_dict().items()}, flags(model)
    with pytest.raises(MoonshotError, match="rotation: the model cannot be differentiated"):
        MoonshotPruner(model, MoonshotConfig(**SETTINGS)).rotate(data, progress=False)
    assert flags(model) == given and all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("name", ["Qwen3NextForCausalLM", "MiMoV2FlashForCausalLM"])
def test_heads_that_do_not_only_mix_tokens_keep_their_basis_and_the_rest_is_rotated(name):
    model, data = made(name)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data += 0.3 * torch.randn(parameter.shape)
    expected = outputs(model, data[0])
    report = MoonshotPruner(model, MoonshotConfig(**SETTINGS)).rotate(data, progress=False)
    assert report.rotated and not all(space.endswith("heads") for space in report.spaces)
    check_same(model, data[0], expected, "it")


class Gated(nn.Module):
    """A residual layer whose sign two more layers choose, without gradients."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 12, bias=False), nn.Linear(12, 8, bias=False)
        self.first, self.second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, x):
        with torch.no_grad():
            sign = self.second(self.first(x)).sum(-1, keepdim=True).sign()
        return x + sign * self.down(self.up(x).relu())


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(10, 8), nn.Linear(8, 10, bias=False)
        self.layers = nn.ModuleList([Gated(), Gated()])

    def forward(self, input_ids):
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


def test_a_space_that_a_layer_without_gradients_may_read_keeps_its_basis():
    torch.manual_seed(0)
    names = [f"layers.{index}.down" for index in range(2)]
    inputs = {"input_ids": torch.arange(8).view(2, 4)}
    spaces, refused = find_all_spaces(Stack(), inputs, heads_only=False, ordered=names)
    assert refused[RESIDUAL] == "gradients do not reach layers.0.second, which may belong to it"
    assert [space.name for space in spaces] == [f"{name} neurons" for name in names]


def test_a_model_whose_layers_have_other_attributes_is_rotated_and_pruned():
    model, data = made("Dots3NoteForCausalLM")
    assert {layer.self_attn.num_heads for layer in model.model.layers} == {2, 4}
    expected = outputs(model, data[0])
    done = MoonshotPruner(model, MoonshotConfig(**{**SETTINGS, "sparsity": None, "pattern": "2:4"}))
    assert RESIDUAL in done.rotate(data, progress=False).spaces
    check_same(model, data[0], expected, "it")
    names = {entry.name for entry in done.prune(data, progress=False).layers}
    for layer in find_structure(model).layers():
        if layer.name in names:
            assert (layer.matrix.unflatten(1, (-1, 4)) != 0).sum(-1).max() <= 2
