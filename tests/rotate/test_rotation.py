"""Rotatable spaces of a model: detected by probing, exact in float64, and restored bit for bit."""

import pytest
import torch
import transformers as hf
from models import CAUSAL, ENCODERS, GROUPED, PATCHED, TEXT, VISION, spread
from torch import nn

from optimum_moonshot.errors import MoonshotError
from optimum_moonshot.model.calls import frozen
from optimum_moonshot.model.layers import find_structure
from optimum_moonshot.model.structured_groups import probe_inputs
from optimum_moonshot.rotate.basis import Basis, check_invariance, check_same, outputs
from optimum_moonshot.rotate.norms import find_norm
from optimum_moonshot.rotate.spaces import RESIDUAL, find_all_spaces

LATENT = dict(
    moe_intermediate_size=8, n_routed_experts=4, num_experts_per_tok=2, n_group=2, topk_group=1,
    first_k_dense_replace=1, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=6,
)  # fmt: skip
MORE = {
    "olmo": lambda: hf.OlmoForCausalLM(hf.OlmoConfig(**GROUPED)),  # norms without parameters
    "olmo2": lambda: hf.Olmo2ForCausalLM(hf.Olmo2Config(**GROUPED)),
    "qwen3-moe": lambda: hf.Qwen3MoeForCausalLM(
        hf.Qwen3MoeConfig(**GROUPED, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8)
    ),
    "deepseek": lambda: hf.DeepseekV3ForCausalLM(
        hf.DeepseekV3Config(**{**TEXT, "num_key_value_heads": 4, "n_shared_experts": 1}, **LATENT)
    ),
    "gpt-oss": lambda: hf.GptOssForCausalLM(
        hf.GptOssConfig(**GROUPED, head_dim=8, num_local_experts=4, num_experts_per_tok=2)
    ),
    "granite": lambda: hf.GraniteForCausalLM(
        hf.GraniteConfig(**GROUPED, embedding_multiplier=3.0, residual_multiplier=0.5)
    ),
    "t5": lambda: hf.T5ForConditionalGeneration(
        hf.T5Config(vocab_size=96, d_model=16, d_kv=4, d_ff=24, num_layers=2, num_heads=4, decoder_start_token_id=0)
    ),
    "dinov2": lambda: hf.Dinov2ForImageClassification(hf.Dinov2Config(**PATCHED)),
    "opt-projected": lambda: hf.OPTForCausalLM(
        hf.OPTConfig(**{**TEXT, "ffn_dim": 24}, word_embed_proj_dim=8, do_layer_norm_before=True)
    ),
}
POST_NORM = "scales its coordinates, and no matrix follows"
# Model → why its residual stream cannot be rotated (None: it can), and how many layers have rotatable heads.
FAMILIES = {
    "llama": (None, 3),
    "llama-tied-biased": (None, 3),
    "mistral-sliding": (None, 3),
    "qwen2": (None, 3),  # biases
    "qwen3": (None, 3),  # norms of q and k
    "gemma": (None, 3),  # 1 + γ, scaled embeddings, tied
    "gemma2": (POST_NORM, 3),
    "gemma3": (POST_NORM, 3),
    "olmo": (None, 3),
    "olmo2": (POST_NORM, 3),
    "phi": (None, 3),  # parallel blocks, layer norms, biases
    "phi3": (None, 3),  # fused projections
    "gpt-neox": (None, 3),  # fused and interleaved
    "gpt2": (None, 3),  # Conv1D, learned positions, tied
    "opt": (None, 3),
    "opt-projected": (None, 3),  # embeddings of another width
    "falcon": (None, 3),  # one key-value head
    "falcon-alibi": (None, 3),
    "bloom": (POST_NORM, 3),  # a norm between the embeddings and the stream
    "bert": (POST_NORM, 3),
    "roberta": (POST_NORM, 3),
    "mixtral": (None, 3),  # router and fused experts
    "qwen3-moe": (None, 3),
    "deepseek": (None, 3),  # latent attention, shared and routed experts
    "gpt-oss": ("a parameter of no Linear", 3),
    "granite": (None, 3),
    "t5": (POST_NORM, 6),
    "vit": (None, 3),
    "deit": (None, 3),
    "dinov2": ("are not a sum of", 3),  # layer scales after attention and MLP
}

# Model → number of layers with permutable neurons, if not 3. Fused experts are not pruned.
NEURONS = {"mixtral": 0, "qwen3-moe": 0, "gpt-oss": 0, "t5": 4}
# The same for scalable neurons: after a gate or a ReLU, not after a GELU.
_BEHIND_GELU = "phi gpt-neox gpt2 falcon falcon-alibi bloom bert roberta vit deit dinov2"
SCALED = {**NEURONS, **dict.fromkeys(_BEHIND_GELU.split(), 0)}


def build(name):
    """A tiny random model in float64 with gains, shifts, biases and experts that matter."""
    torch.manual_seed(0)
    model = spread({**CAUSAL, **ENCODERS, **VISION, **MORE}[name]())
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data += 0.3 * torch.randn(parameter.shape)
        elif parameter.ndim == 3:
            parameter.data = torch.randn(parameter.shape) * parameter.shape[-1] ** -0.5
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # torch's grouped products lack float64
    return model.double()


def random_rotations(spaces):
    generator = torch.Generator().manual_seed(1)
    rotations = {}
    for space in spaces:
        if space.permuted:
            rotations[space] = torch.randperm(space.width, generator=generator)[None]
            continue
        if space.scaled:
            factors = torch.randn(space.count, space.width, generator=generator, dtype=torch.float64).exp()
            rotations[space] = factors
            continue
        skew = torch.randn(space.count, space.width, space.width, generator=generator, dtype=torch.float64)
        if space.fixes_ones:
            skew = skew - skew.mean(-1, keepdim=True)
            skew = skew - skew.mean(-2, keepdim=True)
        rotations[space] = torch.matrix_exp(skew - skew.mT)
    return rotations


@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_computes_the_same_in_a_random_basis(name):
    model, (why, heads) = build(name), FAMILIES[name]
    batch = probe_inputs(model)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    tied = getattr(model.config, "tie_word_embeddings", None)
    names = [layer.name for layer in find_structure(model).layers()]
    spaces, refused = find_all_spaces(model, batch, heads_only=False, ordered=names, scaled=names)
    assert [RESIDUAL in refused, RESIDUAL in {space.name for space in spaces}] == [why is not None, why is None]
    assert why is None or why in refused[RESIDUAL]
    assert sum(space.name.endswith(" heads") for space in spaces) == heads
    assert sum(space.name.endswith(" heads, scaled") for space in spaces) == heads
    assert sum(space.name.endswith(" neurons, scaled") for space in spaces) == SCALED.get(name, 3)
    assert sum(space.permuted for space in spaces) == NEURONS.get(name, 3)
    expected = outputs(model, batch)
    basis = Basis(model, find_structure(model).blocks, spaces)
    basis.keep()
    check_invariance(model, basis, batch, expected)
    basis.write(random_rotations(spaces))
    # Norms that always compute in float32 limit the accuracy.
    limit = 1e-11 if any(isinstance(module, nn.LayerNorm) for module in model.modules()) else 3e-6
    for output, reference in zip(outputs(model, batch), expected, strict=True):
        assert float((output - reference).norm() / reference.norm()) < limit
    moved = [key for key, value in model.state_dict().items() if key in before and not torch.equal(value, before[key])]
    assert moved
    basis.restore()
    assert getattr(model.config, "tie_word_embeddings", None) == tied
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_tied_embeddings_are_untied_and_load_in_plain_transformers(tmp_path):
    model = build("llama-tied-biased").float()
    batch = probe_inputs(model)
    spaces, _ = find_all_spaces(model, batch, heads_only=False)
    expected = outputs(model, batch)
    basis = Basis(model, find_structure(model).blocks, spaces)
    basis.keep()
    assert basis.untied_bytes == model.lm_head.weight.nbytes
    basis.write(random_rotations(spaces))
    check_same(model, batch, expected, "it")
    model.save_pretrained(tmp_path)
    loaded = hf.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.lm_head.weight is not loaded.model.embed_tokens.weight
    check_same(loaded, batch, expected, "loading")
    basis.restore()
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_head_that_needs_no_gain_stays_tied():
    model = build("llama-tied-biased")
    model.model.norm.weight.data.fill_(1)
    spaces, _ = find_all_spaces(model, probe_inputs(model), heads_only=False)
    basis = Basis(model, find_structure(model).blocks, spaces)
    basis.keep()
    assert basis.untied_bytes == 0 and model.config.tie_word_embeddings


def test_rotating_heads_alone_keeps_the_embeddings():
    model = build("llama-tied-biased")
    spaces, refused = find_all_spaces(model, probe_inputs(model), heads_only=True)
    assert {space.name.rpartition(" ")[2] for space in spaces} == {"heads"} and not refused
    basis = Basis(model, find_structure(model).blocks, spaces)
    basis.keep()
    assert basis.untied_bytes == 0
    touched = {id(change.at.parameter) for change in basis.changes}
    assert id(model.model.embed_tokens.weight) not in touched


class Gained(nn.Module):
    """An activation with a gain for every neuron."""

    def __init__(self, width):
        super().__init__()
        self.gain = nn.Parameter(torch.rand(width, dtype=torch.float64))

    def forward(self, x):
        return nn.functional.silu(x) * self.gain


def test_neurons_with_gains_keep_their_order():
    model = build("llama")
    model.model.layers[1].mlp.act_fn = Gained(24)
    names = [f"model.layers.{i}.mlp.down_proj" for i in range(2)]
    spaces, _ = find_all_spaces(model, probe_inputs(model), heads_only=True, ordered=names)
    assert [space.name for space in spaces if space.permuted] == ["model.layers.0.mlp.down_proj neurons"]


@pytest.mark.parametrize("name", ["llama", "phi3", "gpt2"])
def test_permutations_are_exact_in_every_dtype(name):
    model = build(name).bfloat16()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    names = [layer.name for layer in find_structure(model).layers()]
    spaces, _ = find_all_spaces(model, probe_inputs(model), heads_only=True, ordered=names)
    spaces = [space for space in spaces if space.permuted]
    basis = Basis(model, find_structure(model).blocks, spaces)
    basis.keep()
    orders = random_rotations(spaces)
    basis.write(orders)
    for key, value in model.state_dict().items():
        assert torch.equal(value.flatten().sort().values, before[key].flatten().sort().values)
    back = {space: order.argsort(-1) for space, order in orders.items()}
    again = Basis(model, find_structure(model).blocks, spaces)
    again.keep()
    again.write(back)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_models_without_rotatable_spaces_are_refused_with_reasons():
    model = hf.AlbertForMaskedLM(hf.AlbertConfig(**TEXT, embedding_size=8))
    model = spread(model)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data += 0.3 * torch.randn(parameter.shape)
    with pytest.raises(MoonshotError, match="nothing in AlbertForMaskedLM can be rotated .residual stream: .*scales"):
        find_all_spaces(model, probe_inputs(model), heads_only=False)


@pytest.mark.parametrize(
    ("missed", "step"),
    [("mlp.up_proj", "folding the norms"), ("mlp.down_proj", r"a change of basis \(residual stream, .*\)")],
)
def test_a_step_that_changes_the_function_is_named(missed, step):
    model = build("llama").float()
    batch = probe_inputs(model)
    spaces, _ = find_all_spaces(model, batch, heads_only=False)
    expected = outputs(model, batch)
    basis = Basis(model, find_structure(model).blocks, spaces)
    basis.keep()
    layer = model.model.layers[1].get_submodule(missed)
    basis.changes = [change for change in basis.changes if change.at.holder is not layer]
    with pytest.raises(MoonshotError, match=f"rotation: {step}.* changes the outputs of LlamaForCausalLM"):
        check_invariance(model, basis, batch, expected)


def test_16_bit_weights_are_rounded_once():
    model = build("llama").bfloat16()
    batch = probe_inputs(model)
    spaces, _ = find_all_spaces(model, batch, heads_only=False)
    exact = build("llama").bfloat16().double()
    basis = Basis(model, find_structure(model).blocks, spaces)
    twin_spaces, _ = find_all_spaces(exact, batch, heads_only=False)
    twin = Basis(exact, find_structure(exact).blocks, twin_spaces)
    rotations = random_rotations(spaces)
    basis.keep()
    basis.write(rotations)
    twin.keep()
    twin.write(dict(zip(twin_spaces, rotations.values(), strict=True)))
    for weight, reference in zip(model.parameters(), exact.parameters(), strict=True):
        error = (weight.double() - reference).abs()
        assert bool((error <= 2.0**-8 * reference.abs() + 1e-6).all())


class Halved(nn.Module):
    """Not a norm: it halves its input."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return x / 2 * self.weight


@pytest.mark.parametrize(
    ("module", "kind"),
    [
        (nn.LayerNorm(8), (0, 1, True)),
        (nn.LayerNorm(8, elementwise_affine=False), (1, 1, True)),
        (nn.RMSNorm(8, eps=1e-6), (0, 1, False)),
        (hf.models.gemma.modeling_gemma.GemmaRMSNorm(8), (1, 1, False)),
        (nn.Identity(), None),
        (nn.GELU(), None),
        (nn.Softmax(-1), None),
        (Halved(), None),
    ],
)
def test_norms_are_recognised_by_their_computation(module, kind):
    for parameter in module.parameters():
        parameter.data += 0.3 * torch.randn(8)
    norm = find_norm(module, 8)
    assert (None if norm is None else (norm.offset, norm.slope, norm.fixes_ones)) == kind
    if norm is not None and norm.weight is not None:
        getattr(module, norm.weight).data.fill_(norm.neutral)
        assert find_norm(module, 8).gain is None


def test_probing_does_not_change_the_model():
    model = build("deepseek").float()
    model.model.layers[0].train()
    state = {key: value.clone() for key, value in model.state_dict().items()}
    wanted = [parameter.requires_grad for parameter in model.parameters()]
    chosen = model.config._experts_implementation
    with frozen(model):
        pass
    find_all_spaces(model, probe_inputs(model), heads_only=False)
    assert [parameter.requires_grad for parameter in model.parameters()] == wanted
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert model.model.layers[0].training and not model.model.layers[1].training
    assert model.config._experts_implementation == chosen
    assert not any(module._forward_hooks for module in model.modules())
