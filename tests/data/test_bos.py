"""Where the tokenizer puts BOS before a text, calibration samples and evaluation windows begin with it."""

import json
import math
from pathlib import Path

import pytest
import torch
from calibration_data import LONG, SHORT, TEXT, byte_tokenizer
from command_line import failure
from tokenizers import processors
from transformers import LlamaConfig, LlamaForCausalLM

from optimum_moonshot import MoonshotConfig, MoonshotError, MoonshotPruner, SelfCalibration, perplexity
from optimum_moonshot.__main__ import main
from optimum_moonshot.data.text import bos_of, load_calibration
from optimum_moonshot.evaluation.metrics import Perplexity

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
CHAT = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
SIZES = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)


def tokenizer_with(template: str, chat: str | None = None):
    """A byte tokenizer that puts special tokens around a text as the template says."""
    tokenizer = byte_tokenizer(max_length=10**9, **SPECIAL)
    names = [(name, number) for number, name in enumerate(SPECIAL.values())]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(template, special_tokens=names)
    tokenizer.chat_template = chat
    return tokenizer


def tiny():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=259, max_position_embeddings=64, **SIZES)).eval()


def samples(source, tokenizer):
    """The tokens of 8 samples of at most 32, without padding."""
    rows = []
    for batch in load_calibration(source, tokenizer, num_samples=8, sequence_length=32).batches:
        masks = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
        rows += [row[mask].tolist() for row, mask in zip(batch["input_ids"], masks, strict=True)]
    return rows


@pytest.fixture
def sources(book):
    return [str(book), LONG, SHORT, [TEXT, *SHORT]]


def test_every_sample_begins_with_bos_and_goes_on_with_text(sources):
    bos, plain = tokenizer_with("<s> $A"), tokenizer_with("$A")
    assert bos_of(bos) == [0] and bos_of(plain) == []
    for source in sources:
        for row in samples(source, bos):
            text = bos.decode(row[1:])
            assert row[0] == 0 and row.count(0) == 1
            assert text in TEXT or any(text in document for document in [*LONG, *SHORT])
        lengths = [max(map(len, samples(source, tokenizer))) for tokenizer in (bos, plain)]
        assert lengths in ([32, 32], [11, 10], [10, 9])  # of windows; of short documents, which are used whole
    data = load_calibration(LONG, bos, num_samples=8, sequence_length=32)
    assert data.notes == ("every sample begins with the tokenizer's BOS",)


@pytest.mark.parametrize("template", ["$A </s>", "</s> $A <pad>", "$A"])
def test_a_tokenizer_without_bos_gives_slices_of_its_stream(sources, template):
    """As before, with the tokens that it puts at the ends of a text, such as CLS and SEP."""
    tokenizer = tokenizer_with(template)
    for source in sources:
        texts = [Path(source).read_text()] if isinstance(source, str) else source
        streams = [tokenizer(text)["input_ids"] for text in texts]
        for row in samples(source, tokenizer):
            assert any(row == stream[i : i + len(row)] for stream in streams for i in range(len(stream)))


def test_special_tokens_at_the_end_stay_there():
    tokenizer = tokenizer_with("<s> $A </s>")
    rows = samples([text[:20] for text in LONG], tokenizer)
    assert all(row[0] == 0 and row[-1] == 1 and len(row) == 22 for row in rows)


@torch.no_grad()
def by_hand(model, windows):
    losses = [model(input_ids=torch.tensor([row]), labels=torch.tensor([row])).loss for row in windows]
    return math.exp(float(torch.stack(losses).mean()))


def test_perplexity_with_and_without_bos():
    model, bos, plain = tiny(), tokenizer_with("<s> $A"), tokenizer_with("$A")
    stream = bos(TEXT)["input_ids"]
    literature = [stream[i : i + 32] for i in range(0, len(stream) - 31, 32)][:8]
    with_bos = [[0, *stream[i : i + 31]] for i in range(1, len(stream) - 30, 31)][:8]
    cases = (({}, with_bos, True), ({"bos": True}, with_bos, True), ({"bos": False}, literature, False))
    for settings, windows, named in cases:
        result = perplexity(model, bos, [TEXT], sequence_length=32, max_windows=8, **settings)
        assert result.value == pytest.approx(by_hand(model, windows), rel=1e-5) and result.bos is named
        assert result.tokens == 8 * 31
        assert result.measurements()["list of 1 strings"].settings.get("bos", False) is named
    without = perplexity(model, plain, [TEXT], sequence_length=32, max_windows=8)
    assert without == perplexity(model, plain, [TEXT], sequence_length=32, max_windows=8, bos=False)
    assert perplexity(model, plain, [TEXT], sequence_length=32, max_windows=8, bos=True).value == pytest.approx(
        by_hand(model, with_bos), rel=1e-5
    )
    with pytest.raises(MoonshotError, match="bos=True: the tokenizer has no BOS token"):
        perplexity(model, byte_tokenizer(), [TEXT], sequence_length=32, bos=True)
    with pytest.raises(MoonshotError, match="bos='yes': use True, False or None"):
        perplexity(model, bos, [TEXT], sequence_length=32, bos="yes")


def test_eval_names_the_windows_and_compares_only_equal_ones(tmp_path, capsys):
    tiny().save_pretrained(tmp_path / "model")
    tokenizer_with("<s> $A").save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text(TEXT)
    command = ["eval", str(tmp_path / "model"), "--dataset", str(tmp_path / "text.txt"), "--sequence-length", "32"]
    main([*command, "--limit", "2", "--output", str(tmp_path / "bos.json")])
    assert "text.txt with BOS" in capsys.readouterr().out
    main([*command, "--limit", "2", "--no-bos", "--output", str(tmp_path / "plain.json")])
    assert "with BOS" not in capsys.readouterr().out
    (result,) = json.loads((tmp_path / "bos.json").read_text())["measured_on"].values()
    assert result["bos"] is True
    _, lines = failure(capsys, *command, "--baseline", tmp_path / "plain.json")
    assert "do not all begin with BOS; use --no-bos" in lines[-1]
    _, lines = failure(capsys, *command, "--no-bos", "--baseline", tmp_path / "bos.json")
    assert "all begin with BOS; use --bos" in lines[-1]


def test_results_of_earlier_versions_are_those_of_the_literature():
    assert not Perplexity(1.0, "wikitext2", 2, 32, 62).bos


@pytest.mark.parametrize("template", [CHAT, "{{ bos_token }}" + CHAT])
@pytest.mark.parametrize("chat", [True, False])
def test_generated_samples_begin_with_one_bos(template, chat):
    tokenizer = tokenizer_with("<s> $A", template)
    (tokens,) = SelfCalibration(prompts=["who?"], chat=chat).beginnings(tokenizer, 0, 60)
    assert tokens[0] == 0 and tokens.count(0) == 1
    (tokens,) = SelfCalibration(prompts=["who?"], chat=chat).beginnings(tokenizer_with("$A", CHAT), 0, 60)
    assert 0 not in tokens


def test_the_model_reads_the_samples():
    model, seen = tiny(), []
    model.get_input_embeddings().register_forward_pre_hook(lambda module, args: seen.append(args[0].clone()))
    config = MoonshotConfig(solver="wanda", lam=0.9, pattern="2:4", num_samples=4, sequence_length=16, batch_size=2)
    report = MoonshotPruner(model, config, tokenizer_with("<s> $A")).prune(LONG, progress=False)
    assert all((batch[:, 0] == 0).all() for batch in seen)
    assert "every sample begins with the tokenizer's BOS" in report.notes
