"""Speed of a layer's product with weights packed in memory, relative to torch's dense product and to memory bandwidth.

Every round multiplies once with each kind of matrix, so that other load affects all of them; a ratio is the median
over the rounds. There are enough matrices to exceed every cache. With one thread the figure is processor time,
which other processes do not lengthen; with more it is wall-clock time.

For one row and one thread, a dense product written in the same style (dense_kernel.c) is the reference for memory
bandwidth, because torch's product may be slower.

    python benchmarks/runtime.py                                                      # the table of docs/measured.md
    python benchmarks/runtime.py --rows 1 --kinds 2:4 4:8 8:16 16:32 0.5 --name runtime-patterns
    python benchmarks/runtime.py --rows 1 --threads 1 --dtypes bfloat16 float16 float32 --kinds 0.1 0.2 0.3 0.4 0.5 \
        --sets portable avx2 avx512 vbmi2 --name runtime-sets  # thresholds of packing/bitmask_speed.py
"""

import ctypes
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import common
import torch
from torch.nn import functional

from optimum_moonshot.kernels import find_library
from optimum_moonshot.objective.patterns import NM
from optimum_moonshot.packing import find_codec

PATTERNS = {str(pattern): pattern for pattern in (NM(2, 4), NM(4, 8), NM(8, 16), NM(16, 32))}
KINDS = {**PATTERNS, **{f"{tenths / 10}": tenths / 10 for tenths in range(1, 10)}}
USUAL = ["2:4", "0.5", "0.6", "0.7", "0.8", "0.9"]
SOURCE = Path(__file__).with_name("dense_kernel.c")


def matrix(d_out: int, d_in: int, kind, dtype: torch.dtype) -> torch.Tensor:
    scores = torch.rand(d_out, d_in)
    keep = kind.keep(scores) if isinstance(kind, NM) else scores >= kind
    return torch.where(keep, torch.randn(d_out, d_in), 0).to(dtype)


def packed_copies(weight: torch.Tensor, kind, total: int):
    """Enough copies of a packed matrix, as calls that multiply by one, and the bytes of each."""
    codec, shape = find_codec("bitmask"), tuple(weight.shape)
    parts = codec.pack(weight, kind if isinstance(kind, NM) else None)
    plan, size = codec.plan(parts, shape), sum(part.nbytes for part in parts.values())
    copies = [{name: part.clone() for name, part in parts.items()} for _ in range(max(2, total // size))]
    return [lambda x, parts=parts: codec.linear(x, parts, shape, None, plan) for parts in copies], size


def dense_kernel(folder: Path):
    """The C functions of dense_kernel.c by dtype; empty without a compiler."""
    compiler, path = shutil.which("cc"), folder / "dense_kernel.so"
    if compiler is None:
        return {}
    flags = ["-O3", "-ffast-math", "-march=native", "-fPIC", "-shared"]
    subprocess.run([compiler, *flags, str(SOURCE), "-o", str(path)], check=True)
    library = ctypes.CDLL(str(path))
    functions = {torch.bfloat16: library.dense_bf16, torch.float32: library.dense_f32}
    for function in functions.values():
        function.argtypes = [ctypes.c_int64, ctypes.c_int64, *[ctypes.c_void_p] * 3]
        function.restype = None
    return functions


def with_kernel(function, weight: torch.Tensor):
    outputs = torch.empty(len(weight))
    return lambda x: function(*weight.shape, weight.data_ptr(), x.data_ptr(), outputs.data_ptr())


def measure(calls: dict, inputs: torch.Tensor, rounds: int, clock) -> dict[str, list[float]]:
    """Seconds of every call by its kind, after two warm-up rounds."""
    seconds: dict[str, list[float]] = {kind: [] for kind in calls}
    for round_ in range(rounds + 2):
        for kind, copies in calls.items():
            call = copies[round_ % len(copies)]
            started = clock()
            call(inputs)
            seconds[kind].append(clock() - started)
    return {kind: times[2:] for kind, times in seconds.items()}


def copy_speed(clock) -> float:
    """Gigabytes per second, read and written, of a copy that exceeds every cache."""
    source = torch.ones(150_000_000, dtype=torch.uint8)
    target, times = torch.empty_like(source), []
    for _ in range(5):
        started = clock()
        target.copy_(source)
        times.append(clock() - started)
    return 2 * source.nbytes / min(times) / 1e9


def cells(arguments, dtype: torch.dtype, threads: int, kernels: dict) -> list[dict]:
    """The table of one dtype and number of threads."""
    torch.set_num_threads(threads)
    d_out, d_in = arguments.shape
    clock = time.thread_time if threads == 1 else time.perf_counter
    total, count = arguments.megabytes << 20, max(2, (arguments.megabytes << 20) // (d_out * d_in * dtype.itemsize))
    weights = [torch.randn(d_out, d_in).to(dtype) for _ in range(count)]
    calls = {"dense": [lambda x, weight=weight: functional.linear(x, weight) for weight in weights]}
    sizes = {"dense": weights[0].nbytes}
    for name in arguments.kinds:
        kind = KINDS[name]
        calls[name], sizes[name] = packed_copies(matrix(d_out, d_in, kind, dtype), kind, total)
    results = []
    for rows in arguments.rows:
        inputs, used = torch.randn(rows, d_in).to(dtype), dict(calls)
        if rows == threads == 1 and dtype in kernels:
            used["kernel"] = [with_kernel(kernels[dtype], weight) for weight in weights]
        seconds = measure(used, inputs, max(5, arguments.rounds // (1 + rows // 32)), clock)
        for kind in arguments.kinds:
            cell = {"set": find_library().instruction_set, "dtype": str(dtype).removeprefix("torch.")}
            cell |= {"threads": threads, "rows": rows, "kind": kind}
            for other in used.keys() - {*arguments.kinds}:
                ratios = [dense / ours for dense, ours in zip(seconds[other], seconds[kind], strict=True)]
                cell[f"over_{other}"] = round(statistics.median(ratios), 3)
            cell["ms"] = round(1000 * statistics.median(seconds[kind]), 4)
            cell["dense_ms"] = round(1000 * statistics.median(seconds["dense"]), 4)
            cell["gigabytes_per_second"] = round(sizes[kind] / statistics.median(seconds[kind]) / 1e9, 2)
            if "kernel" in used:
                cell["kernel_gigabytes_per_second"] = round(
                    sizes["dense"] / statistics.median(seconds["kernel"]) / 1e9, 2
                )
            results.append(cell)
        print(row(results[-len(arguments.kinds) :]), flush=True)
    return results


def speed(size: int, seconds: list[float]) -> float:
    """Gigabytes per second."""
    return round(size / statistics.median(seconds) / 1e9, 2)


def row(results: list[dict]) -> str:
    """Markdown: speed relative to torch's dense product, and in brackets to the dense kernel."""
    shown = [
        f"{cell['over_dense']:.2f}" + (f" ({cell['over_kernel']:.2f})" if "over_kernel" in cell else "")
        for cell in results
    ]
    first = results[0]
    return f"| {first['set']} | {first['dtype']} | {first['threads']} | {first['rows']} | " + " | ".join(shown) + " |"


def main() -> None:
    parser = common.parser(__doc__.splitlines()[0])
    parser.add_argument("--shape", type=int, nargs=2, default=[4096, 2048], metavar=("D_OUT", "D_IN"))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 64, 512])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--kinds", nargs="+", default=USUAL, choices=list(KINDS))
    parser.add_argument("--sets", nargs="+", help="instruction sets; without it, the one that is used here")
    parser.add_argument("--name", default="runtime", help="of the file in results/")
    parser.add_argument("--megabytes", type=int, default=150, help="of the copies of every kind of matrix")
    arguments = parser.parse_args()
    library = find_library()
    if library is None:
        raise SystemExit("the package was installed without a C compiler: there is nothing to measure")
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    speeds, results = {}, []
    print("| set | dtype | threads | rows | " + " | ".join(arguments.kinds) + " |")
    print("|---|---|---:|---:|" + "---:|" * len(arguments.kinds))
    with tempfile.TemporaryDirectory() as folder:
        kernels = dense_kernel(Path(folder))
        for threads in arguments.threads:
            torch.set_num_threads(threads)
            speeds[threads] = round(copy_speed(time.perf_counter), 2)
            for name in arguments.sets or [None]:
                library.use(name)
                for dtype in arguments.dtypes:
                    results += cells(arguments, getattr(torch, dtype), threads, kernels)
    common.write(
        arguments.name,
        {
            "shape": arguments.shape,
            "instruction_set": library.instruction_sets[-1],
            "copy_gigabytes_per_second": speeds,
            "cells": results,
        },
    )


if __name__ == "__main__":
    main()
