"""The shipped model pruned by this package and by llm-compressor (SparseGPT): seconds and perplexity.

llm-compressor pins other versions of the same libraries, so it runs in a separate environment:

    python -m venv peer && peer/bin/pip install torch==2.13.0 llmcompressor==0.14.0.1
    python benchmarks/peer.py --peer-python peer/bin/python

All sides get the same windows of the same text, each in a separate process, sequentially and in turns. The seconds
are those of the pruning call, without imports and loading.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from common import parser, write
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / "examples" / "demo_model"

PEER = """
import sys, time, json, torch
from datasets import Dataset
from transformers import AutoModelForCausalLM
from llmcompressor import oneshot
from llmcompressor.modifiers.pruning import SparseGPTModifier
model_path, ids_path, output, sparsity, pattern = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
ids = torch.load(ids_path)
data = Dataset.from_dict({"input_ids": ids.tolist(), "attention_mask": torch.ones_like(ids).tolist()})
structure = "0:0" if pattern == "unstructured" else pattern
recipe = SparseGPTModifier(
    sparsity=float(sparsity), mask_structure=structure, targets=["Linear"], ignore=["lm_head"], dampening_frac=0.01
)
started = time.perf_counter()
oneshot(model=model, dataset=data, recipe=recipe, max_seq_length=ids.shape[1], num_calibration_samples=len(ids))
seconds = time.perf_counter() - started
torch.save(model.state_dict(), output)
print(json.dumps({"seconds": seconds}))
"""

OURS = """
import sys, time, json, torch
from transformers import AutoModelForCausalLM
from optimum_moonshot import MoonshotConfig, MoonshotPruner
model_path, ids_path, output, sparsity, pattern, lam = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
ids = torch.load(ids_path)
config = MoonshotConfig(
    solver="sparsegpt", pattern=pattern, sparsity=float(sparsity), lam=float(lam), num_samples=len(ids),
    sequence_length=ids.shape[1],
)
started = time.perf_counter()
MoonshotPruner(model, config).prune([{"input_ids": part} for part in ids.split(8)], progress=False)
seconds = time.perf_counter() - started
torch.save(model.state_dict(), output)
print(json.dumps({"seconds": seconds}))
"""


def windows(tokenizer, samples: int, tokens: int, seed: int) -> torch.Tensor:
    """Random windows of the calibration text, [samples, tokens]."""
    ids = tokenizer((DEMO / "calibration.txt").read_text(encoding="utf-8"), return_tensors="pt").input_ids[0]
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, len(ids) - tokens, (samples,), generator=generator)
    return torch.stack([ids[start : start + tokens] for start in starts.tolist()])


def run(python: str, script: str, arguments: list[str]) -> float:
    """The seconds that a side reports."""
    done = subprocess.run([python, "-c", script, *arguments], capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout.strip().splitlines()[-1])["seconds"]


def heldout(tokenizer, state: str) -> float:
    from optimum_moonshot import perplexity

    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    model.load_state_dict(torch.load(state))
    return perplexity(model, tokenizer, str(DEMO / "heldout.txt"), sequence_length=256, progress=False).value


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--peer-python", required=True, help="interpreter of an environment with llm-compressor")
    for name, value in (("samples", 128), ("tokens", 256), ("rounds", 3)):
        arguments.add_argument(f"--{name}", type=int, default=value)
    options = arguments.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    sides = {
        "llm-compressor": (options.peer_python, PEER, []),
        "moonshot λ=1": (sys.executable, OURS, ["1.0"]),
        "moonshot λ=0.9": (sys.executable, OURS, ["0.9"]),
    }
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        ids_path, output = f"{folder}/ids.pt", f"{folder}/state.pt"
        for pattern, sparsity in (("unstructured", "0.7"), ("2:4", "0.5")):
            seconds, values = {side: [] for side in sides}, {side: [] for side in sides}
            for seed in range(options.rounds):
                torch.save(windows(tokenizer, options.samples, options.tokens, seed), ids_path)
                for side, (python, script, extra) in sides.items():
                    given = [str(DEMO), ids_path, output, sparsity, pattern, *extra]
                    seconds[side].append(run(python, script, given))
                    values[side].append(heldout(tokenizer, output))
            for side in sides:
                row = {"seconds": min(seconds[side]), "perplexity": statistics.mean(values[side])}
                results[f"{side}, {pattern} {sparsity}"] = row
                print(f"{side}, {pattern} {sparsity}: {row['seconds']:.1f} s, perplexity {row['perplexity']:.2f}")
    write("peer", results)


if __name__ == "__main__":
    main()
