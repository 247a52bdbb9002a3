"""Cost of a complete run: pruning a Llama in units of plain forward+backward passes, and λ < 1 relative to λ = 1.

The unit is one dense forward and backward pass of the model over the calibration data with gradients of every weight,
as in a training step without the optimizer. All cases run sequentially in one process.
"""

import sys
import time
from pathlib import Path

import torch
from common import machine, parser, peak_bytes, write
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from optimum_moonshot import MoonshotConfig, MoonshotPruner


def build(layers: int, hidden: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=2048, hidden_size=hidden, intermediate_size=int(2.75 * hidden), num_hidden_layers=layers,
        num_attention_heads=hidden // 64, num_key_value_heads=max(1, hidden // 128), max_position_embeddings=4096,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def dense_passes(model, batches, device) -> float:
    """Seconds of one forward and backward pass over all batches."""
    synchronize(device)
    started = time.perf_counter()
    for batch in batches:
        ids = batch["input_ids"].to(device)
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    synchronize(device)
    seconds = time.perf_counter() - started
    model.zero_grad()
    return seconds


def synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def main() -> None:
    arguments = parser(__doc__)
    for name, value in (("layers", 16), ("hidden", 512), ("samples", 128), ("tokens", 512), ("batch-size", 8)):
        arguments.add_argument(f"--{name}", type=int, default=value)
    arguments.add_argument("--solvers", nargs="+", default=["sparsegpt", "wanda"])
    arguments.add_argument("--device", default="cpu")
    arguments.add_argument("--name", default="calibration")
    options = arguments.parse_args()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 2048, (options.samples, options.tokens), generator=generator)
    batches = [{"input_ids": part} for part in ids.split(options.batch_size)]
    results = {"options": vars(options), "runs": {}}
    dense = dense_passes(build(options.layers, options.hidden).to(options.device), batches, options.device)
    results["dense_pass_seconds"] = dense
    print(f"one dense forward+backward pass: {dense:.1f} s on {machine()['cpu']}")
    for solver, lam in ((solver, lam) for solver in options.solvers for lam in (1.0, 0.9)):
        model = build(options.layers, options.hidden).to(options.device)
        config = MoonshotConfig(
            solver=solver, lam=lam, sparsity=0.6, num_samples=options.samples, sequence_length=options.tokens,
            batch_size=options.batch_size,
        )  # fmt: skip
        report = MoonshotPruner(model, config).prune(batches, progress=False)
        run = {**report.seconds, "dense_passes": report.seconds["total"] / dense, "peak_bytes": peak_bytes()}
        run["calibration_dense_passes"] = report.seconds["calibration"] / dense
        results["runs"][f"{solver} λ={lam:g}"] = run
        print(f"{solver} λ={lam:g}: {run}")
    runs = results["runs"]
    for solver in options.solvers:
        ratio = runs[f"{solver} λ=0.9"]["total"] / runs[f"{solver} λ=1"]["total"]
        results[f"{solver}_ratio"] = ratio
        print(f"{solver}: λ = 0.9 takes {ratio:.2f} times as long as λ = 1")
    write(options.name, results)


if __name__ == "__main__":
    main()
