"""vLLM's server answers with the greedy tokens of the packed checkpoint's weights: `make test-vllm` runs this."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest
import torch
import transformers as hf

from optimum_moonshot import MoonshotConfig, MoonshotPruner

pytest.importorskip("vllm")

PROMPT, TOKENS = "the sky", 12
LIMIT = 300  # seconds to start
OPTIONS = ["--dtype", "float32", "--max-model-len", "48", "--enforce-eager", "--host", "127.0.0.1"]


@pytest.fixture
def packed(tokenizer, tmp_path):
    """A packed checkpoint, and the greedy tokens of its weights in transformers."""
    torch.manual_seed(0)
    sizes = dict(vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2)
    special = dict(max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, **special)).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data *= 5
    pruner = MoonshotPruner(model, MoonshotConfig(solver="magnitude", pattern="2:4"), tokenizer=tokenizer)
    pruner.prune(progress=False)
    pruner.save_pretrained(tmp_path / "packed", format="packed")
    ids = torch.tensor([tokenizer(PROMPT)["input_ids"]])
    settings = dict(max_new_tokens=TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0)
    tokens = model.generate(ids, **settings)[0, ids.shape[1] :].tolist()
    assert len(set(tokens)) > 3
    return tmp_path / "packed", tokens


def free_port():
    with socket.socket() as each:
        each.bind(("127.0.0.1", 0))
        return each.getsockname()[1]


@contextlib.contextmanager
def served(folder, log):
    """The address of a server of the checkpoint, once it answers."""
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), *OPTIONS]
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    with log.open("w") as output:
        server = subprocess.Popen([*command, "--port", str(port)], env=environment, stdout=output, stderr=output)
    try:
        deadline = time.monotonic() + LIMIT
        while True:
            assert server.poll() is None and time.monotonic() < deadline, log.read_text()[-2000:]
            with contextlib.suppress(urllib.error.URLError):
                ask(f"http://127.0.0.1:{port}/v1/models")
                break
            time.sleep(1)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.terminate()
        server.wait(60)


def ask(address, **fields):
    """The answer of the server: to a POST of the fields, without fields to a GET."""
    data = json.dumps(fields).encode() if fields else None
    request = urllib.request.Request(address, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def test_the_server_answers_with_the_greedy_tokens_of_the_packed_model(packed, tmp_path):
    folder, tokens = packed
    log = tmp_path / "server.log"
    with served(folder, log) as address:
        (model,) = ask(f"{address}/models")["data"]
        settings = dict(max_tokens=TOKENS, temperature=0, ignore_eos=True, return_token_ids=True)
        (choice,) = ask(f"{address}/completions", model=model["id"], prompt=PROMPT, **settings)["choices"]
    assert model["id"] == str(folder) and choice["token_ids"] == tokens
    assert choice["text"].split() == hf.AutoTokenizer.from_pretrained(folder).convert_ids_to_tokens(tokens)
    assert "8 linear layers are packed in memory, 0 dense: " in log.read_text()
