"""Shared code of the subcommands of `optimum-cli moonshot`: options, usage errors, loading and measuring a model."""

import argparse
import importlib
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UNSET, MoonshotError, reason

if TYPE_CHECKING:
    import torch

    from ..config import MoonshotConfig
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
