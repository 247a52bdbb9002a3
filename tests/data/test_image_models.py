"""Image models: pruning with a processor, plain modules, accuracy against an explicit loop, the command line."""

import json

import pytest
import torch
import transformers as hf
from calibration_data import to_tensor
from image_folders import picture
from models import image_batches, make
from safetensors.torch import load_model
from torch import nn
from transformers.models.auto.image_processing_auto import AutoImageProcessor

from optimum_moonshot import MoonshotConfig, MoonshotError, MoonshotPruner, accuracy
from optimum_moonshot.__main__ import main


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
    pruned = []
    arrays = [(x.numpy(), y.numpy()) for x, y in pairs]
    for data in (batches, pairs, singles, arrays):
        model = make("convnet")
        report = MoonshotPruner(model, config()).prune(data, progress=False)
        assert report.layers[0].lam == 0.5
        pruned.append(model)
    for other in pruned[1:]:
        for a, b in zip(pruned[0].parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    pruner = MoonshotPruner(make("convnet"), config(), processor=to_tensor)
    pruner.prune(folder, progress=False)
    pruner.save_pretrained(tmp_path)
    loaded = make("convnet")
    load_model(loaded, tmp_path / "model.safetensors")
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), pruner.model.parameters(), strict=True))


class Wrapped(nn.Module):
    """Reads and returns dictionaries: the default forward function does not fit."""

    def __init__(self):
        super().__init__()
        self.net = make("convnet")

    def forward(self, inputs):
        return {"scores": self.net(inputs["picture"])}


def test_a_custom_forward_function():
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
        (lambda batch: batch.update(labels=batch["labels"].float()), "labels of torch.float32; give one integer class"),
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
def test_accuracy_equals_that_of_an_explicit_loop(folder, processor, batch_size):
    model = make("vit").train()
    correct = 0
    with torch.no_grad():
        for i in range(15):
            inputs = processor(images=[picture(i)], return_tensors="pt")
            correct += int(model.eval()(**inputs).logits[0].argmax()) == i // 3
    model.train()
    result = accuracy(model, folder, processor, batch_size=batch_size)
    assert (result.value, result.images, result.dataset) == (correct / 15, 15, str(folder)) and model.training
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
    values = json.loads(run(capsys, "eval", out, "--dataset", folder, "--device", "cpu", "--json"))
    assert values["model"] == str(out) and values["accuracy"] == {str(folder): evaluation["pruned"]}
    packed = run(capsys, "eval", out, "--dataset", folder, "--device", "cpu", "--json", "--runtime", "packed")
    assert json.loads(packed)["accuracy"] == values["accuracy"]


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
