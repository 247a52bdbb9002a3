"""Structured pruning of the shipped model with OSSCAR: perplexity, and size and speed of the compacted model.

Quality: neurons and heads of every decoder layer, by the solvers that support structured patterns. Every seed draws its
own calibration windows; all methods and fractions use the same statistics, which do not depend on them.

With --speed: bytes on disk, tokens per second of a forward pass over 8 × 256 tokens and of greedy generation with a
cache (one sequence, 64 tokens), float32, dense and compacted in turn. In the shipped model overhead dominates
the matrix products; --hidden adds a random Mistral of that width.
"""

import copy
import statistics
import tempfile
import time
from pathlib import Path

import torch
from common import write
from quality import DEMO, demo_parser, load_demo, measure, prune_all, set_weights, show
from transformers import MistralConfig, MistralForCausalLM

from optimum_moonshot import MoonshotConfig, MoonshotPruner
from optimum_moonshot.model.structured_groups import find_structured_groups

SHARES, SPEED_SHARES = (0.1, 0.2), (0.1, 0.2, 0.5)
# Single query heads, as in the paper: such a model cannot be compacted with grouped-query attention.
SINGLE = "0.2, single heads"
COLUMNS = [*(f"{share:g}" for share in SHARES), SINGLE]


def choices(layer, group: int, head_dim: int, lambdas: list[float]):
    """((method, column), configuration) compared on one layer, whose columns leave in groups."""
    columns = [(f"{share:g}", share, group) for share in SHARES]
    if group > 1:
        columns.append((SINGLE, 0.2, head_dim))
    for column, share, size in columns:
        for solver in ("magnitude", "wanda", "osscar"):
            for lam in (1.0, *lambdas) if solver != "magnitude" else (None,):
                name = solver if lam is None else f"{solver} λ={lam:g}"
                choice = dict(pattern="structured", sparsity=share, group_size=size, solver=solver, lam=lam)
                yield (name, column), MoonshotConfig(**choice)


def one_seed(model, tokenizer, seed: int, options) -> dict[str, dict[str, float]]:
    """{method: {column: perplexity}}"""
    config = MoonshotConfig(
        solver="osscar", pattern="structured", sparsity=0.1, lam=0.9, seed=seed, num_samples=options.samples,
        sequence_length=options.tokens,
    )  # fmt: skip
    groups, _ = find_structured_groups(model)

    def choose(_, layer):
        return choices(layer, groups[layer.name].size, model.config.head_dim, options.lambdas)

    weights = prune_all(model, tokenizer, DEMO / "calibration.txt", config, choose)
    results: dict[str, dict[str, float]] = {}
    for name, column in sorted(weights):
        pruned = copy.deepcopy(model)
        if column == SINGLE:  # the same neurons as at 0.2
            set_weights(pruned, weights[name, "0.2"])
        set_weights(pruned, weights[name, column])
        results.setdefault(name, {})[column] = measure(pruned, tokenizer, options)
    print(f"seed {seed}: {results}")
    return results


def quality(options) -> None:
    model, tokenizer = load_demo()
    dense = measure(model, tokenizer, options)
    report(options, dense, [one_seed(model, tokenizer, seed, options) for seed in range(options.seeds)])


def report(options, dense: float, seeds: list[dict[str, dict[str, float]]]) -> None:
    results = {name: {column: [seed[name][column] for seed in seeds] for column in COLUMNS} for name in seeds[0]}
    write(options.name, {"options": vars(options), "dense": dense, "perplexity": results})
    show(results, dense, COLUMNS)


def compacted(model, share: float):
    """The model without a fraction of its neurons and heads; size and speed do not depend on the selection."""
    config = MoonshotConfig(solver="magnitude", pattern="structured", sparsity=share)
    pruner = MoonshotPruner(copy.deepcopy(model), config)
    pruner.prune(progress=False)
    done = pruner.compact()
    return pruner.model, done


def bytes_on_disk(model) -> int:
    with tempfile.TemporaryDirectory() as folder:
        copy.deepcopy(model).to(torch.bfloat16).save_pretrained(folder)
        return sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))


@torch.no_grad()
def forward_rate(model, ids) -> float:
    """Tokens per second."""
    started = time.perf_counter()
    model(input_ids=ids, use_cache=False)
    return ids.numel() / (time.perf_counter() - started)


@torch.no_grad()
def generation_rate(model, ids, tokens: int = 64) -> float:
    """New tokens per second."""
    started = time.perf_counter()
    model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0)
    return tokens / (time.perf_counter() - started)


def rates(models: dict[str, torch.nn.Module], repeats: int) -> dict[str, dict[str, float]]:
    """Medians; every round has all models, the first is a warm-up."""
    ids = torch.randint(3, 1000, (8, 256), generator=torch.Generator().manual_seed(0))
    rates = {name: {"forward": [], "generation": []} for name in models}
    for _ in range(repeats + 1):
        for name, model in models.items():
            rates[name]["forward"].append(forward_rate(model, ids))
            rates[name]["generation"].append(generation_rate(model, ids[:1, :64]))
    return {name: {kind: statistics.median(values[1:]) for kind, values in row.items()} for name, row in rates.items()}


def speed(options) -> None:
    sources = {"demo": load_demo()[0]}
    if options.hidden:
        torch.manual_seed(0)
        config = MistralConfig(
            vocab_size=2048, hidden_size=options.hidden, intermediate_size=int(2.75 * options.hidden),
            num_hidden_layers=8, num_attention_heads=options.hidden // 64, num_key_value_heads=options.hidden // 128,
            max_position_embeddings=512,
        )  # fmt: skip
        sources["random"] = MistralForCausalLM(config).eval()
    results = {}
    for source, dense in sources.items():
        small = {f"{share:g}": compacted(dense, share) for share in SPEED_SHARES}
        models = {"dense": dense, **{share: model for share, (model, _) in small.items()}}
        rows = rates(models, options.repeats)
        for name, model in models.items():
            rows[name] |= {"parameters": model.num_parameters(), "bytes": bytes_on_disk(model)}
            if name in small:
                rows[name] |= {"config": small[name][1].config, "zeros": small[name][1].zeros}
            cells = {key: rows[name][key] for key in ("forward", "generation", "parameters", "bytes")}
            ratios = {key: round(value / rows["dense"][key], 3) for key, value in cells.items()}
            print(f"{source} {name}: {cells}; relative to dense: {ratios}; {rows[name].get('zeros', '')}")
        results[source] = rows
    write(options.name + "_speed", {"options": vars(options), "models": results})


def main() -> None:
    arguments = demo_parser(__doc__, "structured")
    arguments.add_argument("--lambdas", type=float, nargs="+", default=[0.9])
    arguments.add_argument("--speed", action="store_true", help="measure size and speed instead of quality")
    arguments.add_argument("--hidden", type=int, default=512, help="of the random model; 0 for none")
    arguments.add_argument("--repeats", type=int, default=5)
    options = arguments.parse_args()
    (speed if options.speed else quality)(options)


if __name__ == "__main__":
    main()
