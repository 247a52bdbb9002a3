"""`optimum-cli moonshot eval`: perplexity, top-1 accuracy and zero-shot accuracy of a model, in one JSON file."""

import argparse
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import check_whole
from .common import (
    IMAGES_HELP,
    add_data_option,
    add_model_options,
    check_data,
    expect,
    find_device,
    loading,
    make_metric,
    remote_code,
    usage_errors,
)

if TYPE_CHECKING:
    import torch

    from ..evaluation.metrics import Embeddings
    from ..evaluation.report import EvalReport

# The format of a metric's values; ".3f" for others.
SPECS = {"accuracy": ".2%", "same neighbour": ".2%", "same top token": ".2%", "cosine": ".4f", "KL divergence": ".4f"}


def add_eval_options(parser: argparse.ArgumentParser) -> None:
    add_model_options(parser)
    parser.add_argument(
        "--runtime",
        choices=("dense", "auto", "packed"),
        default="dense",
        help="for a pruned MODEL: auto keeps layers packed in memory if their product is faster on this device, packed "
        "keeps all that it can, dense none (the default)",
    )
    add_data_option(
        parser,
        "--dataset",
        f"c4, wikitext2, ptb, a text, JSON, CSV or Parquet file, or a data set on the Hub. {IMAGES_HELP}",
    )
    add_data_option(
        parser,
        "--tasks",
        'zero-shot tasks: "paper" for the seven of the paper, names of lm-eval, or YAML task files; '
        "needs pip install optimum-moonshot[eval]",
        metavar="TASK",
    )
    parser.add_argument(
        "--against",
        metavar="DENSE",
        help="the dense model that MODEL was made from: also the KL divergence of MODEL's predictions from the dense "
        "ones, and how often both predict the same token; for a model without a head, such as a sentence encoder, the "
        "agreement of their embeddings",
    )
    parser.add_argument("--num-fewshot", type=int, default=0, help="solved examples before each question (0)")
    parser.add_argument("--limit", type=int, help="use only the first windows, images, or documents of a task")
    text = "tokens per window; default: the model's longest, at most 2048"
    parser.add_argument("--sequence-length", type=int, help=text)
    parser.add_argument(
        "--bos",
        action=argparse.BooleanOptionalAction,
        help="begin every window with BOS; default: if the tokenizer puts it before a text. --no-bos is the protocol "
        "of published numbers",
    )
    parser.add_argument("--batch-size", type=int, default=4, help="windows, images or requests at a time (4)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--output", metavar="RESULT.json", help="write the results, with versions, after each one")
    parser.add_argument(
        "--baseline",
        metavar="RESULT.json",
        help="the --output of another model, to print its results too, and the fraction of the tasks that MODEL wins",
    )
    parser.add_argument(
        "--record",
        action="store_true",
        help="add the results to the report and the model card of MODEL, a folder that was pruned and saved",
    )
    parser.add_argument(
        "--dense",
        metavar="RESULT.json",
        help="with --record: the --output of the dense model, for the results before pruning",
    )


def evaluate(args: argparse.Namespace) -> None:
    """`moonshot eval`: measure, print, and write each result at once; options are checked before anything is loaded."""
    device = find_device(args.device)
    _check_options(args)
    from ..evaluation.report import EvalReport

    baseline, dense = (_reference(args, option) for option in ("baseline", "dense"))
    tasks = _tasks(args, (baseline, dense))
    against, dense_embeddings = _dense_model(args, device)
    model, tokenizer, processor = _load_for_evaluation(args, device)
    message = "zero-shot tasks are for language models; use --dataset"
    expect(not tasks or processor is None, message, field="tasks")
    _check_windows(args, "baseline", baseline, model, tokenizer)
    _check_windows(args, "dense", dense, model, tokenizer)
    model.to(device).eval()
    report, of_dense = EvalReport(args.model), EvalReport(args.against or "")

    def results() -> Iterator[Any]:
        if args.dataset:
            sizes = (args.sequence_length, args.batch_size, args.limit)
            metric = make_metric(model, tokenizer, processor, *sizes, args.bos, dense_embeddings, against)
            yield from map(metric.measure, args.dataset)
        if tasks:
            from ..evaluation.zeroshot import zero_shot

            options = {"batch_size": args.batch_size, "num_fewshot": args.num_fewshot, "limit": args.limit}
            yield zero_shot(model, tokenizer, tasks, progress=True, **options)

    for result in results():
        report.add(result)
        if hasattr(result, "of_dense"):
            of_dense.add(result.of_dense)
        if not args.json:
            print(*_lines(result, baseline), sep="\n", flush=True)
        if args.output:
            report.save(args.output)
    comparison: dict[str, Any] = {}
    if baseline is not None:
        scores, others = report.zero_shot, baseline.zero_shot
        win_rate = None if scores is None or others is None else scores.win_rate(others)
        comparison = {"baseline": args.baseline, "win_rate": win_rate}
    if args.output:
        report.save(args.output, **comparison)
    if args.json:
        print(json.dumps({**report.to_dict(), **comparison}))
    elif comparison.get("win_rate") is not None:
        print(f"win rate    {comparison['win_rate']:.2%} against {args.baseline}")
    if args.record:
        from ..checkpoint.measuring import record

        card = record(args.model, report, dense or of_dense)
        places = "the report and the model card" if card else "the report; the model card is not one of this package"
        if not args.json:
            print(f"recorded    in {places}")


def _check_options(args: argparse.Namespace) -> None:
    """Check the options before anything is loaded."""
    for name, least in (("sequence_length", 2), ("batch_size", 1), ("limit", 1), ("num_fewshot", 0)):
        if getattr(args, name) is not None:
            with usage_errors():
                check_whole(name, getattr(args, name), least)
    args.dataset = list(dict.fromkeys(args.dataset))
    expect(bool(args.dataset or args.tasks), "nothing to measure: give --dataset or --tasks")
    expect(args.record or not args.dense, "only for --record", field="dense")
    if args.output:
        path = Path(args.output)
        valid = not path.is_dir() and path.parent.is_dir()
        expect(valid, "give a file in a folder", field="output", value=args.output)
    check_data("dataset", args.dataset)
    if args.record:
        from ..checkpoint.measuring import saved_report
        from ..data.sources import short_name

        with usage_errors("record"):
            saved_report(Path(args.model))
        names = [short_name(dataset) for dataset in args.dataset]
        twice = next((name for name in names if names.count(name) > 1), None)
        expect(twice is None, f"two data sets have the name {twice}, which is their key in the report", field="record")


def _reference(args: argparse.Namespace, option: str) -> "EvalReport | None":
    """The results of another model, which must include a requested data set or zero-shot tasks."""
    from ..evaluation.report import EvalReport

    path = getattr(args, option)
    if path is None:
        return None
    with usage_errors(option):
        report = EvalReport.load(path)
    common = any(report.of(dataset) for dataset in args.dataset) or (args.tasks and report.zero_shot)
    expect(bool(common), "it has none of the results to measure", field=option, value=path)
    return report


def _check_windows(args: argparse.Namespace, option: str, reference: Any, model: Any, tokenizer: Any) -> None:
    """Require windows of equal length, that all begin with BOS or not: perplexities are comparable only then."""
    from ..data.text import bos_of, window_length
    from ..model.model_info import max_positions

    length = window_length(args.sequence_length, max_positions(model))
    bos = bool(bos_of(tokenizer)) if args.bos is None and tokenizer is not None else bool(args.bos)
    for dataset in args.dataset if reference is not None else ():
        other = getattr(reference.of(dataset), "sequence_length", length)
        message, hint = f"it has windows of {other} tokens of {dataset}", f"use sequence_length={other}"
        expect(other == length, message, field=option, value=getattr(args, option), hint=hint)
        other = getattr(reference.of(dataset), "bos", bos)
        message = f"its windows of {dataset} {'all begin' if other else 'do not all begin'} with BOS"
        switch = "use --bos" if other else "use --no-bos"
        expect(other == bos, message, field=option, value=getattr(args, option), hint=switch)


def _tasks(args: argparse.Namespace, references: "tuple[EvalReport | None, ...]") -> Any:
    """Find the zero-shot tasks, and check that they exist and are comparable with the references' tasks."""
    if not args.tasks:
        return None
    from ..evaluation.zeroshot import find_tasks

    with usage_errors():
        tasks = find_tasks(args.tasks)
        for reference in references:
            if reference is not None and reference.zero_shot is not None:
                reference.zero_shot.check_comparable(tasks.names, args.num_fewshot, args.limit)
    return tasks


def _dense_model(args: argparse.Namespace, device: "torch.device") -> "tuple[Any, dict[str, Embeddings]]":
    """The dense model; or, of a model without a head, its embeddings of each data set."""
    from ..model.losses import has_head

    dense: dict[str, Embeddings] = {}
    if args.against is None:
        return None, dense
    other = argparse.Namespace(**{**vars(args), "model": args.against, "runtime": "dense"})
    model, tokenizer, processor = _load_for_evaluation(other, device)
    model.to(device).eval()
    if has_head(type(model)):
        return model, dense
    metric = make_metric(model, tokenizer, processor, args.sequence_length, args.batch_size, args.limit, dense=dense)
    for dataset in args.dataset:
        metric.measure(dataset)
    return None, dense


def _lines(result: Any, baseline: Any) -> list[str]:
    """Format a result and the baseline's, with a note if it was measured differently."""
    references = {} if baseline is None else baseline.measurements()
    lines = []
    for name, (metric, value, settings) in result.measurements().items():
        spec = SPECS.get(metric, ".3f")
        stderr = getattr(result, "stderr", {}).get(name)
        line = f"{metric:<11} {value:{spec}}" + ("" if stderr is None else f" ± {stderr:{spec}}")
        line += f" on {getattr(result, 'dataset', name)}" + (" with BOS" if settings.get("bos") else "")
        if metric == "perplexity" and hasattr(result, "dense"):
            line += f" (dense {result.dense:{spec}})"
        if name in references:
            note = "" if references[name][::2] == (metric, settings) else ", measured in another way"
            line += f" (baseline {references[name].value:{spec}}{note})"
        lines.append(line)
    return lines


def _load_for_evaluation(args: argparse.Namespace, device: "torch.device") -> tuple[Any, Any, Any]:
    """Load a model, and its tokenizer or image processor; packed layers are loaded on the device."""
    from transformers import AutoModelForCausalLM

    from ..checkpoint.folder import find_checkpoint
    from ..checkpoint.loading import load_config, load_pruned, model_class
    from ..model.losses import has_head
    from ..model.model_info import load_processor, load_tokenizer
    from ..reports.record import PruningRecord

    with loading(args.model):
        name, shared = find_checkpoint(args.model, {"dtype": args.dtype, **remote_code(args)})
        dtype = shared.pop("dtype")
        config = load_config(name, **shared)
    cls = model_class(config)
    images = getattr(cls, "main_input_name", None) == "pixel_values"
    if has_head(cls):
        message = f"{cls.__name__} classifies images, which accuracy measures; leave the option out"
        expect(args.against is None or not images, message, field="against", value=args.against)
    else:
        message = f"{cls.__name__} has no head: give the dense model, to compare its embeddings"
        expect(args.against is not None, message, field="against")
        expect(not args.tasks, f"{cls.__name__} has no head", field="tasks")
    if args.runtime == "dense":
        loader: Any = (AutoModelForCausalLM if has_head(cls) and not images else cls).from_pretrained
    else:
        message = f"{args.model} is not pruned; leave the option out"
        expect(PruningRecord.read(config) is not None, message, field="runtime", value=args.runtime)
        loader = partial(load_pruned, runtime=args.runtime, device_map=device)
    with loading(args.model):
        model = loader(name, dtype=dtype, **shared)
    if images:
        return model, None, load_processor(model, name, **shared)
    return model, load_tokenizer(name, **shared), None
