"""Calibration data: what samples each kind of source gives, and what is said about data that will not do."""

import gzip
import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset, DatasetDict, IterableDataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerFast

from optimum_moonshot.data.sources import CORPORA
from optimum_moonshot.data.text import CalibrationData, evaluation_text, load_calibration
from optimum_moonshot.errors import MoonshotError

TEXT = " ".join(str(number) for number in range(1000))  # every window of it occurs once
LONG = [f"{i}: " + "abcdefghij" * (3 + i) for i in range(12)]  # 33 tokens and more
SHORT = ["x" * (i + 2) for i in range(9)]  # 2 to 10 tokens


def byte_tokenizer(**special: str) -> PreTrainedTokenizerFast:
    """One token per byte; begins and ends every text with `bos_token` if there is one."""
    symbols = [*special.values(), *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    if "bos_token" in special:
        bos = special["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(f"{bos} $A {bos}", special_tokens=[(bos, 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=64, **special)


TOKENIZER = byte_tokenizer()


def load(source, num_samples: int = 9, sequence_length: int = 32, **options) -> CalibrationData:
    return load_calibration(source, TOKENIZER, num_samples=num_samples, sequence_length=sequence_length, **options)


def inputs(items, num_samples: int, **options) -> CalibrationData:
    return load_calibration(items, None, num_samples=num_samples, **options)


def ids(found: CalibrationData) -> list:
    return [batch["input_ids"].tolist() for batch in found.batches]


def strings(found: CalibrationData, tokenizer=TOKENIZER) -> list[str]:
    """The samples as text, without padding."""
    texts = []
    for batch in found.batches:
        masks = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))
        texts += [tokenizer.decode(row[mask.bool()]) for row, mask in zip(batch["input_ids"], masks, strict=True)]
    return texts


def same(a: CalibrationData, b: CalibrationData) -> bool:
    pairs = zip(a.batches, b.batches, strict=True)
    return a.digest == b.digest and all(torch.equal(x[key], y[key]) for x, y in pairs for key in x)


def write(path: Path, content: str | bytes | list) -> Path:
    """Text or bytes as they are; records in the format that the name asks for."""
    if isinstance(content, list) and path.suffix == ".parquet":
        Dataset.from_list(content).to_parquet(path)
        return path
    if isinstance(content, list):
        array = ".jsonl" not in path.name.lower()
        content = json.dumps(content) if array else "\n".join(json.dumps(record) for record in content)
    content = content.encode() if isinstance(content, str) else content
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" and content else content)
    return path


@pytest.fixture
def book(tmp_path) -> Path:
    return write(tmp_path / "book.txt", TEXT)


def test_running_text_gives_windows_of_exact_length(book):
    found = load(book, num_samples=10, batch_size=4)
    assert [tuple(batch["input_ids"].shape) for batch in found.batches] == [(4, 32), (4, 32), (2, 32)]
    assert all(batch.keys() == {"input_ids"} and batch["input_ids"].dtype == torch.int64 for batch in found.batches)
    windows = strings(found)
    assert all(len(window) == 32 and window in TEXT for window in windows) and len(set(windows)) == 10
    assert (found.num_samples, found.sequence_length, found.source, found.notes) == (10, 32, str(book), ())


def test_windows_reach_both_ends_of_the_text(tmp_path):
    path = write(tmp_path / "tiny.txt", "0123456789")
    found = [load(str(path), num_samples=3, sequence_length=8, seed=seed) for seed in range(70)]
    counts = [sum(strings(each).count("0123456789"[start : start + 8]) for each in found) for start in range(3)]
    assert sum(counts) == 210 and min(counts) > 40
    assert found[0].notes == ("the text has 10 tokens: 3 windows of 8 overlap",)
    assert strings(load(path, num_samples=1, sequence_length=10)) == ["0123456789"]
    with pytest.raises(MoonshotError, match="num_samples=4: .* 10 tokens, 3 different windows of 8; .*num_samples=3"):
        load(path, num_samples=4, sequence_length=8)
    with pytest.raises(MoonshotError, match="num_samples=1000000"):
        load(path, num_samples=10**6, sequence_length=8)
    with pytest.raises(MoonshotError, match="the text has 10 tokens, fewer than sequence_length=11; give more text"):
        load(path, sequence_length=11)


def test_tokens_are_those_of_a_plain_call(tmp_path):
    tokenizer = byte_tokenizer(bos_token="<s>")
    for source in (write(tmp_path / "tiny.txt", "0123456789"), ["0123456789"]):
        found = load_calibration(source, tokenizer, num_samples=1, sequence_length=12)
        assert ids(found) == [[tokenizer("0123456789")["input_ids"]]]
        assert found.batches[0]["input_ids"][0, 0] == tokenizer.bos_token_id


def test_long_texts_raise_no_warning(book, caplog, capfd):
    for source in (book, [TEXT, TEXT]):
        load_calibration(source, byte_tokenizer(), num_samples=1, sequence_length=100)
    captured = capfd.readouterr()
    assert captured.err + captured.out + caplog.text == ""


def test_one_window_from_each_of_enough_long_documents():
    found = load(LONG + SHORT, num_samples=8, batch_size=3)
    assert [batch["input_ids"].shape for batch in found.batches] == [(3, 32), (3, 32), (2, 32)]
    assert all(batch.keys() == {"input_ids"} for batch in found.batches)
    assert (found.source, found.notes, found.sequence_length) == ("list of 21 strings", (), 32)
    assert all(any(window in text for text in LONG) for window in strings(found))
    assert load(LONG, sequence_length=None, max_positions=16).sequence_length == 16


def test_every_long_document_at_most_once_in_random_order():
    documents = [chr(97 + i) * 20 for i in range(6)]
    found = strings(load(documents, num_samples=6, sequence_length=8))
    assert sorted(found) == [text[:8] for text in documents] != found


def test_shorter_documents_are_used_whole_and_padded():
    found = load(SHORT + LONG[:1], num_samples=10, batch_size=4)
    *short, window = sorted(strings(found), key=len)
    assert short == SHORT and len(window) == 32 and window in LONG[0]
    assert found.notes == ("9 of 10 documents used whole, padded per batch: 1 have more than 32 tokens",)
    for batch in found.batches:
        mask = batch["attention_mask"]
        assert mask.sum(1).max() == mask.shape[1] == batch["input_ids"].shape[1]  # no longer than its longest
        assert torch.equal(mask, mask.sort(descending=True).values)  # padded on the right


def test_documents_of_equal_length_need_no_mask():
    found = load(["abcd", "efgh", "ijkl"], num_samples=3, sequence_length=4)
    assert found.batches[0].keys() == {"input_ids"} and found.sequence_length == 4
    assert found.notes == ("3 of 3 documents used whole: 0 have more than 4 tokens",)


def test_more_documents_than_samples_are_chosen_from_at_random():
    chosen = {tuple(strings(load(SHORT, num_samples=3, seed=seed))) for seed in range(5)}
    assert len(chosen) > 2 and all(set(texts) <= set(SHORT) and len(set(texts)) == 3 for texts in chosen)


def test_documents_without_tokens_are_dropped():
    found = load(["", "a", "bc", "def"], num_samples=2)
    assert sorted(strings(found)) == ["bc", "def"]
    assert found.notes[1] == "2 documents of fewer than 2 tokens dropped"
    with pytest.raises(MoonshotError, match="num_samples=2: 1 documents have 2 tokens"):  # special tokens are no text
        load_calibration(["", "a"], byte_tokenizer(bos_token="<s>"), num_samples=2)


@pytest.mark.parametrize(
    ("special", "pad"),
    [({"pad_token": "<pad>", "eos_token": "</s>"}, 0), ({"unk_token": "<unk>", "eos_token": "</s>"}, 1), ({}, 0)],
)
def test_padding_uses_any_token_there_is(special, pad):
    tokenizer = byte_tokenizer(**special)
    before = tokenizer.pad_token_id
    found = load_calibration(["ab", "cdef"], tokenizer, num_samples=2, sequence_length=8)
    (batch,) = found.batches
    assert batch["input_ids"][batch["attention_mask"] == 0].tolist() == [pad] * 2
    assert sorted(strings(found, tokenizer)) == ["ab", "cdef"] and tokenizer.pad_token_id == before


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.json.gz", "a.jsonl.gz", "a.parquet", "we[1]rd *.JSONL"])
def test_files_of_records(tmp_path, name):
    path = write(tmp_path / name, [{"id": i, "text": text} for i, text in enumerate(LONG)])
    found = load(path, num_samples=6)
    assert all(any(window in text for text in LONG) for window in strings(found))
    assert found.source == str(path) and found.num_samples == 6
    assert evaluation_text(str(path))[0] == "\n\n".join(LONG)


def test_other_files(tmp_path, monkeypatch, book):
    assert sorted(strings(load(write(tmp_path / "a.json", SHORT)))) == SHORT  # an array of strings
    tokens = write(tmp_path / "b.jsonl", [{"input_ids": [i, i + 1]} for i in range(4)])
    assert ids(inputs(tokens, 3)) == [[[i, i + 1]] for i in range(3)]
    monkeypatch.setenv("HOME", str(tmp_path))
    assert same(load("~/book.txt"), load(book))


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("column", ["text", "sentence", "content", "prose"])
def test_data_sets_of_text(column, streaming):
    dataset = Dataset.from_dict({"n": list(range(9)), column: SHORT})
    found = load(dataset.to_iterable_dataset() if streaming else dataset)
    assert sorted(strings(found)) == SHORT != strings(found)  # shuffled
    assert found.source == ("IterableDataset" if streaming else "Dataset of 9 rows")


def test_choice_of_the_text_column():
    dataset = Dataset.from_dict({"content": ["no"] * 2, "url": ["no"] * 2, "text": ["yes", None]})
    assert strings(load(dataset, num_samples=1)) == ["yes"]


def test_streams_are_read_no_further_than_needed(monkeypatch):
    monkeypatch.setattr("optimum_moonshot.data.sources.SHUFFLE_BUFFER", 4)
    read = []
    endless = IterableDataset.from_generator(lambda: (read.append(1) or {"text": "abcdefghij"} for _ in iter(int, 1)))
    assert load(endless, num_samples=5, sequence_length=8).num_samples == 5 and len(read) < 200
    items = iter([{"input_ids": torch.tensor([[i]])} for i in range(5)])
    assert inputs(items, 3).num_samples == 3 and next(items)["input_ids"].item() == 3


def test_data_sets_of_tokens():
    rows = {"input_ids": [[1, 2], [3, 4], [5, 6]], "labels": [[1, 2]] * 3, "text": ["a", "b", "c"]}
    dataset = Dataset.from_dict(rows)
    for given in (dataset, dataset.with_format("torch"), dataset.to_iterable_dataset()):
        found = inputs(given, 2)
        assert ids(found) == [[[1, 2]], [[3, 4]]] and found.notes == ("columns left out: text",)
        assert all(batch.keys() == {"input_ids", "labels"} for batch in found.batches)


def test_data_sets_of_images():
    rows = {"pixel_values": np.zeros((4, 3, 2, 2), dtype=np.float32).tolist(), "labels": [0, 1, 2, 3]}
    found = inputs(Dataset.from_dict(rows), 3)
    assert [batch["pixel_values"].shape for batch in found.batches] == [(1, 3, 2, 2)] * 3
    assert [batch["labels"].tolist() for batch in found.batches] == [[0], [1], [2]] and found.sequence_length is None


def test_batches_of_model_inputs_are_split_but_not_joined():
    tokens = torch.arange(60).view(10, 6)
    items = [{"input_ids": tokens[:5], "labels": tokens[:5], "none": None}]
    items += [{"input_ids": part, "labels": part} for part in (tokens[5:6], tokens[6:])]
    found = inputs(items, 8, batch_size=3)
    assert [len(batch["input_ids"]) for batch in found.batches] == [3, 2, 1, 2]
    assert torch.equal(torch.cat([batch["input_ids"] for batch in found.batches]), tokens[:8])
    assert found.batches[1].keys() == {"input_ids", "labels"} and len(found.batches[1]["labels"]) == 2
    assert (found.num_samples, found.sequence_length, found.source) == (8, 6, "list of 3 items")


def test_lists_and_missing_batch_dimensions():
    items = [{"input_ids": [1, 2, 3]}, {"input_ids": [[4, 5]]}, {"input_ids": np.array([6, 7])}]
    assert ids(inputs(items, 3)) == [[[1, 2, 3]], [[4, 5]], [[6, 7]]]
    image = inputs([{"pixel_values": torch.zeros(3, 2, 2), "labels": 1}], 1).batches[0]
    assert image["pixel_values"].shape == (1, 3, 2, 2) and image["labels"].tolist() == [1]
    images = inputs([{"pixel_values": torch.zeros(4, 3, 2, 2), "labels": torch.arange(4)}], 4, batch_size=2).batches
    assert [batch["labels"].tolist() for batch in images] == [[0, 1], [2, 3]]
    unknown = inputs([{"x": torch.zeros(3)}, {"x": torch.zeros(2, 3)}], 3)
    assert [batch["x"].shape for batch in unknown.batches] == [(1, 3), (2, 3)] and unknown.sequence_length is None


def test_what_a_tokenizer_returns():
    encoding = TOKENIZER(["abc", "def"], return_tensors="pt")
    for source in (encoding, [encoding], dict(encoding), iter([encoding])):
        assert ids(inputs(source, 2)) == [encoding["input_ids"].tolist()]


def test_data_loaders_follow_the_seed():
    loader = DataLoader([{"input_ids": torch.tensor([i, i])} for i in range(10)], batch_size=4, shuffle=True)
    first, again, other = (inputs(loader, 6, seed=seed) for seed in (3, 3, 4))
    assert same(first, again) and first.digest != other.digest
    assert first.source == "DataLoader" and [len(batch["input_ids"]) for batch in first.batches] == [4, 2]


def test_only_inputs_that_are_used_are_checked_for_nan():
    items = [{"pixel_values": torch.full((1, 3, 2, 2), value, dtype=torch.bfloat16)} for value in (0, float("nan"))]
    assert inputs(items, 1).num_samples == 1
    with pytest.raises(MoonshotError, match="item 1 of the data: pixel_values contains NaN"):
        inputs(items, 2)


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ({}, "is empty"),
        ({"input_ids": None}, "is empty"),
        ({"input_ids": "abc"}, "input_ids='abc'"),
        ({"input_ids": [[1, 2]], "return_dict": True}, "return_dict=True"),
        ({"input_ids": [[1, 2], [3]]}, "equal length"),
        ({"input_ids": torch.zeros(0, 3)}, "which is empty; leave it out"),
        ({"input_ids": torch.zeros(2, 3), "labels": torch.zeros(3)}, "dim 0 of every tensor"),
        ({"input_ids": torch.zeros(2, 3), "labels": 1}, "dim 0 of every tensor"),
        ({"input_ids": torch.zeros(1, 99)}, "has 99 tokens; cut it to the 98 positions"),
        (torch.zeros(2, 3), "is a Tensor; give dictionaries"),
        ([1, 2], "is a list; give dictionaries"),
        (None, "is a NoneType"),
    ],
)
def test_items_that_are_no_model_inputs(item, message):
    with pytest.raises(MoonshotError, match=f"item 0.*{message}"):
        inputs([item], 1, max_positions=98)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (None, "data of type NoneType; use c4, wikitext2, ptb, the path"),
        (torch.zeros(2, 2), "data of type Tensor; use c4"),
        (b"c4", "data of type bytes; use c4"),
        ([], "an empty list; use c4"),
        (["abc", None], "item 1 of the data is not a string"),
        (SHORT, "num_samples=20: the data has 9 documents; give more text or set num_samples=9"),
        (["", "a", ""] * 7, "none of 21 documents has 2 tokens or more"),
        (
            ["", "ab", "cd"] * 7,
            "num_samples=20: 14 documents have 2 tokens or more; give more text or set num_samples=14",
        ),
        ([{"input_ids": [[1, 2]] * 3}], "num_samples=20: the data has 3 samples; give more or set num_samples=3"),
        (iter([]), "the data has 0 samples; give more"),
        (Dataset.from_dict({"text": []}), "Dataset of 0 rows has no rows"),
        (Dataset.from_dict({"text": [["a", "b"]]}), 'column "text" holds a list'),
        (Dataset.from_dict({"a": ["x"], "b": ["y"]}), "columns a, b; rename the one that holds text to text"),
        (Dataset.from_dict({"n": [1]}), "columns n; rename"),
        (DatasetDict(train=Dataset.from_dict({"text": SHORT})), "DatasetDict with splits train; give one"),
        ("wikitext3", '"wikitext3" is neither .*; use c4, wikitext2, ptb, the path of a .txt, .* .jsonl.gz, .parquet'),
        ("/nowhere/a.txt", '"/nowhere/a.txt" is neither .* c4, wikitext2, ptb'),
        (Path("c4"), '"c4" is neither'),
        (Path("/"), '"/" is neither the name of a data set nor a file'),
    ],
)
def test_sources_that_cannot_be_used(source, message):
    with pytest.raises(MoonshotError, match=message):
        load(source, num_samples=20)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "text\nabc\n", r'a.csv" is a file of unknown format; use one of \.txt, \.json'),
        *((name, "", f'{name}" is empty') for name in ("a.txt", "a.json", "a.jsonl.gz", "a.parquet")),
        *(
            (name, "{no\n", f'{name}" cannot be read .*check')
            for name in ("a.json", "a.jsonl", "a.json.gz", "a.parquet")
        ),
        ("a.txt", b"\xff\xfe\x00a" * 100, "cannot be read .*utf-8"),
        ("a.txt", "\n", "the text has 1 tokens, fewer than"),
        ("a.jsonl", [{"rows": SHORT}], "columns rows"),
    ],
)
def test_files_that_cannot_be_used(tmp_path, name, content, message):
    with pytest.raises(MoonshotError, match=message):
        load(write(tmp_path / name, content))


def test_text_needs_a_tokenizer(book):
    for source in (SHORT, book, Dataset.from_dict({"text": SHORT}), *CORPORA):
        with pytest.raises(MoonshotError, match="tokenizer=None: text calibration needs one"):
            load_calibration(source, None)


@pytest.fixture
def sources(tmp_path, book) -> list:
    records = write(tmp_path / "a.jsonl", [{"text": text} for text in LONG])
    documents = [Dataset.from_dict({"text": LONG}), Dataset.from_dict({"text": SHORT}).to_iterable_dataset()]
    return [book, records, LONG, SHORT, tuple(LONG), *documents]


def test_equal_seeds_give_equal_batches(sources):
    for source in sources:
        for length in (8, 32):
            first, again, other = (load(source, num_samples=6, sequence_length=length, seed=seed) for seed in (3, 3, 4))
            assert same(first, again) and first.digest != other.digest
        one, four = (load(source, num_samples=6, batch_size=size) for size in (1, 4))
        assert strings(one) == strings(four)


def test_global_random_state_is_neither_read_nor_changed(sources):
    loader = DataLoader([{"input_ids": torch.tensor([i, i])} for i in range(10)], shuffle=True)
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed), random.seed(seed), np.random.seed(seed)
        before = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
        found.append([load(source, num_samples=6) for source in [*sources, loader]])
        with pytest.raises(MoonshotError):
            inputs(loader, 99)
        assert torch.equal(before[0], torch.get_rng_state())
        assert before[1:] == (random.getstate(), str(np.random.get_state()))
    assert all(same(a, b) for a, b in zip(*found, strict=True))


def test_digest():
    base = torch.arange(6.0).view(2, 3)
    variants = [{"x": base}, {"y": base}, {"x": base.view(3, 2)}, {"x": base.view(torch.int32)}, {"x": base + 1e-3}]
    variants += [{"x": base, "y": base}, {"x": base.bfloat16()}, {"x": base > 2}]
    digests = [inputs([item], len(next(iter(item.values())))).digest for item in variants]
    digests += [inputs([{"x": base}], 2, batch_size=1).digest]
    assert len(set(digests)) == len(digests) == 9 and all(len(digest) == 64 for digest in digests)
    for moved in (base.T.contiguous().T, base.repeat_interleave(2, 1)[:, ::2]):
        assert inputs([{"x": moved}], 2).digest == digests[0]  # whatever the layout in memory
    assert inputs([{"x": base[:, None], "y": torch.arange(4)[::2]}], 2).num_samples == 2
    assert inputs([{"y": base, "x": base}], 2).digest == digests[5]


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_samples", 0), ("num_samples", 1.5), ("batch_size", 0), ("batch_size", True), ("seed", -1)],
)
def test_whole_numbers(field, value):
    with pytest.raises(MoonshotError, match=f"{field}={value}: give a whole number"):
        load(SHORT, **{field: value})
