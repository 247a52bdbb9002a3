"""Shared by the benchmarks: synthetic layers, the machine's description, JSON output."""

import argparse
import contextlib
import json
import platform
import resource
import time
from importlib import metadata
from pathlib import Path

import torch

RESULTS = Path(__file__).parent / "results"


def read(name: str) -> dict:
    """The results of one benchmark."""
    content = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return content.get("results", content)


def random_layer(d_out: int, d_in: int, samples: int, tokens: int, seed: int = 0, device: str = "cpu"):
    """A weight with correlated inputs and per-sample gradients like those of a linear layer (sums of δ xᵀ)."""
    generator = torch.Generator(device).manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, generator=generator, device=device)  # noqa: E731
    scale = 0.3 + normal(d_in).abs()
    rank = max(1, d_in // 4)
    mixing = normal(rank, d_in) / rank**0.5
    gram = torch.zeros(d_in, d_in, device=device)
    gradients = torch.empty(samples, d_out, d_in, device=device)
    for n in range(samples):
        inputs = (normal(tokens, rank) @ mixing + 0.3 * normal(tokens, d_in)) * scale
        gram += inputs.T @ inputs
        gradients[n] = (normal(tokens, d_out) * 1e-3).T @ inputs
    return normal(d_out, d_in) / d_in**0.5, gram, gradients


def machine() -> dict:
    """Description of the machine."""
    cpu = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            cpu = line.split(":", 1)[1].strip()
            break
    return {
        "cpu": cpu,
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def versions(*packages: str) -> dict[str, str]:
    """Versions of the installed ones of these packages."""
    installed = {}
    for name in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            installed[name] = metadata.version(name)
    return installed


def decoding_rate(model, new: int, clock=time.perf_counter, **inputs: torch.Tensor) -> float:
    """Tokens per second of greedy decoding after a prompt of one sample, the best of three: the first is slow."""
    options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "eos_token_id": None}
    seconds = []
    for _ in range(3):
        started = clock()
        model.generate(**inputs, pad_token_id=0, **options)
        seconds.append(clock() - started)
    return new / min(seconds)


def peak_bytes() -> int:
    """The process's peak resident size."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def peak_above(run, *arguments) -> int:
    """Peak increase of the resident size during a call; the process must do nothing else."""
    Path("/proc/self/clear_refs").write_text("5")  # reset the high-water mark
    before = _resident("VmRSS")
    run(*arguments)
    return _resident("VmHWM") - before


def _resident(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise OSError(f"no {field} in /proc/self/status: memory is measured on Linux only")


def write(name: str, results: object) -> Path:
    """Write results/<name>.json, with the machine."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"machine": machine(), "results": results}, indent=2) + "\n")
    print(f"wrote {path}")
    return path


def parser(description: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
