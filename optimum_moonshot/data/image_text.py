"""Images with text: calibration data for models that read both, such as vision–language models.

A source is a `datasets.Dataset`, a .parquet file, a folder of images with their text in its metadata, or the name of a
data set on the Hub. Its rows have a column of images (one, or a list) and a column of text or chat messages. The
model's processor converts each row to model inputs. A batch is one sample, because images and texts differ in size, and
some models expect the patches of all images in one row.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset, IterableDataset
from torch import Tensor

from ..errors import MoonshotError, check_whole, reason
from .batches import Batch, digest
from .chat import CONVERSATIONS, as_messages
from .images import MODES, image_column, open_rows, picture, read_rows, shuffled, undecoded
from .sources import CORPORA, TEXT_COLUMNS, is_hub_name
from .text import CalibrationData, too_few, window_length

CAPTION_COLUMNS = (*TEXT_COLUMNS, "caption")


@dataclass(frozen=True)
class ImageTextSource:
    """Rows with one or several images, and a text or messages."""

    rows: Dataset | IterableDataset
    image: str
    text: str
    name: str


def reads_both(processor: Any) -> bool:
    """Whether a processor converts both images and text."""
    return all(getattr(processor, part, None) is not None for part in ("image_processor", "tokenizer"))


def open_image_text(source: Any) -> ImageTextSource | None:
    """Open a source of images with text; None for any other: text, model inputs, images without text."""
    if isinstance(source, str | os.PathLike):
        name, path = os.fspath(source), Path(source).expanduser()
        readable = path.is_dir() or path.suffix.lower() == ".parquet"
        if not (readable if path.exists() else name not in CORPORA and is_hub_name(name)):
            return None
    opened = open_rows(source)
    if opened is None:
        return None
    rows, row, name = opened
    image = image_column(rows, row) or ("images" if "images" in row else None)
    text = next((column for column in (*CONVERSATIONS, *CAPTION_COLUMNS) if column in row), None)
    if image is None or text is None or "input_ids" in row or "pixel_values" in row:
        return None
    return ImageTextSource(rows, image, text, name)


def load_image_text(
    source: ImageTextSource,
    processor: Any,
    *,
    num_samples: int,
    seed: int,
    sequence_length: int | None = None,
    max_positions: int | None = None,
) -> CalibrationData:
    """Exactly `num_samples` random rows as model inputs from the model's `processor`, one sample per batch.

    Rows of more than `sequence_length` tokens, including those of images, are skipped; None is the model's maximum,
    `max_positions`, which is None if there is no limit.

    Raises:
        MoonshotError: too few rows, or rows that cannot be read or processed.
    """
    check_whole("num_samples", num_samples, 1)
    limit = max_positions if sequence_length is None else window_length(sequence_length, max_positions)
    rows = shuffled(undecoded(source.rows, source.image), seed, None)
    notes = ["one sample at a time: images with text"]
    batches: list[Batch] = []
    too_long = 0
    for index, row in enumerate(read_rows(rows, source.name)):
        inputs = _inputs(source, row, index, processor)
        if limit and inputs["input_ids"].shape[-1] > limit:
            too_long += 1
            continue
        batches.append(inputs)
        if len(batches) == num_samples:
            break
    notes += [f"{too_long} rows of more than {limit} tokens left out"] if too_long else []
    if len(batches) != num_samples:
        skipped = f", {too_long} more are longer than {limit} tokens" if too_long else ""
        more = "give more" if batches else "give more, or a longer sequence_length"
        raise too_few(num_samples, f"{source.name} has {len(batches)} rows{skipped}", len(batches), more)
    longest = max(batch["input_ids"].shape[-1] for batch in batches)
    return CalibrationData(batches, num_samples, longest, source.name, digest(batches), tuple(notes))


def _inputs(source: ImageTextSource, row: Mapping[str, Any], index: int, processor: Any) -> Batch:
    what, value = f"row {index} of {source.name}", row[source.image]
    pictures = [picture(one, MODES[3], what) for one in (value if isinstance(value, list | tuple) else [value])]
    try:
        text = _prompt(row[source.text], len(pictures), processor)
        inputs = processor(images=pictures, text=[text], return_tensors="pt")
        return {name: tensor for name, tensor in inputs.items() if isinstance(tensor, Tensor) and tensor.numel()}
    except Exception as error:
        raise MoonshotError(f"{what} cannot be processed ({reason(error)})") from error


def _prompt(value: Any, images: int, processor: Any) -> str:
    """A text with a placeholder for every image, by the processor's chat template if it has one."""
    token = getattr(processor, "image_token", None)
    if not isinstance(value, str):
        value = processor.apply_chat_template(_with_images(value, images), tokenize=False)
    elif getattr(processor, "chat_template", None) and not (token and token in value):
        answer = [{"type": "text", "text": value}]
        chat: list[dict[str, Any]] = [{"role": "user", "content": []}, {"role": "assistant", "content": answer}]
        value = processor.apply_chat_template(_with_images(chat, images), tokenize=False)
    return token * images + value if token and token not in value else value


def _with_images(messages: Any, images: int) -> list[dict[str, Any]]:
    """Messages whose contents are lists of parts; without any images in them, they are added to the first message."""
    converted: list[dict[str, Any]] = []
    for message in as_messages(messages, "the row"):
        content = message["content"]
        if isinstance(content, str):
            content = [{"type": "text", "text": content}]
        # A table has every field in every row, None where a part has none.
        parts = [{name: value for name, value in part.items() if value is not None} for part in content]
        converted.append({"role": message["role"], "content": parts})
    if not any(part.get("type") == "image" for message in converted for part in message["content"]):
        converted[0]["content"] = [{"type": "image"}] * images + converted[0]["content"]
    return converted
