"""Laws of smaller tokenizers on generated texts, which Hypothesis reduces to the shortest that breaks one.

`test_tokens.py` has the same laws on random texts, whose parts are words and pieces of a corpus.
"""

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trained_tokenizers import BY_NAME, CORPUS, LINES, loaded

from optimum_moonshot.shrink.tokens import Tokens, token_ids

WORDS = sorted(set("".join(LINES[::40]).split()))
CHARACTERS = st.characters(exclude_categories=["Cs"])
# One of each kind of model: BPE with tokens for bytes, byte-level BPE, Unigram, WordPiece.
KINDS = ("gemma", "smollm2", "t5", "bert")
fixed = settings(deadline=None, derandomize=True, database=None)


def smaller(tokenizer, counts, count=None):
    """The tokenizer with fewer tokens, and old → new ids."""
    tokens = Tokens.of(tokenizer, len(tokenizer))
    chosen = tokens.choose(counts, (), count)
    return tokens.smaller(tokenizer, chosen), tokens.renumbered(chosen)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    """The tokenizer of a family, the one of the tokens of some lines, and old → new ids."""

    @cache
    def pair(name):
        tokenizer = loaded(name, tmp_path_factory.mktemp(name))
        used = {token for ids in token_ids(tokenizer, LINES[::40]) for token in ids}
        return tokenizer, *smaller(tokenizer, dict.fromkeys(used, 1))

    return pair


def texts(*tokenizers):
    """Texts of words, of tokens, of characters of any script, and of spaces between them or not."""
    pieces = [one.convert_tokens_to_string([token]) for one in tokenizers for token in sorted(one.get_vocab())]
    parts = st.one_of(
        st.sampled_from(WORDS), st.sampled_from(pieces), st.text(CHARACTERS, max_size=3), st.sampled_from(" \n\t'-.")
    )
    return st.lists(parts, max_size=8).map("".join) | st.lists(parts, max_size=8).map(" ".join) | st.text(CHARACTERS)


def assert_same(tokenizer, small, numbers, text):
    """Whether all tokens of the text remain, and both laws apply to it."""
    before, after = tokenizer(text)["input_ids"], small(text)["input_ids"]
    remain = numbers.keys() >= set(before)
    if remain:
        assert [numbers[token] for token in before] == after
    assert tokenizer.decode(before) == small.decode(after)
    return remain


@pytest.mark.parametrize("name", BY_NAME)
def test_text_of_remaining_tokens_has_the_same_ones_and_all_text_decodes_as_before(name, tokenizers):
    tokenizer, small, numbers = tokenizers(name)
    remained = []

    @settings(fixed, max_examples=250)
    @given(texts(tokenizer, small))
    def laws(text):
        remained.append(assert_same(tokenizer, small, numbers, text))

    laws()
    assert sum(remained) > 20 and remained.count(False) > 5  # both laws were at stake


@pytest.mark.parametrize("name", KINDS)
def test_the_laws_hold_for_any_choice_of_tokens(name, tokenizers):
    tokenizer, _, _ = tokenizers(name)
    tokens = Tokens.of(tokenizer, len(tokenizer))
    others = sorted(set(tokens.ids) - tokens.with_parts(tokens.base))

    @settings(fixed, max_examples=15)
    @given(st.data())
    def laws(data):
        chosen = data.draw(st.lists(st.sampled_from(others), min_size=1, max_size=100, unique=True), "tokens")
        counts = {token: len(chosen) - place for place, token in enumerate(chosen)}
        least = len(tokens.with_parts([*tokens.base, *chosen]))
        small, numbers = smaller(tokenizer, counts, min(least, len(tokenizer) - 1))
        for text in data.draw(st.lists(texts(tokenizer, small), min_size=10, max_size=20), "texts"):
            assert_same(tokenizer, small, numbers, text)
        assert_same(tokenizer, small, numbers, CORPUS[:2000])

    laws()
