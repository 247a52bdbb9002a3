"""The pieces of `gpu.py`: each yields a row of figures whenever there are more of them; the last row counts.

A row has numbers and short texts alone. `seconds` and `peak` (bytes on the device) are compared with `planned_seconds`
and `planned_peak` where the run was planned, and `summary` is printed as it is. Weights and data are random.
"""

import contextlib
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import alternatives
import generate as generation
import rotation
import runtime
import torch
import torch.distributed as dist
import transformers as hf
from plan import drawn
from random_weights import Setting, random_weight
from scale import SHAPES as LLAMAS

from optimum_moonshot import MoonshotConfig, MoonshotPruner, devices
from optimum_moonshot.distributed import ranks
from optimum_moonshot.options import RECIPES

ROOT = Path(__file__).resolve().parents[1]
DEVICE = devices.default_device()
Rows = Iterator[dict]

SHAPES = {
    "1b": LLAMAS["1b"],
    "3b": dict(hidden_size=3072, intermediate_size=8192, num_hidden_layers=28, num_attention_heads=24,
               num_key_value_heads=8, vocab_size=128256, tie_word_embeddings=True),
    "13b": dict(hidden_size=5120, intermediate_size=13824, num_hidden_layers=40, num_attention_heads=40,
                num_key_value_heads=40, vocab_size=32000, tie_word_embeddings=False),
    "tiny": dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2, vocab_size=96, tie_word_embeddings=True),
}  # fmt: skip
# Decoder layers of two shorter runs, where a whole one may not fit into a piece; its seconds follow from theirs.
DEPTHS = (4, 12)
# d_out, d_in of Llama-3's attention and MLP.
MATRICES = [(4096, 4096), (14336, 4096), (4096, 14336)]
BITMASK = ["2:4", "4:8", "16:32", "0.5", "0.8"]
QUANTIZED = ["2:4 int4", "2:4 int8", "0.8 int4", "int4", "torch int4pack", "torch int8pack"]
INPUTS = (1, 4, 16, 64, 512)
# Relative errors of products in bfloat16; those of the alternatives include the rounding of weights to 4 bits.
PACKED_ERROR, ROUNDED_ERROR = 0.01, 0.2
COPIED = 1 << 28  # bytes of the copies of a matrix, more than any cache
OUTCOME = re.compile(r"\b(PASSED|FAILED|ERROR|SKIPPED)\b")


class Piece(NamedTuple):
    """A part of the measurement."""

    run: Callable[[bool], Rows]  # tiny → rows
    aim: float | None = None  # seconds


@contextlib.contextmanager
def device_peak() -> Iterator[list[int]]:
    """The peak bytes on a GPU within the block, of which the largest counts; on a CPU, those of the process.

    A run resets torch's peak for every layer.
    """
    peaks, reset = [], torch.cuda.reset_peak_memory_stats

    def record(*arguments) -> None:
        peaks.append(devices.peak_bytes(DEVICE))
        reset(*arguments)

    devices.release_unused(DEVICE)
    devices.reset_peak(DEVICE)
    with mock.patch.object(torch.cuda, "reset_peak_memory_stats", record):
        yield peaks
    peaks.append(devices.peak_bytes(DEVICE))


def llama(shape: dict) -> hf.LlamaForCausalLM:
    with torch.device("meta"):
        model = hf.LlamaForCausalLM(hf.LlamaConfig(**shape, max_position_embeddings=2048)).bfloat16()
    return drawn(model, DEVICE).eval()


def planned_run(model: torch.nn.Module, config: MoonshotConfig, data: list[dict]) -> Rows:
    """Plan a run, then measure it."""
    pruner, row = MoonshotPruner(model, config), {}
    resident = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    try:
        plan = pruner.plan(data)
    except Exception as error:  # the run is measured all the same
        row["plan_error"] = f"{type(error).__name__}: {error}"[:300]
    else:
        row["planned_seconds"] = plan.seconds["total"] - plan.seconds["saving"]
        row["planned_peak"] = plan.peaks[plan.device] + resident
    yield row
    with device_peak() as peaks:
        started = time.perf_counter()
        report = pruner.prune(data, progress=False)
        devices.wait_for(DEVICE)
        row["seconds"] = time.perf_counter() - started
    row |= {"peak": max(peaks), "phases": report.seconds, "sparsity": report.sparsity, "notes": report.notes}
    yield row


def language(name: str, fields: dict, depths: tuple[int, int] | None, tiny: bool) -> Rows:
    """Prune a Llama of some shape, all of it or two depths."""
    shape = SHAPES["tiny" if tiny else name]
    sizes = {"num_samples": 4, "sequence_length": 16} if tiny else {"num_samples": 128, "sequence_length": 2048}
    config = MoonshotConfig(**{**fields, **sizes})
    ids = torch.randint(shape["vocab_size"], tuple(sizes.values()), generator=torch.Generator().manual_seed(0))
    data, rows = [{"input_ids": part} for part in ids.split(config.batch_size)], []
    if depths is None:
        yield from planned_run(llama(shape), config, data)
        return
    depths = (1, 2) if tiny else depths
    for depth in depths:
        for row in planned_run(llama({**shape, "num_hidden_layers": depth}), config, data):
            yield {**row, "seconds": None, "summary": f"{depth} decoder layers"}
        rows.append(row)
    yield extrapolated(depths, rows, shape["num_hidden_layers"])


def extrapolated(depths: tuple[int, int], rows: list[dict], layers: int) -> dict:
    """The seconds of all decoder layers, linear in the depth; memory is not, once caches move to the host."""

    def at(key: str) -> float | None:
        few, more = (row.get(key) for row in rows)
        if few is None or more is None:
            return None
        return more + (more - few) / (depths[1] - depths[0]) * (layers - depths[1])

    measured = ", ".join(f"{depth}: {row['seconds']:.1f} s" for depth, row in zip(depths, rows, strict=True))
    seconds = {key: at(key) for key in ("seconds", "planned_seconds")}
    return {**seconds, "summary": f"extrapolated to {layers} layers from {measured}", "runs": rows}


def image(make: Callable[[], torch.nn.Module], side: int, samples: int, fields: dict) -> Rows:
    """Prune an image model at λ = 0.5, the default."""
    torch.manual_seed(0)
    model = make().eval().to(DEVICE)
    config = MoonshotConfig(**fields, num_samples=samples, batch_size=min(samples, 64))
    images, labels = torch.randn(samples, 3, side, side), torch.randint(model.config.num_labels, (samples,))
    parts = zip(images.split(config.batch_size), labels.split(config.batch_size), strict=True)
    yield from planned_run(model, config, [{"pixel_values": x, "labels": y} for x, y in parts])


def resnet(samples: int, tiny: bool) -> Rows:
    """ResNet-50 by OBC."""
    small = dict(embedding_size=8, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic")
    config = hf.ResNetConfig(num_labels=10, **small) if tiny else hf.ResNetConfig(num_labels=1000)
    size = (16, 4) if tiny else (224, samples)
    return image(lambda: hf.ResNetForImageClassification(config), *size, {"solver": "obc", "sparsity": 0.5})


def deit(samples: int, tiny: bool) -> Rows:
    """DeiT-Base by CAP."""
    small = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, image_size=16)
    config = hf.DeiTConfig(num_labels=10, patch_size=8, **small) if tiny else hf.DeiTConfig(num_labels=1000)
    size = (16, 4) if tiny else (224, samples)
    return image(lambda: hf.DeiTForImageClassification(config), *size, {"solver": "cap", "sparsity": 0.5})


def learned_rotation(tiny: bool) -> Rows:
    """100 steps of a rotation of Llama-3-8B, from five of them."""
    size = ("demo", 1, 2, 16) if tiny else ("llama-3-8b", None, 5, None)
    row = rotation.measure(*size, "2:4", str(DEVICE), "float32" if tiny else "bfloat16")
    yield {"seconds": 100 * row["step"], "peak": row["peak"], "summary": f"100 steps of {row['step']:.3f} s"}


def call_seconds(calls: list[Callable], inputs: torch.Tensor, repeats: int) -> dict[str, float]:
    """Seconds of a call in eager mode and, on a GPU, in a CUDA graph, which has no overhead on the host."""

    def timed(run: Callable[[], object]) -> float:
        run()  # includes compilation
        devices.wait_for(DEVICE)
        started = time.perf_counter()
        for _ in range(repeats):
            run()
        devices.wait_for(DEVICE)
        return (time.perf_counter() - started) / repeats / len(calls)

    def multiply() -> None:
        for call in calls:
            call(inputs)

    seconds = {"eager": timed(multiply)}
    if devices.is_gpu(DEVICE):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            multiply()
        seconds["graph"] = timed(graph.replay)
    return seconds


def matrix_calls(kind: str, shape: tuple[int, int], total: int) -> tuple[list[Callable], torch.Tensor | None]:
    """Products with copies of a random matrix, and its dense form; None for a format of torch, which rounds it."""
    torch.manual_seed(0)
    if kind == "dense":
        weight = torch.randn(shape, dtype=torch.bfloat16, device=DEVICE)
        copies = [weight.clone() for _ in range(max(2, total // weight.nbytes))]
        return [partial(torch.nn.functional.linear, weight=copy) for copy in copies], weight
    calls, _ = runtime.copies_of(kind, shape, torch.bfloat16, total, str(DEVICE))
    torch.manual_seed(0)  # the matrix of `copies_of`
    if kind in alternatives.ALTERNATIVES:
        return calls, torch.nn.Linear(*shape[::-1], bias=False, dtype=torch.bfloat16, device=DEVICE).weight
    setting = Setting.of(kind)
    return calls, random_weight(*shape, setting.pattern, setting.grid(torch.bfloat16)).to(DEVICE, torch.bfloat16)


@torch.no_grad()
def kernels(kinds: list[str], tiny: bool) -> Rows:
    """Products with packed weights: their errors against float64, and their speed relative to dense."""
    shapes, counts, total, repeats = ([(64, 256)], (1, 20), 1, 1) if tiny else (MATRICES, INPUTS, COPIED, 20)
    inputs = {count: torch.randn(count, max(max(s) for s in shapes), device=DEVICE).bfloat16() for count in counts}
    kinds, cells, wrong = ["dense", *alternatives.available(kinds, str(DEVICE))], [], 0
    for shape in shapes:
        dense: dict[int, dict[str, float]] = {}
        for kind in kinds:
            calls, weight = matrix_calls(kind, shape, total)
            for count in counts:
                x = inputs[count][:, : shape[1]].contiguous()
                exact = x.double() @ weight.double().T
                error = float((calls[0](x) - exact).norm() / exact.norm())
                cell = {"kind": kind, "shape": list(shape), "rows": count, "error": error}
                correct = error < (ROUNDED_ERROR if kind in alternatives.ALTERNATIVES else PACKED_ERROR)
                wrong += not correct
                if correct:
                    seconds = call_seconds(calls, x, repeats)
                    dense.setdefault(count, seconds)
                    cell |= {f"{mode}_us": 1e6 * value for mode, value in seconds.items()}
                    cell |= {f"{mode}_over_dense": dense[count][mode] / value for mode, value in seconds.items()}
                cells.append(cell)
            del calls, weight
            yield {"summary": f"{len(cells)} products, {wrong} of them wrong", "cells": cells}


def generated(tiny: bool) -> Rows:
    """Tokens per second of a Llama of the shape of 1B with packed weights."""
    settings = ["dense", "2:4", "0.8", "2:4 int4"]
    sizes = {**generation.SIZES, **({"hidden_size": 128, "intermediate_size": 256, "vocab_size": 96} if tiny else {})}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2} if tiny else {}
    new, rates = 2 if tiny else 128, {}
    with tempfile.TemporaryDirectory() as folder:
        generation.make(Path(folder), settings, 1 if tiny else 16, sizes=sizes)
        for place, setting in enumerate(settings):
            model = generation.load(setting, Path(folder), place).to(DEVICE)
            generation.generate(model, 4, 2)
            rates[setting] = new / generation.generate(model, 4, new)
            del model
            shown = ", ".join(f"{name} {rate:.1f}" for name, rate in rates.items())
            yield {"tokens_per_second": rates, "summary": f"tokens/s: {shown}"}


def one_process_group(tiny: bool) -> Rows:
    """A run whose statistics and results pass through NCCL (on a CPU gloo), with one process."""
    shape = SHAPES["tiny"] if tiny else {**SHAPES["1b"], "num_hidden_layers": 2}
    config = MoonshotConfig(pattern="2:4", lam=0.9, num_samples=4, sequence_length=16)
    data = [{"input_ids": torch.randint(shape["vocab_size"], (4, 16), generator=torch.Generator().manual_seed(0))}]
    weights, seconds = [], []
    backend = "cpu:gloo,cuda:nccl" if devices.is_gpu(DEVICE) else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        for grouped in (False, True):
            torch.manual_seed(0)
            pruner = MoonshotPruner(llama(shape), config)
            with mock.patch.object(ranks, "several", lambda grouped=grouped: grouped):
                started = time.perf_counter()
                pruner.prune(data, progress=False)
                devices.wait_for(DEVICE)
                seconds.append(time.perf_counter() - started)
            weights.append([parameter.cpu() for parameter in pruner.model.parameters()])
    finally:
        dist.destroy_process_group()
    equal = all(torch.equal(alone, group) for alone, group in zip(*weights, strict=True))
    times = f"{seconds[0]:.1f} s alone, {seconds[1]:.1f} s in a group"
    yield {"equal": equal, "summary": f"{backend}: weights {'equal' if equal else 'DIFFER'}, {times}"}


def tests(arguments: list[str], few: list[str], tiny: bool) -> Rows:
    """Tests of this repository; those that can use a GPU do if there is one."""
    command = [sys.executable, "-m", "pytest", "-v", "-rN", "--tb=line", "-p", "no:cacheprovider"]
    workers = max(1, min(12, (os.cpu_count() or 1) - 2))
    if not tiny and importlib.util.find_spec("xdist"):
        command += ["-n", str(workers)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": ""}
    counts: dict[str, int] = {}
    failures, tail = [], []
    with subprocess.Popen(
        [*command, *(few if tiny else arguments)], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
    ) as running:
        for line in running.stdout or ():
            outcome = OUTCOME.search(line)
            if outcome is None or "tests/" not in line:
                tail = [*tail[-40:], line.rstrip()]
                continue
            counts[outcome[1]] = counts.get(outcome[1], 0) + 1
            if outcome[1] in ("FAILED", "ERROR"):
                failures.append(line[line.index("tests/") :].split(" FAILED")[0].strip())
            if sum(counts.values()) % 100 == 0:
                yield test_row(counts, failures, [])
    yield test_row(counts, failures, tail if running.returncode else [])


def test_row(counts: dict[str, int], failures: list[str], tail: list[str]) -> dict:
    summary = ", ".join(f"{count} {name.lower()}" for name, count in sorted(counts.items())) or "no tests ran"
    return {"summary": summary, "failures": failures[:200], "tail": tail}


def pieces() -> dict[str, Piece]:
    """All pieces, the most valuable first."""
    gpu_tests = ["tests/kernels/test_triton.py", "tests/kernels/test_triton_quantized.py", "tests/test_golden.py"]
    few = ["tests/kernels/test_triton.py", "-k", "offsets"]
    half, nm = {"sparsity": 0.5}, {"pattern": "2:4"}
    aims = {"1b": 60, "3b": 180, "13b": 600}

    def run(name: str, fields: dict, lam: float, depths: tuple[int, int] | None = None) -> Piece:
        return Piece(partial(language, name, {**fields, "lam": lam}, depths), aims[name])

    return {
        "tests-kernels": Piece(partial(tests, gpu_tests, few)),
        "tests-device": Piece(partial(tests, ["tests/distributed/test_other_device.py", "-k", "gpu"], few)),
        "kernels-bitmask": Piece(partial(kernels, BITMASK)),
        "kernels-quantized": Piece(partial(kernels, QUANTIZED)),
        "1b-2:4-0.9": run("1b", nm, 0.9),
        "1b-2:4-1": run("1b", nm, 1.0),
        "nccl": Piece(one_process_group),
        "resnet-50": Piece(partial(resnet, 512), 120),
        "deit-base": Piece(partial(deit, 512), 60),
        "3b-2:4-0.9": run("3b", nm, 0.9),
        "rotation-8b": Piece(learned_rotation, 60),
        "13b-2:4-0.9": run("13b", nm, 0.9, DEPTHS),
        "13b-2:4-1": run("13b", nm, 1.0, DEPTHS),
        "3b-2:4-1": run("3b", nm, 1.0),
        "generate": Piece(generated),
        "notebooks": Piece(partial(tests, ["tests/test_examples.py", "-k", "notebook"], few)),
        "1b-0.5-0.9": run("1b", half, 0.9),
        "1b-0.5-1": run("1b", half, 1.0),
        "13b-2:4-0.9-whole": run("13b", nm, 0.9),
        "tests-all": Piece(partial(tests, ["-m", "not slow"], few)),
        "1b-one-shot": Piece(partial(language, "1b", {"pattern": "2:4", **RECIPES["one-shot"][1]}, None)),
        "3b-0.5-0.9": run("3b", half, 0.9),
        "3b-0.5-1": run("3b", half, 1.0),
        "13b-0.5-0.9": run("13b", half, 0.9, DEPTHS),
        "13b-0.5-1": run("13b", half, 1.0, DEPTHS),
        "resnet-50-4096": Piece(partial(resnet, 4096), 120),
        "deit-base-4096": Piece(partial(deit, 4096), 60),
        "tests-slow": Piece(partial(tests, ["-m", "slow"], few)),
    }
