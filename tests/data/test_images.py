"""Images as calibration data: sources, classes, splits, colour modes and errors."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from calibration_data import to_tensor
from datasets import Dataset, DatasetDict, Features, Image
from image_folders import CLASSES, fill, picture
from models import image_batches, make
from torch import nn

from optimum_moonshot import MoonshotError, accuracy
from optimum_moonshot.data import images
from optimum_moonshot.data.images import class_numbers, load_images, open_images
from optimum_moonshot.model.model_info import takes_images


def load(source, model=None, processor=to_tensor, num_samples=6, labels=True, batch_size=4, seed=0):
    opened = open_images(source)
    options = dict(num_samples=num_samples, labels=labels, batch_size=batch_size, seed=seed)
    return load_images(opened, model or plain(), processor, **options)


def plain(**config):
    model = nn.Sequential(nn.Conv2d(3, 4, 3))
    if config:
        model.config = SimpleNamespace(**config)
    return model


def numbers(data):
    """The numbers of the images, read from their red channel."""
    return [round(float(x[0, 0, 0]) * 255) for batch in data.batches for x in batch["pixel_values"]]


def labels(data):
    return [int(label) for batch in data.batches for label in batch["labels"]]


def test_a_folder_gives_random_images_with_the_classes_of_their_folders(folder):
    data = load(folder)
    assert [len(batch["labels"]) for batch in data.batches] == [4, 2]
    assert labels(data) == [number // 3 for number in numbers(data)] and len(set(numbers(data))) == 6
    assert (data.num_samples, data.sequence_length, data.source) == (6, None, str(folder))
    again, other = load(str(folder)), load(folder, seed=1)
    assert again.digest == data.digest != other.digest and numbers(again) == numbers(data) != numbers(other)
    assert sorted(numbers(load(folder, num_samples=15))) == list(range(15))
    one = load(folder, batch_size=1)
    assert numbers(one) == numbers(data) and labels(one) == labels(data)
    with pytest.raises(MoonshotError, match="num_samples=16: .*insects has 15 images; give more or set num_samples=15"):
        load(folder, num_samples=16)


def test_the_global_random_state_is_unchanged(folder):
    model, state = plain(), torch.get_rng_state()
    load(folder, model)
    assert torch.equal(state, torch.get_rng_state())


def test_every_other_source_gives_the_same_images(folder, rows, tmp_path):
    rows.to_parquet(tmp_path / "rows.parquet")
    bare = rows.cast_column("image", Image(decode=False))
    expected = load(rows)
    renamed = rows.rename_column("image", "img").rename_column("label", "labels")
    for source in (tmp_path / "rows.parquet", bare, renamed):
        assert numbers(load(source)) == numbers(expected) and labels(load(source)) == labels(expected)
    stream = load(rows.to_iterable_dataset())
    assert labels(stream) == [number // 3 for number in numbers(stream)] and len(set(numbers(stream))) == 6
    assert "drawn from a stream" in stream.notes[0]
    assert numbers(load(rows.to_iterable_dataset(), seed=3)) != numbers(stream)


def test_splits_are_chosen_by_purpose(tmp_path):
    for split in ("train", "validation", "test"):
        fill(tmp_path / "data" / split, each=1 if split == "test" else 2)
    assert len(open_images(tmp_path / "data").rows) == 10
    assert len(open_images(tmp_path / "data", images.EVALUATION_SPLITS).rows) == 10
    model = nn.Sequential(nn.Flatten(), nn.LazyLinear(5))
    assert accuracy(model, tmp_path / "data", to_tensor).images == 10
    rows = open_images(tmp_path / "data").rows
    with pytest.raises(MoonshotError, match="has the splits a, b; give one"):
        open_images(DatasetDict(a=rows, b=rows))
    assert open_images(DatasetDict(a=rows)).rows is rows


def test_a_name_on_the_hub_is_streamed(monkeypatch, rows):
    calls = []

    def stand_in(name, streaming=False):
        calls.append((name, streaming))
        return {"train": rows.to_iterable_dataset()}["train"]

    monkeypatch.setattr(images, "load_dataset", stand_in)
    assert len(numbers(load("someone/insects"))) == 6 and calls == [("someone/insects", True)]

    def unreachable(name, streaming=False):
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(images, "load_dataset", unreachable)
    with pytest.raises(MoonshotError, match=r'"someone/insects" cannot be read \(no route\); use a folder'):
        load("someone/insects")


def test_labels_are_needed_only_where_they_are_used(tmp_path):
    for i in range(4):
        picture(i).save(tmp_path / f"{i}.jpg")
    assert "labels" not in load(tmp_path, num_samples=4, labels=False).batches[0]
    with pytest.raises(
        MoonshotError, match="no labels, which λ < 1 and accuracy need; put the images in one sub-folder"
    ):
        load(tmp_path, num_samples=4)


def test_classes_are_matched_by_name_then_by_number_then_by_position(tmp_path, rows):
    shuffled = {"dog": 0, "eel": 1, "cat": 2, "bee": 3, "ant": 4}
    data = load(rows, plain(label2id=shuffled, num_labels=5))
    assert labels(data) == [shuffled[CLASSES[number // 3]] for number in numbers(data)] and not data.notes
    other = load(rows, plain(label2id={"wolf": 0, "bear": 1, "x": 2, "y": 3, "z": 4}, num_labels=5))
    assert labels(other) == [number // 3 for number in numbers(other)]
    assert "the class names ant, bee, cat, … are not the model's" in other.notes[0]
    assert not load(rows, plain(label2id={f"LABEL_{i}": i for i in range(5)}, num_labels=5)).notes
    digits = fill(tmp_path / "digits", [str(i) for i in range(12)], each=1)
    data = load(digits, plain(label2id={f"LABEL_{i}": i for i in range(12)}, num_labels=12), num_samples=12)
    pairs = dict(zip(numbers(data), labels(data), strict=True))
    assert pairs == {number: number for number in range(12)}
    with pytest.raises(MoonshotError, match="class 4 is beyond the model's 3 classes"):
        load(rows, plain(label2id={}, num_labels=3))
    texts = rows.remove_columns("label").add_column("label", ["bee"] * 15)
    assert labels(load(texts, plain(label2id=shuffled, num_labels=5))) == [3] * 6
    for wrong in (-1, 9, None, 0.5, "wolf"):
        source = open_images(rows.remove_columns("label").add_column("label", [wrong] * 15))
        number, _ = class_numbers(source, plain(label2id=shuffled, num_labels=5))
        with pytest.raises(MoonshotError, match=f"label {wrong!r}; give a class number from 0 to 4"):
            number(wrong)


def test_images_are_converted_to_the_models_colours(tmp_path, rows):
    grey = Dataset.from_dict({"image": [picture(i, mode="L") for i in range(6)]}, Features({"image": Image()}))
    assert load(grey, labels=False).batches[0]["pixel_values"].shape == (4, 3, 20, 24)
    single = lambda image: torch.tensor(np.array(image))[None].float()  # noqa: E731
    data = load(rows, plain(num_channels=1), single, labels=False)
    assert data.batches[0]["pixel_values"].shape == (4, 1, 20, 24)


def test_bad_images_are_named(tmp_path, rows):
    fill(tmp_path / "data", each=2)
    (tmp_path / "data" / "bee" / "0.png").write_bytes(b"no image")
    with pytest.raises(
        MoonshotError, match=r"image \d of .*data \(0\.png\) cannot be processed .*cannot identify image"
    ):
        load(tmp_path / "data", num_samples=10)
    sizes = Dataset.from_dict({"image": [picture(i, size=(9 + i, 9)) for i in range(6)]}, Features({"image": Image()}))
    with pytest.raises(MoonshotError, match="images 0 to 3 of Dataset of 6 rows cannot be processed .*equal size"):
        load(sizes, labels=False)
    holes = Dataset.from_dict({"image": [None] * 6}, Features({"image": Image()}))
    with pytest.raises(MoonshotError, match="image 0 of Dataset of 6 rows is missing; leave its row out"):
        load(holes, labels=False)
    with pytest.raises(MoonshotError, match="processor=None: images need the model's image processor"):
        load(rows, processor=None)


@pytest.mark.parametrize(
    ("make_source", "message"),
    [
        (lambda path: "c4", '"c4" is text; use a folder of images'),
        (lambda path: path / "missing.jpg", "cannot be read"),
        (lambda path: path / "note.txt", "is neither a folder nor a .parquet file"),
        (lambda path: path / "empty", "empty.*cannot be read .*doesn't contain any data files"),
        (lambda path: Dataset.from_dict({"text": ["a"]}), "has the columns text; rename the column with images"),
        (lambda path: Dataset.from_dict({}), "has no rows"),
    ],
)
def test_sources_without_images_are_rejected(make_source, message, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "empty").mkdir()
    (tmp_path / "note.txt").write_text("words")
    with pytest.raises(MoonshotError, match=message):
        open_images(make_source(tmp_path))


def test_model_inputs_are_not_read_as_images():
    assert open_images(image_batches()) is None
    assert open_images(Dataset.from_dict({"pixel_values": [[[[0.0]]]], "labels": [0]})) is None


def test_models_that_take_images():
    assert takes_images(make("vit")) and takes_images(make("convnet")) and takes_images(make("resnet"))
    assert not takes_images(make("llama")) and not takes_images(nn.Sequential(nn.Linear(2, 2)))
