"""`optimum-cli moonshot sweep`: prune by many λ, sparsities and patterns on one calibration, and select the best."""

import argparse
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from ..commands.common import (
    add_calibration_options,
    add_format_option,
    add_method_options,
    add_model_options,
    add_output_options,
    calibration_source,
    check_data,
    expect,
    find_device,
    import_modules,
    load_pruner,
    make_config,
    pruner_metric,
    usage_errors,
)
from ..commands.launch import by_first, is_first
from ..commands.output import Output, open_output
from ..errors import require

if TYPE_CHECKING:
    import torch

    from ..config import MoonshotConfig
    from ..pruner import MoonshotPruner

# Options of `moonshot prune`, and their plural forms here.
SWEPT = {"lam": "lambdas", "sparsity": "sparsities", "pattern": "patterns", "seed": "seeds"}


def add_sweep_options(parser: argparse.ArgumentParser) -> None:
    add_model_options(parser, by_layer=True)
    add_output_options(
        parser,
        "folder for table, plots and, with --save, the model; the weights of the variants are stored in DIR.partial, "
        "and a killed sweep resumes when you rerun the command",
    )
    parser.add_argument("--lambdas", nargs="+", type=float, metavar="LAMBDA", help="default: 0 .1 .25 .5 .75 .9 1")
    parser.add_argument("--sparsities", nargs="+", type=float, metavar="S", help="fractions of the weights to remove")
    parser.add_argument("--patterns", nargs="+", default=["unstructured"], help='default: "unstructured"; or 2:4, …')
    text = "seeds of the calibration samples, one sweep each (0)"
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help=text)
    add_calibration_options(parser)
    parser.add_argument(
        "--metric",
        default="calibration",
        metavar="DATA",
        help="select by perplexity or loss on the calibration data (the default), or by perplexity or accuracy on "
        "other data",
    )
    text = "save the model with the best λ, of the last seed, to DIR/model"
    parser.add_argument("--save", action="store_true", help=text)
    add_format_option(parser, default="dense")
    add_method_options(parser, without=tuple(SWEPT))


def sweep(args: argparse.Namespace) -> None:
    """`moonshot sweep`: calibrate once per seed, solve and measure every variant, write table and plots."""
    from ..objective.patterns import implies_sparsity

    started = time.perf_counter()
    import_modules(args.imports)
    needed = any(not implies_sparsity(pattern) for pattern in args.patterns)
    expect(not needed or bool(args.sparsities), "add --sparsities", field="patterns", value=args.patterns)
    several = len(args.patterns) * max(1, len(args.sparsities or [])) > 1
    message = "give one pattern and one sparsity; the model with the best λ is saved"
    expect(not (args.save and several), message, field="save")
    configs = [_config(args, seed) for seed in args.seeds]
    device = find_device(args.device)
    calibration = calibration_source(args, configs[0]) or "c4"
    if args.metric != "calibration":
        check_data("metric", [args.metric])
    with open_output(args) as output:
        _sweep(args, configs, device, calibration, output)
    if is_first():
        print(f"written     {output.path}\nseconds     {time.perf_counter() - started:.1f}")


def _sweep(
    args: argparse.Namespace, configs: "list[MoonshotConfig]", device: "torch.device", calibration: Any, output: Output
) -> None:
    """Sweep every unfinished seed, write the table and plots, and save the best model."""
    from .report import SweepReport, choice, save_all, table

    pruner = load_pruner(args, configs[0], device)

    def run(config: "MoonshotConfig", **variants: Any) -> SweepReport:
        pruner.config = config
        return pruner.sweep(calibration, work_dir=output.work(config.seed), **variants, **_metric(args, pruner))

    reports: list[SweepReport] = []
    swept = None
    output.begin()
    for config in configs:
        stored = by_first(partial(output.report, config.seed))
        if stored is None:
            swept = config
            reports.append(run(config, **_variants(args)))
            output.keep_report(config.seed, reports[-1].to_dict())
        else:
            reports.append(SweepReport.from_dict(stored))
        if config is not configs[-1] or not args.save:
            output.discard(config.seed)
        if is_first():
            reports[-1].save(output.path / f"seed-{config.seed}" if len(configs) > 1 else output.path)
    if is_first():
        if len(configs) > 1:
            save_all(reports, output.path)
        print(table(reports), "", sep="\n")
    if args.save:
        lam = choice(reports, *reports[-1].settings()[0])
        require(lam is not None, "the metric is NaN for every λ, so no model is saved", field="save")
        last = reports[-1] if swept is configs[-1] else run(configs[-1], **{**_variants(args), "lambdas": [lam]})
        pruner.choose(next(entry for entry in last.entries if entry.lam == lam))
        pruner.save_pretrained(output.path / "model", format=args.format)
        if is_first():
            print(f"saved       {output.path / 'model'} (λ = {lam:g}, seed {configs[-1].seed})")
    output.finish()


def _config(args: argparse.Namespace, seed: int) -> "MoonshotConfig":
    """Return the configuration that the variants of a seed share; check all variants before anything is loaded."""
    from ..objective.patterns import implies_sparsity
    from .variants import combinations

    single = {"seed": seed, "pattern": args.patterns[0]}
    if not implies_sparsity(args.patterns[0]):
        single["sparsity"] = args.sparsities[0]
    config = make_config(argparse.Namespace(**{**vars(args), **single}))
    with usage_errors():
        combinations(config, *_variants(args).values())
    return config


def _variants(args: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(args, name) for name in ("lambdas", "sparsities", "patterns")}


def _metric(args: argparse.Namespace, pruner: "MoonshotPruner") -> dict[str, Any]:
    from ..data.sources import short_name

    if args.metric == "calibration":
        return {}
    metric = pruner_metric(pruner)

    def measure(model: Any) -> float:
        return metric.measure(args.metric).value

    measure.__name__ = f"{metric.name} on {short_name(args.metric)}"
    return {"metric": measure, "maximize": metric.name != "perplexity"}
