"""Perplexity against an explicit loop and the model's own loss; its sources, errors and side effects; the named data
sets of calibration and evaluation, on a stand-in for the Hub."""

import gzip
import json
import math
from types import SimpleNamespace

import pytest
import torch
from calibration_data import byte_tokenizer
from datasets import Dataset, IterableDataset
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel, PreTrainedTokenizerFast, T5Config
from transformers import T5ForConditionalGeneration as T5

from optimum_moonshot.data import sources
from optimum_moonshot.data import text as data
from optimum_moonshot.errors import MoonshotError
from optimum_moonshot.evaluation import metrics as evaluation
from optimum_moonshot.evaluation.metrics import Perplexity, perplexity
from optimum_moonshot.model.model_info import max_positions

TEXT = " ".join(str(number) for number in range(140))
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}


def tiny_config(**changes) -> LlamaConfig:
    return LlamaConfig(**{"vocab_size": 256, "max_position_embeddings": 32, **SIZES, **changes})


@pytest.fixture
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(tiny_config(initializer_range=0.3))
    return model.eval()


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer(max_length=32)


@torch.no_grad()
def by_hand(model, tokenizer, text: str, length: int, max_windows: int | None = None) -> float:
    """One window and one token at a time."""
    ids = tokenizer(text)["input_ids"]
    losses = []
    for start in list(range(0, len(ids) - length + 1, length))[:max_windows]:
        window = torch.tensor([ids[start : start + length]])
        probabilities = model(input_ids=window).logits[0].double().softmax(-1)
        losses += [-math.log(probabilities[i, window[0, i + 1]]) for i in range(length - 1)]
    return math.exp(sum(losses) / len(losses))


class TestValue:
    @pytest.mark.parametrize("batch_size", [1, 3, 4, 100])
    def test_equals_an_explicit_loop(self, model, tokenizer, batch_size):
        result = perplexity(model, tokenizer, [TEXT], sequence_length=24, batch_size=batch_size)
        tokens = len(tokenizer(TEXT)["input_ids"])
        assert tokens % 24 and result.windows == tokens // 24 and result.tokens == result.windows * 23
        assert result.sequence_length == 24 and result.dataset == "list of 1 strings"
        assert result.value == pytest.approx(by_hand(model, tokenizer, TEXT, 24), rel=1e-5)

    @torch.no_grad()
    def test_equals_the_models_own_loss(self, model, tokenizer):
        ids = torch.tensor(tokenizer(TEXT)["input_ids"])
        windows = ids[: len(ids) // 32 * 32].view(-1, 32)
        losses = [model(input_ids=window[None], labels=window[None]).loss for window in windows]
        result = perplexity(model, tokenizer, [TEXT])
        assert result.value == pytest.approx(float(torch.stack(losses).mean().exp()), rel=1e-5)
        assert result.sequence_length == 32  # the model's positions

    @torch.no_grad()
    @pytest.mark.parametrize("batch_size", [1, 3])
    def test_the_divergence_from_the_dense_model_equals_an_explicit_loop(
        self, model, tokenizer, batch_size, monkeypatch
    ):
        monkeypatch.setattr(evaluation, "SLICE_BYTES", 4 * 256 * 7)
        dense, (kls, same) = model, ([], [])
        model = LlamaForCausalLM(dense.config).eval()
        for parameter, other in zip(model.parameters(), dense.parameters(), strict=True):
            parameter.copy_(other + 0.1 * torch.randn_like(other))
        ids = tokenizer(TEXT)["input_ids"]
        for start in range(0, len(ids) - 23, 24):
            window = torch.tensor([ids[start : start + 24]])
            p, q = (each(input_ids=window).logits[0].double().softmax(-1) for each in (dense, model))
            kls += [
                sum(a * math.log(a / b) for a, b in zip(p[i].tolist(), q[i].tolist(), strict=True)) for i in range(23)
            ]
            same += [int(p[i].argmax()) == int(q[i].argmax()) for i in range(23)]
        options = {"sequence_length": 24, "batch_size": batch_size}
        result = perplexity(model, tokenizer, [TEXT], against=dense, **options)
        assert result.kl == pytest.approx(sum(kls) / len(kls), rel=1e-4) and result.kl > 0.01
        assert result.agreement == pytest.approx(sum(same) / len(same)) and result.agreement < 1
        for value, alone in ((result.value, model), (result.dense, dense)):
            assert value == pytest.approx(perplexity(alone, tokenizer, [TEXT], **options).value, rel=1e-6)
        assert result.of_dense.value == result.dense
        itself = perplexity(dense, tokenizer, [TEXT], against=dense, **options)
        assert itself.kl == pytest.approx(0, abs=1e-7) and itself.agreement == 1 and itself.value == itself.dense

    def test_a_dense_model_of_another_vocabulary_is_refused(self, model, tokenizer):
        other = LlamaForCausalLM(tiny_config(vocab_size=300))
        with pytest.raises(MoonshotError, match="against: the model predicts 256 tokens, the dense model 300"):
            perplexity(model, tokenizer, [TEXT], against=other)

    def test_slicing_does_not_change_the_value(self, model, tokenizer, monkeypatch):
        whole = perplexity(model, tokenizer, [TEXT]).value
        for size in (1, 4 * 256 * 7):
            monkeypatch.setattr(evaluation, "SLICE_BYTES", size)
            assert perplexity(model, tokenizer, [TEXT]).value == pytest.approx(whole, rel=1e-6)

    def test_logits_are_read_in_slices(self, model, tokenizer, monkeypatch):
        monkeypatch.setattr(evaluation, "SLICE_BYTES", 4 * 256 * 7)
        rows, plain = [], evaluation.functional.nll_loss

        def spy(scores, *args, **kwargs):
            rows.append(len(scores))
            assert scores.dtype == torch.float32
            return plain(scores, *args, **kwargs)

        monkeypatch.setattr(evaluation.functional, "nll_loss", spy)
        perplexity(model.bfloat16(), tokenizer, [TEXT], max_windows=1)
        assert rows == [7, 7, 7, 7, 3]

    def test_half_precision(self, model, tokenizer):
        full = perplexity(model, tokenizer, [TEXT]).value
        assert perplexity(model.bfloat16(), tokenizer, [TEXT]).value == pytest.approx(full, rel=0.05)

    def test_uniform_predictions(self, model, tokenizer):
        nn.init.zeros_(model.lm_head.weight)
        assert perplexity(model, tokenizer, [TEXT]).value == pytest.approx(256)

    def test_max_windows(self, model, tokenizer):
        result = perplexity(model, tokenizer, [TEXT], max_windows=3, batch_size=2)
        assert result.windows == 3 and result.tokens == 93
        assert result.value == pytest.approx(by_hand(model, tokenizer, TEXT, 32, max_windows=3), rel=1e-5)
        assert perplexity(model, tokenizer, [TEXT], max_windows=10**6) == perplexity(model, tokenizer, [TEXT])

    def test_repeated_calls_agree(self, model, tokenizer):
        assert perplexity(model, tokenizer, [TEXT]) == perplexity(model, tokenizer, [TEXT])

    def test_plain_module_that_returns_logits(self, tokenizer):
        class Bigram(nn.Module):
            def __init__(self):
                super().__init__()
                self.table = nn.Embedding(256, 256)

            def forward(self, input_ids):
                return self.table(input_ids)

        result = perplexity(Bigram(), tokenizer, [TEXT * 5])
        assert result.sequence_length == 2048 and result.windows == 1 and result.value > 1


class TestSources:
    def test_files_and_data_sets(self, model, tokenizer, tmp_path):
        lines = [TEXT[:100], "", TEXT[100:]]
        (tmp_path / "a.txt").write_text("\n\n".join(lines))
        (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": line}) for line in lines))
        (tmp_path / "a.json").write_text(json.dumps([{"content": line} for line in lines]))
        dataset = Dataset.from_dict({"sentence": lines, "label": [0, 1, 0]})
        dataset.to_parquet(tmp_path / "a.parquet")
        expected = by_hand(model, tokenizer, "\n\n".join(lines), 32)
        files = [str(tmp_path / f"a.{suffix}") for suffix in ("txt", "jsonl", "json", "parquet")]
        for source in [*files, tmp_path / "a.txt", lines, dataset, dataset.to_iterable_dataset()]:
            result = perplexity(model, tokenizer, source)
            assert result.value == pytest.approx(expected, rel=1e-5)
            assert result.dataset == sources.describe(source)

    def test_a_shard_of_c4_is_read_as_c4(self, model, tokenizer, tmp_path):
        rows = [{"text": f"{i} ", "timestamp": "2019-04-25T12:57:54Z", "url": "https://x.org"} for i in range(1300)]
        path = tmp_path / "c4-validation.00000-of-00008.json.gz"
        path.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
        text = " ".join(f"{i} " for i in range(1100))
        assert data.evaluation_text(str(path)) == data.evaluation_text(Dataset.from_list(rows)) == (text, 256)
        result = perplexity(model, tokenizer, str(path), sequence_length=8)
        assert result.windows == 256
        assert result.value == pytest.approx(by_hand(model, tokenizer, text, 8, max_windows=256), rel=1e-5)
        assert perplexity(model, tokenizer, str(path), sequence_length=8, max_windows=300).windows == 300

    def test_a_table_of_ptb_is_read_as_ptb(self, model, tokenizer, tmp_path):
        Dataset.from_dict({"sentence": TEXT.split("1")}).to_parquet(tmp_path / "test.parquet")
        result = perplexity(model, tokenizer, tmp_path / "test.parquet")
        assert result.value == pytest.approx(by_hand(model, tokenizer, " ".join(TEXT.split("1")), 32), rel=1e-5)


class Hub:
    """Replaces `load_dataset`: serves rows and records the arguments of every call."""

    def __init__(self, column: str, texts: list[str]):
        self.rows, self.calls = Dataset.from_dict({column: texts}), []

    def __call__(self, *args, **options):
        self.calls.append((args, options))
        return self.rows.to_iterable_dataset() if options.get("streaming") else self.rows


C4 = {"split": "train", "data_files": {"train": "en/c4-train.00000-of-01024.json.gz"}, "streaming": True}
C4_TEST = {
    "split": "validation",
    "data_files": {"validation": "en/c4-validation.00000-of-00008.json.gz"},
    "streaming": True,
}
WIKITEXT = {"name": "wikitext-2-raw-v1"}
PTB = {"revision": "refs/convert/parquet"}


class TestNamedDataSets:
    @pytest.mark.parametrize(
        ("name", "path", "options", "column", "joiner"),
        [
            ("wikitext2", "Salesforce/wikitext", WIKITEXT, "text", "\n\n"),
            ("ptb", "ptb-text-only/ptb_text_only", PTB, "sentence", " "),
        ],
    )
    def test_running_text(self, model, tokenizer, monkeypatch, name, path, options, column, joiner):
        lines = TEXT.split(" ")
        hub = Hub(column, lines)
        monkeypatch.setattr(sources, "load_dataset", hub)
        result = perplexity(model, tokenizer, name)
        assert result.dataset == name
        assert result.value == pytest.approx(by_hand(model, tokenizer, joiner.join(lines), 32), rel=1e-5)
        samples = data.load_calibration(name, tokenizer, num_samples=6, sequence_length=40)
        windows = [tokenizer.decode(ids) for batch in samples.batches for ids in batch["input_ids"]]
        assert samples.source == name and all(len(text) == 40 and text in joiner.join(lines) for text in windows)
        assert hub.calls == [((path,), {**options, "split": split}) for split in ("test", "train")]

    def test_c4_calibration(self, tokenizer, monkeypatch):
        texts = [f"{i}: " + "abcdefghij" * (3 + i) for i in range(12)]
        hub = Hub("text", ["short", *texts, ""])
        monkeypatch.setattr(sources, "load_dataset", hub)
        samples = data.load_calibration("c4", tokenizer, num_samples=12, sequence_length=32)
        windows = [tokenizer.decode(ids) for batch in samples.batches for ids in batch["input_ids"]]
        assert all(len(window) == 32 and any(window in text for text in texts) for window in windows)
        assert hub.calls == [(("allenai/c4",), C4)] and (samples.source, samples.notes) == ("c4", ())
        with pytest.raises(MoonshotError, match="num_samples=13: only 12 documents are longer than sequence_length=32"):
            data.load_calibration("c4", tokenizer, num_samples=13, sequence_length=32)

    def test_c4_evaluation(self, model, tokenizer, monkeypatch):
        hub = Hub("text", [str(i) for i in range(1200)])
        monkeypatch.setattr(sources, "load_dataset", hub)
        assert data.evaluation_text("c4") == (" ".join(str(i) for i in range(1100)), 256)
        assert hub.calls == [(("allenai/c4",), C4_TEST)]
        assert perplexity(model, tokenizer, "c4", sequence_length=8).windows == 256
        assert perplexity(model, tokenizer, "c4", sequence_length=8, max_windows=3).windows == 3

    def test_default_is_wikitext2(self, model, tokenizer, monkeypatch):
        monkeypatch.setattr(
            evaluation, "evaluation_text", lambda source, tokenizer: ({"wikitext2": TEXT}[source], None)
        )
        assert perplexity(model, tokenizer).dataset == "wikitext2"

    @pytest.mark.parametrize("name", ["c4", "wikitext2", "ptb"])
    def test_an_unreachable_hub_is_named_with_a_hint(self, model, tokenizer, monkeypatch, name):
        def fail(*args, **options):
            raise ConnectionError("Couldn't reach it\nat all")

        monkeypatch.setattr(sources, "load_dataset", fail)
        for read in (lambda: data.load_calibration(name, tokenizer), lambda: perplexity(model, tokenizer, name)):
            with pytest.raises(MoonshotError, match=f'"{name}": {sources.CORPORA[name].path} .*local file') as caught:
                read()
            assert "(Couldn't reach it)" in str(caught.value) and ".txt, .json" in str(caught.value)

    def test_connection_lost_while_streaming(self, tokenizer, monkeypatch):
        def rows():
            yield {"text": "abc"}
            raise OSError("gone")

        monkeypatch.setattr(sources, "load_dataset", lambda *args, **options: IterableDataset.from_generator(rows))
        with pytest.raises(MoonshotError, match='"c4": allenai/c4 .*gone'):
            data.load_calibration("c4", tokenizer)

    def test_the_tokenizer_is_checked_before_downloading(self, monkeypatch):
        hub = Hub("text", [TEXT])
        monkeypatch.setattr(sources, "load_dataset", hub)
        for name in sources.CORPORA:
            with pytest.raises(MoonshotError, match="tokenizer=None"):
                data.load_calibration(name, None)
        assert hub.calls == []


class TestModelIsUnchanged:
    def test_modes_gradients_and_weights(self, model, tokenizer):
        model.train()
        model.model.layers[1].eval()
        before = [module.training for module in model.modules()]
        state = {name: value.clone() for name, value in model.state_dict().items()}
        modes = []
        model.lm_head.register_forward_hook(lambda *_: modes.append((model.training, torch.is_grad_enabled())))
        perplexity(model, tokenizer, [TEXT])
        assert set(modes) == {(False, False)}
        assert [module.training for module in model.modules()] == before
        assert torch.is_grad_enabled() and all(parameter.grad is None for parameter in model.parameters())
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())

    def test_modes_survive_errors(self, model, tokenizer):
        model.train()
        nn.init.constant_(model.lm_head.weight, float("nan"))
        with pytest.raises(MoonshotError):
            perplexity(model, tokenizer, [TEXT])
        assert all(module.training for module in model.modules())

    def test_dropout_is_off(self, tokenizer):
        torch.manual_seed(0)
        model = LlamaForCausalLM(tiny_config(attention_dropout=0.9)).train()
        assert perplexity(model, tokenizer, [TEXT]) == perplexity(model, tokenizer, [TEXT])

    def test_no_cache_is_built(self, model, tokenizer):
        seen = []
        model.register_forward_hook(
            lambda _, args, kwargs, output: seen.append((kwargs["use_cache"], output.past_key_values)), with_kwargs=True
        )
        perplexity(model, tokenizer, [TEXT], max_windows=1)
        assert seen == [(False, None)]

    def test_global_random_state_is_untouched(self, model, tokenizer):
        before = torch.get_rng_state()
        perplexity(model, tokenizer, [TEXT])
        assert torch.equal(before, torch.get_rng_state())


class TestProgress:
    def test_off_by_default(self, model, tokenizer, capfd):
        perplexity(model, tokenizer, [TEXT])
        assert capfd.readouterr() == ("", "")

    def test_bar_counts_windows(self, model, tokenizer, capfd, monkeypatch):
        monkeypatch.setattr("optimum_moonshot.progress.bars_are_wanted", lambda: True)  # as in a terminal
        result = perplexity(model, tokenizer, [TEXT], progress=True, batch_size=3)
        assert f"{result.windows}/{result.windows}" in capfd.readouterr().err


class TestErrors:
    def test_short_text(self, model, tokenizer):
        with pytest.raises(MoonshotError, match="the text has 31 tokens, fewer than sequence_length=32; .*_length=31"):
            perplexity(model, tokenizer, ["x" * 31])
        assert perplexity(model, tokenizer, ["x" * 32]).windows == 1
        for text in ("", "x"):
            with pytest.raises(MoonshotError, match=f"the text has {len(text)} tokens.*; give more text$"):
                perplexity(model, tokenizer, [text], sequence_length=2)

    def test_lengths(self, model, tokenizer):
        with pytest.raises(MoonshotError, match="sequence_length=33: give at most the 32 positions"):
            perplexity(model, tokenizer, [TEXT], sequence_length=33)
        for field, value in (("sequence_length", 1), ("batch_size", 0), ("max_windows", 0), ("max_windows", 1.5)):
            with pytest.raises(MoonshotError, match=f"{field}={value}: give a whole number"):
                perplexity(model, tokenizer, [TEXT], **{field: value})

    def test_nan_logits(self, model, tokenizer):
        nn.init.constant_(model.lm_head.weight, float("nan"))
        with pytest.raises(MoonshotError, match="LlamaForCausalLM returns NaN logits; check its weights"):
            perplexity(model, tokenizer, [TEXT])

    def test_no_logits(self, tokenizer):
        with pytest.raises(MoonshotError, match="LlamaModel returns no logits .*AutoModelForCausalLM"):
            perplexity(LlamaModel(tiny_config()), tokenizer, [TEXT])

    def test_logits_of_another_shape(self, model, tokenizer):
        class Last(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = model

            def forward(self, input_ids):
                return SimpleNamespace(logits=self.inner(input_ids=input_ids).logits[:, -1])

        with pytest.raises(MoonshotError, match="Last returns no logits for every token"):
            perplexity(Last(), tokenizer, [TEXT], sequence_length=16)

    def test_encoder_decoder(self, tokenizer):
        config = T5Config(vocab_size=256, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
        with pytest.raises(MoonshotError, match="is an encoder-decoder"):
            perplexity(T5(config), tokenizer, [TEXT], sequence_length=16)

    def test_tokenizer_of_another_model(self, tokenizer):
        with pytest.raises(MoonshotError, match="tokenizer: token .*LlamaForCausalLM, which has 10"):
            perplexity(LlamaForCausalLM(tiny_config(vocab_size=10)), tokenizer, [TEXT])

    def test_no_tokenizer(self, model):
        with pytest.raises(MoonshotError, match="tokenizer=None"):
            perplexity(model, None, [TEXT])

    def test_sources_other_than_text(self, model, tokenizer):
        with pytest.raises(MoonshotError, match='"wikitext3" is neither'):
            perplexity(model, tokenizer, "wikitext3")
        with pytest.raises(MoonshotError, match="contains model inputs; give text"):
            perplexity(model, tokenizer, [{"input_ids": [1, 2]}])


def test_impossible_tokens_have_infinite_perplexity(tokenizer):
    class Sure(nn.Linear):
        def forward(self, input_ids):
            return torch.full((*input_ids.shape, 256), -math.inf).index_fill(2, torch.tensor([0]), 0.0)

    assert perplexity(Sure(1, 1), tokenizer, [TEXT], sequence_length=8).value == math.inf


def test_max_positions_are_read_from_the_config():
    assert max_positions(LlamaForCausalLM(tiny_config())) == 32
    assert max_positions(nn.Linear(2, 2)) is None
    text = SimpleNamespace(max_position_embeddings=77)
    assert max_positions(SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: text))) == 77
    assert max_positions(SimpleNamespace(config=SimpleNamespace(max_position_embeddings=-1))) is None


def test_result_is_plain_data():
    result = Perplexity(1.5, "c4", 256, 2048, 256 * 2047)
    assert result == Perplexity(value=1.5, dataset="c4", windows=256, sequence_length=2048, tokens=524032)


def test_the_default_window_length():
    pairs = ((None, None), (None, 512), (None, 131072), (4096, 131072), (4096, None))
    assert [data.window_length(*pair) for pair in pairs] == [2048, 512, 2048, 4096, 4096]
    assert [data.window_length(*pair, data.LONGEST_SAMPLE) for pair in pairs] == [256, 256, 256, 4096, 4096]
    for pair, message in (((513, 512), "513: give at most the 512 positions"), ((1, None), "1: give a whole number")):
        with pytest.raises(MoonshotError, match=f"sequence_length={message}"):
            data.window_length(*pair)
