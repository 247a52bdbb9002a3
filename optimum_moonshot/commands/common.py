"""Shared code of the subcommands of `optimum-cli moonshot`: options, usage errors, loading and measuring a model.

The options of a method are derived from the fields of `MoonshotConfig` in options.py.
"""

import argparse
import importlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UNSET, MoonshotError, one_line, reason
from ..options import GROUPS, OPTIONS, RECIPES, Field, kind_of

if TYPE_CHECKING:
    import torch

    from ..config import MoonshotConfig
    from ..data.text import SelfCalibration
    from ..evaluation.metrics import Embeddings
    from ..pruner import MoonshotPruner

IMAGES_HELP = "Image models: a folder with one sub-folder of images per class, Parquet, or a data set on the Hub"


class UsageError(MoonshotError):
    """A mistake on the command line, detected before anything is loaded."""


def expect(condition: bool, message: str, *, field: str | None = None, value: Any = UNSET, hint: str = "") -> None:
    """`errors.require` with a `UsageError`; `field` is the destination of an option."""
    if not condition:
        raise UsageError(message, field=field, value=value, hint=hint)


@contextmanager
def usage_errors(option: str | None = None) -> Iterator[None]:
    """Turn every `MoonshotError` raised inside into a `UsageError`, prefixed with an option if one is given."""
    try:
        yield
    except MoonshotError as error:
        copy = UsageError.of(error)
        raise (copy if option is None else copy.within("--" + option.replace("_", "-"))) from None


def add_model_options(
    parser: argparse.ArgumentParser,
    metavar: str = "MODEL",
    help: str = "a language or image model: folder, or name on the Hub",
    loaded: bool = True,
    by_layer: bool = False,
) -> None:
    """Add the model, the options for loading it if `loaded`, and `--offload` if `by_layer`."""
    parser.allow_abbrev = False  # an unknown option would match another with the same prefix
    parser.add_argument("model", metavar=metavar, help=help)
    if loaded:
        dtypes, text = (
            ("auto", "float32", "bfloat16", "float16"),
            "of the loaded model; auto: the checkpoint's dtype",
        )
        parser.add_argument("--dtype", choices=dtypes, default="auto", help=text)
        parser.add_argument("--device", help="default: cuda if there is one, else cpu")
    if by_layer:
        parser.add_argument(
            "--offload",
            choices=("cpu", "disk"),
            help="keep the decoder layers in host memory or the checkpoint's files, with one at a time on the device",
        )
    else:
        parser.set_defaults(offload=None)
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the model")


def add_output_options(parser: argparse.ArgumentParser, help: str, required: bool = True) -> None:
    parser.add_argument("--output", required=required, metavar="DIR", help=help)
    parser.add_argument("--overwrite", action="store_true", help="write to the output even if it is not empty")


def add_format_option(parser: argparse.ArgumentParser, **options: Any) -> None:
    text = (
        "dense loads anywhere; packed stores the surviving weights and one bit for each weight; compressed-tensors "
        "stores the codes of all weights of a quantized model, for vLLM and transformers without this package"
    )
    parser.add_argument("--format", choices=("dense", "packed", "compressed-tensors"), help=text, **options)


def add_data_option(parser: argparse.ArgumentParser, name: str, help: str, metavar: str = "DATA") -> None:
    """Add an option with any number of names."""
    parser.add_argument(name, nargs="+", action="extend", default=[], metavar=metavar, help=help)


def import_modules(names: list[str]) -> None:
    """Import the modules of `--import`, also from the current folder, as ``python -m`` does."""
    if names and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:  # user code may raise anything
            message = f"it cannot be imported ({type(error).__name__}: {reason(error)})"
            raise UsageError(message, field="imports", value=name) from error


def find_device(name: str | None) -> "torch.device":
    """The device with this name; without a name, a GPU if there is one, else the CPU."""
    import torch

    from ..devices import default_device

    if name is None:
        return default_device()
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError):
        raise UsageError("not a device of this machine", field="device", value=name) from None
    return device


def check_data(option: str, sources: list[str]) -> None:
    """Raise `UsageError` for a data set of an option that does not exist, before anything is loaded."""
    from ..data.sources import CORPORA, is_hub_name

    for source in sources:
        exists = source in CORPORA or os.path.exists(os.path.expanduser(source)) or is_hub_name(source)
        message = f"neither one of {', '.join(CORPORA)}, nor a file, a folder or an owner/name"
        expect(exists, message, field=option, value=source)


def check_source(name: str) -> None:
    """Raise `UsageError` unless this is a folder, a GGUF file, or possibly a name on the Hub."""
    named = re.fullmatch(r"(hf://)?[\w.-]+/[\w.-]+(@[^/\s]+)?(/.+\.gguf)?", name) is not None
    valid = Path(name).is_dir() or is_gguf(name) or (named and not Path(name).exists())
    expect(valid, f"{name}: neither a folder nor an owner/name on the Hub")


def is_gguf(name: str) -> bool:
    """Whether this is a GGUF file."""
    return name.endswith(".gguf") and Path(name).is_file()


@contextmanager
def loading(model: str) -> Iterator[None]:
    """Turn every error inside into a `MoonshotError` with the name of the model that is loaded."""
    try:
        yield
    except MoonshotError:
        raise
    except Exception as error:  # transformers raises OSError, ValueError, KeyError, ImportError, … for a wrong model
        raise MoonshotError(f"{model}: cannot be loaded ({reason(error)})") from error


def remote_code(args: argparse.Namespace) -> dict[str, bool]:
    """The keyword argument of `from_pretrained` for `--trust-remote-code`."""
    return {"trust_remote_code": True} if args.trust_remote_code else {}


def loading_options(args: argparse.Namespace) -> dict[str, Any]:
    """The keyword arguments of `from_pretrained` and `plan_for` for the options of `add_model_options`."""
    return {"dtype": args.dtype, "offload": args.offload, **remote_code(args)}


def load_pruner(args: argparse.Namespace, config: "MoonshotConfig", device: "torch.device") -> "MoonshotPruner":
    """Load the model of a command, on the device except for the layers that `--offload` keeps offloaded."""
    from .. import MoonshotPruner

    placement = {} if args.offload is None else {"device_map": str(device)}
    with loading(args.model):
        pruner = MoonshotPruner.from_pretrained(args.model, config, **loading_options(args), **placement)
    if not placement:
        pruner.model.to(device)
    return pruner


@dataclass(frozen=True)
class Metric:
    """Accuracy or agreement with the dense model, higher is better, or perplexity."""

    name: str
    format: str  # the format specification of its values
    measure: Callable[[str], Any]  # name of a data set → `Perplexity`, `Accuracy` or `Agreement`

    def changes(
        self, before: dict[str, Any], record: Callable[[Any, Any], object] = lambda after, before: None
    ) -> list[str]:
        """Measure a changed model; return a line for each data set. `record` stores the results after and before."""
        from ..data.sources import short_name

        lines = []
        for dataset, result in before.items():
            after = self.measure(dataset)
            record(after, result)
            change = f"{result.value:{self.format}} → {after.value:{self.format}}"
            bos = " with BOS" if getattr(result, "bos", False) else ""
            lines.append(f"{self.name:<12}{change} on {short_name(dataset)}{bos}")
        return lines


def make_metric(
    model: Any,
    tokenizer: Any,
    processor: Any,
    sequence_length: int | None,
    batch_size: int,
    limit: int | None = None,
    bos: bool | None = None,
    dense: "dict[str, Embeddings] | None" = None,
    against: Any = None,
) -> Metric:
    """Agreement for models without a head, accuracy for image models, perplexity for the others.

    `limit` selects the first windows, images or texts; `bos` and `against` are for `perplexity`. Agreement
    compares with the embeddings of a data set in `dense`; the first measurement adds missing ones.
    """
    from .. import accuracy, perplexity
    from ..evaluation.metrics import Agreement, embeddings
    from ..model.losses import has_head
    from ..model.model_info import takes_images

    options: dict[str, Any] = {"batch_size": batch_size, "progress": True}
    if not has_head(type(model)):
        options |= {"sequence_length": sequence_length, "max_samples": limit}
        references = {} if dense is None else dense

        def agreement(data: str) -> Agreement:
            pooling = next((reference.pooling for reference in references.values()), None)
            embedded = embeddings(model, data, tokenizer, processor, pooling=pooling, **options)
            return embedded.agreement(references.setdefault(data, embedded))

        return Metric("cosine", ".4f", agreement)
    if takes_images(model):
        return Metric("accuracy", ".2%", lambda data: accuracy(model, data, processor, max_images=limit, **options))
    options |= {"sequence_length": sequence_length, "max_windows": limit, "bos": bos, "against": against}
    return Metric("perplexity", ".3f", lambda data: perplexity(model, tokenizer, data, **options))


def pruner_metric(pruner: "MoonshotPruner", dense: "dict[str, Embeddings] | None" = None) -> Metric:
    """The metric of a pruner's model, with the windows of its configuration; `dense`: see `make_metric`."""
    length, size = pruner.config.sequence_length, min(pruner.config.batch_size, 4)
    return make_metric(pruner.model, pruner.tokenizer, pruner.processor, length, size, dense=dense)


def _argument(field: Field) -> dict[str, Any]:
    """The arguments of `add_argument` for a field of the configuration, whose default applies without the option."""
    (kind, optional), declared = kind_of(field), field.metadata
    text, semicolon, rest = declared["help"].replace("%", "%%").partition(";")
    choices, how = declared.get("choices"), "HOW" if "choices" in declared else None
    argument: dict[str, Any] = {"metavar": declared.get("metavar", how)}
    if kind is bool:
        argument = {"action": argparse.BooleanOptionalAction if optional else "store_true"}
    elif kind in (int, float):
        argument["type"] = kind
        text += f" ({field.default:g})" if field.default is not None else ""
    elif kind == Sequence[str]:
        argument = {"nargs": "+", "action": "extend", "metavar": "REGEX"}
    elif kind == Mapping[str, Any]:
        argument = {"action": "append", "metavar": "NAME=VALUE"}
    elif choices and optional:
        argument |= {"nargs": "?", "const": choices[0]}
        text = text.replace(":", " (also when no HOW is given):", 1)
    return {**argument, "help": text + semicolon + rest}


# Calibration data has options of its own, `add_calibration_options`.
CONFIG_OPTIONS = {name: _argument(field) for name, field in OPTIONS.items() if name != "calibration"}


def flag(name: str) -> str:
    """The option of a field, in the singular if it is repeated for each value."""
    return "--" + (name.removesuffix("s") if name in ("solver_options", "imports") else name).replace("_", "-")


def add_method_options(parser: argparse.ArgumentParser, without: tuple[str, ...] = ()) -> None:
    """Add `--import`, and an option for every field of MoonshotConfig that is not in `without`."""
    for title, fields in GROUPS.items():
        group = parser.add_argument_group(f"method: {title.lower()}")
        if title == "Target" and not without:
            group.add_argument(
                "--recipe",
                choices=tuple(RECIPES),
                help="recommended settings for a --sparsity, an n:m --pattern or a size: paper, the paper's own; "
                "fast, a better solver and a sparsity budget for each layer; one-shot, also a learned basis; "
                "recovered, fast with distillation. Other options override them",
            )
        for name in (field.name for field in fields):
            if name in CONFIG_OPTIONS and name not in without:
                group.add_argument(flag(name), dest=name, default=argparse.SUPPRESS, **CONFIG_OPTIONS[name])
    parser.add_argument(
        "--import",
        dest="imports",
        action="append",
        default=[],
        metavar="MODULE",
        help="import a Python module first, such as one in this folder that registers a solver; may be repeated",
    )


def make_config(args: argparse.Namespace) -> "MoonshotConfig":
    """The configuration of a command; `UsageError` if its options do not make a valid one."""
    from .. import MoonshotConfig

    fields = {name: getattr(args, name) for name in CONFIG_OPTIONS if hasattr(args, name)}
    if "allocation" in fields:
        fields["allocation"] = _read_allocation(fields["allocation"])
    with usage_errors():
        if "solver_options" in fields:
            solver = fields.get("solver", MoonshotConfig.solver)
            fields["solver_options"] = _parse_options(solver, fields["solver_options"])
        budget = getattr(args, "recipe", None)
        if budget is None:
            return MoonshotConfig(**fields)
        pattern = "pattern" if "pattern" in fields else "sparsity"
        has_target = bool(fields.keys() & {pattern, "bits_per_weight", "target_bytes"})
        expect(has_target, "give a --sparsity, a --pattern 2:4 or a --target-bytes 500MB", field="recipe", value=budget)
        return MoonshotConfig.recipe(fields.pop(pattern, None), budget, **fields)


def _read_allocation(value: str) -> str | dict[str, Any]:
    """The name of a method, or the contents of a JSON file."""
    from ..config import ALLOCATIONS

    if value in ALLOCATIONS:
        return value
    usage = f"neither one of {', '.join(ALLOCATIONS)} nor a JSON file with an object of layers"
    try:
        rules = json.loads(Path(value).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{usage} ({one_line(error)})", field="allocation", value=value) from None
    expect(isinstance(rules, dict), usage, field="allocation", value=value)
    return rules


def _parse_options(solver: str, texts: list[str]) -> dict[str, Any]:
    """Parse hyperparameters of a solver, NAME=VALUE each, with the types that it declares."""
    from ..solvers.base import parse_option, solver_options

    options, values = solver_options(solver), {}
    for text in texts:
        name, sign, value = text.partition("=")
        expect(bool(name and sign), "give NAME=VALUE", field="solver_options", value=text)
        message = f"solver={solver!r} has {', '.join(options) or 'none'}"
        expect(name in options, message, field="solver_options", value=text)
        expect(name not in values, f"{name} is given twice", field="solver_options", value=text)
        try:
            values[name] = parse_option(options[name], value)
        except MoonshotError as error:
            raise error.within(f"solver_options={text!r}") from None
    return values


def add_calibration_options(parser: argparse.ArgumentParser, default: str = "the default") -> None:
    """Add `--calibration`, with a remark on its default, and the options of self-calibration."""
    parser.add_argument(
        "--calibration",
        metavar="DATA",
        help=f"c4 ({default}), wikitext2, ptb, a text, JSON, CSV or Parquet file, a data set of text or conversations "
        f"on the Hub, or self: text that the dense model generates first. {IMAGES_HELP}",
    )
    group = parser.add_argument_group("calibration on text that the model generates", "with --calibration self")
    group.add_argument(
        "--prompts",
        metavar="FILE",
        help="prompts, formatted by the model's chat template if it has one: one per line of a .txt file, or a column "
        "of a JSON, CSV or Parquet file; default: the BOS token alone",
    )
    group.add_argument("--temperature", type=float, metavar="T", help="sampling temperature (1)")
    group.add_argument(
        "--thinking",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="enable or disable thinking in the chat template; default: the template's own",
    )


def calibration_source(args: argparse.Namespace, config: "MoonshotConfig") -> "str | SelfCalibration | None":
    """The data of `--calibration`; by default C4 if the method needs data, else None."""
    from ..config import NEEDING_DATA
    from ..solvers import solver_class

    given = ((name, getattr(args, name)) for name in ("prompts", "temperature", "thinking"))
    options = {name: value for name, value in given if value is not None}
    if args.calibration == "self":
        from ..data.text import SelfCalibration

        with usage_errors():
            return SelfCalibration(**options)
    for name in options:
        raise UsageError("only for calibration='self'", field=name)
    if args.calibration is None:
        return "c4" if solver_class(config.solver).calibrated or config.allocation in NEEDING_DATA else None
    check_data("calibration", [args.calibration])
    return str(args.calibration)
