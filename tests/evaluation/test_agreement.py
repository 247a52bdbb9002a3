"""Agreement of embeddings with the dense model's: by hand, in reports and cards, and on the command line."""

import copy
import json

import pytest
import torch
import transformers as hf
from command_line import failure
from models import image_batches, make, token_batches
from sentence_encoders import bert, sentence_encoder
from sentence_encoders import make as make_model

from optimum_moonshot import MoonshotConfig, MoonshotError, MoonshotPruner, agreement
from optimum_moonshot.__main__ import main
from optimum_moonshot.data.batches import split_batches
from optimum_moonshot.evaluation import metrics as module
from optimum_moonshot.evaluation.report import EvalReport

WORDS = ["one two", "three", "four five six", "seven", "eight nine", "ten eleven twelve", "thirteen"]


def pruned(model):
    model = copy.deepcopy(model)
    MoonshotPruner(model, MoonshotConfig(solver="magnitude", sparsity=0.6)).prune(progress=False)
    return model


def vectors(model, tokenizer, texts, length=64):
    """One text at a time."""
    vectors = []
    for text in texts:
        ids = tokenizer(text)["input_ids"][:length]
        with torch.no_grad():
            mean = model(input_ids=torch.tensor([ids])).last_hidden_state[0].mean(0)
        vectors.append(mean / mean.norm())
    return torch.stack(vectors)


@pytest.mark.parametrize("length", [None, 4])
def test_agreement_by_hand(tokenizer, monkeypatch, length):
    dense = bert()
    model = pruned(dense)
    ours, theirs = (vectors(each, tokenizer, WORDS, length or 64) for each in (model, dense))
    cosines = [float(a @ b) for a, b in zip(ours, theirs, strict=True)]
    same = 0
    for i in range(len(WORDS)):
        others = [j for j in range(len(WORDS)) if j != i]
        nearest = [max(others, key=lambda j: float(each[i] @ each[j])) for each in (ours, theirs)]
        same += nearest[0] == nearest[1]
    assert 0 < same < len(WORDS) and max(cosines) < 0.999
    for size in (1, 3, 32):
        monkeypatch.setattr(module, "NEIGHBOURS", size)
        result = agreement(model, dense, WORDS, tokenizer, batch_size=size, sequence_length=length)
        assert result.value == pytest.approx(sum(cosines) / len(cosines), abs=1e-6)
        assert result.neighbours == same / len(WORDS)
    assert (result.samples, result.sequence_length, result.dataset) == (7, length or 64, "list of 7 strings")
    itself = agreement(dense, dense, WORDS, tokenizer)
    assert itself.value == pytest.approx(1, abs=1e-6) and itself.neighbours == 1
    assert agreement(model, dense, WORDS, tokenizer, max_samples=3).samples == 3


def test_pooling_of_the_checkpoint_images_and_model_inputs(tmp_path, tokenizer):
    dense = sentence_encoder(tmp_path / "st")
    (tmp_path / "st" / "1_Pooling" / "config.json").write_text('{"pooling_mode": "cls"}')
    model, batches = pruned(dense), token_batches(padded=True)
    result, total = agreement(model, dense, batches, batch_size=1), 0.0
    with torch.no_grad():
        for sample in split_batches(batches, 1):
            first, second = (each(**sample).last_hidden_state[0, 0] for each in (model, dense))
            total += float(torch.cosine_similarity(first, second, 0))
    assert result.value == pytest.approx(total / 6, abs=1e-6)
    assert result.embedding == "cls-pooled, normalized embedding" and result.sequence_length is None
    copied = pruned(dense)
    copied.name_or_path = str(tmp_path / "without modules.json")
    assert agreement(copied, dense, batches).value == result.value
    report = EvalReport("m")
    report.add(result)
    report.save(tmp_path / "result.json")
    assert EvalReport.load(tmp_path / "result.json").agreement == {result.dataset: result}
    vit = make("vit").vit
    assert 0 < agreement(pruned(vit), vit, image_batches()).value < 1


def test_agreement_is_refused_with_the_reason(tokenizer):
    dense = bert()
    small = make_model(hf.BertModel, hf.BertConfig(**{**dense.config.to_dict(), "hidden_size": 8}))
    damaged = copy.deepcopy(dense)
    damaged.encoder.layer[0].output.dense.weight.data.fill_(float("nan"))
    for arguments, options, message in (
        ((dense, dense, WORDS), {}, "tokenizer=None: text needs"),
        ((dense, dense, WORDS[:1], tokenizer), {}, "has 1 samples; give two or more"),
        ((dense, dense, WORDS, tokenizer), dict(max_samples=1), "max_samples=1: give a whole number of at least 2"),
        ((dense, dense, WORDS, tokenizer), dict(sequence_length=65), "sequence_length=65: .*64 positions"),
        ((small, dense, WORDS, tokenizer), {}, r"\[7, 8\], of the dense model \[7, 16\]; give the model that"),
        ((damaged, dense, WORDS, tokenizer), {}, "BertModel returns NaN"),
    ):
        with pytest.raises(MoonshotError, match=message):
            agreement(*arguments, **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


def run(*argv):
    main([str(part) for part in argv])


def test_commands_measure_and_record_it(folder, tokenizer, capsys):
    sentence_encoder(folder / "dense", tokenizer)
    (folder / "held out.txt").write_text("\n\n".join(WORDS))
    data = ["--calibration", folder / "held out.txt", "--num-samples", 4, "--sequence-length", 8, "--device", "cpu"]
    made = ["--output", folder / "pruned", "--sparsity", 0.6, "--lam", 0.5]
    run("prune", folder / "dense", *made, *data, "--eval", folder / "held out.txt")
    assert "cosine      1.0000 → 0." in capsys.readouterr().out
    path = folder / "pruned" / "moonshot_report.json"
    evaluations = json.loads(path.read_text())["evaluations"]
    assert {name: entry["metric"] for name, entry in evaluations.items()} == {
        "held out.txt (cosine)": "cosine",
        "held out.txt (same neighbour)": "same neighbour",
    }
    written = evaluations["held out.txt (cosine)"]
    assert written["dense"] == pytest.approx(1) and written["settings"]["samples"] == 7
    card = (folder / "pruned" / "README.md").read_text()
    assert f"| cosine on held out.txt | 1.00 | {written['pruned']:.4g} |" in card

    what = ["--against", folder / "dense", "--dataset", folder / "held out.txt", "--sequence-length", 8]
    what += ["--device", "cpu", "--output", folder / "result.json"]
    run("eval", folder / "pruned", *what, "--record")
    printed = capsys.readouterr().out
    assert f"cosine      {written['pruned']:.4f} on" in printed and "same neighbour " in printed
    agreement = EvalReport.load(folder / "result.json").of(folder / "held out.txt")
    assert agreement.value == pytest.approx(written["pruned"]) and 0 <= agreement.neighbours <= 1
    assert json.loads(path.read_text())["evaluations"]["held out.txt (cosine)"]["dense"] == pytest.approx(1)
    for argv, message in (
        ([folder / "pruned", *what[2:]], "BertModel has no head: give the dense model"),
        ([folder / "classifier", *what], "ViTForImageClassification classifies images"),
    ):
        tiny = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, image_size=16)
        hf.ViTForImageClassification(hf.ViTConfig(**tiny)).save_pretrained(folder / "classifier")
        assert message in failure(capsys, "eval", *argv)[1][-1]


def test_a_sweep_ranks_by_it(folder, tokenizer, capsys):
    if not (folder / "dense").exists():
        sentence_encoder(folder / "dense", tokenizer)
    (folder / "texts.txt").write_text("\n".join(WORDS))
    data = ["--calibration", folder / "texts.txt", "--num-samples", 4, "--sequence-length", 8, "--device", "cpu"]
    run("sweep", folder / "dense", "--output", folder / "sweep", "--sparsities", 0.6, "--lambdas", 0.5, 1, *data,
        "--metric", folder / "texts.txt")  # fmt: skip
    report = json.loads((folder / "sweep" / "sweep.json").read_text())
    assert report["metric"] == "cosine on texts.txt" and report["maximize"] and report["dense"] == pytest.approx(1)
    assert all(0 < entry["metric"] < 0.9999 for entry in report["entries"])


def test_a_smaller_model_is_compared_with_the_dense_one(folder, tokenizer, capsys):
    """Shrink makes a new model, whose embeddings must not be compared with themselves."""
    if not (folder / "dense").exists():
        sentence_encoder(folder / "dense", tokenizer)
    (folder / "texts.txt").write_text("\n".join(WORDS))
    data = ["--calibration", folder / "texts.txt", "--num-samples", 4, "--sequence-length", 8, "--device", "cpu"]
    size = ["--output", folder / "small", "--parameters", 0.85]
    run("shrink", folder / "dense", *size, *data, "--eval", folder / "texts.txt")
    assert "cosine      1.0000 → 0." in capsys.readouterr().out
