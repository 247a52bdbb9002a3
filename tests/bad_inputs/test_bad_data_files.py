"""Damaged, empty or too small data files: one line that names the file."""

import json

import pytest
from command_line import DEMO
from datasets import Dataset
from invalid_inputs import config, one_line
from models import make
from PIL import Image
from transformers import ViTImageProcessorPil

from optimum_moonshot import MoonshotError, MoonshotPruner, perplexity


@pytest.fixture(scope="module")
def processor():
    return ViTImageProcessorPil(size={"height": 16, "width": 16})


def pictures(folder, damage):
    for name in ("a", "b"):
        (folder / name).mkdir(parents=True)
        for index in range(2):
            Image.new("RGB", (8, 8), (index, 0, 0)).save(folder / name / f"{index}.jpg")
    path = folder / "b" / "1.jpg"
    path.write_bytes(path.read_bytes()[: len(path.read_bytes()) // 2] if damage == "cut" else b"")


@pytest.mark.parametrize("damage", ["cut", "empty"])
def test_damaged_pictures(tmp_path, processor, damage):
    pictures(tmp_path / "images", damage)
    model = make("vit")
    with pytest.raises(MoonshotError, match=r"image [0-3] of .*images \(1\.jpg\) cannot be processed \(.*\)") as error:
        MoonshotPruner(model, config(lam=1), None, processor).prune(str(tmp_path / "images"), progress=False)
    assert one_line(error.value)


def test_folders_without_pictures(tmp_path, processor):
    (tmp_path / "empty").mkdir()
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.csv").write_text("a,b\n1,2\n")
    for name in ("empty", "texts", "nothing"):
        with pytest.raises(MoonshotError, match=rf"{name}.*(cannot be read|has the columns)"):
            MoonshotPruner(make("vit"), config(), None, processor).prune(str(tmp_path / name), progress=False)


class Untouched:
    """A tokenizer that must not be called."""

    def __call__(self, *arguments, **options):
        raise AssertionError("tokenized")


@pytest.mark.parametrize("kind", ["list", "Dataset", "json", "jsonl", "parquet"])
def test_too_many_samples_are_refused_before_tokenizing(tmp_path, kind):
    texts = [f"document {index}" for index in range(50)]
    data = texts if kind == "list" else Dataset.from_dict({"text": texts})
    if kind in ("json", "jsonl", "parquet"):
        path = tmp_path / f"a.{kind}"
        data = str(path) if data.to_parquet(path) and kind == "parquet" else str(path)
        if kind != "parquet":
            path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    pruner = MoonshotPruner(make("llama"), config(num_samples=10**9), Untouched())
    with pytest.raises(MoonshotError, match=r"num_samples=1000000000: the data has 50 documents.*=50"):
        pruner.prune(data, progress=False)


def test_too_many_images_are_refused_before_reading(tmp_path, processor):
    pictures(tmp_path / "images", "cut")
    with pytest.raises(MoonshotError, match="num_samples=1000000: .* has 4 images; give more or set num_samples=4"):
        MoonshotPruner(make("vit"), config(num_samples=10**6), None, processor).prune(
            str(tmp_path / "images"), progress=False
        )


def test_empty_texts(tmp_path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "lines.txt").write_text("\n\n")
    for name, words in (("empty.txt", "is empty; give a file that contains text"), ("lines.txt", "fewer than")):
        for run in (
            lambda path: MoonshotPruner(make("llama"), config(), tokenizer).prune(path, progress=False),
            lambda path: perplexity(make("llama"), tokenizer, path, sequence_length=12),
        ):
            with pytest.raises(MoonshotError, match=words):
                run(str(tmp_path / name))
