"""A smaller vocabulary: the tokens of a text, or the most frequent ones, and what other text costs."""

import dataclasses
import re
import time
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from typing import Any

from transformers import PreTrainedModel

from ..data.chat import render
from ..data.sources import ModelInputs, describe, open_source, short_name
from ..data.text import NO_TOKENIZER, all_texts
from ..errors import MoonshotError, check_whole, require
from ..model.model_info import embedded_tokens
from ..pipeline.selection import Subject
from .costs import dense_cost
from .report import VocabularyReport
from .token_rows import check_tokens_removable, configured_ids, keep_tokens
from .tokens import Tokens, token_ids, vocabulary_files

# Text is tokenized in pieces of this many characters, or of a 20th of a short text, which end with a line.
PIECE, PIECES = 10_000, 20
HELD_OUT = 10  # one piece of 10 is not counted, and shows the cost of other text
# A conversation shows the words that a chat template writes; others are in the template itself, between quotes.
CONVERSATION = [{"role": role, "content": "a"} for role in ("system", "user", "assistant", "user")]


@dataclasses.dataclass(frozen=True)
class SmallerVocabulary:
    """A model with fewer tokens, and its tokenizer."""

    model: PreTrainedModel
    tokenizer: Any
    report: VocabularyReport
    files: frozenset[str]  # names of the files with the vocabulary of the original


@dataclasses.dataclass(frozen=True)
class Corpus:
    """The token ids of a text in pieces, some of which are held out."""

    name: str
    pieces: list[str]
    ids: list[list[int]]

    @classmethod
    def read(cls, source: Any, tokenizer: Any) -> "Corpus":
        """Tokenize a source of text.

        Raises:
            MoonshotError: it is not text, or too short.
        """
        texts = list(all_texts(source, tokenizer))
        length = min(PIECE, 1 + sum(map(len, texts)) // PIECES)
        pieces = [piece for text in texts for piece in _pieces(text, length) if piece.strip()]
        require(len(pieces) > 1, f"{describe(source)} has {len(pieces)} lines of text", hint="give more text")
        return cls(short_name(describe(source)), pieces, [token_ids(tokenizer, [piece])[0] for piece in pieces])

    @property
    def held_out(self) -> list[int]:
        """The indices of the pieces that are not counted."""
        return list(range(HELD_OUT - 1, len(self.pieces), HELD_OUT)) or [len(self.pieces) - 1]

    def counts(self, everything: bool) -> Counter[int]:
        """How often the text uses each token, in `everything` or only in the pieces that are not held out."""
        without = set() if everything else set(self.held_out)
        return Counter(chain.from_iterable(ids for index, ids in enumerate(self.ids) if index not in without))


def _pieces(text: str, length: int) -> Iterator[str]:
    start = 0
    while start < len(text):
        end = text.find("\n", start + length) + 1 or len(text)
        yield text[start:end]
        start = end


def check_vocabulary(subject: Subject, vocabulary: Any) -> int | None:
    """The number of tokens that a request asks for; None if it is text.

    Raises:
        MoonshotError: a model without a tokenizer, or whose tokens cannot be removed, or several processes.
    """
    number = isinstance(vocabulary, int)
    if number:
        check_whole("vocabulary", vocabulary, 1)
    require(subject.ranks.size == 1, "shrink runs in one process", hint="start it without a launcher")
    check_tokens_removable(subject.model)
    message = "a smaller vocabulary needs one"
    require(subject.tokenizer is not None, message, field="tokenizer", value=None, hint=NO_TOKENIZER)
    return vocabulary if number else None


def check_calibration(calibration: Any) -> None:
    """Check that calibration data can be tokenized again, by a smaller tokenizer.

    Raises:
        MoonshotError: they are model inputs, or cannot be read.
    """
    text = not isinstance(open_source(calibration), ModelInputs)
    message = "token ids are those of all tokens; give text"
    require(text, message, field="calibration", value=describe(calibration))


def reduce_vocabulary(subject: Subject, vocabulary: Any, calibration: Any) -> SmallerVocabulary:
    """A smaller vocabulary, like `MoonshotPruner.shrink`; the subject's model and tokenizer are unchanged.

    Args:
        subject: a model of text, also a pruned one, and its fast tokenizer.
        vocabulary: a number of tokens, or text whose tokens remain.
        calibration: text that determines the most frequent tokens, for a number.

    Raises:
        MoonshotError: an architecture or a tokenizer whose tokens cannot be removed, or text that cannot be read.
    """
    started = time.perf_counter()
    count = check_vocabulary(subject, vocabulary)
    source = vocabulary if count is None else calibration
    message = "the most frequent tokens are those of a text; give some"
    require(source is not None, message, field="calibration", value=None)
    model, tokenizer = subject.model, subject.tokenizer
    assert isinstance(model, PreTrainedModel)
    tokens = Tokens.of(tokenizer, embedded_tokens(model) or 0)
    always = configured_ids(model, tokens.ids) | _template_ids(tokenizer)
    corpus = Corpus.read(source, tokenizer)
    remaining = tokens.choose(corpus.counts(everything=count is None), always, count)
    smaller = tokens.smaller(tokenizer, remaining)
    small = keep_tokens(model, remaining, tokens.renumbered(remaining))
    # Tokens are counted in the whole text; the cost of other text is measured with the tokens of nine tenths.
    counted = tokens.choose(corpus.counts(everything=False), always, count)
    trial = smaller if counted == remaining else tokens.smaller(tokenizer, counted)
    characters, before, after = _held_out_lengths(corpus, trial, tokens.renumbered(counted))
    report = VocabularyReport(
        source=corpus.name,
        tokens=(tokens.embedded, len(remaining)),
        parameters=(model.num_parameters(), small.num_parameters()),
        bytes=(round(dense_cost(model, "bytes")), round(dense_cost(small, "bytes"))),
        characters=characters,
        tokens_per_character=(before / characters, after / characters),
        seconds=time.perf_counter() - started,
    )
    return SmallerVocabulary(small, smaller, report, vocabulary_files(tokenizer))


def _held_out_lengths(corpus: Corpus, tokenizer: Any, numbers: dict[int, int]) -> tuple[int, int, int]:
    """The characters of the text that is held out, and its tokens before and after.

    Raises:
        MoonshotError: a smaller tokenizer divides a text of its own tokens in another way.
    """
    characters = before = after = 0
    for index in corpus.held_out:
        piece, ids = corpus.pieces[index], corpus.ids[index]
        (smaller,) = token_ids(tokenizer, [piece])
        equal = not numbers.keys() >= set(ids) or [numbers[token] for token in ids] == smaller
        message = f"{type(tokenizer).__name__} divides a text of its tokens in another way: nothing changed"
        require(equal, message, field="tokenizer")
        characters, before, after = characters + len(piece), before + len(ids), after + len(smaller)
    return characters, before, after


def _template_ids(tokenizer: Any) -> set[int]:
    """The tokens of a chat template: of a conversation, with the start of an answer, and of all words in it."""
    templates = getattr(tokenizer, "chat_template", None) or ()
    templates = templates.values() if isinstance(templates, dict) else [templates] if templates else []
    texts = [text.replace("\\n", "\n") for one in templates for text in re.split(r"['\"]|[{][{%#]-?|-?[}%#][}]", one)]
    for messages in (CONVERSATION, CONVERSATION[1:]):
        for start in (False, True):
            try:
                texts.append(render(tokenizer, messages, "", add_generation_prompt=start))
            except MoonshotError:  # such as a template without a system's message
                continue
    return set(chain.from_iterable(token_ids(tokenizer, texts))) if texts else set()
