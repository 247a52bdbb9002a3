"""Checkpoints in the format of compressed-tensors: its own code and plain transformers restore every weight."""

import itertools
import json
import logging
import subprocess
import sys

import pytest
import torch
import transformers as hf
from checkpoints import files, tensors
from packaging.version import Version
from quantized_models import quantize

from optimum_moonshot import MoonshotConfig, MoonshotError, MoonshotPruner, convert, verify
from optimum_moonshot.__main__ import main
from optimum_moonshot.checkpoint.folder import Checkpoint
from optimum_moonshot.checkpoint.measuring import record
from optimum_moonshot.evaluation.metrics import Perplexity

EXPORT = "compressed-tensors"
TEXT = dict(
    vocab_size=96, hidden_size=192, intermediate_size=160, num_hidden_layers=2, num_attention_heads=2,
    max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
INPUTS = torch.arange(5, 37)[None]


def llama(**settings):
    return hf.LlamaForCausalLM(hf.LlamaConfig(**{**TEXT, "num_key_value_heads": 1, **settings}))


def mixtral(**settings):
    return hf.MixtralForCausalLM(
        hf.MixtralConfig(**{**TEXT, "num_key_value_heads": 2, "num_local_experts": 4, **settings})
    )


def quantized(model=None, bits=4, group=128, dtype=torch.float32, **settings):
    """A pruner of a model pruned by magnitude and rounded to grids; some groups have no weights."""
    torch.manual_seed(0)
    model = (model or llama()).to(dtype)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data *= 5
            parameter.data[0], parameter.data[1, :70] = 0, 0
    settings = settings or dict(pattern="unstructured", sparsity=0.5)
    pruner = MoonshotPruner(model, MoonshotConfig(solver="magnitude", **settings))
    pruner.prune(progress=False)
    return quantize(pruner, bits, group)


def entry(folder):
    return json.loads((folder / "config.json").read_text())["quantization_config"]


def packed_names(folder):
    """The names of the packed weights in the files."""
    return {name.removesuffix("_packed") for name in tensors(folder) if name.endswith("_packed")}


def load(folder):
    """The model by plain transformers, with all its weights decompressed."""
    pytest.importorskip("compressed_tensors")
    model = hf.AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        return model, model(INPUTS).logits


def assert_loads_as(folder, dense):
    """The same logits and weights, bit for bit, as the dense checkpoint."""
    (model, logits), (expected, expected_logits) = load(folder), load(dense)
    assert torch.equal(logits, expected_logits)
    weights = dict(model.named_parameters())
    for name, weight in expected.named_parameters():
        assert weights[name].dtype == weight.dtype and torch.equal(weights[name], weight), name


@pytest.mark.parametrize("bits, dtype, group", [*itertools.product((8, 4), DTYPES, (64, 256))], ids=str)
def test_compressed_tensors_restores_every_weight_and_packs_in_the_same_way(bits, dtype, group, tmp_path):
    compressors = pytest.importorskip("compressed_tensors.compressors")
    from compressed_tensors.quantization import QuantizationConfig

    pruner = quantized(bits=bits, group=group, dtype=dtype)
    pruner.save_pretrained(tmp_path, format=EXPORT)
    scheme = QuantizationConfig.model_validate(entry(tmp_path)).config_groups["group_0"]
    compressor = compressors.BaseCompressor.get_value_from_registry("pack-quantized")
    stored, names = tensors(tmp_path), packed_names(tmp_path)
    assert len(names) == 14 and "lm_head.weight" in stored
    for name in names:
        weight = pruner.model.get_parameter(name).detach()
        suffixes = ("packed", "scale", "shape")
        parts = {f"weight_{suffix}": stored.pop(f"{name}_{suffix}") for suffix in suffixes}
        restored = compressor.decompress(parts, scheme)["weight"]
        assert restored.dtype == dtype and torch.equal(restored, weight)
        scale = parts["weight_scale"]
        assert not scale[0].any()
        wide = {"weight": weight.float(), "weight_scale": scale.float().clamp(min=1e-6)}
        again = compressor.compress(wide, scheme)
        assert all(torch.equal(again[key], parts[key]) for key in ("weight_packed", "weight_shape"))
    assert not any("weight_" in name for name in stored)


@pytest.mark.slow
def test_plain_transformers_loads_it_in_a_process_without_this_package(tmp_path):
    pytest.importorskip("compressed_tensors")
    pruner = quantized(dtype=torch.bfloat16)
    for format in ("dense", EXPORT):
        pruner.save_pretrained(tmp_path / format, format=format)
    code = (
        "import sys, torch, transformers\n"
        "load = transformers.AutoModelForCausalLM.from_pretrained\n"
        "dense, model = (load(folder).eval() for folder in sys.argv[1:])\n"
        "inputs = torch.arange(5, 37)[None]\n"
        "assert torch.equal(model(inputs).logits, dense(inputs).logits)\n"
        "weights = dict(model.named_parameters())\n"
        "assert all(torch.equal(weights[name], weight) for name, weight in dense.named_parameters())\n"
        "assert 'optimum_moonshot' not in sys.modules\n"
    )
    folders = [str(tmp_path / format) for format in ("dense", EXPORT)]
    subprocess.run([sys.executable, "-c", code, *folders], check=True, cwd=tmp_path, env={"OMP_NUM_THREADS": "1"})


def test_a_model_that_is_quantized_in_its_solve(tmp_path):
    pruner = MoonshotPruner(llama(), MoonshotConfig(solver="magnitude", pattern="2:4", bits=4, quant_group=64))
    pruner.prune(progress=False)
    for format in ("dense", EXPORT):
        pruner.save_pretrained(tmp_path / format, format=format)
    assert_loads_as(tmp_path / EXPORT, tmp_path / "dense")


MODELS = {
    "llama": (llama, {}),
    "tied": (lambda: llama(tie_word_embeddings=True), dict(pattern="2:4", targets=["lm_head", r"\.1\."])),
    "partly": (llama, dict(pattern="2:4", ignore=[r"layers\.0\.mlp", "q_proj"])),
    "mixtral": (mixtral, {}),
}


old = pytest.mark.skipif(Version(hf.__version__) < Version("5.13"), reason="it initializes experts at random")


@pytest.mark.parametrize("name", [pytest.param(name, marks=old if name == "mixtral" else ()) for name in MODELS])
def test_plain_transformers_loads_the_same_model(name, tmp_path):
    make, settings = MODELS[name]
    pruner = quantized(make(), dtype=torch.bfloat16, **settings)
    pruner.save_pretrained(tmp_path / "dense")
    pruner.save_pretrained(tmp_path / EXPORT, format=EXPORT)
    assert_loads_as(tmp_path / EXPORT, tmp_path / "dense")
    assert len(packed_names(tmp_path / EXPORT)) == {"llama": 14, "tied": 7, "partly": 9, "mixtral": 8 + 2 * 4 * 3}[name]


def test_layers_of_different_bits_have_separate_groups(tmp_path):
    names = [name for name, module in llama().named_modules() if isinstance(module, torch.nn.Linear)]
    pruner = quantized(bits={name: 8 if "mlp" in name else 4 for name in names if "o_proj" not in name})
    pruner.save_pretrained(tmp_path / "dense")
    pruner.save_pretrained(tmp_path / EXPORT, format=EXPORT)
    groups = entry(tmp_path / EXPORT)["config_groups"]
    schemes = [(group["weights"]["num_bits"], group["weights"]["group_size"]) for group in groups.values()]
    assert schemes == [(4, 64), (8, 32)]
    assert entry(tmp_path / EXPORT)["ignore"] == ["lm_head", *(f"model.layers.{n}.self_attn.o_proj" for n in (0, 1))]
    assert_loads_as(tmp_path / EXPORT, tmp_path / "dense")


def test_an_entry_that_vllm_accepts(tmp_path):
    quantized(bits=8).save_pretrained(tmp_path, format=EXPORT)
    (group,) = entry(tmp_path)["config_groups"].values()
    assert group["targets"] == ["Linear"] and group["input_activations"] is None
    weights = dict(num_bits=8, type="int", symmetric=True, dynamic=False, actorder=None, strategy="group")
    assert group["weights"] == {**weights, "group_size": 32}  # divides 192, 160 and 128
    assert "sparsity_config" not in entry(tmp_path) and entry(tmp_path)["ignore"] == ["lm_head"]


def test_a_layer_whose_inputs_no_group_divides_stays_dense_with_a_warning(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        pruner = quantized(llama(intermediate_size=72))
        pruner.save_pretrained(tmp_path / EXPORT, format=EXPORT)
    assert "model.layers.1.mlp.down_proj stays dense: its 72 inputs are not a multiple of 32" in caplog.text
    assert sorted(entry(tmp_path / EXPORT)["ignore"]) == [
        "lm_head", "model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj",
    ]  # fmt: skip
    pruner.save_pretrained(tmp_path / "dense")
    assert_loads_as(tmp_path / EXPORT, tmp_path / "dense")


def test_every_way_writes_the_same_files(tmp_path):
    pruner = quantized(dtype=torch.float16)
    for format in ("dense", "packed", EXPORT):
        pruner.save_pretrained(tmp_path / format, format=format)
    main(["convert", str(tmp_path / "dense"), "--format", EXPORT, "--output", str(tmp_path / "first")])
    convert(tmp_path / "packed", tmp_path / "second", EXPORT)
    pruner.to_runtime("packed")
    pruner.save_pretrained(tmp_path / "third", format=EXPORT)
    expected = files(tmp_path / EXPORT)
    expected.pop("README.md")  # has the folder's name
    for folder in ("first", "second", "third"):
        actual = files(tmp_path / folder)
        assert "from transformers import" in actual.pop("README.md").decode()
        assert actual.keys() == expected.keys()
        assert actual["model.safetensors"] == expected["model.safetensors"]
        assert json.loads(actual["config.json"]) == json.loads(expected["config.json"])


def test_several_files_have_an_index(tmp_path):
    pruner = quantized()
    pruner.save_pretrained(tmp_path / "dense")
    pruner.save_pretrained(tmp_path / EXPORT, format=EXPORT, max_shard_size="300KB")
    weight_map, stored = Checkpoint(tmp_path / EXPORT).weight_map, tensors(tmp_path / EXPORT)
    assert len(set(weight_map.values())) > 2 and weight_map.keys() == stored.keys()
    index = json.loads((tmp_path / EXPORT / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in stored.values())
    assert_loads_as(tmp_path / EXPORT, tmp_path / "dense")


def test_its_metadata_matches_and_can_be_extended(tmp_path):
    pruner = quantized(pattern="2:4", dtype=torch.bfloat16)
    pruner.save_pretrained(tmp_path, format=EXPORT)
    result = verify(tmp_path)
    assert result and result.format == EXPORT and not any("another tool" in note for note in result.notes)
    assert all(layer.follows for layer in result.layers)
    card = (tmp_path / "README.md").read_text()
    assert "vLLM serves it" in card and "import optimum_moonshot" not in card
    assert record(tmp_path, Perplexity(7.5, "wikitext2", 1, 1, 1))
    assert "vLLM serves it" in (tmp_path / "README.md").read_text() and verify(tmp_path)


def changed():
    pruner = quantized()
    with torch.no_grad():
        pruner.model.model.layers[1].mlp.up_proj.weight[3, 100] += 0.01
    return pruner


def dense():
    pruner = MoonshotPruner(llama(), MoonshotConfig(solver="magnitude", pattern="2:4"))
    pruner.prune(progress=False)
    return pruner


GPT2 = dict(vocab_size=96, n_embd=64, n_inner=96, n_layer=2, n_head=2, n_positions=64, bos_token_id=1, eos_token_id=2)
REFUSED = {
    "3 bits": (lambda: quantized(bits=3), 'q_proj: bits=3: compressed-tensors has 8 or 4 bits; use format="packed"'),
    "not quantized": (dense, "the model is not quantized; prune it with bits=8 or 4"),
    "changed": (changed, r"layers\.1\.mlp\.up_proj: row 3 is not on a grid of 4 bits with groups of 128"),
    "no Linear": (
        lambda: quantized(hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2))),
        r'no layer can be packed: transformer\.h\.0\.attn\.c_attn: it is not a Linear: Conv1D;.*; use "packed"',
    ),
    "experts of odd sizes": (
        lambda: quantized(mixtral(intermediate_size=72)),
        r"mlp\.experts\.down_proj: .* its 72 inputs are not a multiple of 32; transformers reads experts only if all",
    ),
    "dense experts": (
        lambda: quantized(mixtral(), pattern="2:4", ignore=["experts"]),
        r"mlp\.experts\.(gate_up|down)_proj: .* it is not quantized; transformers reads experts only if all",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_unsupported_models_are_refused_before_anything_is_written(case, tmp_path):
    make, message = REFUSED[case]
    with pytest.raises(MoonshotError, match=message):
        make().save_pretrained(tmp_path, format=EXPORT)
    assert not list(tmp_path.glob("*.safetensors")) and not (tmp_path / "config.json").exists()


def test_it_is_not_converted_back(tmp_path):
    quantized().save_pretrained(tmp_path / "first", format=EXPORT)
    for format, message in ((EXPORT, "checkpoint already"), ("packed", "convert the dense or the packed one")):
        with pytest.raises(MoonshotError, match=message):
            convert(tmp_path / "first", tmp_path / "second", format)
