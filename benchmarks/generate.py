"""Text generation with a packed model: tokens per second, time to the first token, memory; transformers, CPU.

    python benchmarks/generate.py                    # a random Llama of the shape of 1B, at 2:4 and 0.8
    python benchmarks/generate.py --layers 4         # a quarter of it

A random model is pruned by magnitude, because speed and memory do not depend on the mask, and saved packed.
Separate processes then load it dense and packed.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from common import parser, peak_bytes, write
from transformers import LlamaConfig, LlamaForCausalLM

from optimum_moonshot import MoonshotConfig, MoonshotPruner, load_pruned

SETTINGS = {"2:4": {"pattern": "2:4"}, "0.5": {"sparsity": 0.5}, "0.7": {"sparsity": 0.7}, "0.8": {"sparsity": 0.8}}


def make(folder: Path, setting: str, layers: int) -> int:
    """Save a packed checkpoint; returns the number of parameters."""
    torch.manual_seed(0)
    sizes = dict(hidden_size=2048, intermediate_size=8192, num_hidden_layers=layers, vocab_size=32_000)
    heads = dict(num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=2048)
    torch.set_default_dtype(torch.bfloat16)
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=True))
    torch.set_default_dtype(torch.float32)
    pruner = MoonshotPruner(model, MoonshotConfig(solver="magnitude", **SETTINGS[setting]))
    pruner.prune(progress=False)
    pruner.save_pretrained(folder, format="packed")
    return model.num_parameters()


@torch.inference_mode()
def measure(folder: str, runtime: str, prompt: int, new: int, threads: int) -> dict:
    """Measure one way of loading."""
    torch.set_num_threads(threads)
    model = load_pruned(folder, runtime=runtime)
    loaded = int(Path("/proc/self/statm").read_text().split()[1]) * 4096
    ids = torch.randint(3, 32_000, (1, prompt), generator=torch.Generator().manual_seed(0))
    options = dict(do_sample=False, pad_token_id=0, eos_token_id=None)
    model.generate(ids[:, :4], max_new_tokens=2, min_new_tokens=2, **options)
    started = time.perf_counter()
    model.generate(ids, max_new_tokens=1, min_new_tokens=1, **options)
    first = time.perf_counter() - started
    started = time.perf_counter()
    model.generate(ids[:, :4], max_new_tokens=new, min_new_tokens=new, **options)
    rate = new / (time.perf_counter() - started)
    return {"tokens_per_second": rate, "first_token_seconds": first, "resident": loaded, "peak": peak_bytes()}


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--layers", type=int, default=16)
    arguments.add_argument("--settings", nargs="+", default=["2:4", "0.8"], choices=list(SETTINGS))
    arguments.add_argument("--prompt", type=int, default=128, help="tokens before the first one is written")
    arguments.add_argument("--new", type=int, default=32)
    arguments.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    arguments.add_argument("--measure", nargs=2, metavar=("FOLDER", "RUNTIME"), help="print the figures of one process")
    options = arguments.parse_args()
    if options.measure:
        print(json.dumps(measure(*options.measure, options.prompt, options.new, options.threads[0])))
        return
    results = []
    for setting in options.settings:
        with tempfile.TemporaryDirectory() as folder:
            made = [sys.executable, "-c", f"import generate; generate.make({folder!r}, {setting!r}, {options.layers})"]
            subprocess.run(made, check=True, cwd=Path(__file__).parent)
            for threads in options.threads:
                for runtime in ("dense", "packed"):
                    sizes = ["--prompt", options.prompt, "--new", options.new, "--threads", threads]
                    command = [sys.executable, __file__, "--measure", folder, runtime, *map(str, sizes)]
                    done = subprocess.run(command, check=True, capture_output=True, text=True)
                    row = json.loads(done.stdout.splitlines()[-1])
                    results.append({"setting": setting, "threads": threads, "runtime": runtime, **row})
                    print(results[-1], flush=True)
    write("generate", {"options": vars(options), "runs": results})


if __name__ == "__main__":
    main()
