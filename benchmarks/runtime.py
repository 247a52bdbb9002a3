"""Speed of a layer's product with weights packed in memory, relative to torch's dense product and to memory bandwidth.

Every round multiplies once with each kind of matrix, so that other load affects all of them; a ratio is the median
over the rounds. There are enough matrices to exceed every cache. With one thread the figure is processor time,
which other processes do not lengthen; with more it is wall-clock time.

For one row and one thread, a dense product written in the same style (dense_kernel.c) is the reference for memory
bandwidth, because torch's product may be slower.

    python benchmarks/runtime.py                                                      # results/runtime.json
    python benchmarks/runtime.py --rows 1 --kinds 2:4 4:8 8:16 16:32 0.5 --name runtime-patterns
    python benchmarks/runtime.py --rows 1 --threads 1 --dtypes bfloat16 float16 float32 --kinds 0.1 0.2 0.3 0.4 0.5 \
        --sets portable avx2 avx512 vbmi2 --name runtime-sets  # thresholds of packing/bitmask.py
    python benchmarks/runtime.py --quantized    # survivors in 8, 4 and 3 bits, and the layers of torch and torchao
    python benchmarks/runtime.py --quantized --only "2:4 int4" "torchao int4" --rows 1 --threads 1
    python benchmarks/runtime.py --experts 8    # a stack of experts; `rows` are tokens, each of them with two experts
"""

import argparse
import copy
import ctypes
import itertools
import shutil
import statistics
import subprocess
import tempfile
import time
from functools import lru_cache
from pathlib import Path

import common
import torch
from alternatives import ALTERNATIVES, available, converted, tensor_bytes
from random_weights import Setting, random_weight
from torch.nn import Linear, functional

from optimum_moonshot.kernels.library import find_library
from optimum_moonshot.runtime.packed_layers import dense_grouped

USUAL = ["2:4", "0.5", "0.6", "0.7", "0.8", "0.9"]
PACKED = ["2:4", "2:4 int8", "2:4 int4", "2:4 int3", "0.6 int8", "0.6 int4", "0.8", "0.8 int8", "0.8 int4", "int4"]
QUANTIZED = {  # options of --quantized
    "kinds": [*PACKED, *ALTERNATIVES],
    "shapes": [(4096, 2048), (8192, 4096)],
    "rows": [1, 16, 200, 512],
    "dtypes": ["bfloat16"],
    "name": "quantized_runtime",
}
EXPERTS = {  # options of --experts
    "kinds": ["2:4", "0.8", "2:4 int8", "2:4 int4", "int4"],
    "shapes": [(1408, 2048)],
    "rows": [1, 16, 200],
    "dtypes": ["bfloat16", "float32"],
    "threads": [1],
    "rounds": 20,
    "name": "experts_runtime",
}
PER_TOKEN = 2  # experts
SOURCE = Path(__file__).with_name("dense_kernel.c")
Copies = tuple[list, int]  # calls that multiply by a copy of a matrix each, and the bytes of one


@lru_cache
def counts(rows: int, experts: int) -> torch.Tensor:
    """The inputs of each expert, if every input is of a random one."""
    return torch.randint(0, experts, (rows,), generator=torch.Generator().manual_seed(0)).bincount(minlength=experts)


def copies_of(
    name: str, shape: tuple[int, int], dtype: torch.dtype, total: int, device: str = "cpu", experts: int = 0
) -> Copies:
    """Copies of a random matrix, or stack of experts, `total` bytes of them, packed or as an alternative."""
    if name in ALTERNATIVES:
        return module_copies(name, shape, dtype, total, device)
    setting = Setting.of(name)
    codec, weight = setting.codec, random_weight(*shape, setting.pattern, setting.grid(dtype)).to(dtype)
    parts = {name: part.to(device) for name, part in codec.pack(weight, setting.nm).items()}
    plan, size = codec.plan(parts, shape), sum(part.nbytes for part in parts.values())
    copies = [{name: part.clone() for name, part in parts.items()} for _ in range(max(2, total // size))]
    if experts:
        return [
            lambda x, parts=parts: codec.grouped(x, counts(len(x), experts), parts, shape, plan) for parts in copies
        ], size
    return [lambda x, parts=parts: codec.linear(x, parts, shape, None, plan) for parts in copies], size


def module_copies(name: str, shape: tuple[int, int], dtype: torch.dtype, total: int, device: str) -> Copies:
    linear = Linear(shape[1], shape[0], bias=False, dtype=dtype, device=device)
    module = converted(name, linear)
    size = tensor_bytes(module.state_dict().values())
    return [copy.deepcopy(module) for _ in range(max(2, total // size))], size


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


def cells(arguments, shape: tuple[int, int], dtype: torch.dtype, threads: int, kernels: dict) -> list[dict]:
    """The table of one shape, dtype and number of threads."""
    torch.set_num_threads(threads)
    experts, (d_out, d_in) = arguments.experts, shape
    d_out *= experts or 1
    clock = time.thread_time if threads == 1 else time.perf_counter
    total, count = arguments.megabytes << 20, max(2, (arguments.megabytes << 20) // (d_out * d_in * dtype.itemsize))
    weights = [torch.randn(d_out, d_in).to(dtype) for _ in range(count)]
    calls = {"dense": [lambda x, weight=weight: functional.linear(x, weight) for weight in weights]}
    if experts:
        stacks = [weight.unflatten(0, (experts, -1)) for weight in weights]
        calls["dense"] = [lambda x, each=each: dense_grouped(x, counts(len(x), experts), each) for each in stacks]
    sizes = {"dense": weights[0].nbytes}
    for name in arguments.kinds:
        calls[name], sizes[name] = copies_of(name, (d_out, d_in), dtype, total, experts=experts)
    results = []
    for rows in arguments.rows:
        inputs, used = torch.randn(rows * (PER_TOKEN if experts else 1), d_in).to(dtype), dict(calls)
        if rows == threads == 1 and dtype in kernels and not experts:
            used["kernel"] = [with_kernel(kernels[dtype], weight) for weight in weights]
        seconds = measure(used, inputs, max(5, arguments.rounds // (1 + rows // 32)), clock)
        for kind in arguments.kinds:
            cell = {"set": find_library().instruction_set, "dtype": str(dtype).removeprefix("torch.")}
            cell |= {"shape": [*shape], "threads": threads, "rows": rows, "kind": kind}
            for other in used.keys() - {*arguments.kinds}:
                ratios = [dense / ours for dense, ours in zip(seconds[other], seconds[kind], strict=True)]
                cell[f"over_{other}"] = round(statistics.median(ratios), 3)
            cell["ms"] = round(1000 * statistics.median(seconds[kind]), 4)
            cell["dense_ms"] = round(1000 * statistics.median(seconds["dense"]), 4)
            cell["gigabytes_per_second"] = speed(sizes[kind], seconds[kind])
            cell["bits_per_weight"] = round(8 * sizes[kind] / (d_out * d_in), 3)
            if "kernel" in used:
                cell["kernel_gigabytes_per_second"] = speed(sizes["dense"], seconds["kernel"])
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
    shape = "×".join(map(str, first["shape"]))
    labels = [first["set"], shape, first["dtype"], first["threads"], first["rows"], f"{first['dense_ms']:.3f}"]
    return f"| {' | '.join(map(str, [*labels, *shown]))} |"


def parse() -> argparse.Namespace:
    parser = common.parser(__doc__.splitlines()[0])
    parser.add_argument("--shapes", type=read_shape, nargs="+", default=[(4096, 2048)], metavar="D_OUTxD_IN")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 64, 512])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=60)
    kinds = "settings, such as 0.5, 2:4 or 2:4 int4, and layers of torch and torchao"
    parser.add_argument("--kinds", "--only", nargs="+", default=USUAL, help=kinds)
    parser.add_argument("--sets", nargs="+", help="instruction sets; without it, the one that is used here")
    parser.add_argument("--name", default="runtime", help="of the file in results/")
    parser.add_argument("--megabytes", type=int, default=150, help="of the copies of every kind of matrix")
    parser.add_argument(
        "--quantized", action="store_true", help="other defaults: those of the table of quantized weights"
    )
    parser.add_argument("--experts", type=int, default=0, help="of a mixture, with other defaults: shapes are of one")
    chosen = parser.parse_known_args()[0]
    parser.set_defaults(**QUANTIZED if chosen.quantized else EXPERTS if chosen.experts else {})
    return parser.parse_args()


def read_shape(text: str) -> tuple[int, int]:
    d_out, d_in = text.split("x")
    return int(d_out), int(d_in)


def main() -> None:
    arguments = parse()
    library = find_library()
    if library is None:
        raise SystemExit("the package was installed without a C compiler: there is nothing to measure")
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    arguments.kinds = available(arguments.kinds)
    speeds, results = {}, []
    print("| set | shape | dtype | threads | rows | dense, ms | " + " | ".join(arguments.kinds) + " |")
    print("|---|---|---|---:|---:|---:|" + "---:|" * len(arguments.kinds))
    with tempfile.TemporaryDirectory() as folder:
        kernels = dense_kernel(Path(folder))
        for threads in arguments.threads:
            torch.set_num_threads(threads)
            speeds[threads] = round(copy_speed(time.perf_counter), 2)
            for name in arguments.sets or [None]:
                library.use(name)
                for dtype, shape in itertools.product(arguments.dtypes, arguments.shapes):
                    results += cells(arguments, shape, getattr(torch, dtype), threads, kernels)
    common.write(
        arguments.name,
        {
            "shapes": arguments.shapes,
            "experts": arguments.experts,
            "instruction_set": library.instruction_sets[-1],
            "copy_gigabytes_per_second": speeds,
            "versions": common.versions("torch", "torchao"),
            "cells": results,
        },
    )


if __name__ == "__main__":
    main()
