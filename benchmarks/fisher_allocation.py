"""Gain and cost of `allocation="fisher"` on the shipped model, compared with uniform sparsity and six full solves.

"six solves" computes the curves from all samples and rows, by six runs of the solver at the run's λ. Seconds are
processor time; the ratio is to the uniform run. Existing results are kept and completed.
"""

import copy
import dataclasses
import json
import math
import time
from functools import partial
from itertools import product

import torch
from common import RESULTS, parser, write
from quality import DEMO
from transformers import AutoModelForCausalLM, AutoTokenizer

from optimum_moonshot import MoonshotConfig, MoonshotPruner, perplexity
from optimum_moonshot.allocate import run as allocate
from optimum_moonshot.model.calls import frozen
from optimum_moonshot.objective.loss_allocation import LossCurve
from optimum_moonshot.objective.patterns import Unstructured
from optimum_moonshot.pipeline.inputs import prepare
from optimum_moonshot.pipeline.loop import run_pipeline, solve_parts
from optimum_moonshot.pipeline.selection import Subject, select
from optimum_moonshot.pipeline.store import ResultStore
from optimum_moonshot.pipeline.variant import Variant
from optimum_moonshot.progress import progress_bar
from optimum_moonshot.prune.layers import Pruning
from optimum_moonshot.reports.tables import text_table

SIX = (0.4, 0.6, 0.7, 0.8, 0.9, 0.95)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--seeds", type=int, nargs="+", default=[0])
    arguments.add_argument("--sparsities", type=float, nargs="+", default=[0.7, 0.8])
    arguments.add_argument("--lambdas", type=float, nargs="+", default=[1.0, 0.5])
    arguments.add_argument("--solvers", nargs="+", default=["sparsegpt"])
    arguments.add_argument("--samples", type=int, default=128)
    arguments.add_argument("--tokens", type=int, default=256)
    arguments.add_argument("--name", default="fisher_allocation")
    options = arguments.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()
    bench, path = Bench(model, tokenizer, options.tokens), RESULTS / f"{options.name}.json"
    results = json.loads(path.read_text())["results"]["runs"] if path.exists() else {}
    for seed, solver, lam, sparsity in product(options.seeds, options.solvers, options.lambdas, options.sparsities):
        config = MoonshotConfig(
            solver=solver,
            lam=lam,
            seed=seed,
            sparsity=sparsity,
            num_samples=options.samples,
            sequence_length=options.tokens,
        )
        row = results.setdefault(f"{solver} λ={lam:g} {sparsity:g} seed {seed}", {})
        for name, run in (("uniform", bench.uniform), ("fisher", bench.fisher), ("six solves", bench.six)):
            if name not in row:
                row[name] = run(config)
                print(f"{solver} λ={lam:g} {sparsity:g} seed {seed} {name}: {row[name]}", flush=True)
                write(options.name, {"options": vars(options), "dense": bench.dense, "runs": results})
    show(results)


class Bench:
    """The shipped model, pruned in three ways.

    Args:
        model: dense; it is not changed.
        tokenizer: of the model.
        tokens: per window.
    """

    def __init__(self, model, tokenizer, tokens: int):
        self.model, self.tokenizer, self.tokens = model, tokenizer, tokens
        self.dense = self.measure(model)
        self.curves: dict[MoonshotConfig, dict[str, LossCurve]] = {}

    def measure(self, model) -> float:
        return perplexity(model, self.tokenizer, str(DEMO / "heldout.txt"), sequence_length=self.tokens).value

    def uniform(self, config: MoonshotConfig) -> dict:
        return self.run(config)

    def fisher(self, config: MoonshotConfig) -> dict:
        return self.run(dataclasses.replace(config, allocation="fisher"))

    def six(self, config: MoonshotConfig) -> dict:
        """Prune with curves from six full solves, which replace those of the run."""
        curves = self.six_curves(dataclasses.replace(config, sparsity=0.5))
        original = allocate.gather_curves

        def lend(_, variants):
            for variant in variants:
                variant.store.curves.update(curves)

        allocate.gather_curves = lend
        try:
            return self.run(dataclasses.replace(config, allocation="fisher"))
        finally:
            allocate.gather_curves = original

    def run(self, config: MoonshotConfig) -> dict:
        pruner = MoonshotPruner(copy.deepcopy(self.model), config, self.tokenizer)
        started = time.process_time()
        report = pruner.prune(str(DEMO / "calibration.txt"), progress=False)
        seconds, value = time.process_time() - started, self.measure(pruner.model)
        targets = (
            {layer.name: layer.target_sparsity for layer in report.layers} if config.allocation == "fisher" else {}
        )
        excess = math.log(value / self.dense)
        return {
            "perplexity": value,
            "excess": excess,
            "seconds": seconds,
            "sparsity": report.sparsity,
            "targets": targets,
        }

    def six_curves(self, config: MoonshotConfig) -> dict[str, LossCurve]:
        if config in self.curves:
            return self.curves[config]
        selection = select(self.model, dataclasses.replace(config, lam=min(config.lam, 0.5)))
        subject = Subject(self.model, self.tokenizer, progress=False)
        prepared = prepare(subject, selection, str(DEMO / "calibration.txt"))
        with frozen(self.model), progress_bar(total=len(selection.layers), desc="six solves", shown=False) as bar:
            task = SixSolves(prepared, config.lam, [Variant(self.model, selection, ResultStore(None, ""))], bar)
            run_pipeline(task.pipeline, partial(solve_parts, task), task.backoff, task.batches)
        self.curves[config] = task.curves
        return task.curves


class SixSolves(Pruning):
    """Computes the curve of every layer, with the run's statistics, instead of pruning it."""

    def __init__(self, prepared, lam: float, variants, bar):
        super().__init__(prepared, variants, bar)
        self.curves: dict[str, LossCurve] = {}
        self.lam = lam

    def lacks(self, layer) -> bool:
        return layer.name not in self.curves

    @torch.no_grad()
    def solve(self, layer, statistics) -> None:
        weight, solver = layer.matrix, self.prepared.selection.solver
        objective = statistics.objective(weight, self.lam)
        pruned = [solver.solve(objective, Unstructured(sparsity)).weight for sparsity in SIX]
        deltas = torch.stack([each - weight for each in [*pruned, torch.zeros_like(weight)]])
        losses = tuple(statistics.gradients.losses(deltas).tolist())
        self.curves[layer.name] = LossCurve(weight.numel(), (*SIX, 1.0), losses)


def show(results: dict) -> None:
    ways = ("uniform", "fisher", "six solves")
    rows = []
    for name, row in results.items():
        values = (f"{row[way]['perplexity']:.2f}" for way in ways)
        worse = row["fisher"]["excess"] / row["six solves"]["excess"]
        slower = row["fisher"]["seconds"] / row["uniform"]["seconds"]
        rows.append([name, *values, f"{worse:.3f}", f"{slower:.2f}"])
    print(text_table(["", *ways, "excess / six solves", "time / uniform"], rows, 120))


if __name__ == "__main__":
    main()
