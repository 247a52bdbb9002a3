"""`optimum-cli moonshot shrink`: make a model smaller, to a number of parameters, bytes or milliseconds."""

import argparse
import time
from typing import TYPE_CHECKING, Any

from ..commands.common import (
    add_calibration_options,
    add_data_option,
    add_method_options,
    add_model_options,
    add_output_options,
    check_data,
    import_modules,
    make_config,
    usage_errors,
)
from ..commands.output import RESUMED_HELP, Output, change_and_save

if TYPE_CHECKING:
    from ..pruner import MoonshotPruner

# Options that the target determines, or that structured pruning does not have.
WITHOUT = (
    "pattern",
    "sparsity",
    "allocation",
    "bits",
    "quant_group",
    "target_bytes",
    "bits_per_weight",
    "owl_threshold",
    "owl_lambda",
    "alpha_tau",
    "under_calibrated_experts",
    "rotation",
    "rotation_weights",
    "rotation_steps",
    "rotation_lr",
    "rotation_rows",
)


def add_shrink_options(parser: argparse.ArgumentParser) -> None:
    add_model_options(parser)
    add_output_options(parser, f"folder for the smaller model; {RESUMED_HELP}")
    text = "tokens that remain: those of this text (like --calibration), or the N most frequent ones of --calibration"
    parser.add_argument("--vocabulary", metavar="TEXT|N", help=f"{text}; needs no target, and takes seconds alone")
    group = parser.add_argument_group("target", "exactly one, or none with --vocabulary")
    text = "of the smaller model: a fraction of the dense one's up to 1, or a number"
    group.add_argument("--parameters", type=float, metavar="N", help=text)
    group.add_argument(
        "--bytes", metavar="SIZE", help='of the weights of the smaller model, like --parameters, or such as "2GB"'
    )
    text = "of a forward pass on this machine: a fraction up to 1, or milliseconds"
    group.add_argument("--latency", type=float, metavar="T", help=text)
    text = "with --latency: samples and tokens of the forward pass; 1 token is decoded after a context (1 1)"
    group.add_argument("--batch-shape", nargs=2, type=int, default=(1, 1), metavar=("SAMPLES", "TOKENS"), help=text)
    text = "a smaller hidden size is a multiple of this, such as 32 for the blocks of GGUF's Q8_0"
    parser.add_argument("--hidden-multiple", type=int, metavar="N", help=text)
    add_calibration_options(parser)
    add_data_option(parser, "--eval", "measure the model on these data sets before and after")
    add_method_options(parser, without=WITHOUT)


def shrink(args: argparse.Namespace) -> None:
    """`moonshot shrink`: load, measure, decide, shrink, measure, save."""
    from .report import Target, check_batch_shape

    start = time.perf_counter()
    import_modules(args.imports)
    with usage_errors():
        target = {name: getattr(args, name) for name in ("parameters", "latency")}
        target["bytes"] = _number(args.bytes)
        vocabulary = _vocabulary(args.vocabulary)
        Target.optional(vocabulary is None, **target)
        check_batch_shape(args.batch_shape)
    args.solver, args.pattern, args.sparsity = getattr(args, "solver", "osscar"), "structured", 0.0
    config = make_config(args)

    def change(pruner: "MoonshotPruner", calibration: Any, output: Output) -> list[str]:
        options = {"batch_shape": tuple(args.batch_shape), "hidden_multiple": args.hidden_multiple}
        options["vocabulary"] = vocabulary
        report = pruner.shrink(calibration, **target, **options, resume_dir=output.work(several=True))
        return [report.table(), ""]

    change_and_save(args, config, start, change)


def _vocabulary(text: str | None) -> int | str | None:
    """Parse a number of tokens, or the name of a text, which must exist."""
    if text is None or text.isdecimal():
        return None if text is None else int(text)
    check_data("vocabulary", [text])
    return text


def _number(size: str | None) -> float | str | None:
    """Convert a size to a number; other text, such as "2GB", is returned unchanged."""
    try:
        return None if size is None else float(size)
    except ValueError:
        return size
