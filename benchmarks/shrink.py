"""Smaller dense models to a target: whether the predicted loss ranks the alternatives.

    python benchmarks/shrink.py                 # alternatives of equal parameters, by λ; the first row is chosen
    python benchmarks/shrink.py --show          # the tables of the existing results

The model is examples/demo_model in float32. An alternative is a set of blocks and a number of heads with as many
neurons as fit the budget. Rows in the results file are not repeated.
"""

import dataclasses
import itertools
import json
import math
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, machine, parser
from scipy.stats import spearmanr
from transformers import AutoModelForCausalLM, AutoTokenizer

from optimum_moonshot import MoonshotConfig, perplexity
from optimum_moonshot.pipeline.selection import Subject
from optimum_moonshot.shrink.decision import decision_of
from optimum_moonshot.shrink.measurements import measure_parts
from optimum_moonshot.shrink.parts import apply_decision, without_blocks
from optimum_moonshot.shrink.program import Program
from optimum_moonshot.shrink.report import Target
from optimum_moonshot.shrink.request import Shrinking

DEMO = Path(__file__).parents[1] / "examples" / "demo_model"
LENGTH, SHARES, LAMBDAS = 256, (0.9, 0.75, 0.6), (1.0, 0.5)


def config(**changes: Any) -> MoonshotConfig:
    fields = {"solver": "osscar", "pattern": "structured", "sparsity": 0, "sequence_length": LENGTH}
    return MoonshotConfig(**{**fields, **changes})


def held_out(model: Any, tokenizer: Any) -> float:
    return perplexity(model, tokenizer, DEMO / "heldout.txt", sequence_length=LENGTH, progress=False).value


def alternatives(program: Program, budget: float) -> list[Any]:
    """For each set of blocks and number of heads, the choice with as many neurons as fit the budget."""
    names = [each.name for each in program.dimensions]
    neurons = names.index("neurons")
    others = [range(len(each.removed)) if i != neurons else (0,) for i, each in enumerate(program.dimensions)]
    choices = []
    for options in itertools.product(*others):
        levels = range(len(program.dimensions[neurons].removed))
        trials = (program.choice((*options[:neurons], level, *options[neurons + 1 :])) for level in levels)
        choices += [next((each for each in trials if each.cost <= budget), None)]
    return [choice for choice in choices if choice is not None]


def ranked(rows: list[dict], options: Any, save: Any) -> None:
    """Measure every alternative at equal parameters, by λ."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    for share in options.shares:
        target = Target.of(parameters=share)
        subject = Subject(model, tokenizer, progress=False)
        settings = config(num_samples=options.samples, lam=1.0)
        run = Shrinking(subject, settings, str(DEMO / "calibration.txt"), target, (1, 1), None, None)
        tables, _, measured = measure_parts(run)
        program = tables.program(tables.parameters)
        for choice in alternatives(program, target.budget(tables.parameters.dense)):
            decision = decision_of(tables, target, program, choice, measured)
            for lam in LAMBDAS if decision.report.chosen.removed["neurons"] else (1.0,):
                key = {"share": share, "blocks": list(decision.blocks), "removed": decision.report.chosen.removed}
                key["lam"] = lam
                if any(all(row.get(name) == value for name, value in key.items()) for row in rows):
                    continue
                at_lam = dataclasses.replace(run, config=dataclasses.replace(settings, lam=lam))
                smaller, removal, decided = without_blocks(at_lam, tables.merging, decision)
                smaller, _ = apply_decision(at_lam, decided, smaller, removal)
                row = {"predicted": choice.loss, "perplexity": held_out(smaller, tokenizer)}
                row["merged"] = list(decided.report.merged)
                rows.append({**key, "parameters": smaller.num_parameters(), **row})
                save()


def show(results: dict) -> None:
    dense = results["dense"]
    for share in SHARES:
        all_rows = sorted((row for row in results["ranked"] if row["share"] == share), key=lambda r: r["predicted"])
        rows = [row for row in all_rows if row["lam"] == 1]
        for row in all_rows:
            measured = f"measured {math.log(row['perplexity'] / dense):.3f}, perplexity {row['perplexity']:.2f}"
            predicted = f"predicted {row['predicted']:.3f}, {measured} at λ = {row['lam']:g}"
            print(f"{share:<5} {row['parameters']:,} {row['blocks']!s:<7} {row['removed']} {predicted}")
        if len(rows) > 2:
            rank = spearmanr([row["predicted"] for row in rows], [row["perplexity"] for row in rows]).statistic
            print(f"{share}: rank correlation {rank:.3f}")


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--samples", type=int, default=64)
    arguments.add_argument("--shares", type=float, nargs="+", default=list(SHARES))
    arguments.add_argument("--show", action="store_true")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    path = RESULTS / "shrink.json"
    if path.exists():
        results = json.loads(path.read_text(encoding="utf-8"))
    else:
        model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
        dense = held_out(model, AutoTokenizer.from_pretrained(DEMO))
        results = {"machine": machine(), "samples": options.samples, "dense": dense, "ranked": []}

    def save() -> None:
        path.write_text(json.dumps(results, indent=1), encoding="utf-8")

    if not options.show:
        ranked(results["ranked"], options, save)
    show(results)


if __name__ == "__main__":
    main()
