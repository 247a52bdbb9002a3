"""Save a rotated model that is not pruned: a dense checkpoint with its report and a card."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from torch import nn

from ..errors import require
from ..files import replace_file, staged
from ..reports.rotation_report import ROTATION_NAME, RotationReport
from .base_card import MARKER, TEXTS, TEXTS_OR_LISTS, find_base
from .card import find_auto_class
from .markdown import escaped
from .saving import check_saving, save_processor, write_model

_TEXT = """# {title}

This is {base}in another basis: it computes the same function, up to rounding, and loses less when it is pruned. The
rotations were learned and merged into the weights by optimum-moonshot; they add no parameter{untied} and no operation.

```python
from transformers import {cls}

model = {cls}.from_pretrained({literal}, dtype="auto")
```

| | |
|---|---|
| rotations | {rotations} |
| objective, the fraction of the scores that pruning would remove | {before:.4f} before, {after:.4f} after |
| learning steps | {steps}, {seconds:.1f} s |

`{report}` contains all of this as JSON.
"""


def save_rotated(
    model: nn.Module,
    processors: Iterable[Any],
    report: RotationReport,
    directory: str | os.PathLike[str],
    **options: Any,
) -> None:
    """Save model, tokenizer or processor, report and card in `directory`, where the files appear all at once.

    Args:
        model: rotated; a `PreTrainedModel`.
        processors: tokenizer and image processor; None is ignored.
        report: of the rotation.
        directory: the folder, created if missing.
        options: of the model's `save_pretrained`, such as `max_shard_size`.

    Raises:
        MoonshotError: the folder cannot be written, the disk is full, or the options are not supported.
    """
    check_saving(model, "dense", options)
    require(
        hasattr(model, "save_pretrained"),
        f"{type(model).__name__} is not a PreTrainedModel",
        hint="save its state_dict",
    )
    with staged("directory", directory) as staging:
        write_model(model, staging, False, **options)
        for processor in processors:
            if hasattr(processor, "save_pretrained"):
                save_processor(processor, staging)
        report.save(staging)
        replace_file(staging / "README.md", str(_card(model, report, Path(directory).resolve().name)))


def _card(model: nn.Module, report: RotationReport, name: str) -> ModelCard:
    base, (cls, task) = find_base(getattr(model, "name_or_path", "")), find_auto_class(type(model).__name__)
    copied = {field: base.data[field] for field in (*TEXTS, *TEXTS_OR_LISTS) if field in base.data}
    copied.setdefault("pipeline_tag", task)
    tags = ["moonshot", "rotated", *base.data.get("tags", ())]
    data = ModelCardData(model_name=name, base_model=base.name, library_name="transformers", tags=tags, **copied)
    untied = f" but an untied head of {report.untied_bytes / 2**20:.2f} MiB" if report.untied_bytes else ""
    text = _TEXT.format(
        title=escaped(name),
        base=f"[{base.name}](https://huggingface.co/{base.name}) " if base.name else "a model ",
        untied=untied,
        cls=cls,
        literal=json.dumps(name, ensure_ascii=False),
        rotations=escaped(report.changes or "none"),
        before=report.objective_before,
        after=report.objective_after,
        steps=report.steps,
        seconds=report.seconds,
        report=ROTATION_NAME,
    )
    below = f"\n{MARKER}\n\n# Card of the original model\n\n{base.text}\n" if base.text else ""
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text}{below}")
