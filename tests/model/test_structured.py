"""Structured groups: neurons and heads from the probe, compared with the models themselves."""

import pytest
import torch
import transformers as hf
from models import CAUSAL, EDGE, ENCODERS, GROUPED, TEXT, image_batches, make, spread, token_batches
from torch import nn

from optimum_moonshot import MoonshotConfig, MoonshotError, MoonshotPruner
from optimum_moonshot.model.layers import find_structure
from optimum_moonshot.model.structured_groups import CONVOLUTION, find_structured_groups

# Columns per head (with its key-value head) and heads, neurons of the feed-forward layer.
EXPECTED = {
    **dict.fromkeys(["llama", "llama-tied-biased", "mistral-sliding", "qwen2", "phi3", "mixtral"], ((8, 2), (1, 24))),
    **dict.fromkeys(["qwen3", "gemma", "gemma2", "gemma3"], ((16, 2), (1, 24))),
    **dict.fromkeys(["opt", "gpt2", "gpt-neox", "phi", "bert", "roberta", "albert", "vit", "deit"], ((4, 4), (1, 24))),
    **dict.fromkeys(["falcon", "falcon-alibi", "bloom"], ((4, 4), (1, 64))),
}


def batch(name):
    inputs = (image_batches() if name in ("vit", "deit") else token_batches())[0]
    return {key: value for key, value in inputs.items() if key != "labels"}


def logits(model, inputs):
    with torch.no_grad():
        return model(**inputs).logits


@pytest.mark.parametrize("name", [*CAUSAL, *ENCODERS, "vit", "deit"])
def test_every_architecture(name):
    model = make(name)
    units, unused = find_structured_groups(model)
    blocks = 1 if name == "albert" else 3
    heads, neurons = EXPECTED[name]
    sizes = sorted((each.size, each.count) for each in units.values())
    assert sizes == sorted([neurons, heads] * blocks)
    assert not unused
    for each in units.values():
        assert list(each.columns.bincount()) == [each.size] * each.count


@pytest.mark.parametrize("name", [*CAUSAL, *ENCODERS, "vit", "deit"])
def test_without_a_groups_columns_its_rows_have_no_effect(name):
    """Compaction relies on this: without a group's columns no output depends on the rows that serve it."""
    model = make(name)
    units, _ = find_structured_groups(model)
    layers = {layer.name: layer for layer in find_structure(model).layers()}
    for each in units.values():
        layers[each.name].matrix[:, each.columns == each.count - 1] = 0
    inputs = batch(name)
    before = logits(model, inputs)
    for each in units.values():
        for maker, served in each.rows.items():
            layer, last = layers[maker], served == each.count - 1
            layer.matrix.unflatten(0, (layer.matrices, -1))[:, last] = 5.0
            if layer.bias is not None:
                layer.bias.data.view(layer.matrices, -1)[:, last] = 5.0
    assert torch.allclose(logits(model, inputs), before, atol=1e-6)


@pytest.mark.parametrize("name", ["gemma-mqa", "gpt2", "gpt-neox", "phi3"])
def test_the_probe_agrees_with_changing_one_row_at_a_time(name):
    model = multi_query() if name == "gemma-mqa" else make(name)
    units, _ = find_structured_groups(model)
    inputs = batch(name)
    for each in (each for each in units.values() if ".1." in each.name):
        covered = torch.zeros(len(each.columns), dtype=torch.bool)
        for maker, served in each.rows.items():
            for row, number in enumerate(served.tolist()):
                changed = changed_columns(model, maker, row, each.name, inputs)
                assert changed.any() == (number > -2)
                if number >= 0:
                    assert (each.columns[changed] == number).all(), (maker, row)
                    covered |= changed
                elif number == -1:
                    assert set(each.columns[changed].tolist()) == set(range(each.count)), (maker, row)
        assert covered.all()


def multi_query():
    """One key-value head for four query heads."""
    return spread(hf.GemmaForCausalLM(hf.GemmaConfig(**{**TEXT, "num_key_value_heads": 1}, head_dim=8)))


def changed_columns(model, maker, row, reader, inputs):
    """Which input columns of `reader` change with one output channel of `maker`."""
    seen = []
    handle = model.get_submodule(reader).register_forward_hook(lambda module, args, output: seen.append(args[0]))
    logits(model, inputs)

    def change(module, args, output):
        output = output.clone()
        output[..., row] += torch.linspace(-3, 3, output[..., row].numel()).view(output[..., row].shape)
        return output

    other = model.get_submodule(maker).register_forward_hook(change)
    logits(model, inputs)
    handle.remove()
    other.remove()
    return (seen[0] != seen[1]).flatten(0, -2).any(0)


def test_a_shared_key_value_head_stays_while_query_heads_are_groups():
    units, unused = find_structured_groups(multi_query())
    heads = units["model.layers.0.self_attn.o_proj"]
    assert (heads.size, heads.count) == (8, 4) and not unused
    assert (heads.rows["model.layers.0.self_attn.q_proj"] >= 0).all()
    assert (heads.rows["model.layers.0.self_attn.k_proj"] == -1).all()
    assert (heads.rows["model.layers.0.self_attn.v_proj"] == -1).all()


def test_neurons_that_never_fire_are_found():
    model = make("opt")
    for layer in model.model.decoder.layers:
        layer.fc1.bias.data.fill_(-1e4)
    assert find_structured_groups(model)[0]["model.decoder.layers.0.fc2"].count == 24


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    exact, _ = find_structured_groups(make("llama"))
    units, _ = find_structured_groups(make("llama").to(dtype))
    assert list(units) == list(exact)
    for name, each in units.items():
        assert all(torch.equal(rows, exact[name].rows[maker]) for maker, rows in each.rows.items())


class Layer(nn.Module):
    """A feed-forward layer; if `spied`, a second layer reads its neurons."""

    def __init__(self, spied):
        super().__init__()
        self.up, self.down, self.spy = nn.Linear(8, 12), nn.Linear(12, 8), nn.Linear(12, 8) if spied else None

    def forward(self, hidden):
        neurons = nn.functional.gelu(self.up(hidden))
        return hidden + self.down(neurons) + (self.spy(neurons) if self.spy else 0)


class Small(nn.Module):
    def __init__(self, spied=False, leaking=False):
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.leaking = nn.ModuleList([Layer(spied), Layer(spied)]), leaking

    def forward(self, hidden):
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden + self.layers[1].up(hidden).sum() if self.leaking else hidden


def test_neurons_with_other_readers_are_not_groups():
    inputs = {"hidden": torch.randn(2, 5, 8)}
    assert set(find_structured_groups(Small(), inputs)[0]) == {"layers.0.down", "layers.1.down"}
    units, unused = find_structured_groups(Small(spied=True), inputs)
    assert not units and set(unused) == {f"layers.{i}.{name}" for i in (0, 1) for name in ("up", "down", "spy")}
    assert "no neurons or heads" in unused["layers.0.down"]
    assert set(find_structured_groups(Small(leaking=True), inputs)[0]) == {"layers.0.down"}


def test_the_model_is_left_as_it_was():
    model = make("llama").train()
    model.lm_head.weight.requires_grad_(False)
    requires_grad = [parameter.requires_grad for parameter in model.parameters()]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    find_structured_groups(model)
    assert torch.equal(torch.get_rng_state(), state)
    with torch.inference_mode(), pytest.raises(MoonshotError, match="inference_mode"):
        find_structured_groups(model)
    with torch.no_grad():
        assert find_structured_groups(model)[0]
    with pytest.raises(MoonshotError, match="LlamaForCausalLM does not run on a probe of"):
        find_structured_groups(model, {"nonsense": torch.zeros(1)})
    assert model.training and [parameter.requires_grad for parameter in model.parameters()] == requires_grad
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_models_without_text_or_image_inputs_are_refused():
    heads = dict(encoder_attention_heads=4, decoder_attention_heads=4, decoder_start_token_id=2)
    whisper = hf.WhisperConfig(vocab_size=96, d_model=16, encoder_layers=1, decoder_layers=1, **heads, **EDGE)
    with pytest.raises(MoonshotError, match="reads input_features"):
        find_structured_groups(hf.WhisperForConditionalGeneration(whisper))


def prune(model, solver="wanda", **options):
    options = {"sparsity": 0.5, "num_samples": 6, **options}
    pruner = MoonshotPruner(model, MoonshotConfig(solver=solver, pattern="structured", **options))
    pruner.prune(token_batches(), progress=False)
    return pruner


def zero_columns(model, name):
    return (model.get_submodule(name).weight == 0).all(0)


@pytest.mark.parametrize("solver", ["wanda", "magnitude", "osscar"])
def test_a_run_prunes_neurons_and_heads_and_nothing_else(solver):
    model, dense = make("llama"), make("llama")
    report = prune(model, solver, sparsity=0.3).report
    assert [layer.name.rpartition(".")[2] for layer in report.layers] == ["o_proj", "down_proj"] * 3
    for name, parameter in model.named_parameters():
        layer = name.removesuffix(".weight")
        if name.endswith("down_proj.weight"):
            assert zero_columns(model, layer).sum() == round(0.3 * 24)
        elif name.endswith("o_proj.weight"):
            assert zero_columns(model, layer).view(2, 8).all(1).sum() == round(0.3 * 2) == 1
        else:
            assert torch.equal(parameter, dense.get_parameter(name)), name
    assert not report.skipped


def test_groups_of_neurons_and_whole_heads():
    model = make("llama")
    prune(model, group_size=6)
    assert zero_columns(model, "model.layers.0.mlp.down_proj").view(4, 6).all(1).sum() == 2
    assert zero_columns(model, "model.layers.0.self_attn.o_proj").view(2, 8).all(1).sum() == 1
    report = prune(make("llama"), group_size=7).report
    assert all(layer.name.endswith("o_proj") for layer in report.layers)
    assert report.skipped["model.layers.0.mlp.down_proj"] == (
        "its 24 inputs do not divide into groups for structured in 7 columns"
    )


def test_a_sparsity_that_rounds_to_no_head_is_noted():
    report = prune(make("llama"), sparsity=0.1).report
    assert any("3 layers, such as model.layers.0.self_attn.o_proj, keep all" in note for note in report.notes)
    assert not any("keep all" in note for note in prune(make("llama"), sparsity=0.0).report.notes)


def test_targets_ignore_and_layers_without_groups():
    report = prune(make("llama"), ignore=["self_attn"]).report
    assert all(layer.name.endswith("down_proj") for layer in report.layers) and not report.skipped
    model = make("llama")
    report = prune(model, targets=["layers.0.mlp"], sparsity=0.25).report
    assert [layer.name.rpartition(".")[2] for layer in report.layers] == ["gate_proj", "up_proj", "down_proj"]
    assert zero_columns(model, "model.layers.0.mlp.gate_proj").sum() == 4
    assert sum("make no model smaller" in note for note in report.notes) == 2
    report = prune(spread(hf.Qwen2MoeForCausalLM(qwen_moe()))).report
    assert "no neurons or heads" in report.skipped["model.layers.0.mlp.shared_expert_gate"]
    assert "model.layers.0.mlp.experts.down_proj" in {layer.name for layer in report.layers}
    mamba = hf.MambaForCausalLM(hf.MambaConfig(vocab_size=96, hidden_size=16, num_hidden_layers=1, state_size=4))
    with pytest.raises(MoonshotError, match="fits no layer: .*mixer.in_proj.*no neurons or heads"):
        prune(mamba)


def test_convolutions_and_plain_modules_are_skipped_with_the_reason():
    config = MoonshotConfig(solver="magnitude", pattern="structured", sparsity=0.5)
    report = MoonshotPruner(make("convnext"), config).prune(progress=False)
    assert all("pwconv2" in layer.name and layer.sparsity == 0.5 for layer in report.layers) and report.layers
    assert {reason for name, reason in report.skipped.items() if "dwconv" in name} == {CONVOLUTION}
    with pytest.raises(MoonshotError, match="fits no layer.*a convolution: structured pruning finds"):
        MoonshotPruner(make("resnet"), config).prune(progress=False)
    with pytest.raises(MoonshotError, match="fits no layer.*in no repeated layer"):
        MoonshotPruner(make("convnet"), config).prune(progress=False)


def qwen_moe():
    return hf.Qwen2MoeConfig(**GROUPED, num_experts=4, moe_intermediate_size=8, shared_expert_intermediate_size=12)
