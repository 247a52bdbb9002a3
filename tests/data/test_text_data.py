"""Calibration samples of texts: windows of running text, documents, files and data sets of records."""

import pytest
import torch
from calibration_data import LONG, SHORT, TEXT, byte_tokenizer, ids, inputs, load, same, strings, write
from datasets import Dataset

from optimum_moonshot.data.text import evaluation_text, load_calibration
from optimum_moonshot.errors import MoonshotError


def test_running_text_gives_windows_of_exact_length(book):
    data = load(book, num_samples=10, batch_size=4)
    assert [tuple(batch["input_ids"].shape) for batch in data.batches] == [(4, 32), (4, 32), (2, 32)]
    assert all(batch.keys() == {"input_ids"} and batch["input_ids"].dtype == torch.int64 for batch in data.batches)
    windows = strings(data)
    assert all(len(window) == 32 and window in TEXT for window in windows) and len(set(windows)) == 10
    assert (data.num_samples, data.sequence_length, data.source, data.notes) == (10, 32, str(book), ())


def test_windows_reach_both_ends_of_the_text(tmp_path):
    path = write(tmp_path / "tiny.txt", "0123456789")
    draws = [load(str(path), num_samples=3, sequence_length=8, seed=seed) for seed in range(70)]
    counts = [sum(strings(draw).count("0123456789"[start : start + 8]) for draw in draws) for start in range(3)]
    assert sum(counts) == 210 and min(counts) > 40
    assert draws[0].notes == ("the text has 10 tokens: 3 windows of 8 overlap",)
    assert strings(load(path, num_samples=1, sequence_length=10)) == ["0123456789"]
    with pytest.raises(MoonshotError, match="num_samples=4: .* 10 tokens, 3 different windows of 8; .*num_samples=3"):
        load(path, num_samples=4, sequence_length=8)
    with pytest.raises(MoonshotError, match="num_samples=1000000"):
        load(path, num_samples=10**6, sequence_length=8)
    with pytest.raises(MoonshotError, match="the text has 10 tokens, fewer than sequence_length=11; give more text"):
        load(path, sequence_length=11)


def test_tokens_equal_those_of_a_tokenizer_call(tmp_path):
    tokenizer = byte_tokenizer(bos_token="<s>")
    for source in (write(tmp_path / "tiny.txt", "0123456789"), ["0123456789"]):
        data = load_calibration(source, tokenizer, num_samples=1, sequence_length=12)
        assert ids(data) == [[tokenizer("0123456789")["input_ids"]]]
        assert data.batches[0]["input_ids"][0, 0] == tokenizer.bos_token_id


def test_long_texts_raise_no_warning(book, caplog, capfd):
    for source in (book, [TEXT, TEXT]):
        load_calibration(source, byte_tokenizer(), num_samples=1, sequence_length=100)
    captured = capfd.readouterr()
    assert captured.err + captured.out + caplog.text == ""


def test_each_long_document_gives_one_window():
    data = load(LONG + SHORT, num_samples=8, batch_size=3)
    assert [batch["input_ids"].shape for batch in data.batches] == [(3, 32), (3, 32), (2, 32)]
    assert all(batch.keys() == {"input_ids"} for batch in data.batches)
    assert (data.source, data.notes, data.sequence_length) == ("list of 21 strings", (), 32)
    assert all(any(window in text for text in LONG) for window in strings(data))
    assert load(LONG, sequence_length=None, max_positions=16).sequence_length == 16


def test_long_documents_are_drawn_without_replacement():
    documents = [chr(97 + i) * 20 for i in range(6)]
    windows = strings(load(documents, num_samples=6, sequence_length=8))
    assert sorted(windows) == [text[:8] for text in documents] != windows


def test_shorter_documents_are_used_whole_and_padded():
    data = load(SHORT + LONG[:1], num_samples=10, batch_size=4)
    *short, window = sorted(strings(data), key=len)
    assert short == SHORT and len(window) == 32 and window in LONG[0]
    assert data.notes == ("9 of 10 documents used whole, padded per batch: 1 have more than 32 tokens",)
    for batch in data.batches:
        mask = batch["attention_mask"]
        assert mask.sum(1).max() == mask.shape[1] == batch["input_ids"].shape[1]  # no longer than its longest
        assert torch.equal(mask, mask.sort(descending=True).values)  # padded on the right


def test_documents_of_equal_length_need_no_mask():
    data = load(["abcd", "efgh", "ijkl"], num_samples=3, sequence_length=4)
    assert data.batches[0].keys() == {"input_ids"} and data.sequence_length == 4
    assert data.notes == ("3 of 3 documents used whole: 0 have more than 4 tokens",)


def test_surplus_documents_are_sampled_at_random():
    chosen = {tuple(strings(load(SHORT, num_samples=3, seed=seed))) for seed in range(5)}
    assert len(chosen) > 2 and all(set(texts) <= set(SHORT) and len(set(texts)) == 3 for texts in chosen)


def test_documents_without_tokens_are_dropped():
    data = load(["", "a", "bc", "def"], num_samples=2)
    assert sorted(strings(data)) == ["bc", "def"]
    assert data.notes[1] == "2 documents of fewer than 2 tokens dropped"
    with pytest.raises(MoonshotError, match="num_samples=2: 1 documents have 2 tokens"):  # special tokens do not count
        load_calibration(["", "a"], byte_tokenizer(bos_token="<s>"), num_samples=2)


@pytest.mark.parametrize(
    ("special", "pad"),
    [({"pad_token": "<pad>", "eos_token": "</s>"}, 0), ({"unk_token": "<unk>", "eos_token": "</s>"}, 1), ({}, 0)],
)
def test_padding_needs_no_pad_token(special, pad):
    tokenizer = byte_tokenizer(**special)
    before = tokenizer.pad_token_id
    data = load_calibration(["ab", "cdef"], tokenizer, num_samples=2, sequence_length=8)
    (batch,) = data.batches
    assert batch["input_ids"][batch["attention_mask"] == 0].tolist() == [pad] * 2
    assert sorted(strings(data, tokenizer)) == ["ab", "cdef"] and tokenizer.pad_token_id == before


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.json.gz", "a.jsonl.gz", "a.parquet", "we[1]rd *.JSONL"])
def test_files_of_records(tmp_path, name):
    path = write(tmp_path / name, [{"id": i, "text": text} for i, text in enumerate(LONG)])
    data = load(path, num_samples=6)
    assert all(any(window in text for text in LONG) for window in strings(data))
    assert data.source == str(path) and data.num_samples == 6
    assert evaluation_text(str(path))[0] == "\n\n".join(LONG)


def test_files_of_strings_and_of_tokens(tmp_path, monkeypatch, book):
    assert sorted(strings(load(write(tmp_path / "a.json", SHORT)))) == SHORT  # an array of strings
    tokens = write(tmp_path / "b.jsonl", [{"input_ids": [i, i + 1]} for i in range(4)])
    assert ids(inputs(tokens, 3)) == [[[i, i + 1]] for i in range(3)]
    monkeypatch.setenv("HOME", str(tmp_path))
    assert same(load("~/book.txt"), load(book))


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("column", ["text", "sentence", "content", "prose"])
def test_data_sets_of_text(column, streaming):
    dataset = Dataset.from_dict({"n": list(range(9)), column: SHORT})
    data = load(dataset.to_iterable_dataset() if streaming else dataset)
    assert sorted(strings(data)) == SHORT != strings(data)  # shuffled
    assert data.source == ("IterableDataset" if streaming else "Dataset of 9 rows")


def test_the_text_column_is_preferred():
    dataset = Dataset.from_dict({"content": ["no"] * 2, "url": ["no"] * 2, "text": ["yes", None]})
    assert strings(load(dataset, num_samples=1)) == ["yes"]
