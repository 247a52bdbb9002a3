"""Cost of pruning beyond small models: depth, width, samples, and models larger than the available memory.

    python benchmarks/scale.py depth width samples     # cost of a run by each, one thread
    python benchmarks/scale.py disk --shape 1b          # a random Llama of this shape, its decoder layers on disk
    python benchmarks/scale.py disk --shape 8b --layers 2
    python benchmarks/scale.py proof --gigabytes 12     # a model of this size, end to end, with Wanda
    python benchmarks/scale.py --show

Every run is a separate process; its peak memory is the kernel's VmHWM, which includes mapped files. Weights are random
and bfloat16, so no model is downloaded; they are written layer by layer. Results are in results/scale.json.
"""

import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from common import RESULTS, machine, parser
from safetensors.torch import save_file

RESULT = RESULTS / "scale.json"
SHAPES = {
    "1b": dict(hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
               num_key_value_heads=8, vocab_size=128256, tie_word_embeddings=True),
    "8b": dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
               num_key_value_heads=8, vocab_size=128256, tie_word_embeddings=False),
    "small": dict(hidden_size=512, intermediate_size=1408, num_hidden_layers=8, num_attention_heads=8,
                  num_key_value_heads=4, vocab_size=4096, tie_word_embeddings=True),
}  # fmt: skip


def write_model(folder: Path, shape: dict, seed: int = 0) -> int:
    """Write a random Llama's checkpoint in bfloat16, one file per decoder layer; returns its bytes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**shape, architectures=["LlamaForCausalLM"], dtype="bfloat16", max_position_embeddings=2048)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    config.save_pretrained(folder)
    generator, places, total = torch.Generator().manual_seed(seed), {}, 0
    parts: dict[str, list[str]] = {}
    for name in model.state_dict():
        if name != "lm_head.weight" or not config.tie_word_embeddings:
            parts.setdefault(".".join(name.split(".")[:3]) if ".layers." in name else "rest", []).append(name)
    for part, names in parts.items():
        tensors = {}
        for name in names:
            size = model.get_parameter(name).shape
            draw = torch.randn(size, generator=generator, dtype=torch.float32).mul_(0.02).bfloat16()
            tensors[name] = torch.ones(size, dtype=torch.bfloat16) if len(size) == 1 else draw
        file = f"{part}.safetensors"
        save_file(tensors, folder / file, {"format": "pt"})
        places |= dict.fromkeys(names, file)
        total += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def peak_bytes() -> int:
    """Peak memory of this process; unlike `ru_maxrss`, it excludes the parent's."""
    match = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return 1024 * int(match[1])


def prune(folder: Path, output: Path | None, fields: dict, offload: str | None) -> dict:
    """One run in this process: seconds of each part, and peak memory."""
    from optimum_moonshot import MoonshotConfig, MoonshotPruner

    torch.set_num_threads(1)
    layout = fields.pop("format", "packed")
    config = MoonshotConfig(**fields)
    before = peak_bytes()
    begun, cpu = time.perf_counter(), time.process_time()
    pruner = MoonshotPruner.from_pretrained(folder, config, offload=offload)
    loaded = time.perf_counter()
    vocabulary = pruner.model.config.vocab_size
    generator = torch.Generator().manual_seed(0)
    shape = config.num_samples, config.sequence_length
    ids = torch.randint(vocabulary, shape, generator=generator)
    report = pruner.prune([{"input_ids": part} for part in ids.split(config.batch_size)], progress=False)
    pruned = time.perf_counter()
    if output is not None:
        pruner.save_pretrained(output, format=layout)
    from optimum_moonshot.model.offload import Offloaded

    return {
        "seconds": time.perf_counter() - begun,
        "process": time.process_time() - cpu,
        "load": loaded - begun,
        "prune": pruned - loaded,
        "save": time.perf_counter() - pruned,
        "phases": report.seconds,
        "read": Offloaded.read,
        "before": before,
        "peak": peak_bytes(),
        "sparsity": report.sparsity,
        "notes": report.notes,
        "written": 0 if output is None else sum(file.stat().st_size for file in output.glob("*.safetensors")),
    }


def apart(folder: Path, output: Path | None, fields: dict, offload: str | None) -> dict:
    """`prune` in a separate process."""
    arguments = json.dumps([str(folder), None if output is None else str(output), fields, offload])
    done = subprocess.run([sys.executable, __file__, "--one", arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])


def record(results: dict, kind: str, key: str, row: dict) -> None:
    results.setdefault(kind, {})[key] = row
    RESULT.write_text(json.dumps(results, indent=1), encoding="utf-8")
    print(kind, key, f"{row['process']:.0f} s, peak {row['peak'] / 2**30:.2f} GiB", flush=True)


def cost(results: dict, kind: str) -> None:
    """Cost as a function of one parameter."""
    values = {"depth": (4, 8, 16, 32, 64), "width": (512, 1024, 2048, 4096), "samples": (32, 64, 128, 256, 512)}[kind]
    for value in values:
        for lam in (1.0, 0.9):
            key = f"{value}, λ={lam:g}"
            if key in results.get(kind, {}):
                continue
            shape = dict(SHAPES["small"])
            fields = {"pattern": "2:4", "lam": lam, "num_samples": 32, "sequence_length": 128, "batch_size": 8}
            if kind == "depth":
                shape["num_hidden_layers"] = value
            elif kind == "width":
                shape |= {"hidden_size": value, "intermediate_size": 11 * value // 4, "num_hidden_layers": 1}
                shape |= {"num_attention_heads": value // 64, "num_key_value_heads": value // 128}
            else:
                fields["num_samples"] = value
                shape["num_hidden_layers"] = 4
            with tempfile.TemporaryDirectory() as name:
                write_model(Path(name), shape)
                record(results, kind, key, apart(Path(name), None, fields, None))


def disk(results: dict, options) -> None:
    """A model with offloaded decoder layers."""
    shape = dict(SHAPES[options.shape])
    if options.layers:
        shape["num_hidden_layers"] = options.layers
    fields = {"solver": options.solver, "pattern": "2:4", "lam": options.lam, "num_samples": options.samples,
              "sequence_length": options.length, "batch_size": 4, "max_memory": options.max_memory}  # fmt: skip
    key = f"{options.shape}, {shape['num_hidden_layers']} layers, {options.solver}, λ={options.lam:g}"
    if options.rotation:
        fields |= {"rotation": "learned", "rotation_steps": options.rotation, "rotation_rows": 512}
        key += f", rotated in {options.rotation} steps"
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        source, output = Path(name, "dense"), Path(name, "pruned")
        source.mkdir()
        size = write_model(source, shape)
        row = apart(source, output, {**fields, "offload_dir": str(Path(name, "cache"))}, "disk")
        record(results, "disk", key, {**row, "bytes": size, "samples": options.samples, "length": options.length})


def proof(results: dict, options) -> None:
    """A model of the given size, with Wanda at λ = 1 and few samples."""
    shape = dict(SHAPES["8b"])
    each = 2 * (4096 * (4096 * 2 + 1024 * 2) + 3 * 4096 * 14336)
    shape["num_hidden_layers"] = max(1, round((options.gigabytes * 1e9 - 4 * 4096 * 128256) / each))
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        source, output = Path(name, "dense"), Path(name, "pruned")
        source.mkdir()
        size = write_model(source, shape)
        fields = {"solver": "wanda", "pattern": "2:4", "lam": 1.0, "num_samples": 4, "sequence_length": 64,
                  "batch_size": 4, "offload_dir": str(Path(name, "cache"))}  # fmt: skip
        row = apart(source, output, fields, "disk")
        record(results, "proof", f"{shape['num_hidden_layers']} layers", {**row, "bytes": size})


def show(results: dict) -> None:
    for kind, rows in results.items():
        if kind == "machine":
            continue
        print(f"\n| {kind} | seconds | of one core | peak, GiB | model, GiB | read, times |")
        print("|---|---:|---:|---:|---:|---:|")
        for key, row in rows.items():
            size = row.get("bytes", 0)
            times = f"{row['read'] / size:.1f}" if size else ""
            held = f"{size / 2**30:.2f}" if size else ""
            cost = f"{row['seconds']:.0f} | {row['process']:.0f} | {row['peak'] / 2**30:.2f}"
            print(f"| {key} | {cost} | {held} | {times} |")


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("what", nargs="*", default=[], help="depth, width, samples, disk, proof")
    arguments.add_argument("--shape", default="1b", choices=list(SHAPES))
    arguments.add_argument("--layers", type=int)
    arguments.add_argument("--solver", default="sparsegpt")
    arguments.add_argument("--lam", type=float, default=1.0)
    arguments.add_argument("--samples", type=int, default=16)
    arguments.add_argument("--length", type=int, default=128)
    arguments.add_argument("--max-memory", default=None)
    arguments.add_argument("--rotation", type=int, metavar="STEPS", help="of a learned rotation before")
    arguments.add_argument("--gigabytes", type=float, default=8)
    arguments.add_argument("--folder", help="for the models; default: the system's for temporary files")
    arguments.add_argument("--show", action="store_true")
    arguments.add_argument("--one", help="(of this file itself) one run")
    options = arguments.parse_args()
    if options.one:
        folder, output, fields, offload = json.loads(options.one)
        print(json.dumps(prune(Path(folder), None if output is None else Path(output), fields, offload)))
        return
    results = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.exists() else {"machine": machine()}
    for what in options.what:
        {"disk": disk, "proof": proof}.get(what, lambda results, _, kind=what: cost(results, kind))(results, options)
    show(results)


if __name__ == "__main__":
    main()
