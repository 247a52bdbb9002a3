"""Cost of selecting λ: a sweep over the paper's seven λ compared with one pruning, in one process.

Both calibrate once. A sweep also solves every layer for each λ, and evaluates the perplexity of the calibration data
for each: one more forward pass per λ. Longer windows increase the shared work, so the ratio falls with them.
"""

import sys
import time
from pathlib import Path

import torch
from calibration import build
from common import parser, peak_bytes, write
from quality import load_demo

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from optimum_moonshot import MoonshotConfig, MoonshotPruner
from optimum_moonshot.sweep.variants import LAMBDAS


def compare(model, data, config: MoonshotConfig, tokenizer=None) -> dict:
    """Seconds of a sweep, and of one pruning with the configuration's λ."""
    pruner = MoonshotPruner(model, config, tokenizer)
    started = time.perf_counter()
    report = pruner.sweep(data, lambdas=LAMBDAS, progress=False)
    swept = time.perf_counter() - started
    parts = report.seconds | {f"λ={entry.lam:g}": entry.seconds for entry in report.entries}
    started = time.perf_counter()
    parts["pruning"] = pruner.prune(data, progress=False).seconds
    pruned = time.perf_counter() - started
    result = {"sweep": swept, "pruning": pruned, "ratio": swept / pruned, "parts": parts, "peak_bytes": peak_bytes()}
    print(result, flush=True)
    return result


def main() -> None:
    arguments = parser(__doc__)
    for name, value in (("layers", 2), ("hidden", 256), ("samples", 128), ("tokens", 2048), ("batch-size", 4)):
        arguments.add_argument(f"--{name}", type=int, default=value)
    arguments.add_argument("--solver", default="sparsegpt")
    options = arguments.parse_args()
    common = dict(solver=options.solver, sparsity=0.6, lam=0.9, num_samples=options.samples)
    demo, tokenizer = load_demo()
    text = str(Path(__file__).resolve().parents[1] / "examples" / "demo_model" / "calibration.txt")
    results = {"shipped, 256 tokens": compare(demo, text, MoonshotConfig(**common, sequence_length=256), tokenizer)}
    ids = torch.randint(3, 2048, (options.samples, options.tokens), generator=torch.Generator().manual_seed(0))
    batches = [{"input_ids": part} for part in ids.split(options.batch_size)]
    config = MoonshotConfig(**common, sequence_length=options.tokens, batch_size=options.batch_size)
    results[f"random, {options.tokens} tokens"] = compare(build(options.layers, options.hidden), batches, config)
    write("sweep", {"options": vars(options), "lambdas": LAMBDAS, "models": results})


if __name__ == "__main__":
    main()
