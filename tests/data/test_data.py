"""Calibration data of every source: errors of unusable sources, reproducibility by seed, the digest."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from calibration_data import LONG, SHORT, inputs, load, same, strings, write
from datasets import Dataset, DatasetDict
from torch.utils.data import DataLoader

from optimum_moonshot.data.sources import CORPORA
from optimum_moonshot.data.text import load_calibration
from optimum_moonshot.errors import MoonshotError


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
        (Dataset.from_dict({"text": [["a", "b"]]}), 'column "text" has a list'),
        (Dataset.from_dict({"a": ["x"], "b": ["y"]}), "columns a, b; rename the column with text to text"),
        (Dataset.from_dict({"n": [1]}), "columns n; rename"),
        (DatasetDict(train=Dataset.from_dict({"text": SHORT})), "DatasetDict with splits train; give one"),
        ("wikitext3", '"wikitext3" is neither .*; use c4, wikitext2, ptb, the path of a .txt, .* .jsonl.gz, .parquet'),
        ("/nowhere/a.txt", '"/nowhere/a.txt" is neither .* c4, wikitext2, ptb'),
        (Path("c4"), '"c4" is neither'),
        (Path("/"), '"/" is neither the name of a data set nor a file'),
    ],
)
def test_unusable_sources_are_rejected(source, message):
    with pytest.raises(MoonshotError, match=message):
        load(source, num_samples=20)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.tsv", "text\nabc\n", r'a.tsv" is a file of unknown format; use one of \.txt, \.json'),
        *((name, "", f'{name}" is empty') for name in ("a.txt", "a.json", "a.jsonl.gz", "a.parquet", "a.csv")),
        *(
            (name, "{no\n", f'{name}" cannot be read .*check')
            for name in ("a.json", "a.jsonl", "a.json.gz", "a.parquet")
        ),
        ("a.txt", b"\xff\xfe\x00a" * 100, "cannot be read .*utf-8"),
        ("a.txt", "\n", "the text has 1 tokens, fewer than"),
        ("a.jsonl", [{"rows": SHORT}], "columns rows"),
    ],
)
def test_unusable_files_are_rejected(tmp_path, name, content, message):
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
    runs = []
    for seed in (1, 2):
        torch.manual_seed(seed), random.seed(seed), np.random.seed(seed)
        before = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
        runs.append([load(source, num_samples=6) for source in [*sources, loader]])
        with pytest.raises(MoonshotError):
            inputs(loader, 99)
        assert torch.equal(before[0], torch.get_rng_state())
        assert before[1:] == (random.getstate(), str(np.random.get_state()))
    assert all(same(a, b) for a, b in zip(*runs, strict=True))


def test_the_digest_depends_on_names_shapes_dtypes_and_values():
    base = torch.arange(6.0).view(2, 3)
    variants = [{"x": base}, {"y": base}, {"x": base.view(3, 2)}, {"x": base.view(torch.int32)}, {"x": base + 1e-3}]
    variants += [{"x": base, "y": base}, {"x": base.bfloat16()}, {"x": base > 2}]
    digests = [inputs([item], len(next(iter(item.values())))).digest for item in variants]
    assert len(set(digests)) == len(digests) == 8 and all(len(digest) == 64 for digest in digests)
    assert inputs([{"x": base}], 2, batch_size=1).digest == digests[0]
    for moved in (base.T.contiguous().T, base.repeat_interleave(2, 1)[:, ::2]):
        assert inputs([{"x": moved}], 2).digest == digests[0]  # independent of the memory layout
    assert inputs([{"x": base[:, None], "y": torch.arange(4)[::2]}], 2).num_samples == 2
    assert inputs([{"y": base, "x": base}], 2).digest == digests[5]
