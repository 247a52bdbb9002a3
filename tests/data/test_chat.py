"""Conversations as calibration and evaluation data; columns that are no text; CSV files and names on the Hub."""

import pytest
from calibration_data import LONG, byte_tokenizer, same, strings, write
from datasets import Dataset, IterableDataset, IterableDatasetDict

from optimum_moonshot.data import sources
from optimum_moonshot.data.sources import as_messages
from optimum_moonshot.data.text import evaluation_text, load_calibration
from optimum_moonshot.errors import MoonshotError

CHAT = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
ASK, ANSWER = [f"question {i}" for i in range(6)], [f"answer {i}" for i in range(6)]
MESSAGES = [
    [{"role": "user", "content": a}, {"role": "assistant", "content": b}] for a, b in zip(ASK, ANSWER, strict=True)
]
TURNS = [[{"from": "human", "value": a}, {"from": "gpt", "value": b}] for a, b in zip(ASK, ANSWER, strict=True)]
RENDERED = [f"<user>{a}<assistant>{b}" for a, b in zip(ASK, ANSWER, strict=True)]
IDS = [f"identity_{i}" for i in range(6)]
LAYOUTS = {
    "messages": {"messages": MESSAGES, "source": ["mixture"] * 6},
    "conversations": {"id": IDS, "conversations": TURNS, "score": [5.0] * 6},
    "conversations with roles": {"conversations": MESSAGES, "source": IDS},
    "strings": {"prompt": ASK, "completion": ANSWER, "prompt_id": IDS},
    "parts": {"prompt": [m[:1] for m in MESSAGES], "completion": [m[1:] for m in MESSAGES]},
    "preferences": {"prompt": ASK, "chosen": MESSAGES, "rejected": MESSAGES[::-1], "id": IDS},
    "chosen parts": {"prompt": [m[:1] for m in MESSAGES], "chosen": [m[1:] for m in MESSAGES]},
    "chosen alone": {"chosen": MESSAGES, "rejected": MESSAGES[::-1]},
}


@pytest.fixture
def tokenizer():
    tokenizer = byte_tokenizer(max_length=10**9)
    tokenizer.chat_template = CHAT
    return tokenizer


def read(source, tokenizer, num_samples=6, length=64):
    return load_calibration(source, tokenizer, num_samples=num_samples, sequence_length=length)


@pytest.mark.parametrize("name", LAYOUTS)
def test_conversations_are_rendered(tokenizer, name):
    dataset = Dataset.from_dict(LAYOUTS[name])
    for source in (dataset, dataset.to_iterable_dataset(), dataset.to_list()):
        assert sorted(strings(read(source, tokenizer), tokenizer)) == RENDERED
        assert evaluation_text(source, tokenizer)[0] == "".join(RENDERED)


@pytest.mark.parametrize("file", ["a.jsonl", "a.json", "a.parquet"])
def test_files_of_conversations(tmp_path, tokenizer, file):
    path = write(tmp_path / file, Dataset.from_dict(LAYOUTS["conversations"]).to_list())
    assert sorted(strings(read(path, tokenizer), tokenizer)) == RENDERED
    assert evaluation_text(path, tokenizer)[0] == "".join(RENDERED)


def test_a_list_of_conversations(tokenizer):
    assert sorted(strings(read(MESSAGES, tokenizer), tokenizer)) == RENDERED
    assert sorted(strings(read(TURNS, tokenizer), tokenizer)) == RENDERED
    assert sorted(strings(read([{"text": text} for text in ASK], tokenizer), tokenizer)) == ASK


def test_windows_of_long_conversations(tokenizer):
    windows = strings(read(MESSAGES, tokenizer, length=12), tokenizer)
    assert all(len(window) == 12 and any(window in text for text in RENDERED) for window in windows)


def test_a_column_of_text_is_preferred(tokenizer):
    dataset = Dataset.from_dict({"messages": MESSAGES, "text": ASK})
    assert sorted(strings(read(dataset, tokenizer), tokenizer)) == ASK


def test_empty_conversations_are_dropped(tokenizer):
    dataset = Dataset.from_dict({"messages": [*MESSAGES, [], None]})
    assert sorted(strings(read(dataset, tokenizer), tokenizer)) == RENDERED


def test_contents_may_be_empty():
    calls = [{"role": "assistant", "content": None, "tool_calls": [1], "name": None}]
    assert as_messages(calls, "it") == [{"role": "assistant", "content": "", "tool_calls": [1]}]


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"id": ["a"]}, "the data has the columns id; rename"),
        ({"prompt_id": ["a"], "score": [1.0]}, "the data has the columns prompt_id, score; rename"),
        ({"source": ["a"], "turns": [["b", "c"]]}, "the data has the columns source, turns; rename"),
        (
            {"messages": [[{"speaker": "a"}]], "source": ["a"]},
            "column \"messages\" contains {'speaker': 'a'}, which is not",
        ),
    ],
)
def test_columns_that_are_no_text(tokenizer, columns, words):
    for read_it in (lambda data: read(data, tokenizer, 1), lambda data: evaluation_text(data, tokenizer)):
        with pytest.raises(MoonshotError, match=words):
            read_it(Dataset.from_dict(columns))


def test_conversations_need_a_template(tokenizer):
    plain = byte_tokenizer()
    with pytest.raises(MoonshotError, match="item 0 of the data is a conversation, which needs a chat template"):
        read(MESSAGES, plain)
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(MoonshotError, match="item 0 of the data does not fit the chat template .roles must"):
        read(MESSAGES, tokenizer)


def test_csv_files(tmp_path, tokenizer):
    Dataset.from_dict({"id": IDS, "text": LONG[:6]}).to_csv(tmp_path / "a.csv")
    data = read(tmp_path / "a.csv", tokenizer, length=256)
    assert sorted(strings(data, tokenizer)) == sorted(LONG[:6])
    assert evaluation_text(tmp_path / "a.csv")[0] == "\n\n".join(LONG[:6])


class TestNamesOnTheHub:
    @pytest.fixture
    def hub(self, monkeypatch):
        calls = []

        def load(name, streaming=False):
            calls.append((name, streaming))
            if name == "someone/nothing":
                raise ConnectionError("no route\nto host")
            splits = {"train": MESSAGES, "test": MESSAGES[:2]} if name == "someone/chats" else {"a": TURNS, "b": TURNS}
            rows = {split: Dataset.from_dict({"messages": rows}) for split, rows in splits.items()}
            return IterableDatasetDict({split: each.to_iterable_dataset() for split, each in rows.items()})

        monkeypatch.setattr(sources, "load_dataset", load)
        return calls

    def test_the_split_follows_from_the_use(self, hub, tokenizer):
        assert sorted(strings(read("someone/chats", tokenizer), tokenizer)) == RENDERED
        assert evaluation_text("someone/chats", tokenizer)[0] == "".join(RENDERED[:2])
        assert set(hub) == {("someone/chats", True)}
        assert same(read("someone/chats", tokenizer), read("someone/chats", tokenizer))

    def test_a_stream_is_not_read_to_its_end(self, monkeypatch, tokenizer):
        def rows():
            for number in range(100):
                yield {"text": f"text {number}"}
            raise AssertionError("read too far")

        monkeypatch.setattr(sources, "HUB_DOCUMENTS", 50)
        monkeypatch.setattr(sources, "SHUFFLE_BUFFER", 10)
        monkeypatch.setattr(sources, "load_dataset", lambda *args, **options: IterableDataset.from_generator(rows))
        assert len(strings(read("someone/texts", tokenizer, num_samples=20), tokenizer)) == 20

    def test_errors(self, hub, tokenizer):
        with pytest.raises(
            MoonshotError, match='"someone/nothing" is neither a file nor a data set .*no route.; use c4'
        ):
            read("someone/nothing", tokenizer)
        with pytest.raises(MoonshotError, match="someone/other has the splits a, b; give one of them"):
            read("someone/other", tokenizer)
