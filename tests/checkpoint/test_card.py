"""The model card and its plot, offline: their contents for every kind of run, and private data they must omit."""

import math
from pathlib import Path

import pytest
import torch
import transformers as hf
import yaml
from huggingface_hub import ModelCard
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from matplotlib.image import imread
from models import image_batches, make, token_batches

from optimum_moonshot import MoonshotConfig, MoonshotPruner, PruneReport, convert
from optimum_moonshot.checkpoint.base_card import find_base
from optimum_moonshot.reports.plots import PLOT_NAME, by_kind, plot_report, split_name

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.draws


def pruned(name="llama", batches=None, **settings):
    settings = {**dict(pattern="2:4", num_samples=6, sequence_length=12, lam=0.9), **settings}
    pruner = MoonshotPruner(make(name), MoonshotConfig(**settings))
    pruner.prune(token_batches() if batches is None else batches, progress=False)
    return pruner


def card(folder):
    """The parsed YAML header and the text."""
    _, block, text = (folder / "README.md").read_text(encoding="utf-8").split("---\n", 2)
    return yaml.safe_load(block), text


def test_every_saved_model_has_a_card_and_a_picture(tmp_path):
    pruner = pruned()
    pruner.save_pretrained(tmp_path / "small")
    data, text = card(tmp_path / "small")
    assert data["moonshot"]["format"] == "dense" and "base_model" not in data and "license" not in data
    whole = pruner.report.model_sparsity
    assert data["moonshot"]["model_sparsity"] == round(whole, 6)
    assert f"pruned layers are zero, {100 * whole:.1f}% of all its weights." in text
    assert f"| **the whole model** |  |  | {100 * whole:.2f}% |" in text and "stayed dense" not in text
    assert "# small" in text and "Card of the dense model" not in text and "Evaluation" not in text
    picture = imread(tmp_path / "small" / PLOT_NAME)
    assert 800 <= picture.shape[1] <= 1200 and picture.std() > 0.05
    assert ModelCard.load(tmp_path / "small" / "README.md").data.to_dict() == data


def test_converting_adjusts_the_card(tmp_path):
    pruner = pruned()
    pruner.report.record_evaluation("text", 3.0, 4.0)
    pruner.save_pretrained(tmp_path / "packed", format="packed")
    convert(tmp_path / "packed", tmp_path / "dense", "dense")
    before, after = card(tmp_path / "packed"), card(tmp_path / "dense")
    assert "import optimum_moonshot" in before[1] and "import optimum_moonshot" not in after[1]
    assert after[0]["moonshot"] == {**before[0]["moonshot"], "format": "dense"}
    assert after[0]["model-index"][0]["results"] == before[0]["model-index"][0]["results"]
    (tmp_path / "dense" / "README.md").write_text("# Not ours")
    convert(tmp_path / "dense", tmp_path / "again", "packed")
    assert (tmp_path / "again" / "README.md").read_text() == "# Not ours"


def test_a_card_is_carried_through_a_second_pruning(tmp_path):
    dense = make("llama")
    dense.save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "README.md").write_text(
        "---\nlicense: mit\nbase_model: org/older\ntags: [custom]\n---\n# Older\n"
    )
    for source, target, pattern in (("base", "first", "4:8"), ("first", "second", "2:4")):
        config = MoonshotConfig(solver="magnitude", pattern=pattern)
        pruner = MoonshotPruner.from_pretrained(tmp_path / source, config)
        pruner.prune(progress=False)
        pruner.save_pretrained(tmp_path / target)
    data, text = card(tmp_path / "second")
    assert data["license"] == "mit" and {"custom", "2:4"} <= set(data["tags"]) and "4:8" not in data["tags"]
    assert text.count("# Older") == 1 and text.count("Card of the dense model") == 1


def test_the_yaml_of_the_dense_models_card_is_not_lost(tmp_path):
    make("llama").save_pretrained(tmp_path / "base")
    ours = {"license": "mit", "tags": ["custom"], "library_name": "transformers"}
    theirs = {
        "base_model": "org/older",
        "datasets": ["org/text"],
        "extra_gated_prompt": "Line one\n```\ncode: ü\n```\n",
    }
    (tmp_path / "base" / "README.md").write_text(f"---\n{yaml.safe_dump({**ours, **theirs})}---\n# Older\n")
    for source, target in (("base", "first"), ("first", "second")):
        pruner = MoonshotPruner.from_pretrained(tmp_path / source, MoonshotConfig(solver="magnitude", pattern="2:4"))
        pruner.prune(progress=False)
        pruner.save_pretrained(tmp_path / target)
        data, text = card(tmp_path / target)
        assert data["license"] == "mit" and not theirs.keys() & data.keys()
        _, block = text.split("# Card of the dense model")[1].split("````yaml\n")
        assert yaml.safe_load(block.split("\n````")[0]) == theirs


def test_an_edited_card_is_copied_unchanged(tmp_path):
    pruned(solver="magnitude", lam=None).save_pretrained(tmp_path / "dense")
    path = tmp_path / "dense" / "README.md"
    original = path.read_bytes()
    for content in (original.replace(b"weight_bytes", b"bytes_of_weights"), b"", b"\xff\xfe", b"---\n[\n---\n"):
        path.write_bytes(content)
        convert(tmp_path / "dense", tmp_path / "packed", "packed")
        assert (tmp_path / "packed" / "README.md").read_bytes() == content


def test_the_card_of_a_compacted_model(tmp_path):
    """It has no zeros left: packing saves nothing."""
    pruner = MoonshotPruner(make("llama"), MoonshotConfig(solver="magnitude", pattern="structured", sparsity=0.5))
    pruner.prune(progress=False)
    before, after = pruner.compact().parameters
    pruner.save_pretrained(tmp_path)
    data, text = card(tmp_path)
    sizes = data["moonshot"]["weight_bytes"]
    assert sizes["packed"] == sizes["dense"] == sum(p.nbytes for p in pruner.model.parameters())
    assert f"{before:,} → {after:,} parameters" in text


def test_a_folder_gives_no_base_name_and_an_unreadable_card_the_name_alone(tmp_path, caplog, monkeypatch):
    assert find_base("") == find_base(str(tmp_path)) == find_base("/no/such/folder")
    (tmp_path / "README.md").write_text("no header at all")
    assert find_base(str(tmp_path)).text == "no header at all" and find_base(str(tmp_path)).name is None
    (tmp_path / "README.md").write_text("---\n[\n---\nno YAML")
    assert find_base(str(tmp_path)) == find_base("") and "its licence is not copied" in caplog.text
    caplog.clear()

    for error in (ConnectionError("no network"), LocalEntryNotFoundError("offline"), EntryNotFoundError("no card")):

        def failing(*args, error=error, **kwargs):
            raise error

        monkeypatch.setattr(ModelCard, "load", failing)
        caplog.clear()
        assert find_base("org/model").name == "org/model"
        assert ("its licence is not copied" in caplog.text) == (type(error) is not EntryNotFoundError)


def test_non_finite_measurements_are_not_in_the_yaml(tmp_path):
    pruner = pruned(solver="magnitude", lam=None)
    pruner.report.record_evaluation("text", 5.0, math.inf)
    pruner.report.record_evaluation("pipes | and\nlines", 1.0, 2.0)
    pruner.save_pretrained(tmp_path)
    data, text = card(tmp_path)
    values = [metric["value"] for result in data["model-index"][0]["results"] for metric in result["metrics"]]
    assert values == [5.0, 1.0, 2.0]
    assert "| perplexity on text | 5.00 | inf |  |" in text and "pipes \\| and lines" in text


@pytest.mark.parametrize(
    "name, batches, settings",
    [
        ("vit", image_batches, {}),
        ("gpt2", token_batches, dict(pattern="unstructured", sparsity=0.6, allocation="alpha")),
        ("mixtral", token_batches, dict(solver="wanda", fisher_layers="attention")),
        ("llama", token_batches, dict(lam=1.0, recover="gradual", recover_steps=5)),
        ("bert", token_batches, dict(targets=["dense", "decoder"], lam=1.0)),
    ],
)
def test_the_card_of_every_kind_of_model(name, batches, settings, tmp_path):
    pruner = pruned(name, [dict(batch) for batch in batches()], **settings)
    pruner.report.record_evaluation("data", 0.9, 0.8, "accuracy")
    pruner.save_pretrained(tmp_path)
    data, text = card(tmp_path)
    target = settings.get("sparsity", 0.5)
    assert data["moonshot"]["target_sparsity"] == pytest.approx(target, abs=0.01)
    assert data["moonshot"]["sparsity"] == pytest.approx(pruner.report.sparsity, abs=1e-6)
    assert data["moonshot"]["lambda"] == settings.get("lam", 0.9)
    task, cls = {
        "vit": ("image-classification", "AutoModelForImageClassification"),
        "bert": ("fill-mask", "AutoModelForMaskedLM"),
    }.get(name, ("text-generation", "AutoModelForCausalLM"))
    assert data["pipeline_tag"] == task == data["model-index"][0]["results"][0]["task"]["type"]
    assert f"from transformers import {cls}\n" in text and f"model = {cls}.from_pretrained" in text
    assert ("\nMost of the model stayed dense: " in text) == (pruner.report.chosen < 0.5)
    assert ("Selected, but not pruned" in text) == bool(pruner.report.skipped)
    if "allocation" in settings:
        assert "| allocation of the sparsity | alpha |" in text and "% to " in text
    row = "| recovery | gradual, at most 5 steps for each decoder layer |"
    assert (row in text) == ("recover" in settings) == ("| recovery |" in text)


def test_sizes_equal_those_of_the_files(tmp_path):
    for name, settings in (
        ("llama-tied-biased", dict(pattern="2:4")),
        ("gpt2", dict(pattern="unstructured", sparsity=0.6)),
    ):
        pruner = MoonshotPruner(make(name).to(torch.bfloat16), MoonshotConfig(solver="magnitude", **settings))
        pruner.prune(progress=False)
        for format in ("dense", "packed"):
            folder = tmp_path / f"{name}-{format}"
            pruner.save_pretrained(folder, format=format)
            content = next(folder.glob("*.safetensors")).read_bytes()
            stored = len(content) - 8 - int.from_bytes(content[:8], "little")
            assert card(folder)[0]["moonshot"]["weight_bytes"][format] == stored


def test_names_split_into_block_and_kind():
    assert split_name("model.layers.3.mlp.up_proj") == ("model.layers.3", "mlp.up_proj")
    assert split_name("transformer.h.11.attn.c_proj") == ("transformer.h.11", "attn.c_proj")
    assert split_name("stages.0.layers.1.layer.0.convolution") == ("stages.0.layers.1.layer.0", "convolution")
    assert split_name("model.layers.0.experts.3.w1") == ("model.layers.0.experts.3", "w1")
    assert split_name("lm_head") == ("", "lm_head")


def test_the_picture_shows_every_layer_once():
    report = pruned(targets=["layers", "lm_head"]).report
    kinds = by_kind(report)
    assert [place for place, _ in kinds["mlp.up_proj"]] == [0, 1, 2] and [place for place, _ in kinds["lm_head"]] == [3]
    figure = plot_report(report)
    sparsity, loss = figure.axes
    drawn = {line.get_label(): line for line in sparsity.get_lines()}
    assert drawn.keys() == {*kinds, "target"}
    assert list(drawn["mlp.up_proj"].get_ydata()) == [layer.sparsity for _, layer in kinds["mlp.up_proj"]]
    assert len(loss.get_lines()) == len(kinds)
    for axis in figure.axes:
        assert axis.get_ylabel() and axis.get_title()
    assert loss.get_xlabel() and figure.legends
    dataless = MoonshotPruner(make("llama"), MoonshotConfig(solver="magnitude", pattern="2:4"))
    assert len(plot_report(dataless.prune(progress=False)).axes) == 1  # no data, no losses


def test_local_paths_are_not_published(tmp_path):
    text = tmp_path / "secret" / "data.txt"
    text.parent.mkdir()
    text.write_text("some words " * 400)
    tokenizer = hf.AutoTokenizer.from_pretrained(ROOT / "examples" / "demo_model")
    settings = MoonshotConfig(
        pattern="2:4",
        num_samples=2,
        sequence_length=12,
        offload_dir=str(tmp_path / "secret" / "spill"),
        max_memory=4096,
    )
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**{**make("llama").config.to_dict(), "vocab_size": 2048}))
    pruner = MoonshotPruner(model, settings, tokenizer)
    pruner.prune(str(text), progress=False)
    pruner.save_pretrained(tmp_path / "out")
    for path in (tmp_path / "out").iterdir():
        assert b"secret" not in path.read_bytes(), path.name
    assert PruneReport.load(tmp_path / "out").calibration["source"] == "data.txt"
