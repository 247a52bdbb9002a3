"""Top-1 accuracy on CIFAR-10 images after pruning: ResNet-20 with OBC, a small DeiT with CAP, λ = 1 and smaller λ.

First convolution (patch embedding) and classifier stay dense. Every seed draws its own calibration images, with one
calibration: statistics do not depend on λ, sparsity or pattern. `benchmarks/train_deit.py` trains the DeiT.
"""

import time
from pathlib import Path

import torch
from common import parser, write
from quality import mean_error
from torch import nn
from train_deit import OUTPUT
from transformers import DeiTForImageClassification
from vision_models import batches, cifar10, resnet20

from optimum_moonshot import MoonshotConfig, MoonshotPruner, accuracy
from optimum_moonshot.reports.tables import text_table


def run(model: nn.Module, solver: str, options) -> dict:
    """{λ: {sparsity or pattern: [top-1 of every seed]}}, and the seconds."""
    images, labels = cifar10("train")
    test = batches(*cifar10("test"), 256)
    config = MoonshotConfig(
        solver=solver,
        sparsity=0.5,
        allocation=options.allocation,
        fisher=options.fisher,
        num_samples=options.samples,
        batch_size=64,
    )
    results: dict[str, dict[str, list[float]]] = {}
    started = time.process_time()
    for seed in range(options.seeds):
        chosen = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))[: options.samples]
        report = MoonshotPruner(model, config).sweep(
            batches(images[chosen], labels[chosen], 64),
            lambdas=options.lambdas,
            sparsities=options.sparsities,
            patterns=("unstructured",) if options.allocation == "fisher" else ("unstructured", "2:4"),
            metric=lambda pruned: accuracy(pruned, test).value,
            maximize=True,
            progress=False,
        )
        for entry in report.entries:
            column = entry.pattern if ":" in entry.pattern else str(entry.sparsity)
            results.setdefault(f"{entry.lam:g}", {}).setdefault(column, []).append(entry.metric)
        print(
            f"seed {seed}:",
            {lam: {name: round(100 * values[-1], 1) for name, values in row.items()} for lam, row in results.items()},
            flush=True,
        )
    return {"dense": accuracy(model, test).value, "top1": results, "processor_seconds": time.process_time() - started}


def show(title: str, results: dict) -> None:
    columns = next(iter(results["top1"].values()))
    rows = [
        [lam, *(mean_error([100 * value for value in row[name]]) for name in columns)]
        for lam, row in results["top1"].items()
    ]
    print(f"{title}, top-1, dense {results['dense']:.2%}", text_table(["λ", *columns], rows, 100), sep="\n")


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("model", choices=("resnet20", "deit"))
    arguments.add_argument("--deit", type=Path, default=OUTPUT, help="folder written by train_deit.py")
    arguments.add_argument("--solver", help="default: obc for ResNet-20, cap for DeiT")
    arguments.add_argument("--allocation", choices=("uniform", "fisher"), default="uniform")
    arguments.add_argument("--fisher", choices=("rows", "shared"), default="rows")
    arguments.add_argument("--seeds", type=int, default=3)
    arguments.add_argument("--samples", type=int, default=512)
    arguments.add_argument(
        "--sparsities", type=float, nargs="+", default=[0.5, 0.7, 0.8, 0.9], help="beside 2:4, if uniform"
    )
    arguments.add_argument("--name", help="of the results; default: vision_ and the model")
    arguments.add_argument("--lambdas", type=float, nargs="+", default=[1.0, 0.75, 0.5, 0.25, 0.0])
    options = arguments.parse_args()
    if options.model == "resnet20":
        model, solver = resnet20(), options.solver or "obc"
    else:
        model, solver = DeiTForImageClassification.from_pretrained(options.deit).eval(), options.solver or "cap"
    results = run(model, solver, options)
    settings = {name: value for name, value in vars(options).items() if name not in ("deit", "name")} | {
        "solver": solver
    }
    write(options.name or f"vision_{options.model}", {"options": settings | {"solver": solver}, **results})
    show(f"{options.model}, {solver}", results)


if __name__ == "__main__":
    main()
