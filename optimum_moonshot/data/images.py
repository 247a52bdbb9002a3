"""Images: calibration and evaluation data for models that take `pixel_values`.

A source is a folder (one sub-folder of images per class, or images alone), a .parquet file, the name of a data set on
the Hub, or a `datasets.Dataset` with a column of images. `num_samples` of its images are drawn at random, without
repetition; each goes through the model's image processor. Labels are mapped to the model's own class numbers by name
where the names agree, else by position.
"""

import glob
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import torch
from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict, load_dataset
from torch import Tensor, nn

from ..errors import NO_BACKWARD, MoonshotError, check_whole, reason, require
from .batches import Batch, digest
from .text import CORPORA, CalibrationData, describe

IMAGE_COLUMNS = ("image", "img")
LABEL_COLUMNS = ("label", "labels", "fine_label")
# In order of preference; a data set with one split needs none of these names.
CALIBRATION_SPLITS = ("train",)
EVALUATION_SPLITS = ("validation", "val", "test", "train")
SHUFFLE_BUFFER = 4  # a streamed data set is shuffled among so many times the images that are drawn, and at least
SHUFFLE_LEAST = 1000  # so many
MODES = {1: "L", 3: "RGB", 4: "RGBA"}
ACCEPTED = (
    "use a folder of images (one sub-folder per class), a .parquet file, the name of a data set on the Hub, a "
    "datasets.Dataset with a column of images, or an iterable of model inputs"
)


@dataclass(frozen=True)
class ImageSource:
    """Rows with an image, and with a label where `label` names a column."""

    rows: Dataset | IterableDataset
    image: str
    label: str | None
    classes: list[str] | None  # names of the labels 0, 1, …
    name: str


def open_images(source: Any, splits: tuple[str, ...] = CALIBRATION_SPLITS) -> ImageSource | None:
    """A source of images; None where it holds model inputs instead.

    Args:
        source: a folder, a .parquet file, the name of a data set on the Hub, a `datasets` object, or model inputs.
        splits: of a data set with several, in order of preference.

    Raises:
        MoonshotError: data that does not exist, cannot be read, or has no column of images.
    """
    opened = open_rows(source, splits)
    if opened is None or "pixel_values" in opened[1]:
        return None
    rows, row, name = opened
    image = image_column(rows, row)
    if image is None:
        raise MoonshotError(f"{name} has the columns {', '.join(row)}: rename the one that holds images to image")
    label = next((column for column in LABEL_COLUMNS if column in row), None)
    classes = getattr((rows.features or {}).get(label), "names", None)
    return ImageSource(rows, image, label, classes, name)


def open_rows(
    source: Any, splits: tuple[str, ...] = CALIBRATION_SPLITS
) -> tuple[Dataset | IterableDataset, Mapping[str, Any], str] | None:
    """A data set, its first row and its name; None where `source` names or is none.

    Args:
        source: a folder, a .parquet file, the name of a data set on the Hub, or a data set.
        splits: of a data set with several, in order of preference.

    Raises:
        MoonshotError: data that does not exist, cannot be read, or has no rows.
    """
    name = describe(source)
    if isinstance(source, str | os.PathLike):
        source = _load(source)
    if isinstance(source, DatasetDict | IterableDatasetDict):
        source = _split(source, splits, name)
    if not isinstance(source, Dataset | IterableDataset):
        return None
    return source, _first(source, name), name


def image_column(rows: Dataset | IterableDataset, row: Mapping[str, Any]) -> str | None:
    """The column that holds an image in every row; None where none does.

    Args:
        rows: whose features may say so.
        row: the first of them.
    """
    typed = [column for column, feature in (rows.features or {}).items() if isinstance(feature, datasets.Image)]
    return next(iter(typed or [column for column in IMAGE_COLUMNS if column in row]), None)


def shuffled(rows: Dataset | IterableDataset, seed: int, count: int | None) -> Dataset | IterableDataset:
    """Rows in random order; those of a stream shuffled within a buffer (`shuffle_buffer`).

    Args:
        rows: all there are.
        seed: of the order.
        count: how many of them, at most; None is all.
    """
    if isinstance(rows, Dataset):
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))[:count]
        return rows.select(order.tolist())
    mixed = rows.shuffle(seed=seed, buffer_size=shuffle_buffer(count))
    return mixed if count is None else mixed.take(count)


def shuffle_buffer(count: int | None) -> int:
    """Among how many rows of a stream `count` of them are drawn."""
    return max(SHUFFLE_LEAST, SHUFFLE_BUFFER * (count or 0))


def load_images(
    source: ImageSource,
    model: nn.Module,
    processor: Any,
    *,
    num_samples: int,
    batch_size: int,
    seed: int,
    labels: bool,
) -> CalibrationData:
    """Exactly `num_samples` random images, in batches of `pixel_values` [B, C, H, W] and, if wanted, `labels` [B].

    Args:
        source: of `open_images`.
        model: whose classes and channels decide.
        processor: the model's image processor, or a function from an image to its tensor [C, H, W].
        num_samples: images to draw, each once.
        batch_size: images of a batch, at most.
        seed: of the draw.
        labels: whether each image's class is wanted too.

    Raises:
        MoonshotError: no processor, too few images, images that cannot be read, or labels that are missing or unknown.
    """
    check_whole("num_samples", num_samples, 1)
    rows, notes = source.rows, []
    if isinstance(rows, Dataset):
        mend = f"give more or set num_samples={len(rows)}"
        require(num_samples <= len(rows), f"num_samples={num_samples}: {source.name} has {len(rows)} images, {mend}")
    else:
        notes.append(f"images drawn from a stream, shuffled {shuffle_buffer(num_samples)} at a time")
    rows = shuffled(rows, seed, num_samples)
    numbers, note = class_numbers(source, model) if labels else (None, None)
    chosen = ImageSource(rows, source.image, source.label, source.classes, source.name)
    batches = list(image_batches(chosen, model, processor, numbers, batch_size))
    taken = sum(len(batch["pixel_values"]) for batch in batches)
    mend = f"give more or set num_samples={taken}" if taken else "give more"
    require(taken == num_samples, f"num_samples={num_samples}: {source.name} has {taken} images, {mend}")
    notes += [note] if note else []
    return CalibrationData(batches, num_samples, None, source.name, digest(batches), tuple(notes))


def image_batches(
    source: ImageSource, model: nn.Module, processor: Any, numbers: Callable[[Any], int] | None, batch_size: int
) -> Iterator[Batch]:
    """All images of a source in order, in batches of what the processor makes of them.

    Args:
        source: of `open_images`.
        model: whose number of channels decides.
        processor: the model's image processor, or a function from an image to its tensor [C, H, W].
        numbers: from a row's label to the model's class; None leaves labels out.
        batch_size: images of a batch, at most.

    Raises:
        MoonshotError: no processor, an image that cannot be processed, or a label that is no class.
    """
    require(
        processor is not None,
        "processor=None: images need the model's image processor; give it, or batches of pixel_values",
    )
    mode = MODES.get(getattr(getattr(model, "config", None), "num_channels", 3))
    rows = enumerate(read_rows(undecoded(source.rows, source.image), source.name))
    while chunk := list(islice(rows, batch_size)):
        pictures = [picture(row[source.image], mode, f"image {i} of {source.name}") for i, row in chunk]
        try:
            batch = _process(processor, pictures)
        except Exception as error:
            where = f"images {chunk[0][0]} to {chunk[-1][0]}" if len(chunk) > 1 else f"image {chunk[0][0]}"
            raise MoonshotError(f"{where} of {source.name} cannot be processed ({reason(error)})") from error
        if numbers is not None:
            assert source.label is not None  # or there were no numbers
            batch["labels"] = torch.tensor([numbers(row[source.label]) for _, row in chunk])
        yield batch


def class_numbers(source: ImageSource, model: nn.Module) -> tuple[Callable[[Any], int], str | None]:
    """A function from a row's label to the model's class, and a note where their names do not agree.

    Names that are numbers stand for themselves: sorted as text, "10" would come before "2". The function raises
    `MoonshotError` for a label that is no class.

    Args:
        source: of `open_images`, with labels.
        model: whose `label2id` and `num_labels` decide.

    Raises:
        MoonshotError: no labels, or more classes than the model has.
    """
    require(
        source.label is not None,
        f"{source.name}: no labels, which λ < 1 and accuracy need; put the images in one sub-folder per class, add a "
        f"label column, or {NO_BACKWARD}",
    )
    config = getattr(model, "config", None)
    names = source.classes
    known = {str(name): int(number) for name, number in (getattr(config, "label2id", None) or {}).items()}
    table: list[int] = []  # of the data's class numbers, where it names its classes
    note = None
    if names and all(name in known for name in names):
        table = [known[name] for name in names]
    elif names and all(re.fullmatch(r"\d+", name) for name in names):
        table = [int(name) for name in names]
    elif names:
        table = list(range(len(names)))
        if not all(name.startswith("LABEL_") for name in known):
            note = f"the classes {', '.join(names[:3])}, … are not the model's by name: taken by position"
    limit = getattr(config, "num_labels", None)
    largest = max(table) if table else 0
    require(
        not limit or largest < limit,
        f"{source.name}: class {largest} is beyond the model's {limit} classes; give data of the model's classes",
    )

    def number(label: Any) -> int:
        if isinstance(label, str) and label in known:
            return known[label]
        whole = isinstance(label, int) and not isinstance(label, bool)
        count = len(table) if table else limit
        require(
            whole and label >= 0 and (count is None or label < count),
            f"{source.name}: label {label!r}, where a class number is needed"
            + (f" from 0 to {count - 1}" if count else ""),
        )
        return table[label] if table else label

    return number, note


def _load(source: str | os.PathLike[str]) -> Dataset | IterableDataset | DatasetDict | IterableDatasetDict:
    path, name = Path(os.path.expanduser(source)), os.fspath(source)
    require(name not in CORPORA, f'"{name}" is text: {ACCEPTED}')
    try:
        if path.is_dir():
            return load_dataset(str(path.resolve()))
        if path.suffix.lower() == ".parquet" and path.is_file():
            # Whole, for a fair draw; `load_dataset` would take an unescaped path for a pattern.
            return load_dataset("parquet", data_files=glob.escape(str(path.resolve())), split="train")
        require(not path.exists(), f'"{name}" is neither a folder nor a .parquet file: {ACCEPTED}')
        return load_dataset(name, streaming=True)  # whole, it could be hundreds of gigabytes
    except MoonshotError:
        raise
    except Exception as error:
        raise MoonshotError(f'"{name}" cannot be read ({reason(error)}): {ACCEPTED}') from error


def _split(found: DatasetDict | IterableDatasetDict, splits: tuple[str, ...], name: str) -> Any:
    chosen = next((split for split in splits if split in found), None)
    if chosen is None and len(found) == 1:
        chosen = next(iter(found))
    require(chosen is not None, f"{name} has the splits {', '.join(found)}: give one of them as a datasets.Dataset")
    return found[chosen]


def read_rows(rows: Iterable[Mapping[str, Any]], name: str) -> Iterator[Mapping[str, Any]]:
    """The rows, in order.

    Args:
        rows: of a data set.
        name: of their source, for errors.

    Raises:
        MoonshotError: a row cannot be read.
    """
    try:
        yield from rows
    except Exception as error:
        raise MoonshotError(f"{name} cannot be read ({reason(error)})") from error


def _first(rows: Dataset | IterableDataset, name: str) -> Mapping[str, Any]:
    row = next(read_rows(rows, name), None)
    if row is None:
        raise MoonshotError(f"{name} has no rows: {ACCEPTED}")
    return row


def undecoded(rows: Dataset | IterableDataset, column: str) -> Dataset | IterableDataset:
    """The rows with their images as files or bytes, where they are at hand: an error then names the image.

    Args:
        rows: of a data set.
        column: the one of the images.
    """
    if isinstance(rows, Dataset) and isinstance(rows.features.get(column), datasets.Image):
        return rows.cast_column(column, datasets.Image(decode=False))
    return rows


def picture(value: Any, mode: str | None, what: str) -> Any:
    """A PIL image in the model's colours.

    Args:
        value: what a column may hold: an image, its bytes, its path, or a dictionary of the last two.
        mode: PIL's name of the colours, such as "RGB"; None leaves them.
        what: names it in errors.

    Raises:
        MoonshotError: it is missing or damaged.
    """
    require(value is not None, f"{what} is missing: leave its row out")
    if isinstance(value, bytes):
        value = {"bytes": value, "path": None}
    elif isinstance(value, str):
        value = {"bytes": None, "path": value}
    path = value.get("path") if isinstance(value, Mapping) else None
    try:
        if isinstance(value, Mapping):
            value = datasets.Image().decode_example(dict(value))
        return value.convert(mode) if mode else value
    except Exception as error:  # whatever a library for images raises
        file = f" ({os.path.basename(path)})" if path else ""
        raise MoonshotError(f"{what}{file} cannot be processed ({reason(error)}): leave it out") from error


def _process(processor: Any, pictures: list[Any]) -> Batch:
    """What a transformers image processor makes of images, or a function from an image to a tensor [C, H, W]."""
    if hasattr(processor, "model_input_names"):
        found = processor(images=pictures, return_tensors="pt")
        return {name: value for name, value in found.items() if isinstance(value, Tensor)}
    return {"pixel_values": torch.stack([processor(picture) for picture in pictures])}
