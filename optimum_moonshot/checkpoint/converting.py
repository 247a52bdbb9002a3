"""Convert a saved checkpoint to another format."""

import os
from pathlib import Path
from typing import Any

from ..errors import check_choice, check_path, require
from ..files import staged
from ..reports.prune_report import REPORT_NAME, PruneReport
from .card import Facts, write_card
from .compressed_tensors import export_files
from .file_integrity import check_files, check_no_other_weights
from .hub import HUB_OPTIONS, local_folder
from .origin import copy_side_files
from .packed_files import FORMATS, pack_files, unpack_files
from .pretrained import checkpoint_meta_model
from .weight_files import EXPORT, Checkpoint


def convert(source: str | os.PathLike[str], output: str | os.PathLike[str], format: str, **loading: Any) -> None:
    """Convert a pruned checkpoint to another format, with its other files, and update the card.

    The weights are verified first, like in `load_pruned`. Links to files outside the folder are not copied.

    Args:
        source: folder of a checkpoint that this package pruned, or its name on the Hub.
        output: folder of the new one; may be the same.
        format: "dense", "packed" or "compressed-tensors", which is not converted back.
        loading: for the configuration, such as `trust_remote_code`, and `revision`, `token`, … for the Hub.

    Raises:
        MoonshotError: the checkpoint is not pruned, has the format already, or is damaged.
    """
    check_choice("format", format, (*FORMATS, EXPORT))
    check_path("source", source)
    check_path("output", output)
    hub = {name: loading.pop(name) for name in HUB_OPTIONS if name in loading}
    folder = local_folder(source, whole=True, **hub)
    checkpoint = Checkpoint(folder)
    stored, packed = checkpoint.format, checkpoint.packed
    require(stored != format, f"{source} is a {format} checkpoint already")
    require(stored != EXPORT, f"{source} is a {EXPORT} checkpoint", hint="convert the dense or the packed one instead")
    check_files(checkpoint)
    check_no_other_weights(checkpoint)
    model = None if packed else checkpoint_meta_model(folder, **loading)
    with staged("output", output) as staging:
        copy_side_files(folder, staging)
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
