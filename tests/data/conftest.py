"""Files and data sets that the tests of text and of images share."""

from pathlib import Path

import pytest
import transformers as hf
from calibration_data import TEXT, write
from datasets import ClassLabel, Dataset, Features, Image
from image_folders import CLASSES, fill, picture


@pytest.fixture
def book(tmp_path) -> Path:
    return write(tmp_path / "book.txt", TEXT)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return fill(tmp_path_factory.mktemp("images") / "insects")


@pytest.fixture(scope="module")
def processor():
    return hf.ViTImageProcessorPil(size={"height": 16, "width": 16})


@pytest.fixture(scope="module")
def rows():
    features = Features({"image": Image(), "label": ClassLabel(names=CLASSES)})
    return Dataset.from_dict({"image": [picture(i) for i in range(15)], "label": [i // 3 for i in range(15)]}, features)
