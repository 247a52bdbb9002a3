"""vLLM on a CPU with a packed checkpoint and with the dense checkpoint of the same weights: memory and seconds.

A random Llama of 289M parameters in bfloat16, 257M of them pruned by magnitude; each checkpoint in a separate process
that runs all of vLLM. Memory excludes mapped files: the increase by loading the model, after it and at its peak.
Tokens per second are those of greedy decoding after a prompt of 16 tokens, for one request and for eight together; the
first token is that of a prompt of 512. Requires the environment of `make test-vllm`.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from checkpoint import Peak, memory
from common import parser, write
from transformers import LlamaConfig, LlamaForCausalLM

from optimum_moonshot import MoonshotConfig, MoonshotPruner

PATTERNS = {"2:4": {"pattern": "2:4"}, "0.7": {"pattern": "unstructured", "sparsity": 0.7}}


def save(folder: Path, pattern: str, layers: int) -> None:
    """Both checkpoints of a pruned model."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=layers, num_attention_heads=16,
        max_position_embeddings=2048,
    )  # fmt: skip
    settings = MoonshotConfig(solver="magnitude", **PATTERNS[pattern])
    pruner = MoonshotPruner(LlamaForCausalLM(config).bfloat16(), settings)
    pruner.prune(progress=False)
    for format in ("dense", "packed"):
        pruner.save_pretrained(folder / format, format=format)


def measure(folder: str, new: int, repeats: int, compiled: bool) -> dict:
    """Measure in this process, with `new` tokens per request; the best of some repeats."""
    import vllm
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    load, loading = BaseModelLoader.load_model, {}

    def watched(*arguments, **options):
        with Peak() as peak:
            started = time.perf_counter()
            model = load(*arguments, **options)
            loading["seconds_to_load"] = time.perf_counter() - started
            loading["bytes_added"] = memory("RssAnon") - peak.before["RssAnon"]
        loading["peak_bytes_added"] = peak.added["RssAnon"]
        return model

    BaseModelLoader.load_model = watched
    llm = vllm.LLM(
        folder, skip_tokenizer_init=True, max_model_len=1024, enforce_eager=not compiled,
        distributed_executor_backend="uni", enable_prefix_caching=False, disable_log_stats=True,
    )  # fmt: skip
    if not new:
        return loading

    def seconds(requests: int, prompt: int, new: int) -> float:
        prompts = [
            {"prompt_token_ids": [(7 * n + 3 * place) % 15000 for place in range(prompt)]} for n in range(requests)
        ]
        parameters = vllm.SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
        started = time.perf_counter()
        llm.generate(prompts, parameters, use_tqdm=False)
        return time.perf_counter() - started

    for requests in (1, 8):
        seconds(requests, 16, 4)
    return {
        **loading,
        "tokens_per_second": {str(n): n * new / min(seconds(n, 16, new) for _ in range(repeats)) for n in (1, 8)},
        "seconds_to_first_token_of_512": min(seconds(1, 512, 1) for _ in range(repeats)),
    }


def run(folder: Path, options: argparse.Namespace) -> dict:
    """`measure` in a separate process."""
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    settings = ["--new", str(options.new), "--repeats", str(options.repeats), *["--compiled"] * options.compiled]
    command = [sys.executable, __file__, "--measure", str(folder), *settings]
    output = subprocess.run(command, check=True, env=environment, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(output.splitlines()[-1])


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--layers", type=int, default=20)
    arguments.add_argument("--new", type=int, default=48, help="tokens of a request; 0: memory alone")
    arguments.add_argument("--repeats", type=int, default=3)
    arguments.add_argument("--compiled", action="store_true", help="as vLLM does without --enforce-eager")
    arguments.add_argument("--measure", metavar="FOLDER", help="print the figures of one checkpoint")
    arguments.add_argument("--name", default="serving", help="of the results")
    options = arguments.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure, options.new, options.repeats, options.compiled)))
        return
    results = {}
    for pattern in PATTERNS:
        with tempfile.TemporaryDirectory() as root:
            save(Path(root), pattern, options.layers)
            for format in ("dense", "packed"):
                folder = Path(root, format)
                files = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
                result = {"bytes_on_disk": files, **run(folder, options)}
                results.setdefault(pattern, {})[format] = result
                print(pattern, format, result, flush=True)
    write(options.name, results)


if __name__ == "__main__":
    main()
