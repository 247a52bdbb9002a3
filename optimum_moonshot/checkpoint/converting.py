"""Convert a saved checkpoint to another format."""

import os
import shutil
from pathlib import Path
from typing import Any

from ..errors import check_choice, check_path, require
from ..files import STAGING_PREFIX, is_weights, staged
from ..reports.prune_report import REPORT_NAME, PruneReport
from .card import Facts, write_card
from .compressed_tensors import export_files
from .file_integrity import check_files, check_no_other_weights
from .hub import HUB_OPTIONS, local_folder
from .meta_model import checkpoint_meta_model
from .packed_files import FORMATS, pack_files, unpack_files
from .weight_files import EXPORT, stored_format


def convert(source: str | os.PathLike[str], output: str | os.PathLike[str], format: str, **loading: Any) -> None:
    """Convert a pruned checkpoint to another format; other files are copied, and the card is updated.

    The weights are verified first, as by `load_pruned`.

    Args:
        source: folder of a checkpoint that this package pruned, or its name on the Hub.
        output: folder of the new one; may be the same.
        format: "dense", "packed" or "compressed-tensors", which is not converted back.
        loading: for the configuration, such as `trust_remote_code`, and `revision`, `token`, … for the Hub.

    Raises:
        MoonshotError: not a pruned checkpoint, one that has the format already, or one that is damaged.
    """
    check_choice("format", format, (*FORMATS, EXPORT))
    check_path("source", source)
    check_path("output", output)
    hub = {name: loading.pop(name) for name in HUB_OPTIONS if name in loading}
    folder = local_folder(source, whole=True, **hub)
    stored = stored_format(folder)
    packed = stored == "packed"
    require(stored != format, f"{source} is a {format} checkpoint already")
    require(stored != EXPORT, f"{source} is a {EXPORT} checkpoint", hint="convert the dense or the packed one instead")
    weights = {path.resolve() for path in check_files(folder, packed)}
    check_no_other_weights(folder, packed)
    model = None if packed else checkpoint_meta_model(folder, **loading)
    inside = [path.resolve() for path in (Path(output), *Path(output).parents)]
    entries = [path for path in folder.iterdir() if path.resolve() not in inside]

    def weight_names(parent: str, names: list[str]) -> list[str]:
        return [name for name in names if Path(parent, name).resolve() in weights]

    with staged("output", output) as staging:
        for path in entries:
            if path.is_dir() and not path.name.startswith("."):
                shutil.copytree(path, staging / path.name, ignore=weight_names)
            elif path.is_file() and not is_weights(path) and not path.name.startswith(STAGING_PREFIX):
                shutil.copy2(path, staging)
        if model is None:
            unpack_files(folder, staging)
        elif format == "packed":
            pack_files(folder, staging, model)
        if format == EXPORT:
            dense = staging if packed else folder
            export_files(dense, staging, model or checkpoint_meta_model(dense, **loading))
        facts = Facts.read(staging, Path(output).resolve().name, format)
        if facts is not None and (staging / REPORT_NAME).is_file():
            write_card(staging, PruneReport.load(staging), facts)
