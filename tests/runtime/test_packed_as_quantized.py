"""A packed model as a quantized one of transformers: flags, counts, and `dequantize`."""

import copy
import pickle

import pytest
import torch
import transformers as hf
from checkpoints import INPUTS, assert_same, pruned
from packed_models import MIXED, assert_state, held, state
from transformers.trainer_utils import validate_quantization_for_training

from optimum_moonshot import MoonshotError, MoonshotPrunedCheckpoint, load_pruned
from optimum_moonshot.checkpoint.in_memory import to_runtime
from optimum_moonshot.integrations.transformers import MoonshotQuantizer
from optimum_moonshot.packing import find_codec
from optimum_moonshot.runtime.packed_layers import PackedLinear

AUTO = hf.AutoModelForCausalLM


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("packed")
    pruned(dtype=torch.bfloat16).save_pretrained(path, format="packed")
    return path


def load_quantized(folder, **options):
    return AUTO.from_pretrained(folder, quantization_config=MoonshotPrunedCheckpoint(**options))


def assert_flags(model, packed):
    assert model.is_quantized == packed == (getattr(model, "quantization_method", None) == "moonshot")
    assert hasattr(model, "hf_quantizer") == packed == hasattr(model.config, "quantization_config")
    assert all(hasattr(part.config, "_is_quantized") == packed for part in (model, model.model))
    assert ("quantization_config" in model.config.to_dict()) == packed
    assert not packed or model.config.quantization_config.runtime == "packed"


@pytest.mark.parametrize("name", ["llama", "llama-tied-biased"])
def test_flags_and_counts_are_those_of_the_weights_in_memory(name):
    pruner = pruned(name, torch.bfloat16, **MIXED)
    model = pruner.model
    options = [{}, {"only_trainable": True}, {"exclude_embeddings": True}]

    def counts():
        return [part.num_parameters(**each) for part in (model, model.model) for each in options]

    dense, nbytes = counts(), model.get_memory_footprint()
    pruner.to_runtime("packed")
    layers = [module for module in model.modules() if isinstance(module, PackedLinear)]
    packed = sum(module.weight.numel() for module in layers)
    assert packed
    assert_flags(model, packed=True)
    expected = [count - packed * ("only_trainable" in each) for count, each in zip(dense, options * 2, strict=True)]
    assert counts() == expected
    saved = 2 * packed - sum(part.nbytes for module in layers for part in module.parts.values())
    assert nbytes - model.get_memory_footprint() == saved > 0
    pruner.to_runtime("dense")
    assert counts() == dense and model.get_memory_footprint() == nbytes
    assert_flags(model, packed=False)


def test_dequantize_is_the_dense_runtime():
    model, other = (pruned("llama-tied-biased", torch.bfloat16, **MIXED).model for _ in range(2))
    before = state(model)
    for each in (model, other):
        to_runtime(each, "packed")
    assert held(model) and model.dequantize() is model and not held(model)
    assert_state(model, before)
    to_runtime(other, "dense")
    assert model.moonshot_runtime == other.moonshot_runtime and vars(model).keys() == vars(other).keys()
    assert_flags(model, packed=False)
    to_runtime(model, "packed")
    assert model.dequantize(torch.float32).dtype == torch.float32
    with pytest.raises(ValueError, match="need to first quantize"):
        model.dequantize()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_are_dequantized_alone(copied):
    model = pruned().model
    to_runtime(model, "packed")
    other = copied(model)
    other.dequantize()
    assert_flags(model, packed=True)
    assert_flags(other, packed=False)
    assert model.num_parameters() == other.num_parameters()


def test_loaded_models_have_the_flags_of_their_runtime(folder, tmp_path):
    for model in (load_pruned(folder, "packed"), load_quantized(folder, runtime="packed")):
        assert_flags(model, packed=True)
        model.save_pretrained(tmp_path)
        assert_flags(model, packed=True)
        assert_same(AUTO.from_pretrained(tmp_path), model.dequantize())
    for model in (load_pruned(folder), AUTO.from_pretrained(folder), load_quantized(folder, dequantize=True)):
        assert_flags(model, packed=False)
        assert_same(AUTO.from_pretrained(tmp_path), model)


def test_dequantize_contradicts_other_runtimes(folder):
    with pytest.raises(MoonshotError, match="dequantize=True: it contradicts runtime='packed'"):
        MoonshotPrunedCheckpoint("packed", dequantize=True)
    with pytest.raises(MoonshotError, match="dequantize=True: it contradicts runtime='packed'"):
        load_pruned(folder, "packed", quantization_config=MoonshotPrunedCheckpoint(dequantize=True))
    assert not held(load_pruned(folder, quantization_config=MoonshotPrunedCheckpoint(dequantize=True)))


def test_packed_models_are_not_trained_without_adapters(folder):
    model = load_pruned(folder, "packed")
    with pytest.raises(ValueError, match="purely quantized"):
        validate_quantization_for_training(model)
    validate_quantization_for_training(model.dequantize())


def test_generation_compiles_packed_models(folder):
    model = load_pruned(folder, "packed")
    assert model.hf_quantizer.is_compileable and not isinstance(model.hf_quantizer, MoonshotQuantizer)
    assert model.generate(INPUTS[:1], max_new_tokens=3, do_sample=False).shape[1] == INPUTS.shape[1] + 3


@pytest.mark.parametrize("bias", [True, False])
def test_autocast_is_that_of_a_linear(bias):
    linear = torch.nn.Linear(64, 48, bias=bias).bfloat16()
    linear.weight.data[:, ::2] = 0
    codec = find_codec("bitmask")
    packed = PackedLinear(codec, (48, 64), codec.pack(linear.weight.detach(), None), linear.bias)
    x = torch.randn(5, 64, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        outputs = [module(x) for module in (linear, packed)]
    assert outputs[0].dtype == outputs[1].dtype == torch.bfloat16
    assert torch.allclose(outputs[0], outputs[1], rtol=0.02, atol=0.02)
    gradients = [torch.autograd.grad(each.float().square().sum(), x)[0] for each in outputs]
    assert torch.allclose(gradients[0], gradients[1], rtol=0.05, atol=0.05)
    x = x.detach().bfloat16()
    with torch.autocast("cpu", torch.float16):  # of another dtype
        assert torch.allclose(linear(x), packed(x), atol=0.02) and packed(x).dtype == torch.float16
