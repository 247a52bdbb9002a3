"""Layer adapters: one table of modules, and the invariants of the normal form for each."""

import copy

import pytest
import reference
import torch
import transformers as hf
from convolutions import GEOMETRIES
from models import GROUPED, spread, token_batches
from torch import nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from optimum_moonshot import MoonshotConfig, MoonshotError, MoonshotPruner
from optimum_moonshot.model import layer_kinds
from optimum_moonshot.model.layer_kinds import KINDS, find_layer
from optimum_moonshot.model.layers import ROUTER, find_structure

SAMPLES, TOKENS = 3, 5
LINEAR = {
    "linear": lambda: nn.Linear(6, 4),
    "linear without bias": lambda: nn.Linear(6, 4, bias=False),
    "transposed": lambda: Conv1D(4, 6),
}
MODULES = {
    **LINEAR,
    **{name: lambda choice=choice: nn.Conv2d(4, 8, **choice) for name, choice in GEOMETRIES.items()},
    "convolution without bias": lambda: nn.Conv2d(4, 8, 3, bias=False),
    "depthwise with a multiplier": lambda: nn.Conv2d(4, 12, (3, 2), padding="same", groups=4),
}


@pytest.fixture(params=MODULES)
def form(request):
    torch.manual_seed(0)
    module = MODULES[request.param]()
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return find_layer(module)


@pytest.fixture(params=[None, 1, 4000])
def strips(request, monkeypatch):
    """Convolutions in one strip, row by row, and in strips of a few rows."""
    if request.param is not None:
        monkeypatch.setattr(layer_kinds, "STRIP_BYTES", request.param)


def inputs_of(form, samples=SAMPLES):
    generator = torch.Generator().manual_seed(1)
    shape = (4, 9, 7) if form.images else (TOKENS, 6)
    return torch.randn(samples, *shape, generator=generator)


def normal(form, inputs):
    """The reference inputs of the product: [samples, groups, tokens, in]."""
    conv = form.module
    if not form.images:
        return inputs[:, None]
    shape = (conv.kernel_size, conv.stride, conv.padding, conv.dilation, conv.groups, conv.padding_mode)
    return reference.patches(inputs, *shape)


def test_every_kind_is_in_the_table():
    kinds = {type(find_layer(make()).module) for make in MODULES.values()}
    assert kinds == {each.kind for each in KINDS}
    for module in (nn.LayerNorm(4), nn.Embedding(4, 4), nn.Conv1d(4, 4, 1), nn.Sequential(nn.Linear(2, 2))):
        assert find_layer(module) is None


def test_the_matrix_and_back_is_the_parameter(form):
    weight = form.parameter.detach()
    matrix = form.as_matrix(weight)
    assert matrix.shape == form.shape and matrix.data_ptr() == weight.data_ptr()
    back = form.as_parameter(matrix.clone())
    assert back.shape == weight.shape and torch.equal(back, weight)
    assert form.shape[0] % form.groups == 0 and weight.ndim == form.dimensions
    outputs, inputs = (weight.shape[axis] for axis in form.axes)
    assert outputs == form.shape[0] and form.shape[1] % inputs == 0
    form.assign(2 * matrix)
    assert torch.equal(form.matrix, 2 * form.as_matrix(weight / 2))


def test_the_output_is_the_inputs_times_the_matrix(form, strips):
    """`pairs` takes the output in place of its gradient, which has the same shape."""
    inputs = inputs_of(form)
    output = form.module(inputs).detach()
    weight = form.as_matrix(form.parameter.detach()).unflatten(0, (form.groups, -1))
    bias = form.module.bias
    bias = torch.zeros(form.shape[0]) if bias is None else bias.detach()
    seen, last = 0, []
    for pair in form.pairs(inputs, output, None, SAMPLES):
        samples, groups, tokens, d_in = pair.inputs.shape
        assert (samples, groups, d_in) == (SAMPLES, form.groups, form.shape[1])
        assert pair.delta.shape == (SAMPLES, groups, tokens, form.shape[0] // groups)
        product = pair.inputs @ weight.mT + bias.view(groups, 1, -1)
        torch.testing.assert_close(product, pair.delta)
        seen += pair.delta.numel()
        last.append(pair.last)
    assert seen == output.numel() and last == [False] * (len(last) - 1) + [True]


def test_pieces_of_the_inputs_sum_to_the_gram_matrix(form, strips):
    inputs = inputs_of(form)
    exact = normal(form, inputs)
    pieces = list(form.tokens(inputs, None))
    assert all(piece.shape[0] == form.groups and piece.dtype == torch.float32 for piece in pieces)
    assert sum(piece.shape[1] for piece in pieces) == SAMPLES * exact.shape[2]
    gram = torch.einsum("bgti,bgtj->gij", exact, exact)
    torch.testing.assert_close(sum(piece.mT @ piece for piece in pieces), gram, rtol=1e-4, atol=1e-4)


def test_gradients_are_those_of_each_sample_alone(form, strips):
    inputs = inputs_of(form)
    delta = torch.randn(form.module(inputs).shape, generator=torch.Generator().manual_seed(2))
    gradients = sum(pair.delta.mT @ pair.inputs for pair in form.pairs(inputs, delta, None, SAMPLES)).flatten(1, 2)
    for n in range(SAMPLES):
        (expected,) = torch.autograd.grad(form.module(inputs[n : n + 1]), form.parameter, delta[n : n + 1])
        torch.testing.assert_close(gradients[n], form.as_matrix(expected), rtol=1e-4, atol=1e-4)


def test_half_precision_is_converted_to_float32(form):
    half = find_layer(copy.deepcopy(form.module).to(torch.bfloat16))
    inputs = inputs_of(form).to(torch.bfloat16)
    (pair, *_) = half.pairs(inputs, half.module(inputs).detach(), None, SAMPLES)
    assert pair.inputs.dtype == pair.delta.dtype == torch.float32


def test_layers_share_inputs_only_if_their_patches_are_equal():
    linear = {find_layer(make()).input_key for make in LINEAR.values()}
    convolutions = {find_layer(MODULES[name]()).input_key for name in GEOMETRIES}
    assert len(linear) == 1 and len(convolutions) == len(GEOMETRIES) and not linear & convolutions
    assert find_layer(nn.Conv2d(4, 8, 3, bias=False)).input_key == find_layer(nn.Conv2d(4, 2, 3)).input_key


@pytest.mark.parametrize("name", LINEAR)
def test_linear_inputs_are_not_copied(name):
    form = find_layer(LINEAR[name]())
    inputs = inputs_of(form)
    delta = form.module(inputs).detach()
    (piece,), (pair,) = form.tokens(inputs, None), form.pairs(inputs, delta, None, SAMPLES)
    assert piece.data_ptr() == pair.inputs.data_ptr() == inputs.data_ptr()
    assert pair.delta.data_ptr() == delta.data_ptr()


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("name", LINEAR)
def test_padding_contributes_to_neither_inputs_nor_gradients(name, flat):
    form = find_layer(LINEAR[name]())
    inputs, mask = inputs_of(form), torch.ones(SAMPLES, TOKENS, dtype=torch.bool)
    mask[0, 3:] = mask[2, 1:] = False
    delta = torch.randn(SAMPLES, TOKENS, 4)
    layer_inputs, layer_delta = (inputs.flatten(0, 1), delta.flatten(0, 1)) if flat else (inputs, delta)
    layer_mask = form.token_mask(layer_inputs, mask)
    (piece,) = form.tokens(layer_inputs, layer_mask)
    assert torch.equal(piece, inputs[mask][None])
    (pair,) = form.pairs(layer_inputs, layer_delta, layer_mask, SAMPLES)
    assert torch.equal(pair.inputs, inputs[:, None])
    assert torch.equal(pair.delta, (delta * mask[..., None])[:, None])


def test_layouts_without_identifiable_samples_or_padding_are_refused():
    form = find_layer(nn.Linear(6, 4))
    flat, mask = torch.randn(SAMPLES * TOKENS, 6), torch.ones(SAMPLES, TOKENS, dtype=torch.bool)
    with pytest.raises(MoonshotError, match=r"inputs of shape \[15, 6\] do not show which of the batch's 3 samples"):
        next(form.pairs(flat, torch.randn(15, 4), None, SAMPLES))
    (pair,) = form.pairs(flat, torch.randn(15, 4), None, 1)
    assert pair.inputs.shape == (1, 1, 15, 6)
    other = torch.randn(SAMPLES, 2 * TOKENS, 6)
    assert form.token_mask(other, mask) is None
    mask[0, 0] = False
    with pytest.raises(MoonshotError, match=r"inputs of shape \[3, 10, 6\] do not show which tokens are padding"):
        form.token_mask(other, mask)
    conv = find_layer(nn.Conv2d(4, 8, 3))
    assert conv.token_mask(torch.randn(SAMPLES, 4, 9, 7), mask) is None
    with pytest.raises(MoonshotError, match=r"inputs of shape \[6, 4, 9, 7\] do not show which"):
        next(conv.pairs(torch.randn(6, 4, 9, 7), torch.randn(6, 8, 7, 5), None, SAMPLES))


@pytest.mark.parametrize("groups", [1, 2])
def test_images_of_one_sample_are_its_tokens(groups):
    form = find_layer(nn.Conv2d(4, 8, 3, groups=groups))
    images = torch.randn(5, 4, 9, 7)
    output = form.module(images)
    delta = torch.randn_like(output)
    gradient = sum(pair.delta.mT @ pair.inputs for pair in form.pairs(images, delta, None, 1)).flatten(0, 2)
    (expected,) = torch.autograd.grad(output, form.parameter, delta)
    torch.testing.assert_close(gradient, form.as_matrix(expected), rtol=1e-4, atol=1e-4)
    single = sum(pair.delta.mT @ pair.inputs for pair in form.pairs(images[0], delta[0], None, 1))
    batch = sum(pair.delta.mT @ pair.inputs for pair in form.pairs(images[:1], delta[:1], None, 1))
    assert torch.equal(single, batch)


class Scaled(nn.Linear):
    def forward(self, hidden):
        return 2 * super().forward(hidden)


class Several(nn.Linear):
    def forward(self, hidden):
        return super().forward(hidden), hidden


class Normalised(nn.Linear):
    def forward(self, hidden):
        return functional.linear(hidden, functional.normalize(self.weight), self.bias)


class WithMore(nn.Linear):
    """The same product only while `more` is 0."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.more = nn.Parameter(torch.zeros(sizes[1]))

    def forward(self, hidden):
        return super().forward(hidden) + self.more


class OtherConv1D(Conv1D):
    def forward(self, x):
        return super().forward(x).relu()


class OtherConv2d(nn.Conv2d):
    def forward(self, images):
        return super().forward(images).relu()


class PaddedConv2d(nn.Conv2d):
    """Inherits `forward` from Conv2d and overrides the method that it calls."""

    def _conv_forward(self, images, weight, bias):
        return super()._conv_forward(functional.pad(images, (1, 1, 1, 1)), weight, bias)


class Written(nn.Linear):
    """The same product, written out as in Falcon."""

    def forward(self, hidden):
        product = hidden @ self.weight.T
        return product if self.bias is None else product + self.bias


class Initialised(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        nn.init.zeros_(self.weight)


@pytest.mark.parametrize(
    ("module", "kind"),
    [
        (Scaled(6, 4), "Linear"),
        (Several(6, 4), "Linear"),
        (Normalised(6, 4), "Linear"),
        (WithMore(6, 4), "Linear"),
        (OtherConv1D(4, 6), "Conv1D"),
        (OtherConv2d(4, 8, 3), "Conv2d"),
        (PaddedConv2d(4, 8, 3), "Conv2d"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_another_forward_is_refused_with_the_reason(module, kind):
    name = type(module).__name__
    assert find_layer(module).unprunable() == f"{name} overrides the forward of {kind}"
    model = nn.Sequential(nn.Linear(6, 6), module, nn.Linear(4, 4))
    with pytest.raises(MoonshotError, match=f"nothing to prune.*{name} overrides the forward"):
        find_structure(model)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", [Written, Initialised, nn.modules.linear.NonDynamicallyQuantizableLinear])
def test_an_equivalent_forward_is_accepted(kind, bias, device):
    module = kind(6, 4, *([] if kind is Initialised else [bias])).to(device)
    before, state = dict(module.__dict__), torch.get_rng_state()
    assert find_layer(module).unprunable() is None
    assert module.__dict__ == before and torch.equal(torch.get_rng_state(), state)


def test_a_forward_set_by_device_placement_is_accepted():
    module = nn.Linear(6, 4)
    module.forward = lambda hidden: nn.Linear.forward(module, hidden)
    assert find_layer(module).unprunable() is None


def test_computed_and_quantized_weights_are_refused():
    computed = nn.utils.parametrizations.weight_norm(nn.Linear(6, 4))
    assert "its weight is computed" in find_layer(computed).unprunable()
    for dtype in (torch.int8, torch.float8_e4m3fn):
        module = Scaled(6, 4)
        module.weight = nn.Parameter(torch.zeros(4, 6).to(dtype), requires_grad=False)
        assert find_layer(module).unprunable() == f"quantized: Scaled, {dtype}"
    flat = nn.Linear(6, 4)
    flat.weight = nn.Parameter(torch.zeros(24))
    assert "quantized" in find_layer(flat).unprunable()


def mixture(kind):
    """Tiny mixtures of experts with different router layers."""
    experts = {**GROUPED, "num_experts_per_tok": 2, "head_dim": 8}
    torch.manual_seed(0)
    if kind == "phimoe":
        return spread(hf.PhimoeForCausalLM(hf.PhimoeConfig(**GROUPED, num_local_experts=4)))
    if kind == "llama4":
        config = hf.Llama4TextConfig(
            **{**experts, "num_experts_per_tok": 1}, intermediate_size_mlp=24, num_local_experts=4
        )
        return spread(hf.Llama4ForCausalLM(config))
    if kind == "afmoe":
        config = hf.AfmoeConfig(**experts, num_experts=4, moe_intermediate_size=8, num_dense_layers=1)
        return spread(hf.AfmoeForCausalLM(config))
    if not hasattr(hf, "DeepseekV4Config"):
        pytest.skip("this transformers has no DeepSeek V4")
    rates = {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4}
    config = hf.DeepseekV4Config(
        vocab_size=96, hidden_size=16, moe_intermediate_size=8, num_hidden_layers=3, num_attention_heads=4, head_dim=8,
        q_lora_rank=8, num_experts_per_tok=2, n_routed_experts=4, o_groups=2, o_lora_rank=8, index_n_heads=2,
        index_head_dim=8, index_topk=2, max_position_embeddings=64, sliding_window=4, compress_rates=rates,
        partial_rotary_factor=0.5, hc_mult=2, pad_token_id=0,
    )  # fmt: skip
    return spread(hf.DeepseekV4ForCausalLM(config))


@pytest.mark.parametrize(
    ("kind", "name", "reason"),
    [
        ("phimoe", "model.layers.1.mlp.router", "PhimoeTopKRouter overrides the forward of Linear"),
        ("llama4", "model.layers.1.feed_forward.router", "Llama4Router overrides the forward of Linear"),
        ("afmoe", "model.layers.1.mlp.router.gate", ROUTER),
        (
            "deepseek_v4",
            "model.layers.1.self_attn.o_a_proj",
            "DeepseekV4GroupedLinear overrides the forward of Linear",
        ),
    ],
)
@pytest.mark.parametrize("lam", [0.9, 1.0])
def test_routers_and_grouped_linears_stay_dense_and_are_listed(kind, name, reason, lam):
    model = mixture(kind)
    before = model.get_parameter(f"{name}.weight").clone()
    config = MoonshotConfig(pattern="2:4", lam=lam, num_samples=6, sequence_length=12, batch_size=2)
    report = MoonshotPruner(model, config).prune(token_batches(), progress=False)
    assert report.skipped[name] == reason and report.sparsity == 0.5
    assert torch.equal(model.get_parameter(f"{name}.weight"), before)
    assert sum("self_attn" in layer.name for layer in report.layers) >= 3 * 3
    assert sum("experts." in layer.name for layer in report.layers) >= 2 * (2 if kind == "afmoe" else 3)


def test_a_plain_router_is_pruned_where_targets_names_it():
    structure = find_structure(mixture("afmoe"), targets=("router",))
    assert [layer.name for layer in structure.layers()] == [f"model.layers.{i}.mlp.router.gate" for i in (1, 2)]
    with pytest.raises(MoonshotError, match="nothing to prune: .*PhimoeTopKRouter overrides the forward"):
        find_structure(mixture("phimoe"), targets=("router",))


class Listed(nn.Module):
    """A mixture of experts in a list, with a layer of `outputs` outputs beside it."""

    def __init__(self, outputs, part=nn.Identity):
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4)) for _ in range(3))
        self.gate = part(nn.Linear(4, outputs)) if part is nn.Sequential else nn.Linear(4, outputs)
        self.shared = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 4))


def test_a_router_is_the_only_layer_beside_as_many_experts():
    def skipped(*arguments):
        return find_structure(nn.ModuleDict({"layers": nn.ModuleList([Listed(*arguments)])})).skipped

    assert skipped(3) == {"layers.0.gate": ROUTER}
    assert skipped(3, nn.Sequential) == {"layers.0.gate.0": ROUTER}
    assert not skipped(4)
    convolutions = nn.ModuleDict({"conv": nn.Conv1d(4, 8, 3), "proj": nn.Linear(4, 8)})
    assert not find_structure(nn.ModuleDict({"layers": nn.ModuleList([convolutions])})).skipped.get("layers.0.proj")
