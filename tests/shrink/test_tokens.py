"""Smaller tokenizers: text of the remaining tokens has the same ones, and any text decodes as before."""

import json

import pytest
import transformers as hf
from tokenizers import Tokenizer, models
from trained_tokenizers import BY_NAME, LINES, SIZE, loaded, random_texts

from optimum_moonshot.errors import MoonshotError
from optimum_moonshot.shrink.tokens import MULTIPLE, Tokens, token_ids

KEPT = LINES[::40]  # of the corpus


def smaller(tokenizer, count=None, texts=KEPT):
    """The smaller tokenizer, and old → new ids."""
    tokens = Tokens.of(tokenizer, len(tokenizer))
    counts = {}
    for ids in token_ids(tokenizer, texts):
        for token in ids:
            counts[token] = counts.get(token, 0) + 1
    chosen = tokens.choose(counts, (), count)
    return tokens.smaller(tokenizer, chosen), tokens.renumbered(chosen)


@pytest.mark.parametrize("name", BY_NAME)
def test_text_of_remaining_tokens_has_the_same_ones_and_all_text_decodes_as_before(name, tmp_path):
    tokenizer = loaded(name, tmp_path)
    small, numbers = smaller(tokenizer)
    assert len(small) < 0.9 * len(tokenizer)
    same = removed = 0
    for text in [*KEPT, *random_texts(tokenizer, 1500), *random_texts(small, 1500, seed=1)]:
        before, after = tokenizer(text)["input_ids"], small(text)["input_ids"]
        if numbers.keys() >= set(before):
            assert [numbers[token] for token in before] == after, text
            same += 1
        else:
            removed += 1
        assert tokenizer.decode(before) == small.decode(after), text
    assert same > 500 and removed > 200  # both laws were at stake


@pytest.mark.parametrize("name", BY_NAME)
def test_all_files_have_the_new_ids(name, tmp_path):
    tokenizer = loaded(name, tmp_path / "before")
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    small, numbers = smaller(tokenizer)
    small.save_pretrained(tmp_path / "after")
    reloaded = hf.AutoTokenizer.from_pretrained(tmp_path / "after")
    assert type(reloaded) is type(tokenizer) and reloaded.get_vocab() == small.get_vocab()
    assert sorted(reloaded.get_vocab().values()) == list(range(len(reloaded)))
    assert reloaded.chat_template == tokenizer.chat_template
    for attribute in ("bos", "eos", "unk", "pad", "sep", "cls", "mask"):
        old, new = (getattr(one, f"{attribute}_token_id") for one in (tokenizer, reloaded))
        assert new == numbers.get(old)
    for before, after in zip(token_ids(tokenizer, KEPT), token_ids(reloaded, KEPT), strict=True):
        assert [numbers[token] for token in before] == after
    assert [numbers[token] for token in tokenizer("", "")["input_ids"]] == small("", "")["input_ids"]  # of a template


def test_a_number_of_tokens_is_exact_and_prefers_frequent_ones(tmp_path):
    tokenizer = loaded("smollm2", tmp_path)
    least = len(Tokens.of(tokenizer, len(tokenizer)).base)
    for count in (least + 1, 500, 777, SIZE - 1):
        small, numbers = smaller(tokenizer, count)
        assert len(small) == len(numbers) == count
    small, numbers = smaller(tokenizer, 600)
    used = token_ids(tokenizer, ["".join(KEPT)])[0]
    frequent = sorted(set(used), key=used.count)[-100:]
    assert numbers.keys() >= set(frequent)
    with pytest.raises(MoonshotError, match=f"vocabulary={least - 1}: .* are {least} tokens; give more"):
        smaller(tokenizer, least - 1)
    with pytest.raises(MoonshotError, match=f"vocabulary={SIZE}: the model has {SIZE:,} tokens; give fewer"):
        smaller(tokenizer, SIZE)


def test_text_determines_a_multiple_that_further_tokens_fill(tmp_path):
    tokenizer = loaded("gemma", tmp_path)
    for count in (1, 3, 10, 40):
        small, _ = smaller(tokenizer, texts=LINES[:count])
        assert len(small) % MULTIPLE == 0
    with pytest.raises(MoonshotError, match="vocabulary: the text uses almost all tokens"):
        smaller(tokenizer, texts=LINES * 2)


def test_everything_that_makes_a_token_stays(tmp_path):
    """Of all merges that make it, not only of those that a text takes."""
    tokenizer = loaded("smollm2", tmp_path)
    spec = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    _, numbers = smaller(tokenizer)
    vocabulary = spec["vocab"]
    for left, right in spec["merges"]:
        if vocabulary[left + right] in numbers:
            assert vocabulary[left] in numbers and vocabulary[right] in numbers


def test_merges_as_strings(tmp_path):
    """Older files have pairs as strings with a space."""
    tokenizer = loaded("smollm2", tmp_path)
    tokens = Tokens.of(tokenizer, len(tokenizer))
    model = {**tokens.spec["model"], "merges": [" ".join(pair) for pair in tokens.spec["model"]["merges"]]}
    old = Tokens({**tokens.spec, "model": model}, tokens.embedded)
    chosen = tokens.choose({}, range(700, 800), 800)
    assert chosen == old.choose({}, range(700, 800), 800)
    new, expected = (one._spec(one.renumbered(chosen))["model"] for one in (old, tokens))
    assert [merge.split(" ") for merge in new["merges"]] == expected["merges"] and new["vocab"] == expected["vocab"]


def test_the_lowest_score_stays_since_unknown_characters_cost_more_than_it():
    """At -25 instead of -50, an unknown X would make "a", X, "bcd" the best path of a text of remaining tokens."""
    scores = {"<unk>": 0, "a": -1, "b": -15, "c": -15, "d": -15, "z": -15, "aXb": -15, "cd": -15, "bcd": -1}
    scores |= {"cdcd": -2, "zz": -3, "zzz": -40, "zzzz": -4}
    tokenizer = hf.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.Unigram(list(scores.items()), 0)))
    pieces = ["aXb", "cd"]
    assert tokenizer.tokenize("aXbcd") == pieces
    tokens = Tokens.of(tokenizer, len(tokenizer))
    counts = dict.fromkeys(tokenizer.convert_tokens_to_ids([*pieces, "bcd"]), 1)
    small = tokens.smaller(tokenizer, tokens.choose(counts, (), len(scores) - 3))
    assert small.get_vocab().keys() == scores.keys() - {"cdcd", "zz", "zzzz"}
    assert small.tokenize("aXbcd") == pieces


def test_truncation_and_padding_stay_set(tmp_path):
    """As in files of sentence-transformers, whose texts are longer than the sequences of the model."""
    tokenizer = loaded("bert", tmp_path)
    tokenizer.backend_tokenizer.enable_truncation(8)
    tokenizer.backend_tokenizer.enable_padding(length=8, pad_id=tokenizer.pad_token_id, pad_token="[PAD]")
    before = json.loads(tokenizer.backend_tokenizer.to_str())
    small, numbers = smaller(tokenizer)
    assert len(token_ids(small, ["".join(KEPT)])[0]) == len(token_ids(tokenizer, ["".join(KEPT)])[0]) > 100
    for one in (tokenizer, small):
        spec = json.loads(one.backend_tokenizer.to_str())
        pad = numbers[before["padding"]["pad_id"]] if one is small else before["padding"]["pad_id"]
        assert spec["truncation"] == before["truncation"] and spec["padding"] == before["padding"] | {"pad_id": pad}


def test_an_added_token_without_an_embedding_stays_behind_all_others(tmp_path):
    tokenizer = loaded("gemma", tmp_path)
    rows = len(tokenizer)
    tokenizer.add_tokens(["<image_soft_token>"])
    tokens = Tokens.of(tokenizer, rows)
    chosen = tokens.choose({}, (), 500)
    small = tokens.smaller(tokenizer, chosen)
    assert len(chosen) == 500 and small.convert_tokens_to_ids("<image_soft_token>") == 500


def test_tokenizers_whose_tokens_cannot_be_removed(tmp_path):
    words = hf.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, "<unk>")))
    with pytest.raises(MoonshotError, match="is a WordLevel tokenizer: a word that is removed cannot be spelled"):
        Tokens.of(words, 2)
    with pytest.raises(MoonshotError, match="tokenizer: ByT5Tokenizer has no tokenizer.json; load the fast tokenizer"):
        Tokens.of(hf.ByT5Tokenizer(), 384)
    tokenizer = loaded("smollm2", tmp_path)
    with pytest.raises(MoonshotError, match="the model has no embedding of the token '.+'"):
        Tokens.of(tokenizer, len(tokenizer) - 1)
