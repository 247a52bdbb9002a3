"""Agreement of a pruned sentence encoder with the dense one, by λ: 2:4, a sparsity of 0.5, and 4 bits.

    python benchmarks/embeddings.py --model all-MiniLM-L6-v2 --calibration valid.txt --test test.txt --seeds 0 1 2

Sentences come from two files of tokenized WikiText-2, one paragraph per line: samples for calibration by the seed, and
500 of the other file to judge by. Settings that results/embeddings.json has already are not measured again.
"""

import argparse
import json
import time
from itertools import product
from pathlib import Path

import torch
from common import RESULTS, machine, versions

from optimum_moonshot import MoonshotConfig, MoonshotPruner
from optimum_moonshot.evaluation.metrics import embeddings

PATTERNS = {"2:4": {"pattern": "2:4"}, "0.5": {"sparsity": 0.5}, "4 bits": {"bits": 4}}
SPACED = {" @-@ ": "-", " @,@ ": ",", " @.@ ": "."}  # tokenized numbers and compounds
JUDGED, TOKENS = 500, 128


def sentences(path: str) -> list[str]:
    """The sentences of 8 words or more, without unknown ones and headings."""
    text = Path(path).read_text(encoding="utf-8")
    for spaced, plain in SPACED.items():
        text = text.replace(spaced, plain)
    lines = (line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith("="))
    parts = (part.strip() for line in lines for part in line.split(" . "))
    return [f"{part} ." for part in parts if len(part.split()) >= 8 and "<unk>" not in part]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "calibration", "test"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--solvers", nargs="+", default=["sparsegpt", "alps"])
    parser.add_argument("--patterns", nargs="+", default=list(PATTERNS), choices=PATTERNS)
    parser.add_argument("--lambdas", nargs="+", type=float, default=[1, 0.9, 0.75, 0.5])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--samples", nargs="+", type=int, default=[128])
    parser.add_argument("--output", type=Path, default=RESULTS / "embeddings.json")
    args = parser.parse_args()
    results = json.loads(args.output.read_text())["results"] if args.output.exists() else {}
    calibration, test = sentences(args.calibration), sentences(args.test)
    order = torch.randperm(len(test), generator=torch.Generator().manual_seed(0))
    test = [test[index] for index in order[:JUDGED].tolist()]
    for solver, pattern, samples, seed in product(args.solvers, args.patterns, args.samples, args.seeds):
        names = {lam: f"{solver}, {pattern}, λ={lam:g}, {samples} sentences, seed {seed}" for lam in args.lambdas}
        missing = [lam for lam, name in names.items() if name not in results]
        if not missing:
            continue
        options = dict(solver=solver, num_samples=samples, sequence_length=TOKENS, seed=seed, **PATTERNS[pattern])
        pruner = MoonshotPruner.from_pretrained(args.model, MoonshotConfig(**options), dtype="float32")
        dense = embeddings(pruner.model, test, pruner.tokenizer, sequence_length=TOKENS)
        report = pruner.sweep(calibration, lambdas=missing, progress=False)
        for entry in report.entries:
            with pruner.applied(entry) as model:
                agreement = embeddings(model, test, pruner.tokenizer, sequence_length=TOKENS).agreement(dense)
            values = {"cosine": agreement.value, "same neighbour": agreement.neighbours, "seconds": entry.seconds}
            results[names[entry.lam]] = values
            print(time.strftime("%H:%M"), names[entry.lam], values, flush=True)
        document = {"machine": machine(), "versions": versions("torch", "transformers"), "results": results}
        args.output.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
