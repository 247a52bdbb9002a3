"""Experts packed in memory: the dense model's outputs, weights and files, for every family and every routing."""

import copy
import pickle

import pytest
import torch
import transformers as hf
from checkpoint_edits import change_config
from checkpoints import assert_same, tensors
from damage import make_folder
from packed_experts import packed_names
from packed_models import assert_state, held, state
from tiny_configs import tiny_config
from tiny_mixtures import FAMILIES, family, mixtral, prune

from optimum_moonshot import MoonshotError, load_pruned
from optimum_moonshot.packing import Bitmask
from optimum_moonshot.runtime.packed_layers import PackedMixture

IDS = torch.randint(3, 90, (2, 9), generator=torch.Generator().manual_seed(0))
QUICK = ("mixtral", "gpt_oss", "nemotron_h", "qwen3_5_moe_text", "llama4_text", "inkling_text")
EVERY = [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in FAMILIES]
ITSELF = {
    "llama4_text": "Llama4TextExperts multiplies its experts itself",
    "jetmoe": "JetMoeParallelExperts multiplies its experts itself",
    "inkling_text": "InklingSharedExperts multiplies its experts itself",
}


def pruned(model, pattern="2:4", **settings):
    sparsity = {} if ":" in pattern else {"sparsity": 0.6}
    return prune(model, solver="magnitude", pattern=pattern, **sparsity, **settings)


def logits(model):
    with torch.no_grad():
        return model(IDS, use_cache=False).logits


@pytest.mark.parametrize("pattern", ["2:4", "unstructured"])
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]
)
def test_every_family_is_packed_loaded_and_saved(name, pattern, tmp_path):
    model = family(name)
    pruner = pruned(model, pattern)
    expected, before = logits(model), state(model)
    pruner.save_pretrained(tmp_path / "packed", format="packed")
    chosen = pruner.to_runtime("packed")
    entries = {layer: entry for layer, entry in chosen.items() if "experts" in layer}
    assert len(entries) == len([layer for layer in pruner.report.layers if "experts" in layer.name])
    assert set(entries.values()) <= {"packed: requested", f"dense: {ITSELF.get(name)}"}
    assert (f"dense: {ITSELF.get(name)}" in entries.values()) == (name in ITSELF)
    assert held(model) == {layer for layer, entry in chosen.items() if entry.startswith("packed")}
    assert torch.allclose(logits(model), expected, atol=1e-6)

    loaded = load_pruned(tmp_path / "packed", runtime="packed").eval()
    assert {**loaded.moonshot_runtime} == {**chosen}
    assert_same(model, loaded)
    assert torch.equal(logits(loaded), logits(model))
    loaded.save_pretrained(tmp_path / "again")
    stored, again = tensors(tmp_path / "packed"), tensors(tmp_path / "again")
    assert stored.keys() == again.keys() and all(torch.equal(stored[key], again[key]) for key in stored)

    pruner.to_runtime("dense")
    assert_state(model, before)
    assert not any(isinstance(module, PackedMixture) for module in model.modules())


# With weights of experts that transformers reorders, transposes if they do not fit, splits, or initializes itself.
CONVERTED = (
    "Inkling2ForCausalLM",
    "InklingForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
    "Qwen3OmniMoeThinkerForConditionalGeneration",
)


@pytest.mark.parametrize("settings", [{"pattern": "2:4"}, {"bits": 4, "quant_group": 64}], ids=["2:4", "4 bits"])
@pytest.mark.parametrize("name", CONVERTED)
def test_experts_with_conversions_of_their_own_are_loaded_packed(name, settings, tmp_path):
    if not hasattr(hf, name):
        pytest.skip(f"transformers {hf.__version__} has no {name}")
    torch.manual_seed(0)
    model = getattr(hf, name)(tiny_config(getattr(hf, name).config_class.model_type, name)).eval()
    pruner = prune(model, [{"input_ids": IDS}] * 3, solver="magnitude", **settings)
    before = state(model)
    pruner.save_pretrained(tmp_path / "packed", format="packed")
    assert any("w13_weight" in name or "gate_up_proj" in name for name in packed_names(tmp_path / "packed")) or (
        "Omni" in name
    )
    torch.manual_seed(0)
    loaded = load_pruned(tmp_path / "packed", runtime="packed")
    assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(0)))  # nothing was drawn
    mixtures = {path: module for path, module in loaded.named_modules() if isinstance(module, PackedMixture)}
    assert mixtures
    for path, mixture in mixtures.items():
        for weight in mixture.packed:
            assert torch.equal(getattr(mixture, weight), before[f"{path}.{weight}"])
    loaded.save_pretrained(tmp_path / "again", format="dense")
    assert_state(load_pruned(tmp_path / "again"), before)


def experts(name, dtype):
    """A module of 4 experts and the same packed."""
    model = (mixtral() if name == "mixtral" else family(name)).to(dtype)
    pruner = pruned(model, "unstructured")
    path = next(path for path, module in model.named_modules() if path.endswith("experts"))
    dense = copy.deepcopy(model.get_submodule(path))
    pruner.to_runtime("packed")
    return dense, model.get_submodule(path)


def reference(module, hidden, index, weights):
    """The mixture in float64, one expert of one token after another."""
    module = copy.deepcopy(module).double()
    outputs = torch.zeros(hidden.shape, dtype=torch.float64)
    for token, choices in enumerate(index.tolist()):
        for place, expert in enumerate(choices):
            if expert >= len(module.down_proj):
                continue
            up, down = ((each[expert].T if module.is_transposed else each[expert]) for each in (
                module.gate_up_proj if module.has_gate else module.up_proj, module.down_proj
            ))  # fmt: skip
            biases = (module.gate_up_proj_bias[expert], module.down_proj_bias[expert]) if module.has_bias else (0, 0)
            inner = up @ hidden[token].double() + biases[0]
            inner = module._apply_gate(inner[None])[0] if module.has_gate else module.act_fn(inner)
            outputs[token] += weights[token, place] * (down @ inner + biases[1])
    return outputs


def routes(tokens, count):
    """The experts of every token, [tokens, 2], by what is special about them."""
    spread = torch.stack([torch.arange(tokens) % count, (torch.arange(tokens) + 1) % count], 1)
    return {
        "spread": spread,
        "an expert without tokens": torch.where(spread == 2, 0, spread),
        "all tokens to one expert": torch.tensor([[1, 3]]).expand(tokens, 2),
        "experts of other processes": torch.where(spread == 2, count, spread),
        "one token": spread[:1],
        "no token": spread[:0],
    }


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "nemotron_h", "aria_text"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_routing_gives_the_sum_of_the_experts(name, dtype):
    dense, packed = experts(name, dtype)
    if not hasattr(dense, "down_proj"):
        pytest.skip("early releases of transformers have other experts in Aria")
    size = dense.down_proj.shape[1 if not dense.is_transposed else 2]
    for index in routes(40, len(dense.down_proj)).values():
        hidden = torch.randn(len(index), size).to(dtype)
        weights = torch.rand(index.shape).to(dtype)
        with torch.no_grad():
            outputs = packed(hidden, index, weights)
        exact = reference(dense, hidden, index, weights)
        assert outputs.dtype == dtype and outputs.shape == hidden.shape
        assert torch.allclose(outputs.double(), exact, atol=1e-6 if dtype == torch.float32 else 5e-2, rtol=1e-2)


@pytest.mark.parametrize("ignored", [None, "down_proj"])
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_gradients_reach_inputs_and_routing_weights(name, ignored):
    dense, packed = experts(name, torch.float32)
    if ignored:
        packed.unpack(ignored)
    dense.config._experts_implementation = "eager"
    hidden = torch.randn(6, dense.down_proj.shape[1 if not dense.is_transposed else 2], requires_grad=True)
    index, weights = routes(6, len(dense.down_proj))["an expert without tokens"], torch.rand(6, 2, requires_grad=True)
    towards = torch.randn(hidden.shape)
    gradients = [
        torch.autograd.grad((module(hidden, index, weights) * towards).sum(), (hidden, weights))
        for module in (dense, packed)
    ]
    for expected, actual in zip(*gradients, strict=True):
        assert expected.any() and torch.allclose(actual, expected, atol=1e-6)


def test_the_dense_weights_are_not_in_memory():
    model = mixtral().bfloat16()
    pruner = pruned(model)
    layers = [layer for layer in pruner.report.layers if "experts" in layer.name]
    dense = sum(layer.shape[0] * layer.shape[1] * 2 for layer in layers)
    pruner.to_runtime("packed")
    mixtures = [module for module in model.modules() if isinstance(module, PackedMixture)]
    buffers = sum(buffer.nbytes for mixture in mixtures for buffer in mixture.buffers())
    assert buffers == sum(mixture.packed_bytes for mixture in mixtures) == dense * 9 // 16
    assert sum(mixture.dense_bytes for mixture in mixtures) == dense
    assert not any(parameter.ndim == 3 for parameter in model.parameters())
    assert all(tensor.is_meta for mixture in mixtures for tensor in mixture.origin.parameters())


@pytest.mark.parametrize("name, most", [("mixtral", 0), ("gpt_oss", 1)])
def test_loading_unpacks_at_most_one_expert_at_a_time(name, most, tmp_path, monkeypatch):
    """Stored by expert, they are stacked as they are; a fused parameter is divided into the matrices of its experts."""
    model = mixtral() if name == "mixtral" else family(name)
    pruned(model).save_pretrained(tmp_path, format="packed")
    sizes, original = [], Bitmask.unpack

    def unpack(self, parts, shape, plan=None):
        sizes.append(shape[0] * shape[1])
        return original(self, parts, shape, plan)

    monkeypatch.setattr(Bitmask, "unpack", unpack)
    load_pruned(tmp_path, runtime="packed")
    largest = max(parameter[0].numel() for parameter in model.parameters() if parameter.ndim == 3)
    assert bool(sizes) == bool(most) and max(sizes, default=0) <= most * largest


def test_a_file_in_another_dtype_is_loaded(tmp_path):
    model = mixtral().bfloat16()
    pruned(model).save_pretrained(tmp_path, format="packed")
    loaded = load_pruned(tmp_path, runtime="packed", dtype=torch.float32)
    assert len(held(loaded)) == 12
    assert torch.allclose(logits(loaded), logits(model.float()), atol=1e-6)


def test_a_weight_that_stays_dense_is_multiplied_beside_a_packed_one(tmp_path):
    model = mixtral()
    pruner = pruned(model, ignore=["experts.down_proj"])
    expected, before = logits(model), state(model)
    pruner.save_pretrained(tmp_path / "before", format="packed")
    pruner.to_runtime("packed")
    assert {name.rpartition(".")[2] for name in held(model) if "experts" in name} == {"gate_up_proj"}
    assert torch.allclose(logits(model), expected, atol=1e-6)
    model.save_pretrained(tmp_path / "after")
    stored, again = tensors(tmp_path / "before"), tensors(tmp_path / "after")
    assert stored.keys() == again.keys() and all(torch.equal(stored[key], again[key]) for key in stored)
    loaded = load_pruned(tmp_path / "after", runtime="packed")
    assert held(loaded) == held(model) and torch.equal(logits(loaded), logits(model))
    pruner.to_runtime("dense")
    assert_state(model, before)


def test_experts_with_other_numbers_of_nonzeros_are_stacked(tmp_path):
    """An expert that packing would not shrink is dense in the files."""
    model = mixtral()
    pruner = pruned(model, "unstructured")
    with torch.no_grad():
        model.model.layers[0].mlp.experts.down_proj[1].normal_()
        model.model.layers[0].mlp.experts.down_proj[2] = 0
    expected = logits(model)
    pruner.save_pretrained(tmp_path, format="packed")
    assert "model.layers.0.block_sparse_moe.experts.1.w2.weight" in tensors(tmp_path)
    loaded = load_pruned(tmp_path, runtime="packed")
    pruner.to_runtime("packed")
    assert_same(model, loaded)
    assert torch.allclose(logits(loaded), expected, atol=1e-6)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_are_independent(copied, tmp_path):
    model = mixtral()
    pruner = pruned(model)
    pruner.to_runtime("packed")
    expected, other = logits(model), copied(model)
    pruner.to_runtime("dense")
    assert len(held(other)) == 12 and torch.equal(logits(other), expected)
    other.save_pretrained(tmp_path)
    assert_same(model, load_pruned(tmp_path))


def test_a_state_dict_replaces_the_packed_tensors():
    first, second = mixtral(), mixtral()
    with torch.no_grad():
        for parameter in second.parameters():
            parameter.mul_(2)
    for model in (first, second):
        pruned(model).to_runtime("packed")
        logits(model)
    second.load_state_dict(first.state_dict())
    assert torch.equal(logits(second), logits(first))


def test_auto_packs_experts_whose_matrices_are_large_enough(monkeypatch):
    model = mixtral()
    pruner = pruned(model)
    entries = {entry for layer, entry in pruner.to_runtime("auto").items() if "experts" in layer}
    assert entries and all(entry.startswith("dense: ") for entry in entries) and not held(model)
    shapes = []

    def decoding(self, shape, pattern, fraction, dtype, device):
        shapes.append((shape, round(fraction, 4)))
        return Bitmask.__mro__[1].decoding(self, shape, pattern, fraction, dtype, device)

    monkeypatch.setattr(Bitmask, "decoding", decoding)
    pruner.to_runtime("auto")
    assert {((48, 16), 0.5312), ((16, 24), 0.5312)} <= set(shapes)  # of one expert, not of all


def test_shared_and_moved_experts_stay_dense():
    model = mixtral()
    pruner = pruned(model)
    layers = model.model.layers
    layers[1].mlp.experts.gate_up_proj = layers[0].mlp.experts.gate_up_proj
    vars(layers[0].mlp.experts)["_hf_hook"] = object()
    chosen = pruner.to_runtime("packed")
    assert chosen["model.layers.0.mlp.experts.gate_up_proj"] == "dense: tied to another weight"
    assert chosen["model.layers.0.mlp.experts.down_proj"] == "dense: accelerate moves it in every call"
    assert chosen["model.layers.1.mlp.experts.down_proj"] == "packed: requested"


def test_a_forward_of_its_own_stays_dense():
    model = mixtral()
    pruner = pruned(model)
    module = model.model.layers[0].mlp.experts
    original = type(module)
    module.__class__ = type("Other", (original,), {"forward": lambda self, *args: original.forward(self, *args) * 2})
    chosen = pruner.to_runtime("packed")
    assert chosen["model.layers.0.mlp.experts.down_proj"] == "dense: Other multiplies its experts itself"


def test_generated_tokens_are_those_of_the_dense_model():
    model = mixtral()
    pruner = pruned(model)
    options = dict(max_new_tokens=12, do_sample=False, eos_token_id=None)
    expected = model.generate(IDS, **options)
    pruner.to_runtime("packed")
    assert torch.equal(model.generate(IDS, **options), expected)


def test_experts_compile_to_one_graph():
    _, packed = experts("mixtral", torch.float32)
    hidden, index = torch.randn(6, 16), routes(6, 4)["an expert without tokens"]
    compiled = torch.compile(packed, fullgraph=True, backend="eager")
    with torch.no_grad():
        expected = packed(hidden, index, torch.ones(6, 2))
        assert torch.allclose(compiled(hidden, index, torch.ones(6, 2)), expected)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"ignore": ["experts.down_proj"]}], ids=["all", "one weight is dense"])
def test_a_model_with_packed_experts_compiles_with_gradients(settings):
    model = mixtral(num_hidden_layers=1)
    pruned(model, **settings).to_runtime("packed")
    torch.compiler.reset()
    expected, gradients = model(IDS, labels=IDS), []
    for called in (torch.compile(model, fullgraph=True, backend="aot_eager"), model):
        outputs = called(IDS, labels=IDS, use_cache=False)
        assert torch.allclose(outputs.logits, expected.logits, atol=1e-6)
        outputs.loss.backward()
        gradients.append({name: each.grad for name, each in model.named_parameters() if each.grad is not None})
        model.zero_grad()
    assert ("model.layers.0.mlp.experts.down_proj" in gradients[0]) == bool(settings)
    for name, each in gradients[1].items():
        assert torch.allclose(gradients[0][name], each, atol=1e-6), name


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"ignore": ["experts.down_proj"]}], ids=["all", "one weight is dense"])
def test_a_model_with_packed_experts_is_exported(settings, tmp_path):
    model = mixtral(num_hidden_layers=1)
    pruned(model, **settings).to_runtime("packed")
    sizes = {"input_ids": {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}, "use_cache": None}
    inputs = {"input_ids": IDS, "use_cache": False}
    program = torch.export.export(model, (), inputs, dynamic_shapes=sizes, strict=False)
    torch.export.save(program, tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2").module()
    for ids in (IDS, IDS[:1, :5]):
        expected = model(ids, use_cache=False).logits
        assert torch.allclose(loaded(input_ids=ids, use_cache=False).logits, expected, atol=1e-6)


@pytest.mark.parametrize("changes", [{"intermediate_size": 100}, {"intermediate_size": 8}, {"num_local_experts": 4}])
def test_experts_of_other_shapes_than_in_config_json_are_refused(tmp_path, changes):
    make_folder(tmp_path, "experts")
    change_config(tmp_path, **changes)
    for runtime in ("dense", "packed"):
        # The first message is of transformers, as far as its release compares the shapes.
        with pytest.raises(MoonshotError, match="cannot load it|its shape in the files is not the one of config.json"):
            load_pruned(tmp_path, runtime=runtime)
