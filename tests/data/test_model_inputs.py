"""Calibration samples of model inputs: dictionaries, batches, data sets, streams and data loaders."""

import numpy as np
import pytest
import torch
from calibration_data import TOKENIZER, ids, inputs, load, same
from datasets import Dataset, IterableDataset
from torch.utils.data import DataLoader

from optimum_moonshot.errors import MoonshotError


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
    for source in (dataset, dataset.with_format("torch"), dataset.to_iterable_dataset()):
        data = inputs(source, 2)
        assert ids(data) == [[[1, 2]], [[3, 4]]] and data.notes == ("columns left out: text",)
        assert all(batch.keys() == {"input_ids", "labels"} for batch in data.batches)


def test_data_sets_of_images():
    rows = {"pixel_values": np.zeros((4, 3, 2, 2), dtype=np.float32).tolist(), "labels": [0, 1, 2, 3]}
    data = inputs(Dataset.from_dict(rows), 3)
    assert [batch["pixel_values"].shape for batch in data.batches] == [(1, 3, 2, 2)] * 3
    assert [batch["labels"].tolist() for batch in data.batches] == [[0], [1], [2]] and data.sequence_length is None


def test_batches_of_model_inputs_are_split_but_not_joined():
    tokens = torch.arange(60).view(10, 6)
    items = [{"input_ids": tokens[:5], "labels": tokens[:5], "none": None}]
    items += [{"input_ids": part, "labels": part} for part in (tokens[5:6], tokens[6:])]
    data = inputs(items, 8, batch_size=3)
    assert [len(batch["input_ids"]) for batch in data.batches] == [3, 2, 1, 2]
    assert torch.equal(torch.cat([batch["input_ids"] for batch in data.batches]), tokens[:8])
    assert data.batches[1].keys() == {"input_ids", "labels"} and len(data.batches[1]["labels"]) == 2
    assert (data.num_samples, data.sequence_length, data.source) == (8, 6, "list of 3 items")


def test_lists_and_missing_batch_dimensions():
    items = [{"input_ids": [1, 2, 3]}, {"input_ids": [[4, 5]]}, {"input_ids": np.array([6, 7])}]
    assert ids(inputs(items, 3)) == [[[1, 2, 3]], [[4, 5]], [[6, 7]]]
    image = inputs([{"pixel_values": torch.zeros(3, 2, 2), "labels": 1}], 1).batches[0]
    assert image["pixel_values"].shape == (1, 3, 2, 2) and image["labels"].tolist() == [1]
    images = inputs([{"pixel_values": torch.zeros(4, 3, 2, 2), "labels": torch.arange(4)}], 4, batch_size=2).batches
    assert [batch["labels"].tolist() for batch in images] == [[0, 1], [2, 3]]
    unknown = inputs([{"x": torch.zeros(3)}, {"x": torch.zeros(2, 3)}], 3)
    assert [batch["x"].shape for batch in unknown.batches] == [(1, 3), (2, 3)] and unknown.sequence_length is None


def test_tokenizer_output_is_accepted():
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
def test_invalid_items_are_rejected(item, message):
    with pytest.raises(MoonshotError, match=f"item 0.*{message}"):
        inputs([item], 1, max_positions=98)
