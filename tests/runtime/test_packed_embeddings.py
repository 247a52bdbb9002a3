"""Word embeddings and heads packed in memory and in files: equal weights and outputs, tied ones once."""

import copy
import pickle
import subprocess
import sys

import pytest
import torch
import transformers as hf
from checkpoints import assert_same, files, tensors
from models import EDGE, TEXT, make, spread
from packed_models import assert_state, held, state
from safetensors.torch import load_file, save_file

from optimum_moonshot import (
    MoonshotConfig,
    MoonshotError,
    MoonshotPrunedCheckpoint,
    MoonshotPruner,
    convert,
    load_pruned,
    verify,
)
from optimum_moonshot.checkpoint.weight_files import described_layers, read_header
from optimum_moonshot.integrations.conversion import unpacked
from optimum_moonshot.packing import quantized as quantized_format
from optimum_moonshot.reports.prune_report import PruneReport
from optimum_moonshot.runtime.packed_layers import PackedEmbedding, PackedLinear

IDS = torch.randint(3, 96, (2, 7), generator=torch.Generator().manual_seed(0))
SETTINGS = dict(solver="magnitude", pattern="2:4", bits=4, quant_group=64)


def projected_opt():
    """Word embeddings of another width than the hidden states, with projections between them."""
    sizes = dict(vocab_size=96, hidden_size=16, ffn_dim=32, num_hidden_layers=2, num_attention_heads=4)
    return spread(hf.OPTForCausalLM(hf.OPTConfig(**sizes, max_position_embeddings=64, word_embed_proj_dim=8, **EDGE)))


def bert_encoder():
    torch.manual_seed(0)
    return spread(hf.BertModel(hf.BertConfig(**TEXT)))


def t5():
    torch.manual_seed(0)
    sizes = dict(vocab_size=96, d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=4)
    return spread(hf.T5ForConditionalGeneration(hf.T5Config(**sizes, decoder_start_token_id=0)))


MODELS = {name: lambda name=name: make(name) for name in ("llama", "llama-tied-biased", "gpt2", "gemma3", "bert")}
MODELS |= {"opt with projections": projected_opt, "bert encoder": bert_encoder, "t5": t5}
TIED = {"llama-tied-biased", "gpt2", "gemma3", "bert", "opt with projections", "t5"}


def quantized(name, dtype=torch.bfloat16, **changes):
    """A pruner that has pruned and quantized a tiny model."""
    pruner = MoonshotPruner(MODELS[name]().to(dtype), MoonshotConfig(**{**SETTINGS, **changes}))
    pruner.prune(progress=False)
    return pruner


@torch.no_grad()
def outputs(model):
    inputs = {"decoder_input_ids": IDS} if model.config.is_encoder_decoder else {}
    return model(input_ids=IDS, **inputs)[0]


def packed_bytes(model):
    """Bytes of all tensors in memory, shared ones once."""
    stored = {tensor.data_ptr(): tensor.nbytes for tensor in (*model.parameters(), *model.buffers()) if tensor.numel()}
    return sum(stored.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_saved_loaded_packed_and_unpacked(name, dtype, tmp_path):
    pruner = quantized(name, dtype)
    model, expected = pruner.model, outputs(pruner.model)
    pruner.save_pretrained(tmp_path / "packed", format="packed")
    stored = tensors(tmp_path / "packed")
    embedding = next(key for key, value in model.named_parameters() if value is model.get_input_embeddings().weight)
    assert f"{embedding}_codes" in stored and embedding not in stored
    # Rows of one byte per weight and one scale; tied heads are not stored again.
    others = {embedding, "lm_head.weight"} if name == "llama" else {embedding}
    assert sum(key.endswith("_codes") for key in stored) == len(pruner.report.layers) + len(others)
    assert stored[f"{embedding}_codes"].numel() == model.get_parameter(embedding).numel()
    assert verify(tmp_path / "packed")

    assert_same(model, type(model).from_pretrained(tmp_path / "packed"))
    loaded = load_pruned(tmp_path / "packed", runtime="packed", inputs="float")
    assert isinstance(loaded.get_input_embeddings(), PackedEmbedding)
    assert torch.equal(loaded.get_input_embeddings().weight, model.get_input_embeddings().weight)
    head = loaded.get_output_embeddings()
    assert (head is not None) == (model.get_output_embeddings() is not None)
    if head is not None:
        assert isinstance(head, PackedLinear) and torch.equal(head.weight, model.get_output_embeddings().weight)
        assert (head.owner is loaded.get_input_embeddings().owner) == (name in TIED)
        assert not (name in TIED and head.owner is not head and [*head.buffers()])
    assert held(loaded) == {key for key, what in loaded.moonshot_runtime.items() if what.startswith("packed: ")}
    tolerance = dict(rtol=1e-4, atol=1e-5) if dtype == torch.float32 else dict(rtol=0.05, atol=0.05)
    assert torch.allclose(outputs(loaded), expected, **tolerance)

    loaded.save_pretrained(tmp_path / "again")
    again = tensors(tmp_path / "again")
    assert again.keys() == stored.keys() and all(torch.equal(again[key], stored[key]) for key in stored)
    assert loaded.num_parameters() == model.num_parameters()
    without = dict(exclude_embeddings=True)
    assert loaded.num_parameters(**without) == model.num_parameters(**without)
    assert_same(model, loaded.dequantize())
    tied = model.get_output_embeddings() is not None and name in TIED
    assert not tied or loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight


@pytest.mark.parametrize("name", ["llama", "llama-tied-biased", "gpt2", "gemma3", "t5"])
def test_packed_in_memory_and_back(name):
    pruner = quantized(name, torch.float32)
    model, before, expected = pruner.model, state(pruner.model), outputs(pruner.model)
    dense = packed_bytes(model)
    chosen = pruner.to_runtime("packed", inputs="float")
    assert chosen == pruner.to_runtime("packed", inputs="float")
    assert isinstance(model.get_input_embeddings(), PackedEmbedding) and packed_bytes(model) < dense
    assert torch.allclose(outputs(model), expected, rtol=1e-4, atol=1e-5)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        head, embeddings = copied.get_output_embeddings(), copied.get_input_embeddings()
        assert head.owner.get_buffer("weight_codes") is not model.get_output_embeddings().owner.weight_codes
        assert (head.owner is embeddings.owner) == (name in TIED)
        assert torch.equal(outputs(copied), outputs(model))
    pruner.to_runtime("dense")
    assert_state(model, before)
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert tied == (name in TIED) and all(parameter.requires_grad for parameter in model.parameters())
    assert not {"tie_weights", "resize_token_embeddings"} & vars(model).keys()


def test_tied_weights_are_kept_once_and_move_together():
    pruner = quantized("llama-tied-biased", torch.float32)
    model = pruner.model
    pruner.to_runtime("packed")
    codes = [key for key in model.state_dict() if key.endswith("_codes") and "layers" not in key]
    assert codes == ["model.embed_tokens.weight_codes"]
    size = packed_bytes(model)
    model.to(torch.bfloat16)
    head, embeddings = model.lm_head, model.model.embed_tokens
    assert head.owner is embeddings and head.dtype == torch.bfloat16 and packed_bytes(model) < size
    assert torch.equal(head.weight, embeddings.weight) and outputs(model).dtype == torch.bfloat16
    model.tie_weights()
    assert head.owner is embeddings and model.lm_head is head and model.all_tied_weights_keys


def test_generation_and_gradients_of_embedded_inputs():
    pruner = quantized("llama-tied-biased", torch.float32)
    model = pruner.model
    options = dict(max_new_tokens=8, do_sample=False, pad_token_id=0)
    expected = model.generate(IDS, **options)
    vectors = model.get_input_embeddings()(IDS).detach()
    pruner.to_runtime("packed", inputs="float")
    assert torch.equal(model.generate(IDS, **options), expected)
    rows = model.get_input_embeddings()(IDS)
    assert torch.equal(rows, vectors) and not rows.requires_grad
    gradients = []
    for runtime in ("packed", "dense"):
        pruner.to_runtime(runtime, inputs="float")
        leaf = vectors.clone().requires_grad_()
        model(inputs_embeds=leaf).logits.square().mean().backward()
        gradients.append(leaf.grad)
    assert torch.allclose(*gradients, rtol=1e-4, atol=1e-7)


@pytest.mark.slow
def test_one_graph_for_the_compiler():
    pruner = quantized("llama-tied-biased", torch.float32)
    expected = outputs(pruner.model)
    pruner.to_runtime("packed", inputs="float")
    compiled = torch.compile(pruner.model, fullgraph=True, backend="eager")
    assert torch.allclose(outputs(compiled), expected, rtol=1e-4, atol=1e-5)


def test_unknown_ids_are_errors():
    pruner = quantized("llama", torch.float32)
    pruner.to_runtime("packed")
    for wrong in (-1, 96):
        with pytest.raises((IndexError, RuntimeError), match="index"):
            pruner.model.get_input_embeddings()(torch.tensor([[wrong]]))


def test_new_sizes_are_refused():
    pruner = quantized("llama-tied-biased")
    model = pruner.model
    pruner.to_runtime("packed")
    assert model.resize_token_embeddings() is model.resize_token_embeddings(96) is model.get_input_embeddings()
    with pytest.raises(MoonshotError, match=r'packed in memory.*to_runtime\("dense"\)'):
        model.resize_token_embeddings(100)
    pruner.to_runtime("dense")
    assert model.resize_token_embeddings(100).num_embeddings == 100


def test_a_tied_head_is_not_repacked_alone():
    pruner = quantized("llama-tied-biased")
    pruner.to_runtime("packed")
    with pytest.raises(MoonshotError, match="tied to the word embeddings"):
        pruner.model.lm_head.pack(pruner.model.lm_head.weight)


@pytest.mark.parametrize("bits", [8, 4])
def test_auto_packs_tied_embeddings_where_the_head_is_faster(bits, monkeypatch, tmp_path):
    pruner = quantized("llama-tied-biased", torch.bfloat16, embedding_bits=bits)
    pruner.save_pretrained(tmp_path, format="packed")
    monkeypatch.setattr(quantized_format, "kernel_obstacle", lambda *_: None)
    monkeypatch.setattr(quantized_format, "kernel_name", lambda *_: "vbmi2")
    for model in (load_pruned(tmp_path, runtime="auto"), pruner.model):
        if model is pruner.model:
            pruner.to_runtime("auto")
        assert model.moonshot_runtime["model.embed_tokens"] == f"packed: vbmi2 kernels for int{bits}g64"
        assert isinstance(model.get_input_embeddings(), PackedEmbedding)
    monkeypatch.setattr(quantized_format, "kernel_obstacle", lambda *_: "slow")
    pruner.to_runtime("auto")
    assert pruner.model.moonshot_runtime["lm_head"] == "dense: slow" and not held(pruner.model)
    assert load_pruned(tmp_path, runtime="auto").moonshot_runtime["lm_head"] == "dense: slow"
    encoder = quantized("bert encoder")
    assert encoder.to_runtime("auto")["embeddings.word_embeddings"] == "packed: rows are looked up"


def test_normalizing_embeddings_stay_dense():
    pruner = quantized("llama")
    pruner.model.get_input_embeddings().max_norm = 1.0
    assert pruner.to_runtime("packed")["model.embed_tokens"] == "dense: its rows are normalized in every call"


def test_a_fresh_process_loads_and_generates(tmp_path):
    pruner = quantized("gemma3")
    expected = pruner.model.generate(IDS, max_new_tokens=4, do_sample=False, pad_token_id=0)
    pruner.save_pretrained(tmp_path, format="packed")
    code = f"""
import torch, transformers, optimum_moonshot
ids = torch.tensor({IDS.tolist()})
for config in (None, optimum_moonshot.MoonshotPrunedCheckpoint(runtime="packed", inputs="float")):
    options = {{}} if config is None else dict(quantization_config=config)
    model = transformers.AutoModelForCausalLM.from_pretrained({str(tmp_path)!r}, dtype="auto", **options)
    tokens = model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0).tolist()
    assert tokens == {expected.tolist()}, tokens
print(type(model.get_input_embeddings()).__name__, type(model.get_output_embeddings()).__name__)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == ["PackedEmbedding", "PackedLinear"], done.stderr


def test_a_base_model_and_one_with_another_head(tmp_path):
    pruner = quantized("llama-tied-biased", torch.float32)
    pruner.save_pretrained(tmp_path, format="packed")
    options = dict(runtime="packed", inputs="float")
    base = hf.LlamaModel.from_pretrained(tmp_path, quantization_config=MoonshotPrunedCheckpoint(**options))
    assert isinstance(base.embed_tokens, PackedEmbedding)
    with torch.no_grad():
        assert torch.allclose(base(IDS)[0], pruner.model.model(IDS)[0], rtol=1e-4, atol=1e-5)
    classifier = hf.LlamaForSequenceClassification.from_pretrained(
        tmp_path, quantization_config=MoonshotPrunedCheckpoint(**options), num_labels=3, pad_token_id=0
    )
    assert isinstance(classifier.model.embed_tokens, PackedEmbedding) and classifier.score.weight.shape == (3, 16)


def test_the_stream_for_other_loaders_has_dense_embeddings(tmp_path):
    """As vLLM reads it."""
    pruner = quantized("llama-tied-biased")
    pruner.save_pretrained(tmp_path, format="packed")
    (path,) = tmp_path.glob("*.safetensors")
    layers = described_layers(read_header(path).metadata)
    dense = dict(unpacked(load_file(path).items(), lambda: layers))
    expected = pruner.model.state_dict()
    assert dense.keys() == expected.keys() - {"lm_head.weight"}
    assert all(torch.equal(dense[key], expected[key]) for key in dense)


def test_converted_between_formats(tmp_path):
    pruner = quantized("gpt2")
    for format in ("dense", "packed"):
        pruner.save_pretrained(tmp_path / format, format=format)
    convert(tmp_path / "dense", tmp_path / "from dense", "packed")
    convert(tmp_path / "packed", tmp_path / "from packed", "dense")
    stored = {name: tensors(tmp_path / name) for name in ("dense", "packed", "from dense", "from packed")}
    for made, expected in (("from dense", "packed"), ("from packed", "dense")):
        assert stored[made].keys() == stored[expected].keys()
        assert all(torch.equal(stored[made][key], stored[expected][key]) for key in stored[made])
    assert files(tmp_path / "dense")["config.json"] == files(tmp_path / "from packed")["config.json"]


def test_changed_embeddings_are_not_declared_as_rounded(tmp_path):
    pruner = quantized("llama-tied-biased", torch.float32)
    with torch.no_grad():
        pruner.model.get_input_embeddings().weight.mul_(torch.rand(96, 16) + 1)
    with pytest.raises(MoonshotError, match="embed_tokens.*not on a grid of 8 bits"):
        pruner.save_pretrained(tmp_path / "packed", format="packed")
    pruner.save_pretrained(tmp_path / "dense", format="dense")
    config = hf.AutoConfig.from_pretrained(tmp_path / "dense")
    assert "embedding_bits" not in config.moonshot and pruner.model.config.moonshot["embedding_bits"] == 8
    report = PruneReport.load(tmp_path / "dense")
    assert report.notes[-1].startswith("word embeddings are no longer on their grid: model.embed_tokens.weight")
    assert report.embedding_bits is None and pruner.report.embedding_bits == 8


def test_verify_checks_the_grid_of_dense_embeddings(tmp_path):
    pruner = quantized("gpt2", torch.float32)
    pruner.save_pretrained(tmp_path, format="dense")
    assert verify(tmp_path)
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    save_file(
        {**weights, "transformer.wte.weight": weights["transformer.wte.weight"] * 1.2345 + 0.01}, path, {"format": "pt"}
    )
    (line,) = verify(tmp_path).mismatches
    assert line == "config.json says 8 bits of the word embeddings: transformer.wte.weight is not on their grid"
