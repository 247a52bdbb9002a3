"""`optimum-cli moonshot eval`: perplexity, top-1 accuracy and zero-shot accuracy of a model, into one JSON file."""

import argparse
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from optimum.commands.base import BaseOptimumCLICommand, CommandInfo

from ..errors import MoonshotError
from .common import IMAGES_HELP, UsageError, add_model_options, check_data, expect, find_device, load, remote_code
from .measuring import make_meter
from .messages import guard
from .method_options import flag

RUNTIMES = ("dense", "auto", "packed")


def add_eval_options(parser: argparse.ArgumentParser) -> None:
    """The options of `moonshot eval`."""
    add_model_options(parser)
    parser.add_argument(
        "--runtime",
        choices=RUNTIMES,
        default="dense",
        help="of a pruned MODEL: auto leaves its layers packed in memory where this device multiplies them faster so, "
        "packed wherever they can be, dense none (the default)",
    )
    parser.add_argument(
        "--dataset",
        nargs="+",
        action="extend",
        default=[],
        metavar="DATA",
        help=f"c4, wikitext2, ptb, or a text, JSON or Parquet file. {IMAGES_HELP}",
    )
    parser.add_argument(
        "--tasks",
        nargs="+",
        action="extend",
        default=[],
        metavar="TASK",
        help='zero-shot tasks: "paper" for the seven of the paper, names that lm-eval knows, or YAML task files; '
        "needs pip install optimum-moonshot[eval]",
    )
    parser.add_argument("--num-fewshot", type=int, default=0, help="solved examples before each question (0)")
    parser.add_argument(
        "--limit", type=int, help="the first so many windows, images, or documents of a task only, for a quick look"
    )
    parser.add_argument(
        "--sequence-length", type=int, help="tokens per window; default: the model's longest, at most 2048"
    )
    parser.add_argument("--batch-size", type=int, default=4, help="windows, images or requests at a time (4)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--output", metavar="RESULT.json", help="write the results, with versions, as each is known")
    parser.add_argument(
        "--baseline",
        metavar="RESULT.json",
        help="the --output of another model: its figures are printed too, with the share of the tasks that MODEL wins",
    )
    parser.add_argument(
        "--record",
        action="store_true",
        help="note the results in the report and the model card of MODEL, a folder that was pruned and saved",
    )
    parser.add_argument(
        "--dense", metavar="RESULT.json", help="with --record: the --output of the dense model, for what was before"
    )


def evaluate(args: argparse.Namespace) -> None:
    """`moonshot eval`: measure, print, and write each result as soon as it is known.

    Raises:
        UsageError: options that make no sense, before anything is loaded.
        MoonshotError: a model or data that cannot be loaded or measured.
    """
    device = find_device(args.device)
    _check_options(args)
    from ..evaluation.report import EvalReport

    references = {option: _reference(args, option) for option in ("baseline", "dense")}
    tasks = _tasks(args, list(references.values()))
    if args.record:
        _check_record(args)
    model, tokenizer, processor = _load_for_evaluation(args, device)
    expect(not tasks or processor is None, "--tasks: zero-shot tasks are for language models; use --dataset")
    for option, reference in references.items():
        _check_windows(args, option, reference, model)
    model.to(device).eval()
    baseline, dense = references.values()
    report = EvalReport(args.model)
    for result in _results(args, model, tokenizer, processor, tasks):
        report.add(result)
        if not args.json:
            print(*_lines(result, baseline), sep="\n", flush=True)
        if args.output:
            report.save(args.output)
    more = _compared(args, report, baseline)
    if args.output:
        report.save(args.output, **more)
    if args.json:
        print(json.dumps({**report.to_dict(), **more}))
    elif more.get("win_rate") is not None:
        print(f"win rate    {more['win_rate']:.2%} against {args.baseline}")
    if args.record:
        _record(args, report, dense)


def _check_options(args: argparse.Namespace) -> None:
    """Everything that can be said without loading anything."""
    for name, least in (("sequence_length", 2), ("batch_size", 1), ("limit", 1), ("num_fewshot", 0)):
        value = getattr(args, name)
        expect(value is None or value >= least, f"{flag(name)} {value}: give a whole number of at least {least}")
    args.dataset = list(dict.fromkeys(args.dataset))
    expect(bool(args.dataset or args.tasks), "nothing to measure: give --dataset or --tasks")
    expect(args.record or not args.dense, "--dense: only --record has a place for it")
    if args.output:
        place = Path(args.output)
        expect(not place.is_dir() and place.parent.is_dir(), f"--output {args.output}: give a file in a folder")
    check_data("--dataset", args.dataset)


def _reference(args: argparse.Namespace, option: str) -> Any:
    """The results of another model, which must have something in common with what is asked for."""
    from ..evaluation.report import EvalReport

    given = getattr(args, option)
    if given is None:
        return None
    try:
        found = EvalReport.load(given)
    except MoonshotError as error:
        raise UsageError(f"--{option}: {error}") from None
    common = any(found.of(dataset) for dataset in args.dataset) or (args.tasks and found.zero_shot)
    expect(bool(common), f"--{option} {given}: it has nothing of what is to be measured")
    return found


def _check_windows(args: argparse.Namespace, option: str, reference: Any, model: Any) -> None:
    """Perplexities compare on windows of one length."""
    from ..data.text import window_length
    from ..model.model_info import max_positions

    length = window_length(args.sequence_length, max_positions(model))
    for dataset in args.dataset if reference is not None else ():
        other = getattr(reference.of(dataset), "sequence_length", length)
        advice = f"has windows of {other} tokens of {dataset}; --sequence-length {other} makes such"
        expect(other == length, f"--{option} {getattr(args, option)}: it {advice}")


def _tasks(args: argparse.Namespace, references: list[Any]) -> Any:
    """The zero-shot tasks; unknown ones, and those that do not compare with the references', are found here."""
    if not args.tasks:
        return None
    from ..evaluation.zeroshot import find_tasks

    try:
        tasks = find_tasks(args.tasks)
        for reference in references:
            if reference is not None and reference.zero_shot is not None:
                reference.zero_shot.check_comparable(tasks.names, args.num_fewshot, args.limit)
    except MoonshotError as error:
        raise UsageError(f"--{error}") from None
    return tasks


def _check_record(args: argparse.Namespace) -> None:
    from ..checkpoint.saving import saved_report
    from ..data.corpora import short_name

    try:
        saved_report(Path(args.model))
    except MoonshotError as error:
        raise UsageError(f"--record: {error}") from None
    names = [short_name(dataset) for dataset in args.dataset]
    twice = next((name for name in names if names.count(name) > 1), None)
    expect(twice is None, f"--record: two data sets are called {twice}, and a report knows them by their names")


def _results(args: argparse.Namespace, model: Any, tokenizer: Any, processor: Any, tasks: Any) -> Iterator[Any]:
    """One result after another."""
    from ..evaluation.zeroshot import zero_shot

    if args.dataset:
        meter = make_meter(model, tokenizer, processor, args.sequence_length, args.batch_size, args.limit)
        yield from map(meter.measure, args.dataset)
    if tasks:
        options = {"batch_size": args.batch_size, "num_fewshot": args.num_fewshot, "limit": args.limit}
        yield zero_shot(model, tokenizer, tasks, progress=True, **options)


def _lines(result: Any, baseline: Any) -> list[str]:
    """For people: a result's figures, and the baseline's where they were measured in the same way."""
    known = {} if baseline is None else baseline.measurements()
    lines = []
    for name, (metric, value, settings) in result.measurements().items():
        shown = ".2%" if metric == "accuracy" else ".3f"
        stderr = getattr(result, "stderr", {}).get(name)
        spread = "" if stderr is None else f" ± {stderr:{shown}}"
        other = ""
        if name in known:
            same = known[name][::2] == (metric, settings)
            other = f" (baseline {known[name].value:{shown}}{'' if same else ', measured in another way'})"
        lines.append(f"{metric:<12}{value:{shown}}{spread} on {getattr(result, 'dataset', name)}{other}")
    return lines


def _compared(args: argparse.Namespace, report: Any, baseline: Any) -> dict[str, Any]:
    """What the JSON says of the baseline."""
    if baseline is None:
        return {}
    both = report.zero_shot is not None and baseline.zero_shot is not None
    return {"baseline": args.baseline, "win_rate": report.zero_shot.win_rate(baseline.zero_shot) if both else None}


def _record(args: argparse.Namespace, report: Any, dense: Any) -> None:
    from ..checkpoint.saving import record

    card = record(args.model, report, dense)
    where = "the report and the model card" if card else "the report; the model card is not one of this package"
    if not args.json:
        print(f"recorded    in {where}")


def _load_for_evaluation(args: argparse.Namespace, device: Any) -> tuple[Any, Any, Any]:
    """A model, and its tokenizer or its image processor; packed layers are on the device already."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from ..checkpoint.loading import load_pruned
    from ..checkpoint.meta_model import model_class
    from ..model.model_info import load_processor
    from ..reports.record import PruningRecord

    config = load(lambda dtype, **kwargs: AutoConfig.from_pretrained(args.model, **kwargs), args)
    cls = model_class(config)
    images = getattr(cls, "main_input_name", None) == "pixel_values"
    if args.runtime == "dense":
        loader = (cls if images else AutoModelForCausalLM).from_pretrained
    else:
        pruned = PruningRecord.read(config) is not None
        expect(pruned, f"--runtime {args.runtime}: {args.model} is not pruned; leave the option out")
        loader = partial(load_pruned, runtime=args.runtime, device_map=device)
    model = load(lambda **kwargs: loader(args.model, **kwargs), args)
    if images:
        return model, None, load_processor(model, args.model, **remote_code(args))
    return model, load(lambda dtype, **kwargs: AutoTokenizer.from_pretrained(args.model, **kwargs), args), None


class EvalCommand(BaseOptimumCLICommand):
    COMMAND = CommandInfo(name="eval", help="Measure a model's perplexity, zero-shot accuracy, or accuracy on images.")
    parse_args = staticmethod(add_eval_options)

    def run(self) -> None:
        guard(evaluate, self.args)
