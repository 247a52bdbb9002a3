"""Fused experts: observed without side effects, and pruned as one matrix per expert, in every family."""

import copy

import pytest
import torch
import transformers as hf
from checkpoints import tensors
from marks import slow_but
from models import token_batches
from packed_experts import packed_names
from tiny_configs import tiny_config
from tiny_mixtures import FAMILIES, Seen, experts, family, mixtral, observe, prune, same, starving
from torch import nn

from optimum_moonshot import MoonshotConfig, MoonshotError, MoonshotPruner, prune_weight
from optimum_moonshot.calibration.observer import Observer
from optimum_moonshot.calibration.storage import Storage
from optimum_moonshot.checkpoint.verification import verify
from optimum_moonshot.data.batches import split_batches
from optimum_moonshot.masks import Masks, find_pruned
from optimum_moonshot.model.calls import run_model
from optimum_moonshot.model.experts import ExpertsLayer, routing, with_others
from optimum_moonshot.model.layer_kinds import expert_parameters
from optimum_moonshot.model.layers import find_structure
from optimum_moonshot.model.losses import loss_gradient
from optimum_moonshot.packing import weight_of

LARGE = ("MixtralForCausalLM", "Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM", "GptOssForCausalLM", "Llama4ForCausalLM")


COMMON = {"deepseek_v3", "gpt_oss", "mixtral", "qwen3_moe"}


@pytest.mark.parametrize("name", slow_but(COMMON, FAMILIES))
def test_every_family(name, tmp_path):
    model = family(name)
    fused = [module for module in model.modules() if expert_parameters(module)]
    layers = experts(model)
    if name == "aria_text" and not layers:
        pytest.skip("early releases of transformers have no experts that it counts")
    assert len(layers) == sum(len(expert_parameters(module)) for module in fused) > 0
    pruner = prune(model, pattern="2:4", lam=0.5)
    reported = {layer.name for layer in pruner.report.layers}
    for layer in experts(model):
        assert layer.name in reported
        assert ((layer.matrix.view(-1, 4) != 0).sum(1) == 2).all(), layer.name
    for format in ("dense", "packed"):
        pruner.save_pretrained(tmp_path / format, format=format)
        loaded = type(model).from_pretrained(tmp_path / format, dtype=model.dtype)
        assert same(loaded, model)
        verification = verify(tmp_path / format)
        assert verification and verification.sparsity == pruner.report.sparsity, verification.mismatches
        loaded.save_pretrained(tmp_path / "again")
        assert tensors(tmp_path / "again").keys() == tensors(tmp_path / "dense").keys()
    check_packed(tmp_path, verification, pruner)


def check_packed(folder, verification, pruner):
    """Every pruned weight is packed, in 17/32 of its bytes in float32."""
    assert all(layer.stored.startswith("packed") for layer in verification.layers)
    dense, packed = tensors(folder / "dense"), tensors(folder / "packed")
    names = packed_names(folder / "packed")
    whole = sum(dense[name].nbytes for name in names)
    assert whole == 4 * sum(layer.shape[0] * layer.shape[1] for layer in pruner.report.layers)
    assert sum(tensor.nbytes for name, tensor in packed.items() if weight_of(name) in names) == whole * 17 // 32


def test_experts_stacked_along_rows_stay_dense_with_the_reason():
    """DBRX: the parent module multiplies slices, and their layout does not show the orientation."""
    config = tiny_config("dbrx", "DbrxForCausalLM")
    config.attn_config.clip_qkv, width = 8, config.d_model
    config.ffn_config.hidden_size = config.ffn_config.ffn_hidden_size = width  # early releases confuse the two
    report = prune(hf.DbrxForCausalLM(config).eval(), pattern="2:4", lam=1.0).report
    reasons = {name: reason for name, reason in report.skipped.items() if name.endswith("experts.mlp")}
    assert len(reasons) == config.n_layers and all(
        "experts stacked along the rows" in reason for reason in reasons.values()
    )
    assert report.mostly_dense and "most of the model stayed dense" in report.table()
    assert not [layer.name for layer in report.layers if "experts" in layer.name]


@pytest.mark.parametrize("name", LARGE)
def test_at_least_90_percent_of_large_mixtures_are_prunable(name):
    kind = getattr(hf, name)
    with torch.device("meta"):
        model = kind(kind.config_class().get_text_config())
    total = sum(parameter.numel() for parameter in model.parameters())
    assert sum(layer.shape[0] * layer.shape[1] for layer in find_structure(model).layers()) >= 0.9 * total


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "llama4_text", "jetmoe"])
def test_observing_a_model_does_not_change_it(name):
    model, batch = family(name), token_batches()[0]
    if hasattr(model, "set_experts_implementation") and name != "llama4_text":
        model.set_experts_implementation("eager")
    before = {key: dict(vars(module)) for key, module in model.named_modules()}
    with torch.no_grad():
        expected = run_model(model, batch).logits
        with Observer(experts(model), False, set(), 6, Storage(torch.device("cpu"))) as observer:
            observer.begin(0, 2, None)
            assert torch.equal(run_model(model, batch).logits, expected)
    for key, module in model.named_modules():
        assert vars(module).keys() == before[key].keys()
        assert vars(module).get("config") is before[key].get("config")
        assert not module._forward_pre_hooks and not module._forward_hooks


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "llama4_text", "nemotron_h", "jetmoe"])
def test_gradients_equal_autograd(name):
    """A_n of every expert, from the observed calls, against the gradient of the fused parameter."""
    model, batches = family(name).float(), split_batches(token_batches(), 1)[:3]
    layers = experts(model)
    statistics = observe(model, layers, batches)
    for index, batch in enumerate(batches):
        model.zero_grad()
        output = run_model(model, batch)
        torch.autograd.backward(*loss_gradient(model, output, batch)[:2])
        for layer in layers:
            expected = layer.as_matrix(layer.parameter.grad)
            gradient = statistics[layer.name].gradients.gradients[index]
            torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6 * float(expected.abs().max() + 1e-9))


def test_gram_matrices_sum_the_routed_tokens_by_their_gates():
    """G of an expert is Σ g² x xᵀ: the block adds g·f(x), so this is the error of its output."""
    model, batches = mixtral(), split_batches(token_batches(), 1)
    module = model.model.layers[0].mlp
    expected, tokens = torch.zeros(4, 16, 16), torch.zeros(4)

    def route(_, args):
        hidden, index, gates = args
        for token in range(len(hidden)):
            for expert, gate in zip(index[token].tolist(), gates[token], strict=True):
                expected[expert] += gate**2 * hidden[token, :, None] * hidden[token]
                tokens[expert] += 1

    handle = module.experts.register_forward_pre_hook(route)
    layer = experts(model)[0]
    statistics = observe(model, [layer], batches, gradients=False)[layer.name]
    handle.remove()
    torch.testing.assert_close(statistics.inputs, expected)
    assert torch.equal(statistics.tokens.float(), tokens) and torch.equal(statistics.extra[Seen], tokens)


@pytest.mark.parametrize("name", slow_but(COMMON, [name for name in FAMILIES if name not in ("jetmoe", "llama4_text")]))
def test_every_family_shows_the_gates_of_its_experts(name):
    """Except JetMoE, which passes sorted tokens, and Llama 4, which multiplies the inputs by the gates itself.

    With all gates doubled, outside of the experts, every Gram matrix of an expert is four times as large.
    """
    model, batches, sums = family(name), split_batches(token_batches(), 1)[:2], []
    layers = [layer for layer in experts(model) if layer.modules[0] is experts(model)[0].modules[0]]
    if not layers:
        pytest.skip("early releases of transformers have no experts that it counts")
    for factor in (1, 2):

        def scale(module, args, kwargs, factor=factor):
            _, gates = routing(args, kwargs)
            return with_others(args, kwargs, (gates, factor * gates))

        handle = layers[0].modules[0].register_forward_pre_hook(scale, with_kwargs=True, prepend=True)
        sums.append([statistics.inputs for statistics in observe(model, layers, batches, gradients=False).values()])
        handle.remove()
    for once, twice in zip(*sums, strict=True):
        assert once.any()
        torch.testing.assert_close(twice, 4 * once)


def test_gates_follow_an_expert_whose_first_product_has_no_layer():
    """Only down_proj is observed: the order of its tokens is that of the product before it."""
    model, batches = mixtral(), split_batches(token_batches(), 1)
    up, down = experts(model)[:2]
    assert down.key == "down_proj"
    both = observe(model, [up, down], batches, gradients=False)[down.name].inputs
    alone = observe(model, [down], batches, gradients=False)[down.name].inputs
    assert torch.equal(both, alone) and both.any()
    halved = lambda module, args: (args[0], args[1], args[2] / 2)  # noqa: E731
    model.model.layers[0].mlp.experts.register_forward_pre_hook(halved, prepend=True)
    assert torch.allclose(observe(model, [down], batches, gradients=False)[down.name].inputs, alone / 4)


@pytest.mark.parametrize("solver", ["sparsegpt", "wanda", "obc", "cap"])
@pytest.mark.parametrize("pattern", ["2:4", "unstructured"])
def test_every_expert_is_pruned_as_a_separate_matrix(solver, pattern):
    model, batches = mixtral(), split_batches(token_batches(), 1)
    dense, layer = copy.deepcopy(model), experts(model)[-1]  # the last of the last block
    statistics = observe(dense, [experts(dense)[-1]], batches)[layer.name]
    options = dict(solver=solver, pattern=pattern, lam=0.5, under_calibrated_experts="routed")
    options |= {} if pattern == "2:4" else {"sparsity": 0.5}
    prune(model, batches, **options)
    size = layer.shape[0] // 4
    for expert in range(4):
        rows = slice(expert * size, (expert + 1) * size)
        weight, gradients = experts(dense)[-1].matrix[rows], statistics.gradients.gradients[:, rows]
        alone = prune_weight(weight, statistics.inputs[expert], gradients, config=MoonshotConfig(**options))
        torch.testing.assert_close(layer.matrix[rows], alone.weight, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    "options", [dict(pattern="2:4"), dict(sparsity=0.5, solver="obc"), dict(sparsity=0.6, lam=1.0)]
)
def test_a_memory_limit_does_not_change_the_result(options):
    results = []
    for memory in (None, "60KiB" if "lam" not in options else "10KiB"):
        model = mixtral()
        pruner = prune(model, **{"lam": 0.5, **options}, max_memory=memory)
        results.append(model)
        assert any("experts solved in" in note for note in pruner.report.notes) == (memory is not None)
    assert same(*results)


def test_experts_without_tokens_are_noted():
    for method, message in (("all", "have the Gram matrix of all tokens"), ("magnitude", "are pruned by magnitude")):
        model = starving(mixtral())
        dense = copy.deepcopy(model)
        pruner = prune(model, sparsity=0.5, lam=0.5, under_calibrated_experts=method)
        notes = [note for note in pruner.report.notes if message in note]
        assert len(notes) == 2 and all("model.layers.0.mlp.experts" in note and "experts 2 " in note for note in notes)
        layer, before = experts(model)[0], experts(dense)[0]
        rows = slice(2 * 48, 3 * 48)
        kept, weight = layer.matrix[rows] != 0, before.matrix[rows]
        assert int(kept.sum()) == 48 * 16 // 2
        largest = weight.abs() >= weight.abs().flatten().kthvalue(48 * 16 // 2 + 1).values
        assert torch.equal(kept, largest) == (method == "magnitude")


def test_many_experts_without_tokens_are_noted_as_ranges():
    """A layer may have hundreds of experts."""
    model = mixtral(experts=8)
    always = lambda module, args, output: (*output[:2], torch.tensor([0, 5]).expand_as(output[2]))  # noqa: E731
    model.model.layers[0].mlp.gate.register_forward_hook(always)
    notes = prune(model, sparsity=0.5, lam=1.0).report.notes
    assert "model.layers.0.mlp.experts.gate_up_proj: experts 1 to 4, 6, 7 read fewer than 4 tokens" in " ".join(notes)


def test_under_calibrated_experts_do_not_affect_the_others():
    """Expert 2 has no token; expert 0 is solved as if alone."""
    model = starving(mixtral())
    dense, batches = copy.deepcopy(model), split_batches(token_batches(), 1)
    layer, before = experts(model)[1], experts(dense)[1]
    statistics = observe(dense, [before], batches)[before.name]
    options = dict(sparsity=0.5, lam=0.5, under_calibrated_experts="routed")
    prune(model, batches, **options, targets=[r"0\.mlp\.experts\.down"])
    rows = slice(0, 16)
    weight, gradients = before.matrix[rows], statistics.gradients.gradients[:, rows]
    alone = prune_weight(weight, statistics.inputs[0], gradients, config=MoonshotConfig(**options))
    torch.testing.assert_close(layer.matrix[rows], alone.weight, rtol=1e-3, atol=1e-5)


def test_without_data_every_expert_is_pruned_by_magnitude():
    model, dense = mixtral(), mixtral()
    MoonshotPruner(model, MoonshotConfig(solver="magnitude", sparsity=0.5)).prune(progress=False)
    for layer, before in zip(experts(model), experts(dense), strict=True):
        for pruned, weight in zip(layer.parameter, before.parameter, strict=True):
            threshold = weight.abs().flatten().kthvalue(weight.numel() // 2).values
            assert torch.equal(pruned != 0, weight.abs() > threshold)


@pytest.mark.parametrize("recover", ["blockwise", "gradual"])
def test_recovery_keeps_the_zeros_of_every_expert(recover):
    model, plain = mixtral(), mixtral()
    options = dict(sparsity=0.5, lam=1.0)
    prune(plain, **options)
    report = prune(model, **options, recover=recover, recover_steps=8).report
    assert all(block.loss_after <= block.loss_before for block in report.recovery)
    for layer in experts(model):
        matrices = layer.matrix.unflatten(0, (4, -1))
        assert all(int((matrix == 0).sum()) == matrix.numel() // 2 for matrix in matrices)
    assert not same(model, plain)


@pytest.mark.parametrize(
    "options",
    [
        {"sparsity": 0.5, "allocation": "fisher"},
        {"sparsity": 0.5, "pattern": "n:4", "allocation": "fisher"},
        {"sparsity": 0.5, "allocation": "owl"},
        {"sparsity": 0.5, "recompute": True},
        {"sparsity": 0.5, "rotation": "learned", "rotation_steps": 3},
    ],
    ids=str,
)
def test_experts_are_pruned_with_every_kind_of_run(options):
    report = prune(mixtral(), lam=0.5, **options).report
    assert abs(report.sparsity - 0.5) < 0.01 and sum("experts" in layer.name for layer in report.layers) == 4


def test_masks_keep_the_zeros_during_training():
    model = mixtral()
    prune(model, sparsity=0.5, lam=1.0)
    zeros = [layer.parameter == 0 for layer in experts(model)]
    masks = Masks(find_pruned(model))
    before = [layer.parameter.detach().clone() for layer in experts(model)]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    for batch in token_batches()[:3]:
        optimizer.zero_grad()
        model(**batch, labels=batch["input_ids"]).loss.backward()
        optimizer.step()
        masks.apply()
    for layer, zero, old in zip(experts(model), zeros, before, strict=True):
        assert not layer.parameter[zero].any() and not torch.equal(layer.parameter, old)


def test_experts_in_one_einsum_are_refused():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.num_experts = 3
            self.up_proj = nn.Parameter(torch.randn(3, 8, 8))

        def forward(self, x):
            return torch.einsum("ti,eoi->to", x, self.up_proj)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.experts = nn.Linear(8, 8), Experts()

        def forward(self, x):
            return self.experts(self.linear(x).flatten(0, -2)).view_as(x)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Block()])

        def forward(self, x):
            return self.layers[0](x)

    data = [{"x": torch.randn(1, 5, 8)} for _ in range(6)]
    with pytest.raises(MoonshotError, match=r"Experts.up_proj: its experts are computed by einsum.*ignore"):
        prune(Model(), data, pattern="2:4", lam=1.0)
    model = Model()
    prune(model, data, pattern="2:4", lam=1.0, ignore=("up_proj",))
    assert model.layers[0].experts.up_proj.all()


def test_invalid_options_are_refused():
    with pytest.raises(MoonshotError, match="under_calibrated_experts=None: use .all. or .magnitude. or .routed."):
        MoonshotConfig(sparsity=0.5, under_calibrated_experts=None)


def test_transposed_layouts_are_detected():
    assert not ExpertsLayer("", (family("mixtral").model.layers[0].mlp.experts,), key="down_proj").transposed
    assert ExpertsLayer("", (family("llama4_text").model.layers[0].feed_forward.experts,), key="down_proj").transposed
    assert expert_parameters(nn.Conv1d(4, 4, 3)) == {} == expert_parameters(nn.Linear(3, 3))
