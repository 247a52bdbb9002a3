"""Packed and dense checkpoints of a 200M-parameter Llama, 2:4 in bfloat16: bytes, saving, loading, peak memory.

A dense file is memory-mapped, so `from_pretrained` returns before most of it is read. A load is therefore timed until
every weight was read once, from a warm and from a cold page cache. Memory is the peak increase of the resident size of
a fresh process by one load and that reading; mapped pages of a file, which the system may reclaim at any time, are
counted, and also reported separately.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
from common import parser, write

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from optimum_moonshot import MoonshotConfig, MoonshotPruner, load_pruned

UNCHECKED = "from_pretrained, MOONSHOT_VERIFY=0"
LOADERS = {
    "from_pretrained": lambda folder: AutoModelForCausalLM.from_pretrained(folder, dtype="auto"),
    UNCHECKED: lambda folder: AutoModelForCausalLM.from_pretrained(folder, dtype="auto"),
    "load_pruned": lambda folder: load_pruned(folder, dtype="auto"),
    "load_pruned, kept packed": lambda folder: load_pruned(folder, runtime="packed", dtype="auto"),
    "load_pruned, auto": lambda folder: load_pruned(folder, runtime="auto", dtype="auto"),
}


def build(layers: int = 11) -> MoonshotPruner:
    """66 million random weights, and 12.8 million per decoder layer, pruned to 2:4 by magnitude."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=layers, num_attention_heads=16,
        num_key_value_heads=16,
    )  # fmt: skip
    pruner = MoonshotPruner(LlamaForCausalLM(config).bfloat16(), MoonshotConfig(solver="magnitude", pattern="2:4"))
    pruner.prune(progress=False)
    return pruner


def memory(field: str) -> int:
    """Bytes in a line of /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return 1024 * int(line.split()[1])
    raise KeyError(field)


class Peak:
    """Peak increase of the resident memory within the block: in total, and without mapped files."""

    def __enter__(self):
        self.before = {field: memory(field) for field in ("VmRSS", "RssAnon")}
        self.most = dict(self.before)
        self.running = True
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self

    def watch(self):
        while self.running:
            self.most = {field: max(value, memory(field)) for field, value in self.most.items()}
            time.sleep(0.002)

    def __exit__(self, *exception):
        self.running = False
        self.thread.join()
        self.added = {field: self.most[field] - self.before[field] for field in self.most}


def drop_pages(folder: Path) -> None:
    """Drop the file's pages from the page cache."""
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def load(loader: str, folder: Path) -> tuple[float, float]:
    """Seconds until the loader returns, and until every weight was read once."""
    started = time.perf_counter()
    model = LOADERS[loader](folder)
    returned = time.perf_counter() - started
    for tensor in model.state_dict().values():
        tensor.clone()
    return returned, time.perf_counter() - started


def measure(loader: str, folder: Path, repeats: int) -> dict:
    """Load in a separate process; memory is that of its first load."""
    with Peak() as peak:
        load(loader, folder)
    warm = [load(loader, folder) for _ in range(repeats)]
    cold = []
    for _ in range(repeats):
        drop_pages(folder)
        cold.append(load(loader, folder)[1])
    return {
        "seconds_returned": statistics.median(returned for returned, _ in warm),
        "seconds": statistics.median(read for _, read in warm),
        "seconds_cold": statistics.median(cold),
        "peak_bytes": peak.added["VmRSS"],
        "peak_bytes_without_mapped_files": peak.added["RssAnon"],
    }


def save(pruner: MoonshotPruner, folder: Path, format: str, repeats: int) -> float:
    times = []
    for _ in range(repeats):
        shutil.rmtree(folder, ignore_errors=True)
        started = time.perf_counter()
        pruner.save_pretrained(folder, format=format)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def checkpoints(options) -> dict:
    """All figures of both formats; ratios are packed to dense."""
    results = {"options": vars(options), "save": {}, "bytes": {}, "load": {}}
    with tempfile.TemporaryDirectory(dir=options.folder) as root:
        folders = {format: Path(root) / format for format in ("dense", "packed")}
        pruner = build(options.layers)
        results["model_bytes"] = sum(parameter.nbytes for parameter in pruner.model.parameters())
        for format, folder in folders.items():
            results["save"][format] = save(pruner, folder, format, options.repeats)
            results["bytes"][format] = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        del pruner
        for format, folder in folders.items():
            for loader in LOADERS:
                if format == "dense" and loader not in ("from_pretrained", "load_pruned"):
                    continue
                environment = {**os.environ, "MOONSHOT_VERIFY": "0" if loader == UNCHECKED else "1"}
                arguments = ["--measure", loader, "--folder", str(folder), "--repeats", str(options.repeats)]
                done = subprocess.run(
                    [sys.executable, __file__, *arguments], capture_output=True, text=True, check=True, env=environment
                )
                results["load"][f"{format}, {loader}"] = json.loads(done.stdout.splitlines()[-1])
    dense, packed = (results["load"][f"{format}, from_pretrained"] for format in folders)
    results["ratios"] = {
        "bytes": results["bytes"]["packed"] / results["bytes"]["dense"],
        "save": results["save"]["packed"] / results["save"]["dense"],
        "checksums": packed["seconds"] / results["load"][f"packed, {UNCHECKED}"]["seconds"],
        "checksums_cold": packed["seconds_cold"] / results["load"][f"packed, {UNCHECKED}"]["seconds_cold"],
        **{name: packed[name] / dense[name] for name in ("seconds", "seconds_cold")},
        "peak_to_model": packed["peak_bytes"] / results["model_bytes"],
        "peak_to_model_without_mapped_files": packed["peak_bytes_without_mapped_files"] / results["model_bytes"],
    }
    return results


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--layers", type=int, default=11, help="of 12.8 million weights each")
    arguments.add_argument("--name", default="checkpoint", help="of the file in results/")
    arguments.add_argument("--repeats", type=int, default=5)
    arguments.add_argument("--folder", help="where the checkpoints are written for a while")
    arguments.add_argument("--measure", choices=LOADERS, help="one loader on --folder; the benchmark calls itself so")
    options = arguments.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure, Path(options.folder), options.repeats)))
        return
    results = checkpoints(options)
    results["options"].pop("folder")
    print(json.dumps(results, indent=2))
    write(options.name, results)


if __name__ == "__main__":
    main()
