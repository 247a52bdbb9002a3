"""Shared by the subcommands of `optimum-cli moonshot`: model options, loading, usage errors."""

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UNSET, MoonshotError, Text, reason

if TYPE_CHECKING:
    import torch

    from ..config import MoonshotConfig
    from ..pruner import MoonshotPruner

OUTPUT_HELP = "folder for the pruned model; a killed run leaves DIR.partial, and resumes when you rerun the command"
IMAGES_HELP = "Image models: a folder with one sub-folder of images per class, Parquet, or a data set on the Hub"
FORMAT_HELP = "dense loads anywhere; packed stores the surviving weights and one bit for each weight"
DTYPES = ("auto", "float32", "bfloat16", "float16")
FORMATS = ("dense", "packed")


class UsageError(MoonshotError):
    """A mistake on the command line, detected before anything is loaded."""


def expect(
    condition: bool, message: str | Text, *, field: str | None = None, value: Any = UNSET, hint: str | Text = ""
) -> None:
    """Raise `UsageError` unless a condition holds.

    Args:
        condition: the check.
        message: as for `MoonshotError`.
        field: the destination of the option that is wrong, if it is one.
        value: of the option.
        hint: as for `MoonshotError`.

    Raises:
        UsageError: the condition does not hold.
    """
    if not condition:
        raise UsageError(message, field=field, value=value, hint=hint)


@contextmanager
def usage_errors() -> Iterator[None]:
    """Turn every `MoonshotError` raised inside into a `UsageError`."""
    try:
        yield
    except MoonshotError as error:
        raise UsageError.of(error) from None


def one_line(text: str) -> str:
    """Join the lines of a message."""
    return " ".join(text.split())


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that select a model and how it is loaded."""
    whole_names(parser)
    parser.add_argument("model", metavar="MODEL", help="a language or image model: folder, or name on the Hub")
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="of the loaded model; auto: as it was saved")
    parser.add_argument("--device", help="default: cuda if there is one, else cpu")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the model")


def add_offload_option(parser: argparse.ArgumentParser) -> None:
    """Add `--offload`, for models that are larger than the memory."""
    parser.add_argument(
        "--offload",
        choices=("cpu", "disk"),
        help="keep the decoder layers in host memory, or in the checkpoint's files, and one at a time on the device",
    )


def whole_names(parser: argparse.ArgumentParser) -> None:
    """Reject abbreviated options: one that a command lacks would match another with the same prefix."""
    parser.allow_abbrev = False


def import_modules(names: list[str]) -> None:
    """Import the modules of `--import`, also from the current folder, as ``python -m`` does.

    Raises:
        UsageError: a module cannot be imported.
    """
    if names and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:  # user code may raise anything
            message = f"it cannot be imported ({type(error).__name__}: {reason(error)})"
            raise UsageError(message, field="imports", value=name) from error


def find_device(name: str | None) -> "torch.device":
    """Return the device of this name; without a name a GPU if there is one, else the CPU.

    Raises:
        UsageError: this machine has no such device.
    """
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
    """Raise `UsageError` for a data set that does not exist, before anything is loaded.

    Args:
        option: the option with the names.
        sources: names of corpora, paths, or names on the Hub.
    """
    from ..data.sources import CORPORA, is_hub_name

    for source in sources:
        exists = source in CORPORA or os.path.exists(os.path.expanduser(source)) or is_hub_name(source)
        message = f"none of {', '.join(CORPORA)}, no file, no folder and no owner/name"
        expect(exists, message, field=option, value=source)


def check_source(name: str) -> None:
    """Raise `UsageError` unless this is a folder, or possibly a name on the Hub."""
    from ..data.sources import is_hub_name

    valid = Path(name).is_dir() or (is_hub_name(name) and not Path(name).exists())
    expect(valid, f"{name}: not a folder, nor an owner/name on the Hub")


def load(loader: Callable[..., Any], args: argparse.Namespace) -> Any:
    """Call a loader of a model, or of a part of it, with the options of a command.

    Args:
        loader: takes ``dtype`` and, if the user asked for it, ``trust_remote_code``.
        args: of the command.

    Returns:
        The result of the loader.

    Raises:
        MoonshotError: loading failed, with the reason in one line.
    """
    try:
        return loader(dtype=args.dtype, **remote_code(args))
    except MoonshotError:
        raise
    except Exception as error:  # transformers raises OSError, ValueError, KeyError, ImportError, … for a wrong model
        raise MoonshotError(f"{args.model}: cannot be loaded ({reason(error)})") from error


def remote_code(args: argparse.Namespace) -> dict[str, bool]:
    """Return the keyword argument of `from_pretrained` for `--trust-remote-code`."""
    return {"trust_remote_code": True} if args.trust_remote_code else {}


def load_pruner(args: argparse.Namespace, config: "MoonshotConfig", device: "torch.device") -> "MoonshotPruner":
    """Load the model of a command, on its device except for the layers that `--offload` keeps offloaded.

    Args:
        args: of the command.
        config: the configuration of the command.
        device: for the computation.

    Raises:
        MoonshotError: loading failed, with the reason in one line.
    """
    from .. import MoonshotPruner

    placement = {} if args.offload is None else {"offload": args.offload, "device_map": str(device)}
    pruner = load(lambda **kwargs: MoonshotPruner.from_pretrained(args.model, config, **placement, **kwargs), args)
    if not placement:
        pruner.model.to(device)
    return pruner
