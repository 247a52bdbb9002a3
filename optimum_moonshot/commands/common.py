"""What the subcommands of `optimum-cli moonshot` share: which model, loading, usage errors."""

import argparse
import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import MoonshotError, reason

if TYPE_CHECKING:
    import torch

OUTPUT_HELP = "where the pruned model goes; a killed run leaves DIR.partial, and the same command goes on from there"
IMAGES_HELP = "Image models: a folder with one sub-folder of images per class, Parquet, or a data set on the Hub"
FORMAT_HELP = "dense loads anywhere; packed stores the weights that survive and one bit for each"
DTYPES = ("auto", "float32", "bfloat16", "float16")
FORMATS = ("dense", "packed")


class UsageError(MoonshotError):
    """A mistake in the command line, found before anything was loaded."""


def expect(condition: bool, message: str) -> None:
    """Raise `UsageError(message)` unless `condition` holds."""
    if not condition:
        raise UsageError(message)


def one_line(error: BaseException) -> str:
    """What it says; where it says nothing, its type."""
    return " ".join(str(error).split()) or type(error).__name__


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Which model, and how to load it."""
    whole_names(parser)
    parser.add_argument("model", metavar="MODEL", help="a language or image model: folder, or name on the Hub")
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="of the loaded model; auto: as it was saved")
    parser.add_argument("--device", help="default: cuda if there is one, else cpu")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the model")


def add_offload_option(parser: argparse.ArgumentParser) -> None:
    """Where the layers of a model are that is larger than the memory."""
    parser.add_argument(
        "--offload",
        choices=("cpu", "disk"),
        help="keep the decoder layers in host memory, or in the checkpoint's files, and one at a time on the device",
    )


def whole_names(parser: argparse.ArgumentParser) -> None:
    """Take no abbreviated option: one that a command lacks would pass for another that begins alike."""
    parser.allow_abbrev = False


def import_modules(names: list[str]) -> None:
    """Import the modules of `--import`, which may lie in the current folder as for ``python -m``.

    Raises:
        UsageError: one that cannot be imported.
    """
    if names and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:  # whatever the code of a user raises
            kind = type(error).__name__
            raise UsageError(f"--import {name}: it cannot be imported ({kind}: {reason(error)})") from error


def find_device(name: str | None) -> "torch.device":
    """The device of this name; a GPU where there is one, else the CPU, without a name.

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
        raise UsageError(f"--device {name}: not a device of this machine") from None
    return device


def check_data(flag: str, sources: list[str]) -> None:
    """Raise `UsageError` for what is no data set, before anything is loaded.

    Args:
        flag: the option that the names came with.
        sources: names of corpora, paths, or names on the Hub.
    """
    from ..data.corpora import CORPORA, is_hub_name

    for source in sources:
        known = source in CORPORA or os.path.exists(os.path.expanduser(source)) or is_hub_name(source)
        expect(known, f"{flag} {source[:200]}: none of {', '.join(CORPORA)}, no file, no folder and no owner/name")


def check_source(name: str) -> None:
    """Raise `UsageError` for what is neither a folder nor may be a name on the Hub."""
    from ..data.corpora import is_hub_name

    known = Path(name).is_dir() or (is_hub_name(name) and not Path(name).exists())
    expect(known, f"{name}: not a folder, nor an owner/name on the Hub")


def load(loader: Callable[..., Any], args: argparse.Namespace) -> Any:
    """What `loader` loads, a model or a part of it.

    Args:
        loader: gets ``dtype`` and, where it was asked for, ``trust_remote_code``.
        args: of the command.

    Raises:
        MoonshotError: it cannot be loaded; it says why in one line.
    """
    try:
        return loader(dtype=args.dtype, **remote_code(args))
    except MoonshotError:
        raise
    except Exception as error:  # transformers raises OSError, ValueError, KeyError, ImportError, … for a wrong model
        raise MoonshotError(f"{args.model}: cannot be loaded ({reason(error)})") from error


def remote_code(args: argparse.Namespace) -> dict[str, Any]:
    """The option of `from_pretrained` that `--trust-remote-code` is."""
    return {"trust_remote_code": True} if args.trust_remote_code else {}


def offload_place(args: argparse.Namespace, device: Any) -> dict[str, str]:
    """The options of `from_pretrained` by which `--offload` leaves layers elsewhere; none without it.

    Args:
        args: of a command.
        device: where one layer at a time comes to.
    """
    return {} if args.offload is None else {"offload": args.offload, "device_map": str(device)}


def load_pruner(args: argparse.Namespace, config: Any, device: Any) -> Any:
    """The `MoonshotPruner` of a command, its model on the device but for what `--offload` leaves elsewhere.

    Args:
        args: of the command.
        config: the `MoonshotConfig` that they make.
        device: where the model works.

    Raises:
        MoonshotError: it cannot be loaded; it says why in one line.
    """
    from .. import MoonshotPruner

    place = offload_place(args, device)
    pruner = load(lambda **kwargs: MoonshotPruner.from_pretrained(args.model, config, **place, **kwargs), args)
    if not place:
        pruner.model.to(device)
    return pruner
