"""Images as calibration and evaluation data, and accuracy against a loop written out."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers as hf
from datasets import ClassLabel, Dataset, Features, Image
from image_folders import CLASSES, fill, picture
from models import image_batches, make
from torch import nn
from transformers.models.auto.image_processing_auto import AutoImageProcessor

from optimum_moonshot import MoonshotConfig, MoonshotError, MoonshotPruner, accuracy
from optimum_moonshot.__main__ import main
from optimum_moonshot.data import images
from optimum_moonshot.data.images import class_numbers, load_images, open_images
from optimum_moonshot.model.model_info import takes_images


def to_tensor(image):
    """A processor as plain torch code has them."""
    return torch.tensor(np.array(image)).permute(2, 0, 1).float() / 255


def load(source, model=None, processor=to_tensor, num_samples=6, labels=True, batch_size=4, seed=0):
    opened = open_images(source)
    options = dict(num_samples=num_samples, labels=labels, batch_size=batch_size, seed=seed)
    return load_images(opened, model or plain(), processor, **options)


def plain(**config):
    model = nn.Sequential(nn.Conv2d(3, 4, 3))
    if config:
        model.config = SimpleNamespace(**config)
    return model


def numbers(found):
    """Which images they are, by their red channel."""
    return [round(float(x[0, 0, 0]) * 255) for batch in found.batches for x in batch["pixel_values"]]


def labels(found):
    return [int(label) for batch in found.batches for label in batch["labels"]]


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


def test_a_folder_gives_random_images_with_the_classes_of_their_folders(folder):
    found = load(folder)
    assert [len(batch["labels"]) for batch in found.batches] == [4, 2]
    assert labels(found) == [number // 3 for number in numbers(found)] and len(set(numbers(found))) == 6
    assert (found.num_samples, found.sequence_length, found.source) == (6, None, str(folder))
    again, other = load(str(folder)), load(folder, seed=1)
    assert again.digest == found.digest != other.digest and numbers(again) == numbers(found) != numbers(other)
    assert sorted(numbers(load(folder, num_samples=15))) == list(range(15))
    one = load(folder, batch_size=1)
    assert numbers(one) == numbers(found) and labels(one) == labels(found)
    with pytest.raises(MoonshotError, match="num_samples=16: .*insects has 15 images; give more or set num_samples=15"):
        load(folder, num_samples=16)


def test_the_global_random_state_is_left_alone(folder):
    model, state = plain(), torch.get_rng_state()
    load(folder, model)
    assert torch.equal(state, torch.get_rng_state())


def test_every_other_source_gives_the_same_images(folder, rows, tmp_path):
    rows.to_parquet(tmp_path / "rows.parquet")
    bare = rows.cast_column("image", Image(decode=False))
    expected = load(rows)
    for source in (
        tmp_path / "rows.parquet",
        bare,
        rows.rename_column("image", "img").rename_column("label", "labels"),
    ):
        assert numbers(load(source)) == numbers(expected) and labels(load(source)) == labels(expected)
    stream = load(rows.to_iterable_dataset())
    assert labels(stream) == [number // 3 for number in numbers(stream)] and len(set(numbers(stream))) == 6
    assert "drawn from a stream" in stream.notes[0] and numbers(load(rows.to_iterable_dataset(), seed=3)) != numbers(
        stream
    )


def test_splits_are_chosen_by_purpose(tmp_path):
    for split in ("train", "validation", "test"):
        fill(tmp_path / "data" / split, each=1 if split == "test" else 2)
    assert len(open_images(tmp_path / "data").rows) == 10
    assert len(open_images(tmp_path / "data", images.EVALUATION_SPLITS).rows) == 10
    model = nn.Sequential(nn.Flatten(), nn.LazyLinear(5))
    assert accuracy(model, tmp_path / "data", to_tensor).images == 10
    from datasets import DatasetDict

    rows = open_images(tmp_path / "data").rows
    with pytest.raises(MoonshotError, match="has the splits a, b; give one"):
        open_images(DatasetDict(a=rows, b=rows))
    assert open_images(DatasetDict(a=rows)).rows is rows


def test_a_name_on_the_hub_is_streamed(monkeypatch, rows):
    asked = []

    def stand_in(name, streaming=False):
        asked.append((name, streaming))
        return {"train": rows.to_iterable_dataset()}["train"]

    monkeypatch.setattr(images, "load_dataset", stand_in)
    assert len(numbers(load("someone/insects"))) == 6 and asked == [("someone/insects", True)]

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
    found = load(rows, plain(label2id=shuffled, num_labels=5))
    assert labels(found) == [shuffled[CLASSES[number // 3]] for number in numbers(found)] and not found.notes
    other = load(rows, plain(label2id={"wolf": 0, "bear": 1, "x": 2, "y": 3, "z": 4}, num_labels=5))
    assert labels(other) == [number // 3 for number in numbers(other)]
    assert "the class names ant, bee, cat, … are not the model's" in other.notes[0]
    assert not load(rows, plain(label2id={f"LABEL_{i}": i for i in range(5)}, num_labels=5)).notes
    digits = fill(tmp_path / "digits", [str(i) for i in range(12)], each=1)
    found = load(digits, plain(label2id={f"LABEL_{i}": i for i in range(12)}, num_labels=12), num_samples=12)
    pairs = dict(zip(numbers(found), labels(found), strict=True))
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
    found = load(rows, plain(num_channels=1), single, labels=False)
    assert found.batches[0]["pixel_values"].shape == (4, 1, 20, 24)


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
        (lambda path: Dataset.from_dict({"text": ["a"]}), "has the columns text; rename the one that holds images"),
        (lambda path: Dataset.from_dict({}), "has no rows"),
    ],
)
def test_what_is_no_source_of_images(make_source, message, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "empty").mkdir()
    (tmp_path / "note.txt").write_text("words")
    with pytest.raises(MoonshotError, match=message):
        open_images(make_source(tmp_path))


def test_model_inputs_are_left_to_the_other_reader():
    assert open_images(image_batches()) is None
    assert open_images(Dataset.from_dict({"pixel_values": [[[[0.0]]]], "labels": [0]})) is None


def test_which_models_take_images():
    assert takes_images(make("vit")) and takes_images(make("convnet")) and takes_images(make("resnet"))
    assert not takes_images(make("llama")) and not takes_images(nn.Sequential(nn.Linear(2, 2)))


def config(**changes):
    return MoonshotConfig(**{**dict(sparsity=0.5, num_samples=6, batch_size=2), **changes})


@pytest.mark.parametrize("name", ["vit", "deit", "resnet", "convnext"])
def test_a_model_is_pruned_saved_and_loaded_with_its_processor(name, folder, processor, tmp_path):
    make(name).save_pretrained(tmp_path / "dense")
    processor.save_pretrained(tmp_path / "dense")
    pruner = MoonshotPruner.from_pretrained(tmp_path / "dense", config())
    assert type(pruner.processor) is type(processor) and pruner.tokenizer is None
    report = pruner.prune(folder, progress=False)
    assert report.layers[0].lam == 0.5 and 0 < report.layers[0].fisher < 1
    assert report.calibration["source"] == folder.name
    pruner.save_pretrained(tmp_path / "out")
    loaded = AutoImageProcessor.from_pretrained(tmp_path / "out")
    assert loaded.size == processor.size
    model = hf.AutoModelForImageClassification.from_pretrained(tmp_path / "out")
    assert accuracy(model, folder, loaded) == accuracy(pruner.model, folder, processor)
    twin = MoonshotPruner.from_pretrained(tmp_path / "dense", config())
    twin.prune(str(folder), progress=False)
    for a, b in zip(pruner.model.parameters(), twin.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_images_without_labels_need_lambda_one(folder, processor, rows):
    bare = rows.remove_columns("label")
    with pytest.raises(MoonshotError, match="no labels.*set lam=1"):
        MoonshotPruner(make("vit"), config(), None, processor).prune(bare, progress=False)
    assert MoonshotPruner(make("vit"), config(lam=1.0), None, processor).prune(bare, progress=False).sparsity == 0.5
    loss = lambda output, batch: output.logits.square().mean(1)  # noqa: E731
    report = MoonshotPruner(make("vit"), config(), None, processor).prune(bare, loss=loss, progress=False)
    assert report.sparsity == 0.5 and report.layers[0].lam == 0.5


def test_a_plain_module_takes_batches_pairs_and_images(folder, tmp_path):
    batches = image_batches()
    pairs = [(batch["pixel_values"], batch["labels"]) for batch in batches]
    singles = [(x, int(y)) for batch in batches for x, y in zip(*batch.values(), strict=True)]
    found = []
    arrays = [(x.numpy(), y.numpy()) for x, y in pairs]
    for data in (batches, pairs, singles, arrays):
        model = make("convnet")
        report = MoonshotPruner(model, config()).prune(data, progress=False)
        assert report.layers[0].lam == 0.5
        found.append(model)
    for other in found[1:]:
        for a, b in zip(found[0].parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    pruner = MoonshotPruner(make("convnet"), config(), processor=to_tensor)
    pruner.prune(folder, progress=False)
    pruner.save_pretrained(tmp_path)
    loaded = make("convnet")
    from safetensors.torch import load_model

    load_model(loaded, tmp_path / "model.safetensors")
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), pruner.model.parameters(), strict=True))


class Wrapped(nn.Module):
    """Takes and gives dictionaries, which only its own forward function knows."""

    def __init__(self):
        super().__init__()
        self.net = make("convnet")

    def forward(self, inputs):
        return {"scores": self.net(inputs["picture"])}


def test_a_forward_function_of_ones_own():
    batches = [{"picture": batch["pixel_values"], "labels": batch["labels"]} for batch in image_batches()]
    forward = lambda model, batch: model({"picture": batch["picture"]})["scores"]  # noqa: E731
    wrapped, bare = Wrapped(), make("convnet")
    MoonshotPruner(wrapped, config()).prune(batches, forward=forward, progress=False)
    MoonshotPruner(bare, config()).prune(image_batches(), progress=False)
    for a, b in zip(wrapped.net.parameters(), bare.parameters(), strict=True):
        assert torch.equal(a, b)
    assert accuracy(wrapped, batches, forward=forward) == accuracy(
        wrapped.net, batches, forward=lambda m, b: m(b["picture"])
    )
    loss = lambda output, batch: -output["scores"].log_softmax(1)[torch.arange(2), batch["labels"]]  # noqa: E731
    plain = lambda model, batch: model({"picture": batch["picture"]})  # noqa: E731
    twin = Wrapped()
    MoonshotPruner(twin, config()).prune(batches, forward=plain, loss=loss, progress=False)
    for a, b in zip(twin.parameters(), wrapped.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda batch: batch["labels"].add_(5), "label .*: the model has the classes 0 to 4"),
        (
            lambda batch: batch.update(labels=batch["labels"].float()),
            "labels of torch.float32; give one integer class",
        ),
        (
            lambda batch: batch.update(labels=batch["labels"][:, None]),
            r"labels of shape \[., 1\] for logits of shape \[., 5\]",
        ),
        (lambda batch: batch.pop("labels"), "labels"),
    ],
)
def test_labels_that_do_not_fit_are_refused(change, message):
    batches = image_batches()
    for batch in batches:
        change(batch)
    for name in ("vit", "resnet", "convnet"):
        with pytest.raises(MoonshotError, match=message):
            MoonshotPruner(make(name), config()).prune(batches, progress=False)
        with pytest.raises(MoonshotError, match=message):
            accuracy(make(name), batches)


@pytest.mark.parametrize("batch_size", [1, 4, 100])
def test_accuracy_against_a_loop_written_out(folder, processor, batch_size):
    model = make("vit").train()
    right = 0
    with torch.no_grad():
        for i in range(15):
            inputs = processor(images=[picture(i)], return_tensors="pt")
            right += int(model.eval()(**inputs).logits[0].argmax()) == i // 3
    model.train()
    found = accuracy(model, folder, processor, batch_size=batch_size)
    assert (found.value, found.images, found.dataset) == (right / 15, 15, str(folder)) and model.training
    assert accuracy(model, folder, processor, max_images=7).images == 7
    assert accuracy(model, image_batches(), max_images=3).images == 3


def test_accuracy_needs_logits_of_classes(folder, processor):
    with pytest.raises(MoonshotError, match="returns no logits"):
        accuracy(make("vit").vit, image_batches())
    model = make("vit")
    model.classifier.weight.data.fill_(float("nan"))
    with pytest.raises(MoonshotError, match="NaN logits"):
        accuracy(model, folder, processor)
    for options in (dict(batch_size=0), dict(max_images=0)):
        with pytest.raises(MoonshotError, match="=0: give a whole number"):
            accuracy(model, folder, processor, **options)
    with pytest.raises(MoonshotError, match="is text; give model inputs"):
        accuracy(model, ["some words"])


@pytest.fixture(scope="module")
def saved(tmp_path_factory, processor):
    folder = tmp_path_factory.mktemp("models") / "vit"
    make("vit").save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def run(capsys, *argv):
    main([str(part) for part in argv])
    return capsys.readouterr().out


def test_image_models_on_the_command_line(capsys, saved, folder, tmp_path):
    out = tmp_path / "out"
    options = ["--output", out, "--sparsity", "0.5", "--num-samples", "6", "--device", "cpu"]
    printed = run(capsys, "prune", saved, *options, "--calibration", folder, "--eval", folder)
    measured = run(capsys, "eval", out, "--dataset", folder, "--device", "cpu")
    evaluation = json.loads((out / "moonshot_report.json").read_text())["evaluations"]["insects"]
    assert evaluation["metric"] == "accuracy"
    after = f"{evaluation['pruned']:.2%}"
    assert f"accuracy    {evaluation['dense']:.2%} → {after} on insects" in printed
    assert measured == f"accuracy    {after} on {folder}\n"
    found = json.loads(run(capsys, "eval", out, "--dataset", folder, "--device", "cpu", "--json"))
    assert found["model"] == str(out) and found["accuracy"] == {str(folder): evaluation["pruned"]}
    packed = run(capsys, "eval", out, "--dataset", folder, "--device", "cpu", "--json", "--runtime", "packed")
    assert json.loads(packed)["accuracy"] == found["accuracy"]


def test_image_models_need_images_on_the_command_line(capsys, saved, tmp_path):
    (tmp_path / "empty").mkdir()
    for argv, status, message in (
        (["--sparsity", "0.5"], 2, "--calibration: an image model needs images"),
        (["--sparsity", "0.5", "--calibration", tmp_path / "nowhere"], 2, "--calibration"),
        (["--sparsity", "0.5", "--calibration", tmp_path / "empty"], 1, "doesn't contain any data files"),
    ):
        with pytest.raises(SystemExit) as caught:
            main([str(part) for part in ("prune", saved, "--output", tmp_path / "out", *argv, "--device", "cpu")])
        lines = capsys.readouterr().err.splitlines()
        assert caught.value.code == status and message in lines[-1] and lines[-1].startswith("error: ")
    with pytest.raises(SystemExit):
        main(["eval", str(saved), "--dataset", "wikitext2", "--device", "cpu"])
    assert '"wikitext2" is text' in capsys.readouterr().err.splitlines()[-1]
