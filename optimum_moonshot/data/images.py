"""Images, also with text: calibration and evaluation data for models with `pixel_values`.

A source is a folder (one sub-folder of images per class, or only images), a .parquet file, the name of a data set on
the Hub, or a `datasets.Dataset` with a column of images. `num_samples` images are drawn at random, without repetition,
and converted by the model's image processor. Labels are mapped to the model's classes by name if the names agree, else
by position.

Images with text, for models of both such as vision–language models, are a data set, a .parquet file, a folder of images
with their text in its metadata, or a name on the Hub, whose rows have a column of images (one, or a list) and a column
of text or chat messages. The model's processor converts each row to model inputs. A batch is one sample, because images
and texts differ in size, and some models expect the patches of all images in one row.
"""

import glob
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import torch
from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict, load_dataset
from torch import Tensor, nn

from ..errors import NO_BACKWARD, MoonshotError, reason
from .batches import Batch, digest
from .sources import (
    CALIBRATION_SPLITS,
    CONVERSATIONS,
    CORPORA,
    TEXT_COLUMNS,
    as_messages,
    choose_split,
    describe,
    is_hub_name,
)
from .text import CalibrationData, too_few, window_length

IMAGE_COLUMNS = ("image", "img")
LABEL_COLUMNS = ("label", "labels", "fine_label")
EVALUATION_SPLITS = ("validation", "val", "test", "train")
SHUFFLE_BUFFER, SHUFFLE_LEAST = 4, 1000  # rows in the buffer that shuffles a stream: per drawn image, and the minimum
MODES = {1: "L", 3: "RGB", 4: "RGBA"}
ACCEPTED = (
    "use a folder of images (one sub-folder per class), a .parquet file, the name of a data set on the Hub, a "
    "datasets.Dataset with a column of images, or an iterable of model inputs"
)


@dataclass(frozen=True)
class ImageSource:
    """Rows with an image, and a label if `label` is not None."""

    rows: Dataset | IterableDataset
    image: str
    label: str | None
    classes: list[str] | None  # the names of the labels 0, 1, …
    name: str


def open_images(source: Any, splits: tuple[str, ...] = CALIBRATION_SPLITS) -> ImageSource | None:
    """Open a source of images, the first of `splits` that it has; None if it contains model inputs.

    Raises:
        MoonshotError: data that does not exist, cannot be read, or has no column of images.
    """
    opened = open_rows(source, splits)
    if opened is None or "pixel_values" in opened[1]:
        return None
    rows, row, name = opened
    image = image_column(rows, row)
    if image is None:
        hint = "rename the column with images to image"
        raise MoonshotError(f"{name} has the columns {', '.join(row)}", hint=hint)
    label = next((column for column in LABEL_COLUMNS if column in row), None)
    classes = getattr((rows.features or {}).get(label), "names", None)
    return ImageSource(rows, image, label, classes, name)


def open_rows(
    source: Any, splits: tuple[str, ...] = CALIBRATION_SPLITS
) -> tuple[Dataset | IterableDataset, Mapping[str, Any], str] | None:
    """A data set, its first row and its name; None if `source` is not a data set."""
    name = describe(source)
    if isinstance(source, str | os.PathLike):
        source = _load(source)
    source = choose_split(source, splits, name)
    if not isinstance(source, Dataset | IterableDataset):
        return None
    row = next(read_rows(source, name), None)
    if row is None:
        raise MoonshotError(f"{name} has no rows", hint=ACCEPTED)
    return source, row, name


def image_column(rows: Dataset | IterableDataset, row: Mapping[str, Any]) -> str | None:
    """The column of images, by its feature type or by its name in the first `row`; None without one."""
    typed = [column for column, feature in (rows.features or {}).items() if isinstance(feature, datasets.Image)]
    return next(iter(typed or [column for column in IMAGE_COLUMNS if column in row]), None)


def shuffled(rows: Dataset | IterableDataset, seed: int, count: int | None) -> Dataset | IterableDataset:
    """At most `count` rows in random order; a stream is shuffled in a buffer of `shuffle_buffer` rows."""
    if isinstance(rows, Dataset):
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))[:count]
        return rows.select(order.tolist())
    mixed = rows.shuffle(seed=seed, buffer_size=shuffle_buffer(count))
    return mixed if count is None else mixed.take(count)


def shuffle_buffer(count: int | None) -> int:
    """Rows in the buffer from which `count` rows of a stream are drawn."""
    return max(SHUFFLE_LEAST, SHUFFLE_BUFFER * (count or 0))


def load_images(
    source: ImageSource, model: nn.Module, processor: Any, *, num_samples: int, batch_size: int, seed: int, labels: bool
) -> CalibrationData:
    """Exactly `num_samples` random images, in batches of `pixel_values` [B, C, H, W] and, with `labels`, `labels` [B].

    The `processor` is the model's image processor, or a function from an image to its tensor [C, H, W].

    Raises:
        MoonshotError: no processor, too few images, images that cannot be read, or labels that are missing or unknown.
    """
    notes = []
    if not isinstance(source.rows, Dataset):
        notes.append(f"images drawn from a stream, shuffled {shuffle_buffer(num_samples)} at a time")
    elif num_samples > len(source.rows):
        raise too_few(num_samples, f"{source.name} has {len(source.rows)} images", len(source.rows))
    numbers, note = class_numbers(source, model) if labels else (None, None)
    drawn = replace(source, rows=shuffled(source.rows, seed, num_samples))
    batches = list(image_batches(drawn, model, processor, numbers, batch_size))
    count = sum(len(batch["pixel_values"]) for batch in batches)
    if count != num_samples:
        raise too_few(num_samples, f"{source.name} has {count} images", count)
    notes += [note] if note else []
    return CalibrationData(batches, num_samples, None, source.name, digest(batches), tuple(notes))


def image_batches(
    source: ImageSource, model: nn.Module, processor: Any, numbers: Callable[[Any], int] | None, batch_size: int
) -> Iterator[Batch]:
    """All images of a source in order, processed, in batches; `numbers` maps labels to classes; None omits labels."""
    if processor is None:
        message, hint = "images need the model's image processor", "give it, or batches of pixel_values"
        raise MoonshotError(message, field="processor", value=None, hint=hint)
    mode = MODES.get(getattr(getattr(model, "config", None), "num_channels", 3))
    rows = enumerate(read_rows(undecoded(source.rows, source.image), source.name))
    while chunk := list(islice(rows, batch_size)):
        pictures = [picture(row[source.image], mode, f"image {i} of {source.name}") for i, row in chunk]
        try:
            if hasattr(processor, "model_input_names"):
                inputs = processor(images=pictures, return_tensors="pt")
                batch = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
            else:
                batch = {"pixel_values": torch.stack([processor(picture) for picture in pictures])}
        except Exception as error:
            which = f"images {chunk[0][0]} to {chunk[-1][0]}" if len(chunk) > 1 else f"image {chunk[0][0]}"
            raise MoonshotError(f"{which} of {source.name} cannot be processed ({reason(error)})") from error
        if numbers is not None:
            assert source.label is not None  # `class_numbers` requires it
            batch["labels"] = torch.tensor([numbers(row[source.label]) for _, row in chunk])
        yield batch


def class_numbers(source: ImageSource, model: nn.Module) -> tuple[Callable[[Any], int], str | None]:
    """A function from a row's label to the model's class, and a note if the class names do not agree.

    Numeric names are used as numbers: sorted as text, "10" would come before "2". Both raise `MoonshotError`: the
    function for a label that is not a class, this call without labels or for more classes than the model has.
    """
    if source.label is None:
        raise MoonshotError(
            f"{source.name}: no labels, which λ < 1 and accuracy need",
            hint=f"put the images in one sub-folder per class, add a label column, or {NO_BACKWARD}",
        )
    config, names = getattr(model, "config", None), source.classes
    label2id = {str(name): int(number) for name, number in (getattr(config, "label2id", None) or {}).items()}
    table: list[int] = []  # the data's class number → the model's; empty if the data have no class names
    note = None
    if names and all(name in label2id for name in names):
        table = [label2id[name] for name in names]
    elif names and all(re.fullmatch(r"\d+", name) for name in names):
        table = [int(name) for name in names]
    elif names:
        table = list(range(len(names)))
        if not all(name.startswith("LABEL_") for name in label2id):
            note = f"the class names {', '.join(names[:3])}, … are not the model's: mapped by position"
    limit = getattr(config, "num_labels", None)
    if limit and table and max(table) >= limit:
        message = f"{source.name}: class {max(table)} is beyond the model's {limit} classes"
        raise MoonshotError(message, hint="give data of the model's classes")
    count = len(table) if table else limit

    def number(label: Any) -> int:
        if isinstance(label, str) and label in label2id:
            return label2id[label]
        whole = isinstance(label, int) and not isinstance(label, bool)
        if not whole or label < 0 or (count is not None and label >= count):
            hint = "give a class number" + (f" from 0 to {count - 1}" if count else "")
            raise MoonshotError(f"{source.name}: label {label!r}", hint=hint)
        return table[label] if table else label

    return number, note


def _load(source: str | os.PathLike[str]) -> Dataset | IterableDataset | DatasetDict | IterableDatasetDict:
    path, name = Path(os.path.expanduser(source)), os.fspath(source)
    if name in CORPORA:
        raise MoonshotError(f'"{name}" is text', hint=ACCEPTED)
    parquet = path.suffix.lower() == ".parquet" and path.is_file()
    if path.exists() and not parquet and not path.is_dir():
        raise MoonshotError(f'"{name}" is neither a folder nor a .parquet file', hint=ACCEPTED)
    try:
        if parquet:
            # Not streamed, to draw uniformly; escaped, because `load_dataset` expands glob characters.
            return load_dataset("parquet", data_files=glob.escape(str(path.resolve())), split="train")
        if path.exists():
            return load_dataset(str(path.resolve()))
        return load_dataset(name, streaming=True)  # a download could take hundreds of gigabytes
    except Exception as error:
        raise MoonshotError(f'"{name}" cannot be read ({reason(error)})', hint=ACCEPTED) from error


def read_rows(rows: Iterable[Mapping[str, Any]], name: str) -> Iterator[Mapping[str, Any]]:
    """The rows, in order; an error while reading names the source."""
    try:
        yield from rows
    except Exception as error:
        raise MoonshotError(f"{name} cannot be read ({reason(error)})") from error


def undecoded(rows: Dataset | IterableDataset, column: str) -> Dataset | IterableDataset:
    """The rows with undecoded images, unless they are streamed, so that a decoding error can name the image."""
    if isinstance(rows, Dataset) and isinstance(rows.features.get(column), datasets.Image):
        return rows.cast_column(column, datasets.Image(decode=False))
    return rows


def picture(value: Any, mode: str | None, what: str) -> Any:
    """A PIL image from an image, its bytes, its path, or a dictionary of these.

    It is converted to the `mode` of PIL, such as "RGB", unless that is None; `what` names it in errors.
    """
    if value is None:
        raise MoonshotError(f"{what} is missing", hint="leave its row out")
    if isinstance(value, bytes):
        value = {"bytes": value, "path": None}
    elif isinstance(value, str):
        value = {"bytes": None, "path": value}
    path = value.get("path") if isinstance(value, Mapping) else None
    try:
        if isinstance(value, Mapping):
            value = datasets.Image().decode_example(dict(value))
        return value.convert(mode) if mode else value
    except Exception as error:  # PIL's plugins raise anything
        file = f" ({os.path.basename(path)})" if path else ""
        raise MoonshotError(f"{what}{file} cannot be processed ({reason(error)})", hint="leave it out") from error


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

    Rows of more than `sequence_length` tokens, including image tokens, are skipped; None is the model's maximum,
    `max_positions`, which is None if there is no limit.

    Raises:
        MoonshotError: too few rows, or rows that cannot be read or processed.
    """
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
    """Messages whose contents are lists of entries; without images, these are added to the first message."""
    converted: list[dict[str, Any]] = []
    for message in as_messages(messages, "the row"):
        content = message["content"]
        if isinstance(content, str):
            content = [{"type": "text", "text": content}]
        # A table has every field in every row, None where an entry has none.
        entries = [{name: value for name, value in entry.items() if value is not None} for entry in content]
        converted.append({"role": message["role"], "content": entries})
    if not any(entry.get("type") == "image" for message in converted for entry in message["content"]):
        converted[0]["content"] = [{"type": "image"}] * images + converted[0]["content"]
    return converted
