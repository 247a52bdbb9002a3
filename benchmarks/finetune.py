"""Kinds of recovery of the shipped model after pruning, and the cost of keeping the zeros per training step.

Recovery: held-out perplexity at 0.7 and 2:4, before and after 200 steps of 4 windows with the Trainer (all weights with
masks; LoRA; distillation) or block-wise. λ: block-wise at 0.8, from λ = 1 and below. Gradual: compared with block-wise,
from λ = 1. Overhead: Trainer steps with and without masks, alternating.
"""

import copy
import json
import statistics
import tempfile
import time
from collections.abc import Iterator

import torch
from common import RESULTS, parser, write
from peft import LoraConfig, get_peft_model
from quality import DEMO, mean_error
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainerCallback, TrainingArguments

from optimum_moonshot import MoonshotCallback, MoonshotConfig, MoonshotPruner, perplexity
from optimum_moonshot.integrations.peft import sparse_lora
from optimum_moonshot.masks import Masks, find_pruned
from optimum_moonshot.recover.blockwise import Recovery
from optimum_moonshot.reports.tables import text_table

PATTERNS = {"0.7": {"sparsity": 0.7}, "2:4": {"pattern": "2:4"}}
LENGTH = 256
WAYS = ("fine-tuning", "LoRA", "distillation")
RATES = {"fine-tuning": 5e-4, "LoRA": 2e-3, "distillation": 5e-4}


def windows(tokenizer, text: str, length: int) -> list[dict]:
    """A text as training samples of `length` tokens, with the tokens as labels."""
    ids = torch.tensor(tokenizer(text)["input_ids"])
    return [{"input_ids": row, "labels": row} for row in ids[: len(ids) // length * length].view(-1, length)]


def training(output: str, steps: int, learning_rate: float) -> TrainingArguments:
    """Arguments of a short run with four windows per step."""
    return TrainingArguments(
        output_dir=output,
        max_steps=steps,
        per_device_train_batch_size=4,
        learning_rate=learning_rate,
        lr_scheduler_type="cosine",
        logging_steps=max(1, steps // 10),
        save_strategy="no",
        report_to=[],
    )


class Bench:
    def __init__(self, samples: int):
        self.tokenizer = AutoTokenizer.from_pretrained(DEMO)
        self.dense = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()
        self.text = DEMO / "calibration.txt"
        self.data = windows(self.tokenizer, self.text.read_text(encoding="utf-8"), LENGTH)
        self.samples = samples

    def prune(self, **choice):
        """The pruned model, the recovered one (the same without recovery), and the report."""
        config = MoonshotConfig(**choice, num_samples=self.samples, sequence_length=LENGTH)
        pruner = MoonshotPruner(copy.deepcopy(self.dense), config, self.tokenizer)
        pruned = [pruner.model]

        def copied(recovery):
            pruned[0] = copy.deepcopy(self.dense)
            for layer in recovery.prepared.selection.layers:
                pruned[0].get_submodule(layer.name).weight.data.copy_(recovery.store.weight(layer))
            return original(recovery)

        original, Recovery.run = Recovery.run, copied
        try:
            report = pruner.prune(str(self.text), progress=False)
        finally:
            Recovery.run = original
        return pruned[0], pruner.model, report

    def perplexity(self, model) -> float:
        return perplexity(model.eval(), self.tokenizer, str(DEMO / "heldout.txt"), sequence_length=LENGTH).value

    def train(self, pruned, way: str, steps: int, seed: int) -> float:
        """Perplexity after training a copy of a pruned model with one of the Trainer's methods."""
        model = copy.deepcopy(pruned).train()
        masks = Masks(find_pruned(model))
        torch.manual_seed(seed)
        if way == "LoRA":
            model = sparse_lora(get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")))
        callback = MoonshotCallback(teacher=self.dense if way == "distillation" else None)
        self.trainer(model, steps, RATES[way], seed, callback).train()
        model = model.merge_and_unload() if way == "LoRA" else model
        masks.check()
        return self.perplexity(model)

    def trainer(self, model, steps: int, rate: float, seed: int, *callbacks) -> Trainer:
        arguments = training(tempfile.mkdtemp(), steps, rate)
        arguments.seed = arguments.data_seed = seed
        arguments.disable_tqdm = True
        return Trainer(model, arguments, train_dataset=self.data, callbacks=list(callbacks))


def recovery(bench: Bench, seed: int, steps: int) -> Iterator[dict]:
    for pattern, choice in PATTERNS.items():
        pruned, recovered, _ = bench.prune(**choice, lam=0.9, seed=seed, recover="blockwise")
        row = {"case": pattern, "pruned": bench.perplexity(pruned), "block-wise": bench.perplexity(recovered)}
        for way in WAYS:
            row[way] = bench.train(pruned, way, steps, seed)
        row["block-wise, then distillation"] = bench.train(recovered, "distillation", steps, seed)
        yield row


def lambdas(bench: Bench, seed: int, steps: int) -> Iterator[dict]:
    for lam in (1.0, 0.9, 0.5):
        pruned, recovered, report = bench.prune(sparsity=0.8, lam=lam, seed=seed, recover="blockwise")
        yield {
            "case": f"λ={lam:g}",
            "pruned": bench.perplexity(pruned),
            "recovered": bench.perplexity(recovered),
            "prune seconds": report.seconds["total"] - report.seconds["recovery"],
            "recovery seconds": report.seconds["recovery"],
            "block losses": [(block.loss_before, block.loss_after) for block in report.recovery],
        }


def gradual(bench: Bench, seed: int, steps: int) -> Iterator[dict]:
    for pattern, choice in {"0.6": {"sparsity": 0.6}, "0.8": {"sparsity": 0.8}, "2:4": {"pattern": "2:4"}}.items():
        row: dict = {"case": pattern}
        for how in ("blockwise", "gradual"):
            _, recovered, report = bench.prune(**choice, lam=1.0, seed=seed, recover=how)
            row |= {how: bench.perplexity(recovered), f"{how} seconds": report.seconds["recovery"]}
            row[f"{how} losses"] = [(block.loss_before, block.loss_after) for block in report.recovery]
        yield row


class Switch(TrainerCallback):
    """Enable masks in every other step; returns the seconds of each step except the first ones."""

    def __init__(self, masks: Masks):
        self.masks = masks
        self.seconds: dict[bool, list[float]] = {True: [], False: []}

    def on_step_begin(self, args, state, control, optimizer=None, **kwargs):
        if state.global_step % 2:
            self.masks.attach(optimizer)
        else:
            self.masks.detach()
        self.started = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step > 4:
            self.seconds[state.global_step % 2 == 0].append(time.perf_counter() - self.started)


def overhead(bench: Bench, steps: int) -> dict:
    pruned, _, _ = bench.prune(solver="magnitude", sparsity=0.7)
    switch = Switch(Masks(find_pruned(pruned)))
    bench.trainer(pruned.train(), steps, 5e-4, 0, switch).train()
    without, kept = (statistics.median(switch.seconds[on]) for on in (False, True))
    started = time.perf_counter()
    switch.masks.sparsity()
    return {
        "seconds per step without": without,
        "with": kept,
        "ratio": kept / without,
        "seconds per logged sparsity": time.perf_counter() - started,
    }


def show(title: str, rows: list[dict]) -> None:
    cases = sorted({row["case"] for row in rows})
    lines = [
        [name, *(mean_error([row[name] for row in rows if row["case"] == case]) for case in cases)]
        for name, value in rows[0].items()
        if name not in ("case", "seed") and isinstance(value, float)
    ]
    print(title, text_table(["", *cases], lines, 100), sep="\n")


def merged(name: str, rows: list[dict]) -> list[dict]:
    """Add the rows of other seeds from existing results, so that seeds can be measured one at a time."""
    path = RESULTS / f"{name}.json"
    earlier = json.loads(path.read_text())["results"]["rows"] if path.exists() else []
    seeds = {row["seed"] for row in rows}
    return sorted([row for row in earlier if row["seed"] not in seeds] + rows, key=lambda row: row["seed"])


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("part", choices=("recovery", "lambdas", "gradual", "overhead"))
    arguments.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments.add_argument("--samples", type=int, default=128)
    arguments.add_argument("--steps", type=int, default=200)
    options = arguments.parse_args()
    name, bench = f"finetune-{options.part}", Bench(options.samples)
    if options.part == "overhead":
        seconds = overhead(bench, options.steps)
        write(name, {"steps": options.steps, **seconds})
        print(seconds)
        return
    rows, dense = [], bench.perplexity(bench.dense)
    for seed in options.seeds:
        for row in {"recovery": recovery, "lambdas": lambdas, "gradual": gradual}[options.part](
            bench, seed, options.steps
        ):
            rows.append({"seed": seed, **row})
            print(rows[-1], flush=True)
    rows = merged(name, rows)
    write(name, {"samples": options.samples, "steps": options.steps, "dense": dense, "rows": rows})
    show(f"held-out perplexity, dense {dense:.1f}", rows)


if __name__ == "__main__":
    main()
