"""Estimates of `MoonshotPruner.plan` compared with the run: memory excluding the model, and seconds.

    python benchmarks/plan.py [--only NAME …]
    python benchmarks/plan.py --group llama      # every solver and stage on one model, in 10 minutes of one core
    python benchmarks/plan.py --work DIR         # keeps every measurement in DIR, and continues from those there

Plan and run of a case each have a separate process with one thread. Memory is the peak increase of the resident size
by the run, after a small warm-up run for libraries and buffers; seconds are processor time.
"""

import ctypes
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import transformers as hf
from common import RESULTS, parser, peak_above, write

from optimum_moonshot import MoonshotConfig, MoonshotPruner

DEMO = "examples/demo_model"
WIDE = dict(
    vocab_size=8000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=4, num_attention_heads=16,
    num_key_value_heads=8, max_position_embeddings=512,
)  # fmt: skip
LLAMA = dict(
    vocab_size=8000, hidden_size=384, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=6,
    num_key_value_heads=2, max_position_embeddings=512,
)  # fmt: skip
MIXED = dict(
    vocab_size=2000, hidden_size=256, intermediate_size=512, moe_intermediate_size=192, num_hidden_layers=4,
    num_attention_heads=8, num_key_value_heads=4, head_dim=32, num_experts=16, num_experts_per_tok=4,
    max_position_embeddings=512,
)  # fmt: skip
# One decoder layer of Qwen3-30B-A3B, 603M weights in experts, with a small vocabulary.
LARGE = dict(
    vocab_size=1000, hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_hidden_layers=1,
    num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8,
    max_position_embeddings=512, dtype="bfloat16",
)  # fmt: skip
TINY = dict(
    vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    max_position_embeddings=64,
)  # fmt: skip
SETTING = dict(sparsity=0.6, num_samples=32, batch_size=8)
# Where all layers would take long.
LAST = {"demo": (r"layers\.3\.",), "wide": (r"layers\.3\.mlp\.gate",), "llama": (r"layers\.3\.(self_attn|mlp.up)",)}
CASES = {
    "demo sparsegpt λ=1": ("demo", dict(lam=1)),
    "demo sparsegpt λ=0.5": ("demo", dict(lam=0.5)),
    "demo sparsegpt λ=0.9 N=128": ("demo", dict(lam=0.9, num_samples=128)),
    "demo sparsegpt λ=0.5 batch 1": ("demo", dict(lam=0.5, batch_size=1)),
    "demo wanda λ=1 N=128": ("demo", dict(solver="wanda", lam=1, num_samples=128)),
    "demo wanda λ=0.5 N=128": ("demo", dict(solver="wanda", lam=0.5, num_samples=128)),
    "demo obc λ=0.5": ("demo", dict(solver="obc", lam=0.5, targets=LAST["demo"])),
    "demo obc λ=0.5 N=128, 64 MiB": (
        "demo", dict(solver="obc", lam=0.5, num_samples=128, max_memory="64MiB", targets=LAST["demo"]),
    ),
    "demo alps λ=0.5": ("demo", dict(solver="alps", lam=0.5, targets=LAST["demo"])),
    "demo recovered": ("demo", dict(lam=1, recover="blockwise", recover_steps=30)),
    "demo rotated": ("demo", dict(lam=1, rotation="learned", rotation_steps=20)),
    "demo allocated": ("demo", dict(lam=1, allocation="fisher")),
    "wide sparsegpt λ=1": ("wide", dict(lam=1)),
    "wide sparsegpt λ=0.5": ("wide", dict(lam=0.5, targets=LAST["wide"])),
    "wide wanda λ=0.5": ("wide", dict(solver="wanda", lam=0.5)),
    "wide alps λ=1": ("wide", dict(solver="alps", lam=1, targets=LAST["wide"])),
    "mixture sparsegpt λ=1": ("mixture", dict(lam=1)),
    "mixture sparsegpt λ=0.5": ("mixture", dict(lam=0.5)),
    "mixture sparsegpt λ=0.5, 200 MiB": ("mixture", dict(lam=0.5, max_memory="200MiB")),
    "Qwen3-30B-A3B layer wanda λ=1": ("large", dict(solver="wanda", lam=1, num_samples=16)),
    "Qwen3-30B-A3B layer sparsegpt λ=1": ("large", dict(lam=1, num_samples=16)),
    "Qwen3-30B-A3B layer sparsegpt λ=0.5": ("large", dict(lam=0.5, num_samples=4, targets=(r"down_proj",))),
    "llama sparsegpt": ("llama", dict(lam=0.5)),
    "llama wanda": ("llama", dict(solver="wanda", lam=0.5)),
    "llama alps": ("llama", dict(solver="alps", lam=0.5, targets=LAST["llama"])),
    "llama obc": ("llama", dict(solver="obc", lam=0.5, targets=LAST["llama"])),
    "llama cap": ("llama", dict(solver="cap", lam=0.5, targets=LAST["llama"])),
    "llama osscar": ("llama", dict(solver="osscar", pattern="structured", sparsity=0.25, lam=1)),
    "llama rotated": ("llama", dict(lam=1, rotation="learned", rotation_steps=20)),
    "llama recovered": ("llama", dict(lam=1, recover="blockwise", recover_steps=30)),
    "llama 4 bits": ("llama", dict(lam=1, bits=4)),
    "llama allocated": ("llama", dict(lam=1, allocation="fisher")),
    "llama offloaded": ("llama", dict(lam=0.5, solver="wanda")),
}  # fmt: skip
TOKENS = 256


def pruner(name: str) -> tuple[MoonshotPruner, object]:
    """The pruner of a case, with its data."""
    model, fields = CASES[name]
    if "offload_dir" in fields:
        fields = {**fields, "offload_dir": tempfile.mkdtemp(dir=os.environ.get("MOONSHOT_DISK"))}
    config = MoonshotConfig(**{**SETTING, "sequence_length": TOKENS, **fields})
    if model == "demo":
        return MoonshotPruner.from_pretrained(DEMO, config), f"{DEMO}/calibration.txt"
    torch.manual_seed(0)
    if model in ("wide", "llama"):
        made = hf.LlamaForCausalLM(hf.LlamaConfig(**(WIDE if model == "wide" else LLAMA)))
    else:
        shape = LARGE if model == "large" else MIXED
        with torch.device("meta" if model == "large" else "cpu"):
            made = hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**shape))
        if model == "large":
            made = drawn(made.bfloat16())
    ids = torch.randint(made.config.vocab_size, (config.num_samples, TOKENS))
    data = [{"input_ids": batch} for batch in ids.split(config.batch_size)]
    if name.endswith("offloaded"):
        folder = tempfile.mkdtemp(dir=os.environ.get("MOONSHOT_DISK"))
        made.save_pretrained(folder)
        return MoonshotPruner.from_pretrained(folder, config, offload="disk"), data
    return MoonshotPruner(made.eval(), config), data


def drawn(model: torch.nn.Module, device: str | torch.device = "cpu") -> torch.nn.Module:
    """A model from the meta device with small random weights; drawing them in its dtype needs no extra memory."""
    made = model.to_empty(device=device)
    made.tie_weights()
    for parameter in made.parameters():
        parameter.data.normal_(std=0.02) if parameter.ndim > 1 else parameter.data.fill_(1.0)
    rotary = made.model.rotary_emb
    rotary.inv_freq.copy_(rotary.compute_default_rope_parameters(made.config)[0])
    return made


def warm() -> None:
    """Warm up libraries, threads and buffers."""
    config = MoonshotConfig(sparsity=0.5, lam=0.5, num_samples=4, batch_size=2)
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**TINY))
    batches = [{"input_ids": torch.randint(96, (2, 32))} for _ in range(2)]
    MoonshotPruner(model, config).prune(batches, progress=False)
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)


def run(name: str) -> dict:
    """Prune a case."""
    moonshot, data = pruner(name)
    resident = (each for each in moonshot.model.parameters() if not each.is_meta)
    sum(float(parameter.sum()) for parameter in resident)  # touch all pages
    warm()
    started = time.process_time()
    peak = peak_above(lambda: moonshot.prune(data, progress=False))
    notes = [note for note in moonshot.report.notes if "memory" in note or "disk" in note]
    return {"bytes": peak, "seconds": time.process_time() - started, "wall": moonshot.report.seconds, "notes": notes}


def plan(name: str) -> dict:
    """Plan a case."""
    moonshot, data = pruner(name)
    warm()
    started = time.process_time()
    made = moonshot.plan(data)
    taken = time.process_time() - started
    most = made.peak()
    seconds = made.seconds["total"] - made.seconds["saving"]
    return {
        "bytes": made.peaks["cpu"], "seconds": seconds, "phases": made.seconds, "at": f"{most.phase}: {most.where}",
        "items": {what: sizes.get("cpu", 0) for what, sizes in most.items.items()}, "taken": taken, "fits": made.fits,
    }  # fmt: skip


def measured(what: str, name: str, folder: str | None) -> dict:
    """The plan or the run of a case, in a process of its own, unless the folder has it."""
    slug = "".join("_" if letter in " /," else letter for letter in name)
    path = None if folder is None else Path(folder) / f"{what}-{slug}.json"
    if path is not None and path.is_file() and path.stat().st_size:
        return json.loads(path.read_text().splitlines()[-1])
    command = [sys.executable, __file__, f"--{what}", name]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        return {"error": done.stderr[-800:]}
    if path is not None:
        path.write_text(done.stdout)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--only", nargs="+", default=list(CASES), metavar="NAME", help="cases")
    options.add_argument("--run", choices=list(CASES), help=argparse_hidden())
    options.add_argument("--plan", choices=list(CASES), help=argparse_hidden())
    options.add_argument("--samples", type=int, help=argparse_hidden())
    options.add_argument("--group", help="the cases whose names begin so")
    options.add_argument(
        "--work", metavar="DIR", help="folder of finished measurements, from which a later call continues"
    )
    args = options.parse_args()
    torch.set_num_threads(1)
    SETTING["num_samples"] = args.samples or SETTING["num_samples"]
    if args.run or args.plan:
        print(json.dumps(run(args.run) if args.run else plan(args.plan)))
        return
    results = {}
    for name in (name for name in args.only if name.startswith(args.group or "")):
        each = {}
        for what in ("plan", "run"):
            each[what] = measured(what, name, args.work)
        if "error" in each["plan"] or "error" in each["run"]:
            print(name, each)
            continue
        ratio = {key: each["plan"][key] / each["run"][key] for key in ("bytes", "seconds")}
        results[name] = {**each, "ratio": ratio}
        print(
            f"{name:34s} {each['plan']['bytes'] / 2**20:8.1f} planned {each['run']['bytes'] / 2**20:8.1f} MiB "
            f"({ratio['bytes']:.2f})  {each['plan']['seconds']:6.1f} planned {each['run']['seconds']:6.1f} s "
            f"({ratio['seconds']:.2f})  {each['plan']['at']} plan took {each['plan']['taken']:.1f} s",
            flush=True,
        )
        write("plan", {**saved_cases(), **results})


def saved_cases() -> dict:
    """The cases in the results file."""
    path = RESULTS / "plan.json"
    return json.loads(path.read_text())["results"] if path.is_file() else {}


def argparse_hidden() -> str:
    """Hide options for internal use from the help."""
    import argparse

    return argparse.SUPPRESS


if __name__ == "__main__":
    main()
