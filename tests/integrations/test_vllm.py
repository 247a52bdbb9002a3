"""vLLM serves packed checkpoints as it serves the dense ones of the same weights: `make test-vllm` runs this."""

import gc
import json
import logging
import os
import re
import shutil

import pytest
import torch
import transformers as hf
from damage import flip
from quantized_models import quantize
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from optimum_moonshot import MoonshotConfig, MoonshotError, MoonshotPruner
from optimum_moonshot.checkpoint.weight_files import METHOD, Description

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # before vLLM is imported: errors come as they are
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
vllm = pytest.importorskip("vllm")

EDGE = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
TEXT = dict(
    vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
    max_position_embeddings=64, **EDGE,
)  # fmt: skip
MODELS = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**TEXT, num_key_value_heads=1, head_dim=32)),
    "llama-tied": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**TEXT, tie_word_embeddings=True)),
    "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**TEXT, num_key_value_heads=1)),
    "gpt2": lambda: hf.GPT2LMHeadModel(
        hf.GPT2Config(vocab_size=96, n_embd=64, n_inner=96, n_layer=2, n_head=2, n_positions=64, **EDGE)
    ),
    "gpt-neox": lambda: hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**TEXT)),
    "mixtral": lambda: hf.MixtralForCausalLM(
        hf.MixtralConfig(**TEXT, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2)
    ),
    "qwen2-moe": lambda: hf.Qwen2MoeForCausalLM(  # with shared experts beside those of the router
        hf.Qwen2MoeConfig(
            **TEXT,
            num_key_value_heads=2,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=64,
            shared_expert_intermediate_size=64,
        )  # fmt: skip
    ),
}
PATTERNS = {"2:4": {"pattern": "2:4"}, "0.7": {"pattern": "unstructured", "sparsity": 0.7}}
# The layers that vLLM merges into one.
MERGED = {
    "self_attn.qkv_proj": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "self_attn.o_proj": ["self_attn.o_proj"],
    "mlp.gate_up_proj": ["mlp.gate_proj", "mlp.up_proj"],
    "mlp.down_proj": ["mlp.down_proj"],
}
PROMPTS = [{"prompt_token_ids": [(7 * n * n + 3 * place) % 90 + 5 for place in range(5 + n)]} for n in range(3)]


KINDS = [*((name, pattern) for name in MODELS for pattern in PATTERNS), ("llama", "partly")]
QUANTIZED = [("llama", 4), ("llama-tied", 4), ("qwen2", 4), ("llama", 8), ("mixtral", 4)]  # model, bits
CODES = [("llama", "int4"), ("llama", "int8"), ("mixtral", "int4")]
SAVED = [*KINDS, ("mixtral", "attention"), *CODES, *QUANTIZED]
FLOAT = {"additional_config": {"moonshot": {"inputs": "float"}}}


def save(folder, name, pattern):
    """Saves a pruned model with biases in one folder per format."""
    torch.manual_seed(0)
    model = MODELS[name]()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter *= 5
            elif parameter_name.endswith("bias"):
                parameter.normal_()
    ignored = {"partly": [r"layers\.0\.mlp", r"layers\.1\.self_attn\.q_proj"], "attention": ["experts"]}
    settings = PATTERNS.get(pattern) or {"pattern": "2:4", "ignore": ignored.get(pattern, [])}
    pruner = MoonshotPruner(model, MoonshotConfig(solver="magnitude", **settings))
    pruner.prune(progress=False)
    if pattern.startswith("int"):
        quantize(pruner, int(pattern.removeprefix("int")))
    for format in ("dense", "packed"):
        pruner.save_pretrained(folder / format, format=format)


def save_quantized(folder, name, bits):
    """Saves a quantized model dense and for other readers."""
    torch.manual_seed(0)
    model = MODELS[name]().to(torch.bfloat16)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data *= 5
    pruner = MoonshotPruner(model, MoonshotConfig(solver="magnitude", pattern="2:4"))
    pruner.prune(progress=False)
    quantize(pruner, bits)
    for format in ("dense", "compressed-tensors"):
        pruner.save_pretrained(folder / format, format=format)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Returns the folder of a model; all are saved before vLLM changes classes of transformers."""
    root = tmp_path_factory.mktemp("saved")
    for number, kind in enumerate(SAVED):
        (save if isinstance(kind[1], str) else save_quantized)(root / str(number), *kind)
    return lambda name, pattern: root / str(SAVED.index((name, pattern)))


@pytest.fixture
def packed(saved, tmp_path):
    """A packed copy to damage."""
    return shutil.copytree(saved("llama", "2:4") / "packed", tmp_path / "packed")


def load(folder, **options):
    options = {"distributed_executor_backend": "uni", "dtype": "float32", **options}
    return vllm.LLM(str(folder), skip_tokenizer_init=True, max_model_len=48, enforce_eager=True, **options)


def generate(llm):
    """For every prompt the greedy tokens, and the log-probabilities of the four likeliest at each step."""
    greedy = vllm.SamplingParams(temperature=0, max_tokens=12, logprobs=4, ignore_eos=True, detokenize=False)
    outputs = [request.outputs[0] for request in llm.generate(PROMPTS, greedy, use_tqdm=False)]
    return [
        (list(output.token_ids), [{token: one.logprob for token, one in step.items()} for step in output.logprobs])
        for output in outputs
    ]


def assert_same(actual, expected):
    for (tokens, steps), (expected_tokens, expected_steps) in zip(actual, expected, strict=True):
        assert tokens == expected_tokens
        for step, expected_step in zip(steps, expected_steps, strict=True):
            assert step == pytest.approx(expected_step, abs=1e-4)


def weights(llm):
    """Each linear layer's effective weight, and whether it is packed in memory, by name."""

    def read(model):
        methods = {name: (module, getattr(module, "quant_method", None)) for name, module in model.named_modules()}
        return {
            name: (method.apply(module, torch.eye(module.input_size)).T, bool(method.packed))
            for name, (module, method) in methods.items()
            if type(method).__name__ == "PackedLinearMethod"
        }

    (layers,) = llm.apply_model(read)
    return layers


@pytest.fixture(autouse=True)
def released():
    yield
    gc.collect()
    vllm.distributed.cleanup_dist_env_and_memory()  # a failed load leaves its groups of processes


@pytest.mark.parametrize(("name", "pattern"), KINDS)
def test_packed_is_served_as_dense(name, pattern, saved):
    folder = saved(name, pattern)
    expected = generate(load(folder / "dense"))
    assert len({one for _, steps in expected for step in steps for one in step.values()}) > 30
    llm = load(folder / "packed")
    assert_same(generate(llm), expected)
    layers = weights(llm)
    dense = {"model.layers.0.mlp.gate_up_proj", "model.layers.0.mlp.down_proj"} if pattern == "partly" else set()
    assert {name for name, (_, packed) in layers.items() if not packed} == dense
    fused = {"mixtral": 2, "qwen2-moe": 0}.get(name, 0)  # experts in place of a feed-forward network
    assert len(layers) == (len(MERGED) - fused) * 2


@pytest.mark.parametrize("pattern", [*PATTERNS, "partly"])
def test_weights_are_those_of_the_files_bit_for_bit(pattern, saved):
    folder = saved("llama", pattern)
    stored, served = load_file(folder / "dense" / "model.safetensors"), weights(load(folder / "packed"))
    for layer in ("model.layers.0", "model.layers.1"):
        for name, parts in MERGED.items():
            weight, _ = served[f"{layer}.{name}"]
            assert torch.equal(weight, torch.cat([stored[f"{layer}.{part}.weight"] for part in parts]))


def mixtures(llm):
    """The packed weights of every layer of experts, with their sizes, by its name."""

    def read(model):
        methods = {name: getattr(module, "quant_method", None) for name, module in model.named_modules()}
        return {
            name: {weight: matrix.shape for weight, matrix in method.packed.items()}
            for name, method in methods.items()
            if type(method).__name__ == "PackedExpertsMethod"
        }

    (layers,) = llm.apply_model(read)
    return layers


@pytest.mark.parametrize("pattern", PATTERNS)
def test_experts_are_packed_in_memory(pattern, saved, caplog, monkeypatch):
    folder = saved("mixtral", pattern)
    stored = load_file(folder / "packed" / "moonshot.safetensors")
    assert sum(name.endswith("weight_packed") and ".experts." in name for name in stored) == 2 * 4 * 3
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    llm = load(folder / "packed")
    layers = mixtures(llm)
    assert len(layers) == 2
    assert all(sizes == {"w13_weight": (4 * 192, 64), "w2_weight": (4 * 64, 96)} for sizes in layers.values())
    (names,) = llm.apply_model(lambda model: [name for name, _ in model.named_parameters()])
    assert not any(name.endswith(("w13_weight", "w2_weight")) for name in names)
    assert "2 layers of experts are packed in memory, 0 dense: " in caplog.text


def test_experts_without_zeros_stay_dense(saved, tmp_path, caplog, monkeypatch):
    folder = saved("mixtral", "attention")
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    llm = load(folder / "packed")
    assert list(mixtures(llm).values()) == [{}, {}]
    assert "0 layers of experts are packed in memory, 2 dense: " in caplog.text
    assert_same(generate(llm), generate(load(folder / "dense")))


def formats(model):
    """The formats of the packed weights in memory, by name; not a local function, so that processes can send it."""
    names = {}
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        for key, (codec, _) in getattr(method, "packed", {}).items():
            integers = [part_name for part_name, part in module.named_parameters() if part.dtype == torch.uint8]
            assert not hasattr(module, key) and (f"{key}_codes" in integers) == codec.name.startswith("int")
            names[f"{name}.{key}"] = codec.name
    return names


def packed_weights(name):
    """The weights that vLLM's model multiplies with, without those of embeddings."""
    experts = "block_sparse_moe.experts.routed_experts"
    fused = [f"{experts}.w13_weight", f"{experts}.w2_weight"] if name == "mixtral" else []
    linear = [f"{each}.weight" for each in MERGED if not (fused and each.startswith("mlp"))]
    return [f"model.layers.{layer}.{weight}" for layer in (0, 1) for weight in linear + fused]


@pytest.mark.parametrize(("name", "bits"), CODES)
def test_integer_codes_stay_codes_in_memory(name, bits, saved, caplog, monkeypatch):
    folder = saved(name, bits)
    expected = generate(load(folder / "dense"))
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    llm = load(folder / "packed", **FLOAT)
    assert llm.apply_model(formats) == [dict.fromkeys(packed_weights(name), f"{bits}g64")]
    assert_same(generate(llm), expected)
    count = 4 if name == "mixtral" else 8
    assert f"{count} of {count} weights of linear layers are integer codes, for float inputs" in caplog.text
    assert ("4 of 4 weights of layers of experts are integer codes" in caplog.text) == (name == "mixtral")
    assert "not on a grid" not in caplog.text


@pytest.mark.parametrize(("name", "bits"), CODES)
def test_inputs_are_rounded_to_eight_bits_by_default(name, bits, saved):
    """Up to the first token that differs, the log-probabilities of the likeliest tokens do by less than 0.1."""
    folder = saved(name, bits)
    expected = generate(load(folder / "dense"))
    actual = generate(load(folder / "packed"))
    compared = []
    for (tokens, steps), (expected_tokens, expected_steps) in zip(actual, expected, strict=True):
        for place, (step, expected_step) in enumerate(zip(steps, expected_steps, strict=True)):
            if tokens[:place] == expected_tokens[:place]:
                compared += [abs(step[token] - expected_step[token]) for token in step.keys() & expected_step.keys()]
    assert len(compared) > 40 and 1e-3 < max(compared) < 0.1


def test_weights_in_another_dtype_are_no_codes(saved, caplog, monkeypatch):
    folder = saved("llama", "int4")
    expected = generate(load(folder / "dense", dtype="bfloat16"))
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    llm = load(folder / "packed", dtype="bfloat16")
    assert llm.apply_model(formats) == [dict.fromkeys(packed_weights("llama"), "bitmask")]
    assert "0 of 8 weights of linear layers are integer codes" in caplog.text
    assert re.search(r"such as .*_proj in bfloat16, are not on a grid of 4 bits with groups of 64", caplog.text)
    assert [tokens for tokens, _ in generate(llm)] == [tokens for tokens, _ in expected]


@pytest.mark.parametrize(("name", "value", "message"), [("inputs", "int4", "use .int8."), ("input", "int8", "give ")])
def test_other_options_are_refused(name, value, message, saved):
    with pytest.raises(MoonshotError, match=f"^additional_config: moonshot: .*{name}.*{value}.*: {message}"):
        load(saved("llama", "int4") / "packed", additional_config={"moonshot": {name: value}})


def test_a_dense_checkpoint_is_packed_on_request(saved):
    folder = saved("qwen2", "0.7")
    llm = load(folder / "dense", quantization="moonshot")
    assert all(packed for _, packed in weights(llm).values())
    assert_same(generate(llm), generate(load(folder / "dense")))
    quantized = load(saved("llama", "int4") / "dense", quantization="moonshot")
    assert quantized.apply_model(formats) == [dict.fromkeys(packed_weights("llama"), "int4g64")]


def test_weights_are_not_loaded_again(saved):
    llm = load(saved("llama", "2:4") / "packed")
    with pytest.raises(MoonshotError, match="_proj: it is packed and cannot be reloaded"):
        llm.collective_rpc("reload_weights")


@pytest.mark.parametrize(
    ("name", "pattern"), [("llama-tied", "2:4"), ("mixtral", "2:4"), ("llama", "int4"), ("mixtral", "int4")]
)
def test_two_processes_share_the_layers(name, pattern, saved, monkeypatch):
    """q, k, v, gate and up are sharded by rows, the other layers by columns."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|0")
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # of `formats`
    folder = saved(name, pattern)
    expected = generate(load(folder / "dense"))
    shared = load(folder / "packed", tensor_parallel_size=2, distributed_executor_backend="mp", **FLOAT)
    assert_same(generate(shared), expected)
    if pattern != "2:4":
        first, second = shared.apply_model(formats)
        assert first == dict.fromkeys(packed_weights(name), "int4g64")
        cut = ("down_proj.weight", "w2_weight")  # from input 48 on
        assert second == {weight: "bitmask" if weight.endswith(cut) else "int4g64" for weight in first}


def test_damage_is_refused(packed, monkeypatch):
    flip(packed / "moonshot.safetensors")
    with pytest.raises(MoonshotError, match="it is damaged: its checksum differs"):
        load(packed)
    monkeypatch.setenv("MOONSHOT_VERIFY", "0")
    load(packed)


def test_files_that_are_not_in_the_index_are_refused(packed):
    shutil.copy(packed / "moonshot.safetensors", packed / "other.safetensors")
    with pytest.raises(MoonshotError, match="vLLM would not load the files of the index"):
        load(packed)


@pytest.mark.parametrize("lost", ["model.layers.1.mlp.up_proj.weight", "model.layers.1.input_layernorm.weight"])
def test_a_weight_missing_from_all_files_is_an_error(lost, packed):
    path, index = packed / "moonshot.safetensors", packed / "moonshot.safetensors.index.json"
    with safe_open(path, "pt") as file:
        layers = Description.read(file.metadata()).layers
    tensors = {name: tensor for name, tensor in load_file(path).items() if not name.startswith(lost)}
    layers.pop(lost, None)
    save_file(tensors, path, {METHOD: Description.of(tensors, layers, 1).to_json()})
    index.write_text(json.dumps({"weight_map": dict.fromkeys(tensors, path.name)}))
    with pytest.raises(ValueError, match=r"gate_up_proj: only 6144 of its 12288|not initialized.*1\.input_layernorm"):
        load(packed)


def test_a_later_format_is_refused(packed):
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"]["version"] = 9
    (packed / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="update it"):
        load(packed)


def assert_served_as_dense(folder, abs):
    """The same greedy tokens, and their log-probabilities up to the rounding of 16 bits."""
    expected = generate(load(folder / "dense", dtype="bfloat16"))
    llm = load(folder / "compressed-tensors", dtype="bfloat16")
    for (tokens, steps), (expected_tokens, expected_steps) in zip(generate(llm), expected, strict=True):
        assert tokens == expected_tokens
        chosen = [
            [each[token] for token, each in zip(tokens, by_step, strict=True)] for by_step in (steps, expected_steps)
        ]
        assert chosen[0] == pytest.approx(chosen[1], abs=abs)
    return llm


@pytest.mark.skipif(not torch.cpu._is_avx512_supported(), reason="vLLM's product of 4 bits needs AVX-512")
@pytest.mark.parametrize("name", [name for name, bits in QUANTIZED if bits == 4 and name != "mixtral"])
def test_four_bits_in_compressed_tensors_are_served_as_dense(name, saved, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_INT4_W4A8", "0")  # with AMX, vLLM would round the inputs to 8 bits
    llm = assert_served_as_dense(saved(name, 4), abs=0.05)
    (kernels,) = llm.apply_model(
        lambda model: [type(layer.scheme.kernel).__name__ for layer in model.modules() if hasattr(layer, "scheme")]
    )
    assert kernels == ["CPUWNA16LinearKernel"] * len(MERGED) * 2


def test_eight_bits_in_compressed_tensors_have_no_kernel_for_cpus(saved):
    with pytest.raises(ValueError, match=r"(?s)Failed to find a kernel.*uint8b128.*not supported by CPUWNA16"):
        load(saved("llama", 8) / "compressed-tensors", dtype="bfloat16")


@pytest.mark.skipif(torch.cpu._is_amx_tile_supported(), reason="vLLM multiplies experts of 4 bits with AMX")
def test_experts_of_four_bits_need_amx(saved):
    with pytest.raises(NotImplementedError, match="No WNA16 MoE backend supports the deployment"):
        load(saved("mixtral", 4) / "compressed-tensors", dtype="bfloat16")
