"""Self-calibration compared with calibration on text, by the number of samples.

Held-out perplexity of the shipped model after SparseGPT, on windows of its calibration text, and on as many samples
generated from its BOS token.
"""

import time

from common import parser, write
from quality import DEMO, load_demo, measure

from optimum_moonshot import MoonshotConfig, MoonshotPruner
from optimum_moonshot.reports.tables import text_table

SPARSITIES, LAMBDAS = [0.7, 0.8], [1.0, 0.5]


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--samples", type=int, nargs="+", default=[32, 128, 512])
    arguments.add_argument("--tokens", type=int, default=256)
    arguments.add_argument("--seeds", type=int, nargs="+", default=[0])
    options = arguments.parse_args()
    model, tokenizer = load_demo()
    dense, rows = measure(model, tokenizer, options), []
    for seed in options.seeds:
        for samples in options.samples:
            for name, data in {"text": str(DEMO / "calibration.txt"), "self": "self"}.items():
                config = MoonshotConfig(sparsity=0.5, num_samples=samples, sequence_length=options.tokens, seed=seed)
                started = time.perf_counter()
                report = MoonshotPruner(model, config, tokenizer).sweep(
                    data,
                    lambdas=LAMBDAS,
                    sparsities=SPARSITIES,
                    metric=lambda pruned: measure(pruned, tokenizer, options),
                    progress=False,
                )
                for entry in report.entries:
                    row = {"data": name, "samples": samples, "seed": seed, "perplexity": entry.metric}
                    rows.append({**row, "sparsity": entry.sparsity, "λ": entry.lam})
                print(name, samples, f"{time.perf_counter() - started:.0f} s", rows[-len(report.entries) :], flush=True)
    write("self_calibration", {"options": vars(options), "dense": dense, "rows": rows})
    show(rows, dense)


def show(rows: list[dict], dense: float) -> None:
    headers = ["data", "samples", *(f"{s:g}, λ = {lam:g}" for s in SPARSITIES for lam in LAMBDAS)]
    lines = []
    for data, samples in dict.fromkeys((row["data"], row["samples"]) for row in rows):
        values_shown = []
        for sparsity in SPARSITIES:
            for lam in LAMBDAS:
                wanted = {"data": data, "samples": samples, "sparsity": sparsity, "λ": lam}
                values = [row["perplexity"] for row in rows if wanted.items() <= row.items()]
                values_shown.append(f"{sum(values) / len(values):.1f}")
        lines.append([data, str(samples), *values_shown])
    print(f"held-out perplexity, dense {dense:.1f}", text_table(headers, lines, 100), sep="\n")


if __name__ == "__main__":
    main()
