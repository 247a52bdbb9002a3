"""A smaller hidden size compared with fewer neurons and with both, for equal parameters of the shipped model.

Neurons are removed by OSSCAR at λ = 1 from every block; "both" removes neurons down to the square root of the
fraction, then directions of the residual stream. Every seed draws its own calibration windows. With --steps, the first
seed's models are also trained towards the dense model's logits on windows of the calibration text, 8 a step (AdamW
with two learning rates; the table shows the better result).
"""

import copy
import math

import torch
from common import write
from quality import DEMO, demo_parser, load_demo, mean_error, measure
from torch.nn import functional

from optimum_moonshot import MoonshotConfig, MoonshotPruner
from optimum_moonshot.shrink.hidden_size import cut_stream, observe_stream

RATES = (3e-4, 1e-3)
METHODS = ("neurons", "width λ=1", "width λ=0.5", "both λ=0.5")


def windows(tokenizer, length: int) -> torch.Tensor:
    ids = tokenizer((DEMO / "calibration.txt").read_text(), return_tensors="pt", verbose=False)["input_ids"][0]
    return ids[: len(ids) // length * length].view(-1, length)


def draw(text: torch.Tensor, seed: int, samples: int) -> list[dict[str, torch.Tensor]]:
    order = torch.randperm(len(text), generator=torch.Generator().manual_seed(seed))[:samples]
    return [{"input_ids": part} for part in text[order].split(8)]


def without_neurons(model, tokenizer, fraction: float, seed: int, options):
    """The compacted model with about this fraction of the parameters."""
    neurons = sum(part.numel() for name, part in model.named_parameters() if ".mlp." in name)
    share = (1 - fraction) * model.num_parameters() / neurons
    config = MoonshotConfig(
        solver="osscar", pattern="structured", sparsity=share, lam=1.0, targets=["down_proj"], seed=seed,
        num_samples=options.samples, sequence_length=options.tokens,
    )  # fmt: skip
    pruner = MoonshotPruner(copy.deepcopy(model), config, tokenizer)
    pruner.prune(str(DEMO / "calibration.txt"), progress=False)
    pruner.compact()
    return pruner.model


def narrowed(stream, fraction: float):
    """With the multiple of 4 heads that is next to this fraction of the hidden size."""
    return cut_stream(stream, 4 * round(fraction * stream.space.width / 4))[0]


def smaller_models(model, tokenizer, seed: int, text: torch.Tensor, options):
    """(method, fraction, model)"""
    samples = draw(text, seed, options.samples)
    streams = {f"width λ={lam:g}": observe_stream(model, samples, lam=lam) for lam in (1.0, 0.5)}
    for fraction in options.fractions:
        yield "neurons", fraction, without_neurons(model, tokenizer, fraction, seed, options)
        for name, stream in streams.items():
            yield name, fraction, narrowed(stream, fraction)
        half = without_neurons(model, tokenizer, math.sqrt(fraction), seed, options)
        yield "both λ=0.5", fraction, narrowed(observe_stream(half, samples), math.sqrt(fraction))


def distilled(model, teacher, text: torch.Tensor, rate: float, steps: int):
    student = copy.deepcopy(model).train().requires_grad_(True)
    optimizer = torch.optim.AdamW(student.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    generator, order = torch.Generator().manual_seed(0), torch.empty(0, dtype=torch.long)
    for step in range(steps):
        if len(order) < 8:
            order = torch.randperm(len(text), generator=generator)
        ids, order = text[order[:8]], order[8:]
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / 10) * (1 + math.cos(math.pi * step / steps)) / 2
        with torch.no_grad():
            target = teacher(input_ids=ids).logits.log_softmax(-1).flatten(0, 1)
        result = student(input_ids=ids).logits.log_softmax(-1).flatten(0, 1)
        loss = functional.kl_div(result, target, log_target=True, reduction="batchmean")
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
    return student.eval().requires_grad_(False)


def main() -> None:
    arguments = demo_parser(__doc__, "width")
    arguments.add_argument("--fractions", type=float, nargs="+", default=[0.9, 0.75, 0.6], help="of the parameters")
    arguments.add_argument("--steps", type=int, default=0, help="of distillation")
    options = arguments.parse_args()
    model, tokenizer = load_demo()
    dense, text = measure(model, tokenizer, options), windows(tokenizer, options.tokens)
    rows: dict[str, dict[str, dict]] = {name: {} for name in METHODS}
    for seed in range(options.seeds):
        for name, fraction, small in smaller_models(model, tokenizer, seed, text, options):
            cell = rows[name].setdefault(str(fraction), {"perplexity": [], "parameters": small.num_parameters()})
            cell["perplexity"].append(measure(small, tokenizer, options))
            if options.steps and not seed:
                trained = (distilled(small, model, text, rate, options.steps) for rate in RATES)
                cell["distilled"] = [measure(each, tokenizer, options) for each in trained]
            print(seed, name, fraction, cell, flush=True)
        write(options.name, {"options": vars(options), "dense": dense, "rates": RATES, "methods": rows})
    for name, row in rows.items():
        cells = [
            f"{mean_error(cell['perplexity'])} {min(cell.get('distilled', [math.nan])):.1f}" for cell in row.values()
        ]
        print(f"{name:12}", *cells, sep=" | ")


if __name__ == "__main__":
    main()
