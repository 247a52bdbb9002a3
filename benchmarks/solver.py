"""SparseGPT with per-row Hessians: this package compared with the literal Algorithm 2 of MOONSHOT (arXiv 2604.13287).

Both sides prune the same synthetic layers (N = 128, λ = 0.9, 60% unstructured) in float32, in one process on one CPU
thread, in turn; the figure is the median processor time. Time per row is that of a square layer: work shared by all
rows (the inverse or the factor of the d_in × d_in matrix) is timed separately and divided by d_in rows. Memory per
row is the slope between two numbers of rows of the peak increase of the resident size, each in a separate
process; weight, Gram matrix and gradients are excluded, and listed.

With --shapes, seconds per decoder layer with every linear layer multi-objective, on --device.
"""

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from common import parser, peak_above, random_layer, write

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
import reference

from optimum_moonshot import MoonshotConfig, prune_weight
from optimum_moonshot.objective.linalg import damped_inverse_factor

SAMPLES, LAM, SPARSITY = 128, 0.9, 0.6
# Rows pruned together by d_in: ours, and as many as fit in memory for the literal algorithm.
ROWS = {512: (512, 128), 1024: (512, 128), 2048: (512, 64), 4096: (128, 16)}
# The same for memory: enough rows to dominate the shared matrix at the peak.
MEMORY_ROWS = {512: (512, 128), 1024: (512, 128), 2048: (1024, 64), 4096: (1024, 16)}
# d_out, d_in of the linear layers of one decoder layer.
SHAPES = {
    "llama-3.2-1b": [(2048, 2048), (512, 2048), (512, 2048), (2048, 2048), (8192, 2048), (8192, 2048), (2048, 8192)],
    "tiny": [(64, 64), (16, 64), (16, 64), (64, 64), (256, 64), (256, 64), (64, 256)],
}


def prune(side: str, weight, gram, gradients) -> None:
    if side == "ours":
        prune_weight(weight, gram, gradients, config=MoonshotConfig(sparsity=SPARSITY, lam=LAM))
    else:
        reference.sparsegpt(weight, gram, gradients, LAM, SPARSITY)


def prepare(side: str, weight, gram) -> None:
    """The part of `prune` that does not depend on the number of rows."""
    if side == "ours":
        damped_inverse_factor(gram, float(gram.diagonal().mean()), 0.01)
    else:
        reference.inverse_hessians(weight[:1], gram, None, 1)


def seconds(run, *arguments) -> float:
    started = time.process_time()
    run(*arguments)
    return time.process_time() - started


def measure_time(d_in: int, repeats: int) -> dict[str, float]:
    """Seconds per row of a square layer, both sides."""
    rows = dict(zip(("ours", "literal"), ROWS[d_in], strict=True))
    weight, gram, gradients = random_layer(max(rows.values()), d_in, SAMPLES, tokens=16)
    times = {side: [] for side in rows}
    for _ in range(repeats):
        for side, count in rows.items():
            shared = seconds(prepare, side, weight, gram)
            total = seconds(prune, side, weight[:count], gram, gradients[:, :count])
            times[side].append((total - shared) / count + shared / d_in)
    return {side: statistics.median(values) for side, values in times.items()}


def measure_memory(d_in: int) -> dict[str, float]:
    """Bytes per row, both sides."""
    slopes = {}
    for side, count in zip(("ours", "literal"), MEMORY_ROWS[d_in], strict=True):
        peaks = []
        for rows in (count // 2, count):
            command = [sys.executable, __file__, "--peak", side, str(d_in), str(rows)]
            output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            peaks.append(int(json.loads(output)))
        slopes[side] = (peaks[1] - peaks[0]) / (count - count // 2)
    return slopes


def compare(sizes: list[int], repeats: int) -> list[dict]:
    results = []
    print("| d_in | ms/row: literal | ours | faster | MB/row: literal | ours | smaller | gradients |")
    print("|---|---|---|---|---|---|---|---|")
    for d_in in sizes:
        took, memory = measure_time(d_in, repeats), measure_memory(d_in)
        row = {
            "d_in": d_in,
            "seconds_per_row": took,
            "time_ratio": took["literal"] / took["ours"],
            "bytes_per_row": memory,
            "memory_ratio": memory["literal"] / memory["ours"],
            "gradient_bytes_per_row": 4 * SAMPLES * d_in,
        }
        results.append(row)
        cells = [1e3 * took["literal"], 1e3 * took["ours"], row["time_ratio"]]
        cells += [memory["literal"] / 1e6, memory["ours"] / 1e6, row["memory_ratio"]]
        cells.append(row["gradient_bytes_per_row"] / 1e6)
        print(f"| {d_in} | " + " | ".join(f"{cell:.3g}" for cell in cells) + " |", flush=True)
    return results


def decoder_layer(name: str, device: str) -> dict:
    """Wall-clock seconds of every linear layer of one decoder layer, λ < 1 and λ = 1."""
    synchronize = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
    layers = []
    print("| d_out | d_in | λ = 0.9, s | λ = 1, s |\n|---|---|---|---|")
    for d_out, d_in in SHAPES[name]:
        weight, gram, gradients = random_layer(d_out, d_in, SAMPLES, tokens=64, device=device)
        row = {"d_out": d_out, "d_in": d_in}
        for lam in (LAM, 1.0):
            for _ in range(2):  # the first run is a warm-up
                synchronize()
                started = time.perf_counter()
                prune_weight(weight, gram, gradients, config=MoonshotConfig(sparsity=SPARSITY, lam=lam))
                synchronize()
                row[f"lam={lam:g}"] = time.perf_counter() - started
        layers.append(row)
        print(f"| {d_out} | {d_in} | {row[f'lam={LAM:g}']:.3f} | {row['lam=1']:.3f} |", flush=True)
        del weight, gram, gradients
    totals = {f"lam={lam:g}": sum(row[f"lam={lam:g}"] for row in layers) for lam in (LAM, 1.0)}
    print(f"one decoder layer of {name} on {device}: {totals}")
    return {"shapes": name, "device": device, "samples": SAMPLES, "layers": layers, "seconds_per_decoder_layer": totals}


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--sizes", type=int, nargs="+", choices=list(ROWS), default=list(ROWS))
    arguments.add_argument("--repeats", type=int, default=3)
    arguments.add_argument("--shapes", choices=list(SHAPES), help="time a decoder layer instead")
    arguments.add_argument("--device", default="cpu", help="of the decoder layer")
    arguments.add_argument("--peak", nargs=3, metavar=("SIDE", "D_IN", "ROWS"), help="print one peak, for internal use")
    options = arguments.parse_args()
    if options.shapes:
        results = decoder_layer(options.shapes, options.device)
        write(f"solver-{options.shapes}-{options.device}", results)
        return
    torch.set_num_threads(1)
    if options.peak:
        side, d_in, rows = options.peak
        layer = random_layer(int(rows), int(d_in), SAMPLES, tokens=16)
        print(peak_above(prune, side, *layer))
        return
    settings = {"samples": SAMPLES, "lam": LAM, "sparsity": SPARSITY, "repeats": options.repeats}
    write("solver", {**settings, "sizes": compare(options.sizes, options.repeats)})


if __name__ == "__main__":
    main()
