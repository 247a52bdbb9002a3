"""OBC, CAP and OSSCAR with per-row Hessians: this package compared with the literal algorithms, per row.

The literal algorithms are those of `tests/support/reference.py` in float32, with rows batched as in the textbook (32,
fewer if a matrix per row would take more than 1 GiB): every removal updates the inverse Hessian of every row. Both
sides factor or invert their rows' Hessians, and compute the weights at 90% (OSSCAR: 10%). One process, one CPU thread;
the figure is processor time, the median of the repeats; λ = 0.5, as for vision.

* OBC, CAP: statistics are the matrices of the rows, as for many samples (N ≥ d_in). The literal loop runs to the
  end, as the ranking requires. Where that would take minutes, its first and last steps are timed and extrapolated,
  because all steps cost the same; the results are marked.
* OSSCAR: N = 128 samples. The literal algorithm holds a dense inverse Hessian per row in float32; it is timed on a few
  rows and removals, which all cost the same, and extrapolated. Work shared by all rows is divided by d_in rows.

Memory per row is the slope between two numbers of rows of the peak increase of the resident size, each in a separate
process; the input statistics are excluded.

With --shapes, seconds for all layers of a model on --device, with random statistics.
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

from optimum_moonshot.objective.fisher import FisherMatrices, SampleGradients
from optimum_moonshot.objective.patterns import Structured, Unstructured
from optimum_moonshot.objective.quadratic import Quadratic
from optimum_moonshot.solvers.osscar import OSSCAR
from optimum_moonshot.solvers.ranked import CAP, OBC

LAM, SPARSITY, BLOCK, SAMPLES = 0.5, 0.9, 192, 128
OBC_SIZES = (256, 576, 1152, 2304)
BATCH, BATCH_BYTES = 32, 2**30
# Timed steps of the literal loop where all of them would take minutes.
TIMED_STEPS = 48
# Rows pruned together: the batch size of OBC's elimination, and CAP's blocks.
ROWS = {256: 144, 576: 64, 1152: 32, 2304: 16}
CAP_ROWS, CAP_INPUTS = 96, 768
OSSCAR_SIZE, OSSCAR_SHARE = 2048, 0.1
# d_out, d_in and count, of the convolutions of ResNet-50 (without the first) and the linear layers of DeiT-Base.
SHAPES = {
    "resnet-50": [
        *[(64, 64, 1), (64, 576, 3), (256, 64, 4), (64, 256, 2)],
        *[(128, 256, 1), (128, 1152, 4), (512, 128, 4), (512, 256, 1), (128, 512, 3)],
        *[(256, 512, 1), (256, 2304, 6), (1024, 256, 6), (1024, 512, 1), (256, 1024, 5)],
        *[(512, 1024, 1), (512, 4608, 3), (2048, 512, 3), (2048, 1024, 1), (512, 2048, 2)],
    ],
    "deit-base": [(768, 768, 48), (3072, 768, 12), (768, 3072, 12)],
    "toy": [(8, 24, 2), (6, 40, 1)],
}


def problem(solver: str, rows: int, d_in: int, samples: int | None = None, device: str = "cpu"):
    """The objective of a layer on random statistics; the matrices of the rows are of 2·d_in samples."""
    column_block = CAP(block_size=BLOCK).column_block(d_in, Unstructured(SPARSITY)) if solver == "cap" else None
    size = column_block or d_in
    weight, gram, gradients = random_layer(rows, d_in, samples or 8, tokens=max(4, 2 * d_in // 8), device=device)
    fisher = SampleGradients(gradients)
    if samples is None:
        generator = torch.Generator(device).manual_seed(1)
        matrices = torch.empty(rows * d_in // size, size, size, device=device)
        scale = gram.diagonal().sqrt().view(-1, size)
        for index, matrix in enumerate(matrices):
            part = torch.randn(2 * size, size, generator=generator, device=device) * scale[index % len(scale)]
            torch.mm(part.T, part, out=matrix)
        fisher = FisherMatrices(matrices, 2 * size)
    return Quadratic.build(weight, gram, fisher, LAM, column_block=column_block)


def run_ours(solver: str, objective: Quadratic) -> None:
    if solver == "osscar":
        OSSCAR().solve(objective, Structured(OSSCAR_SHARE))
    else:
        made = OBC() if solver == "obc" else CAP(block_size=BLOCK)
        made.solve(objective, Unstructured(SPARSITY))


def damped(objective: Quadratic, rows: slice) -> torch.Tensor:
    """The rows' damped matrices in float32, for the literal algorithms."""
    matrices = objective.row_hessians(rows).float()
    diagonal = matrices.diagonal(dim1=1, dim2=2)
    diagonal += 0.01 * diagonal.mean(1, keepdim=True)
    return matrices


def run_literal(objective: Quadratic, steps: int | None = None) -> None:
    """The textbook loop over batches of rows to the end (or for some steps), and the weights from its trace."""
    weight, size = objective.row_weights, objective.size
    batch = max(1, min(BATCH, BATCH_BYTES // (4 * size * size)))
    for start in range(0, len(weight), batch):
        rows = slice(start, start + batch)
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped(objective, rows)))
        _, losses, trace = reference.greedy(weight[rows], inverse, steps=steps)
        counts = (losses < losses.flatten().kthvalue(max(1, int(SPARSITY * losses.numel()))).values).sum(1)
        torch.stack([trace[count][k] for k, count in enumerate(counts)])


def literal_rows(solver: str, d_in: int) -> int:
    size = BLOCK if solver == "cap" else d_in
    return max(1, min(BATCH, BATCH_BYTES // (4 * size * size)) // (d_in // size))


def seconds(run, *arguments) -> float:
    started = time.process_time()
    run(*arguments)
    return time.process_time() - started


def time_literal(objective: Quadratic) -> tuple[float, int]:
    """Seconds of the textbook loop, and the number of timed steps per row."""
    size = objective.size
    if size <= 4 * TIMED_STEPS:
        return seconds(run_literal, objective), size
    few, more = (seconds(run_literal, objective, steps) for steps in (TIMED_STEPS // 2, TIMED_STEPS))
    step = (more - few) / (TIMED_STEPS - TIMED_STEPS // 2)
    return few + step * (size - TIMED_STEPS // 2), TIMED_STEPS


def compare(solver: str, d_in: int, repeats: int) -> dict:
    """OBC or CAP: seconds and bytes per row, both sides."""
    rows = CAP_ROWS if solver == "cap" else ROWS[d_in]
    objective = problem(solver, rows, d_in)
    theirs = problem(solver, literal_rows(solver, d_in), d_in)
    ours, literal, timed = [], [], 0
    for _ in range(repeats):
        ours.append(seconds(run_ours, solver, objective) / rows)
        spent, timed = time_literal(theirs)
        literal.append(spent / len(theirs.weight))
    return {
        "solver": solver,
        "d_in": d_in,
        "seconds_per_row": {"ours": statistics.median(ours), "literal": statistics.median(literal)},
        "literal_steps_timed": timed,
        "rows": {"ours": rows, "literal": len(theirs.weight)},
        "bytes_per_row": {
            "ours": memory("ours", solver, d_in, rows),
            "literal": memory("literal", solver, d_in, literal_rows(solver, d_in)),
        },
    }


def dense_osscar(objective: Quadratic, removals: int) -> None:
    """The textbook: the inverse Hessian of every row, updated after every removal, and an exact solve at the end."""
    weight, d_in = objective.weight, objective.weight.shape[1]
    matrices = objective.row_hessians(slice(None)).float()
    matrices.diagonal(dim1=1, dim2=2).add_(0.01 * objective.damping_unit)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(matrices))
    gone = torch.zeros(d_in, dtype=torch.bool)
    for _ in range(removals):
        diagonal = inverse.diagonal(dim1=1, dim2=2)
        column = int((weight**2 / diagonal).sum(0).masked_fill(gone, torch.inf).argmin())
        gone[column] = True
        update = inverse[:, :, column] / diagonal[:, column, None]
        weight = weight - update * weight[:, column, None]
        inverse -= update[:, :, None] * inverse[:, column, None, :]
        inverse.diagonal(dim1=1, dim2=2)[:, gone] = 1
    lower = torch.linalg.cholesky(matrices[:, ~gone][:, :, ~gone])
    torch.cholesky_solve(objective.weight[:, ~gone, None], lower)


def compare_osscar(d_in: int, rows: int, dense_rows: int) -> dict:
    """OSSCAR: ours on `rows` rows in full, dense on a few rows and a few removals."""
    objective = problem("osscar", rows, d_in, SAMPLES)
    removals = round(OSSCAR_SHARE * d_in)
    total = seconds(run_ours, "osscar", objective)
    single = problem("osscar", 1, d_in, SAMPLES)
    shared = seconds(run_ours, "osscar", single)  # one row: the shared work plus a negligible part of its own
    few = problem("osscar", dense_rows, d_in, SAMPLES)
    started, more = (seconds(dense_osscar, few, steps) for steps in (2, 10))
    dense = (started + (more - started) / 8 * (removals - 2)) / dense_rows
    return {
        "solver": "osscar",
        "d_in": d_in,
        "samples": SAMPLES,
        "removed": removals,
        "seconds_per_row": {"ours": (total - shared) / (rows - 1) + shared / d_in, "literal": dense},
        "seconds_shared": shared,
        "rows": {"ours": rows, "literal": dense_rows},
        "literal_steps_timed": 10,
        "bytes_per_row": {
            "ours": memory("ours", "osscar", d_in, rows),
            "literal": memory("literal", "osscar", d_in, dense_rows),
        },
    }


def memory(side: str, solver: str, d_in: int, rows: int) -> float:
    """Peak memory per row."""
    peaks = []
    for count in (rows // 2, rows):
        command = [sys.executable, __file__, "--peak", side, solver, str(d_in), str(count)]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        peaks.append(int(json.loads(output)))
    return (peaks[1] - peaks[0]) / (rows - rows // 2)


def print_peak(side: str, solver: str, d_in: int, rows: int) -> None:
    objective = problem(solver, rows, d_in, SAMPLES if solver == "osscar" else None)
    if side == "ours":
        print(peak_above(run_ours, solver, objective))
    elif solver == "osscar":
        print(peak_above(dense_osscar, objective, 2))
    else:
        print(peak_above(run_literal, objective, 4))


def whole_model(name: str, solver: str, device: str) -> dict:
    """Seconds for every layer of a model: each shape once, multiplied by its count."""
    synchronize = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
    layers, total = [], 0.0
    print("| d_out | d_in | times | s each |\n|---|---|---|---|")
    for d_out, d_in, times in SHAPES[name]:
        objective = problem(solver, d_out, d_in, device=device)
        synchronize()
        started = time.perf_counter()
        run_ours(solver, objective)
        synchronize()
        spent = time.perf_counter() - started
        total += spent * times
        layers.append({"d_out": d_out, "d_in": d_in, "times": times, "seconds": spent})
        print(f"| {d_out} | {d_in} | {times} | {spent:.3f} |", flush=True)
        del objective
    print(f"{solver} on all of {name}, {device}: {total:.1f} s")
    return {"shapes": name, "solver": solver, "device": device, "layers": layers, "seconds": total}


def show(row: dict) -> dict:
    took, held = row["seconds_per_row"], row["bytes_per_row"]
    row["time_ratio"], row["memory_ratio"] = took["literal"] / took["ours"], held["literal"] / held["ours"]
    cells = [1e3 * took["literal"], 1e3 * took["ours"], row["time_ratio"]]
    cells += [held["literal"] / 1e6, held["ours"] / 1e6, row["memory_ratio"]]
    print(f"| {row['solver']} | {row['d_in']} | " + " | ".join(f"{cell:.3g}" for cell in cells) + " |", flush=True)
    return row


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--solvers", nargs="+", choices=["obc", "cap", "osscar"], default=["obc", "cap", "osscar"])
    arguments.add_argument("--sizes", type=int, nargs="+", choices=OBC_SIZES, default=OBC_SIZES, help="of OBC")
    arguments.add_argument("--repeats", type=int, default=3)
    arguments.add_argument(
        "--osscar", type=int, nargs=3, default=(OSSCAR_SIZE, 256, 8), metavar=("D_IN", "ROWS", "DENSE")
    )
    arguments.add_argument("--shapes", choices=list(SHAPES), help="time all layers of a model instead")
    arguments.add_argument("--device", default="cpu", help="of that model")
    arguments.add_argument("--peak", nargs=4, help="SIDE SOLVER D_IN ROWS: print one peak, for internal use")
    options = arguments.parse_args()
    if options.shapes:
        solver = options.solvers[0] if len(options.solvers) == 1 else {"deit-base": "cap"}.get(options.shapes, "obc")
        write(f"greedy-{options.shapes}-{options.device}", whole_model(options.shapes, solver, options.device))
        return
    torch.set_num_threads(1)
    if options.peak:
        side, solver, *numbers = options.peak
        print_peak(side, solver, *map(int, numbers))
        return
    results = []
    print("| solver | d_in | ms/row: literal | ours | faster | MB/row: literal | ours | smaller |")
    print("|---|---|---|---|---|---|---|---|")
    for d_in in options.sizes if "obc" in options.solvers else ():
        results.append(show(compare("obc", d_in, options.repeats)))
    if "cap" in options.solvers:
        results.append(show(compare("cap", CAP_INPUTS, options.repeats)))
    if "osscar" in options.solvers:
        results.append(show(compare_osscar(*options.osscar)))
    write("greedy", {"lam": LAM, "sparsity": SPARSITY, "block": BLOCK, "repeats": options.repeats, "layers": results})


if __name__ == "__main__":
    main()
