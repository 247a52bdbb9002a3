"""Compaction: a smaller model of the same class with the same outputs, or zeros with the reason."""

import copy
import json

import pytest
import torch
import transformers as hf
from huggingface_hub import ModelCard
from models import CAUSAL, EDGE, ENCODERS, GROUPED, PATCHED, TEXT, image_batches, make, spread, token_batches

from optimum_moonshot import (
    Compaction,
    MoonshotConfig,
    MoonshotError,
    MoonshotPruner,
    PruneReport,
    compact_model,
    load_pruned,
)
from optimum_moonshot.model import compaction as compact_module
from optimum_moonshot.model.layers import find_structure
from optimum_moonshot.model.structured_groups import find_structured_groups

GROUPED_HEADS = {"num_attention_heads": (4, 2), "num_key_value_heads": (2, 1)}
NEURONS = {"intermediate_size": (24, 19)}
# Some releases of transformers have no `head_dim` for vision transformers: their heads stay.
SIZED = len({hf.ViTModel(hf.ViTConfig(**PATCHED, **heads)).num_parameters() for heads in ({}, {"head_dim": 2})}) == 2
VISION_HEADS = {"num_attention_heads": (4, 2), "head_dim": (None, 4)} if SIZED else {}
# Changes of the configuration without 5 neurons and half of the heads; heads stay where they are not listed.
CHANGES = {
    **dict.fromkeys(
        ["llama", "llama-tied-biased", "mistral-sliding", "qwen3", "gemma", "gemma2", "gemma3"],
        {**NEURONS, **GROUPED_HEADS},
    ),
    **dict.fromkeys(["qwen2", "phi3"], {**NEURONS, **GROUPED_HEADS, "head_dim": (None, 4)}),
    "mixtral": {"intermediate_size": (24, 16), **GROUPED_HEADS, "head_dim": (None, 4)},
    "phi": {**NEURONS, "num_attention_heads": (4, 2), "num_key_value_heads": (4, 2), "head_dim": (None, 4)},
    **dict.fromkeys(["vit", "deit"], {**NEURONS, **VISION_HEADS}),
    **dict.fromkeys(["gpt-neox", "bert", "roberta", "albert"], NEURONS),
    "opt": {"ffn_dim": (24, 19)},
    "gpt2": {"n_inner": (24, 19)},
    **dict.fromkeys(["falcon", "falcon-alibi"], {"ffn_hidden_size": (64, 59)}),
    "bloom": {},
}


def kill(model, neurons=5, heads=None, only=None):
    """Zeroes the columns of random groups of every layer: `neurons` neurons, and `heads` heads (default: half).

    Every expert loses 8 neurons, and other ones.
    """
    generator = torch.Generator().manual_seed(1)
    layers = {layer.name: layer for layer in find_structure(model).layers()}
    for each in find_structured_groups(model)[0].values():
        count = neurons if each.size == 1 else each.count // 2 if heads is None else heads
        layer = layers[each.name]
        count = 8 if layer.separate else count
        for matrix in layer.matrix.unflatten(0, (layer.matrices, -1)):  # views of the weight
            dead = torch.randperm(each.count, generator=generator)[:count]
            if only is None or only in each.name:
                matrix[:, torch.isin(each.columns, dead)] = 0
    return model


def inputs_of(model):
    name = model.main_input_name
    return {name: (image_batches() if name == "pixel_values" else token_batches())[0][name]}


def logits(model, inputs):
    with torch.no_grad():
        return model.eval()(**inputs).logits


def size(folder):
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def count(model):
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", [*CAUSAL, *ENCODERS, "vit", "deit"])
def test_every_architecture(name, tmp_path):
    model = kill(make(name))
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    inputs = inputs_of(model)
    small, done = compact_model(model)
    assert done.config == CHANGES[name]
    assert bool(done.zeros) == ("num_attention_heads" not in done.config)
    assert all("has no setting without them" in reason for reason in done.zeros.values())
    assert done.parameters == (count(model), count(small)) and (count(small) < count(model)) == bool(done.config)
    small.save_pretrained(tmp_path / "small")
    model.save_pretrained(tmp_path / "zeros")
    loaded = type(model).from_pretrained(tmp_path / "small")
    assert torch.allclose(logits(loaded, inputs), logits(model, inputs), atol=1e-5)
    assert count(loaded) == count(small)
    assert (size(tmp_path / "small") < size(tmp_path / "zeros")) == bool(done.config)
    for field, (_, value) in done.config.items():
        assert json.loads((tmp_path / "small" / "config.json").read_text())[field] == value
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())


SIDES = {
    f"{side}_{field}": value
    for side in ("encoder", "decoder")
    for field, value in {"layers": 1, "ffn_dim": 24, "attention_heads": 4}.items()
}
OTHERS = {
    "multi-query": (
        lambda: hf.GemmaForCausalLM(hf.GemmaConfig(**{**TEXT, "num_key_value_heads": 1}, head_dim=8)),
        {**NEURONS, "num_attention_heads": (4, 2)},
    ),
    "one field for encoder and decoder": (
        lambda: hf.T5ForConditionalGeneration(
            hf.T5Config(vocab_size=96, d_model=16, d_kv=4, d_ff=24, num_layers=2, num_heads=4, decoder_start_token_id=0)
        ),
        {"d_ff": (24, 19)},
    ),
    "a field for each": (
        lambda: hf.BartForConditionalGeneration(
            hf.BartConfig(vocab_size=96, d_model=16, decoder_start_token_id=2, **SIDES, **EDGE)
        ),
        {"encoder_ffn_dim": (24, 19), "decoder_ffn_dim": (24, 19)},
    ),
    "a field left open": (
        lambda: hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=96, n_embd=16, n_layer=2, n_head=4, n_positions=64)),
        {"n_inner": (None, 59)},
    ),
    "nested": (
        lambda: hf.LlavaForConditionalGeneration(
            hf.LlavaConfig(text_config=hf.LlamaConfig(**GROUPED), vision_config=hf.CLIPVisionConfig(**PATCHED))
        ),
        {f"text_config.{name}": change for name, change in {**NEURONS, **GROUPED_HEADS}.items()},
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_the_configuration_field_of_the_width_is_found(name, tmp_path):
    torch.manual_seed(0)
    build, changes = OTHERS[name]
    model = kill(spread(build()))
    small, done = compact_model(model)
    assert done.config == changes
    small.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    ids = token_batches()[0]["input_ids"]
    inputs = {"input_ids": ids, **({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {})}
    assert torch.allclose(logits(loaded, inputs), logits(model, inputs), atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype, tmp_path):
    model = kill(make("llama").to(dtype))
    small, _ = compact_model(model)
    assert all(parameter.dtype == dtype for parameter in small.parameters())
    small.save_pretrained(tmp_path)
    loaded = hf.LlamaForCausalLM.from_pretrained(tmp_path)
    assert loaded.dtype == dtype
    expected, actual = logits(model, inputs_of(model)).float(), logits(loaded, inputs_of(model)).float()
    assert (actual - expected).norm() < 0.02 * expected.norm()


def test_mixed_dtypes_are_kept():
    model = OTHERS["one field for encoder and decoder"][0]().half()
    for name, module in model.named_modules():
        if name.endswith(".wo"):
            module.float()  # as T5 loads in float16
    small, _ = compact_model(kill(spread(model)))
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    assert {name: parameter.dtype for name, parameter in small.named_parameters()} == dtypes
    assert len({*dtypes.values()}) == 2


def test_tied_weights_stay_tied_and_share_no_memory_with_the_model(tmp_path):
    model = kill(make("llama-tied-biased"))
    small, _ = compact_model(model)
    assert small.lm_head.weight is small.model.embed_tokens.weight
    pointers = {parameter.data_ptr() for parameter in model.parameters()}
    assert not any(parameter.data_ptr() in pointers for parameter in small.parameters())


def test_generation_with_a_cache():
    model = kill(make("llama"))
    model.generation_config.max_new_tokens = 12
    small, _ = compact_model(model)
    ids = token_batches()[0]["input_ids"]
    assert small.generation_config.max_new_tokens == 12
    settings = dict(do_sample=False, eos_token_id=None, pad_token_id=0)
    generated, expected = (one.generate(ids, **settings) for one in (small, model))
    assert generated.shape == (2, 24) and torch.equal(generated, expected)
    assert torch.equal(small.generate(ids, use_cache=False, **settings), expected)


def test_modes_and_gradients_carry_over_and_it_trains():
    model = kill(make("llama")).train()
    model.lm_head.weight.requires_grad_(False)
    small, _ = compact_model(model)
    assert small.training and model.training and not small.lm_head.weight.requires_grad
    small(**inputs_of(model), labels=inputs_of(model)["input_ids"]).loss.backward()
    assert small.model.layers[0].mlp.down_proj.weight.grad.shape == (16, 19)
    assert small.lm_head.weight.grad is None


def test_one_width_serves_all_layers():
    model = kill(make("llama"), neurons=3)
    model.model.layers[1].mlp.down_proj.weight.data[:, :20] = 0
    dead = int((model.model.layers[1].mlp.down_proj.weight == 0).all(0).sum())
    small, done = compact_model(model)
    assert small.config.intermediate_size == 21
    assert list(done.zeros) == ["model.layers.1.mlp.down_proj"]
    assert (
        f"{dead - 3} of 24 neurons or heads remain as zeros: other layers" in done.zeros["model.layers.1.mlp.down_proj"]
    )
    assert torch.allclose(logits(small, inputs_of(model)), logits(model, inputs_of(model)), atol=1e-5)


def test_the_architecture_limits_the_heads_that_are_removed():
    config = hf.LlamaConfig(**{**TEXT, "num_attention_heads": 8})
    model = kill(spread(hf.LlamaForCausalLM(config)), neurons=0, heads=5)
    small, done = compact_model(model)
    assert small.config.num_attention_heads == small.config.num_key_value_heads == 4 and small.config.head_dim == 2
    (reason,) = done.zeros.values()
    assert "1 of 8 neurons or heads" in reason and "hidden size (16) is not a multiple" in reason
    model = kill(spread(hf.LlamaForCausalLM(config)), neurons=0, heads=1)
    same, done = compact_model(model)
    assert same is model and not done.removed and done.parameters[0] == done.parameters[1]
    assert "not a multiple" in done.zeros["model.layers.*.self_attn.o_proj"]


def test_a_layer_without_any_neuron_keeps_one():
    model = kill(make("llama"), neurons=24, heads=0)
    small, done = compact_model(model)
    assert small.config.intermediate_size == 1 and "1 of 24" in done.zeros["model.layers.*.mlp.down_proj"]
    assert torch.allclose(logits(small, inputs_of(model)), logits(model, inputs_of(model)), atol=1e-5)


def test_models_that_cannot_be_compacted_are_refused():
    with pytest.raises(MoonshotError, match="nothing to compact: no neuron or head has only zeros"):
        compact_model(make("llama"))
    with pytest.raises(MoonshotError, match="model is a Linear"):
        compact_model(torch.nn.Linear(2, 2))
    model = kill(make("llama"))
    model.lm_head.to("meta")
    with pytest.raises(MoonshotError, match="its weights are on cpu, meta"):
        compact_model(model)
    with pytest.raises(MoonshotError, match="not pruned yet"):
        MoonshotPruner(make("llama"), MoonshotConfig(pattern="2:4")).compact()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("part", ["model.layers.1.self_attn.v_proj.weight", "lm_head.weight"])
def test_a_smaller_model_with_other_outputs_is_refused(part, dtype, monkeypatch):
    """One matrix is 2% off: bfloat16 logits hide it, the float32 comparison of decoder layers does not."""
    model = make("llama").to(dtype)
    pruner = MoonshotPruner(model, MoonshotConfig(solver="magnitude", pattern="structured", sparsity=0.5))
    pruner.prune(progress=False)
    original = compact_module.GroupSearch.state
    factor = 1.02 if "layers" in part else 2.0

    def wrong(self, removed):
        state = original(self, removed)
        state[part] = state[part] * factor
        return state

    monkeypatch.setattr(compact_module.GroupSearch, "state", wrong)
    before = copy.deepcopy(pruner.report.to_dict())
    with pytest.raises(MoonshotError, match="the smaller LlamaForCausalLM differs"):
        pruner.compact()
    assert pruner.model is model and pruner.report.to_dict() == before
    assert not any(module._forward_pre_hooks for module in model.modules())
    monkeypatch.undo()
    assert pruner.compact().config == {"intermediate_size": (24, 12), **GROUPED_HEADS}


def test_prune_compact_save_and_load(tmp_path):
    config = MoonshotConfig(solver="wanda", pattern="structured", sparsity=0.5, num_samples=6)
    pruner = MoonshotPruner(make("llama"), config)
    pruner.prune(token_batches(), progress=False)
    pruned, zeros = pruner.model, logits(pruner.model, inputs_of(pruner.model))
    done = pruner.compact()
    assert pruner.model is not pruned and count(pruner.model) == done.parameters[1] < done.parameters[0]
    pruner.save_pretrained(tmp_path)
    loaded = hf.LlamaForCausalLM.from_pretrained(tmp_path)
    assert torch.allclose(logits(loaded, inputs_of(loaded)), zeros, atol=1e-5)
    report = PruneReport.load(tmp_path)
    assert report.compaction == loaded.config.moonshot["compaction"] == done.to_dict()
    assert loaded.config.moonshot["config"]["pattern"] == "structured"
    assert f"compacted: {done.parameters[0]:,} → {done.parameters[1]:,} parameters" in report.table()
    with pytest.raises(MoonshotError, match="nothing to compact"):
        pruner.compact()
    again = MoonshotPruner(loaded, MoonshotConfig(solver="magnitude", pattern="structured", sparsity=0.5))
    again.prune(progress=False)
    assert again.compact().config["intermediate_size"] == (12, 6)


@pytest.mark.parametrize("values", [{}, {"config": 1, "parameters": [2, 1], "removed": {}, "zeros": {}}])
def test_a_damaged_compaction_is_an_error(values):
    with pytest.raises(MoonshotError, match="compaction: damaged"):
        Compaction.from_dict(values)


def test_a_reloaded_model_compacts_without_a_report(tmp_path):
    config = MoonshotConfig(solver="magnitude", pattern="structured", sparsity=0.5)
    pruner = MoonshotPruner(make("llama"), config)
    pruner.prune(progress=False)
    pruner.save_pretrained(tmp_path / "pruned")
    pruner.compact()
    again = MoonshotPruner(load_pruned(tmp_path / "pruned"), config)
    done = again.compact()
    assert done.config == {"intermediate_size": (24, 12), **GROUPED_HEADS} and again.report is None
    assert again.model.config.moonshot["compaction"] == done.to_dict()
    again.model.save_pretrained(tmp_path / "compact")
    loaded = hf.LlamaForCausalLM.from_pretrained(tmp_path / "compact")
    assert torch.equal(logits(loaded, inputs_of(loaded)), logits(pruner.model, inputs_of(loaded)))
    with pytest.raises(MoonshotError, match="model is a ConvNet; pass a PreTrainedModel"):
        plain = MoonshotPruner(make("convnet"), MoonshotConfig(solver="magnitude", sparsity=0.5))
        plain.prune(progress=False)
        plain.compact()


@pytest.mark.parametrize(
    ("name", "ignore", "field"),
    [("qwen2", (), "head_dim"), ("qwen2", ("o_proj",), None), ("mixtral", ("experts",), None)],
)
def test_the_report_names_a_field_that_the_configuration_does_not_declare(name, ignore, field):
    """Mixtral declares a `head_dim` without a value."""
    config = MoonshotConfig(solver="magnitude", pattern="structured", sparsity=0.5, ignore=ignore)
    pruner = MoonshotPruner(make(name), config)
    pruner.prune(progress=False)
    before = [*pruner.report.notes]
    changed = pruner.compact().config
    assert any(previous is None for previous, _ in changed.values()) == (name == "mixtral" or field is not None)
    notes = [note for note in pruner.report.notes if "does not declare" in note]
    assert pruner.report.notes == before + notes and len(notes) == (field is not None)
    assert all(f"Qwen2Config does not declare {field}" in note for note in notes)


def test_the_smaller_model_names_its_base_model(tmp_path):
    """Its card keeps the metadata of the dense model's card."""
    make("llama").save_pretrained(tmp_path / "dense")
    (tmp_path / "dense/README.md").write_text("---\nlicense: mit\n---\n# Dense\n")
    config = MoonshotConfig(solver="magnitude", pattern="structured", sparsity=0.5)
    pruner = MoonshotPruner.from_pretrained(tmp_path / "dense", config)
    pruner.prune(progress=False)
    pruner.compact()
    assert pruner.model.name_or_path == pruner.model.config.name_or_path == str(tmp_path / "dense")
    pruner.save_pretrained(tmp_path / "small")
    card = ModelCard.load(tmp_path / "small/README.md")
    assert card.data.license == "mit" and pruner.report.compacted in card.text and "zeros in it" not in card.text
    sizes = card.data.to_dict()["moonshot"]["weight_bytes"]
    assert sizes["dense"] == sizes["packed"]  # nothing is left to pack


def test_a_recovered_model_compacts():
    config = MoonshotConfig(
        solver="wanda", pattern="structured", sparsity=0.5, num_samples=8, recover="blockwise", recover_steps=4
    )
    pruner = MoonshotPruner(make("llama"), config)
    pruner.prune(token_batches(samples=8), progress=False)
    expected = logits(pruner.model, inputs_of(pruner.model))
    assert pruner.compact().config == {"intermediate_size": (24, 12), **GROUPED_HEADS}
    assert torch.allclose(logits(pruner.model, inputs_of(pruner.model)), expected, atol=1e-5)
