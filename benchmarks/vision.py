"""Top-1 accuracy on CIFAR-10 images after pruning: ResNet-20 with OBC, a small DeiT with CAP, λ = 1 against smaller λ.

First convolution (patch embedding) and classifier stay dense. Every seed draws its own calibration images, which are
visited once: no λ or sparsity changes the statistics. One elimination of a layer's weights per λ serves all sparsities;
2:4 takes one of its own. `benchmarks/train_deit.py` makes the DeiT.
"""

import copy
import math
import statistics
import time
from pathlib import Path

import torch
from common import parser, write
from rich.console import Console
from rich.table import Table
from torch import nn
from train_deit import OUTPUT
from transformers import DeiTForImageClassification
from vision_models import batches, cifar10, resnet20

from optimum_moonshot import accuracy
from optimum_moonshot.layers import PrunableLayer, find_structure
from optimum_moonshot.linalg import escalate
from optimum_moonshot.passes import WholePasses, frozen
from optimum_moonshot.patterns import NM, Unstructured
from optimum_moonshot.solvers import solver_class
from optimum_moonshot.solvers.base import block_size
from optimum_moonshot.statistics import Collector, LayerStatistics
from optimum_moonshot.storage import Storage

SPARSITIES = (0.5, 0.7, 0.8, 0.9)
PATTERNS = {**{f"{sparsity:g}": Unstructured(sparsity) for sparsity in SPARSITIES}, "2:4": NM(2, 4)}


def gather(model: nn.Module, data: list[dict]) -> dict[PrunableLayer, LayerStatistics]:
    """The statistics of every layer that is pruned by default, with gradients."""
    layers = tuple(find_structure(model).layers())
    samples = sum(len(batch["labels"]) for batch in data)
    names = {layer.name for layer in layers}
    with frozen(model), Collector(list(layers), False, names, samples, Storage(torch.device("cpu"))) as collector:
        for visit in WholePasses(model, data, True, None).visits(layers):
            visit.run(collector, True)
        return {layer: collector.take(layer) for layer in layers}


def prune_all(solver, gathered: dict[PrunableLayer, LayerStatistics], lam: float) -> dict[str, dict[str, torch.Tensor]]:
    """{pattern: {layer: pruned weight}}."""
    found: dict[str, dict[str, torch.Tensor]] = {name: {} for name in PATTERNS}
    for layer, gained in gathered.items():
        for names in ([name for name in PATTERNS if ":" not in name], ["2:4"]):
            pattern = PATTERNS[names[0]]
            objective = gained.objective(layer.matrix, lam, block_size(solver, layer.shape[1], pattern))
            ranking, damping = escalate(solver.damping, lambda d, o=objective, p=pattern: solver.rank(o, p, d))
            keeps = [ranking.keep(PATTERNS[name]).view_as(objective.weight) for name in names]
            weights = solver.minimise(objective, keeps, damping)
            for name, weight, keep in zip(names, weights, keeps, strict=True):
                found[name][layer.name] = torch.where(keep, weight, 0)
    return found


@torch.no_grad()
def measure(model: nn.Module, weights: dict[str, torch.Tensor], test: list[dict]) -> float:
    pruned = copy.deepcopy(model)
    for layer in find_structure(pruned).layers():
        layer.assign(weights[layer.name])
    return accuracy(pruned, test).value


def run(model: nn.Module, solver_name: str, options) -> dict:
    """{λ: {pattern: [top-1 of every seed]}}, and what it took."""
    images, labels = cifar10("train")
    test = batches(*cifar10("test"), 256)
    solver = solver_class(solver_name)()
    found: dict[str, dict[str, list[float]]] = {}
    seconds = {"calibration": 0.0, "solver": 0.0}
    for seed in range(options.seeds):
        chosen = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))[: options.samples]
        started = time.process_time()
        gathered = gather(model, batches(images[chosen], labels[chosen], 64))
        seconds["calibration"] += time.process_time() - started
        for lam in options.lambdas:
            started = time.process_time()
            with torch.no_grad():
                weights = prune_all(solver, gathered, lam)
            seconds["solver"] += time.process_time() - started
            row = found.setdefault(f"{lam:g}", {})
            for name, layers in weights.items():
                row.setdefault(name, []).append(measure(model, layers, test))
            print(f"seed {seed}, λ = {lam:g}:", {name: round(100 * row[name][-1], 1) for name in row}, flush=True)
    return {"dense": accuracy(model, test).value, "top1": found, "processor_seconds": seconds}


def mean_error(values: list[float]) -> str:
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return f"{100 * statistics.mean(values):.1f} ± {100 * error:.1f}"


def show(title: str, found: dict) -> None:
    table = Table("λ", *PATTERNS, title=f"{title}, top-1, dense {found['dense']:.2%}")
    for lam, row in found["top1"].items():
        table.add_row(lam, *(mean_error(row[name]) for name in PATTERNS))
    Console(width=100).print(table)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("model", choices=("resnet20", "deit"))
    arguments.add_argument("--deit", type=Path, default=OUTPUT, help="what train_deit.py wrote")
    arguments.add_argument("--solver", help="default: obc for ResNet-20, cap for DeiT")
    arguments.add_argument("--seeds", type=int, default=3)
    arguments.add_argument("--samples", type=int, default=512)
    arguments.add_argument("--lambdas", type=float, nargs="+", default=[1.0, 0.75, 0.5, 0.25, 0.0])
    options = arguments.parse_args()
    if options.model == "resnet20":
        model, solver = resnet20(), options.solver or "obc"
    else:
        model, solver = DeiTForImageClassification.from_pretrained(options.deit).eval(), options.solver or "cap"
    found = run(model, solver, options)
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
    settings.pop("deit")
    write(f"vision_{options.model}", {"options": {**settings, "solver": solver}, **found})
    show(f"{options.model}, {solver}", found)


if __name__ == "__main__":
    main()
