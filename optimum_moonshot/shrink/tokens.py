"""A tokenizer with fewer tokens, which tokenizes every text of the remaining tokens as before.

* BPE merges the adjacent pair of lowest rank. If a token is kept with both sides of every merge that leads to it, all
  merges of a text of kept tokens remain, and each is still the first that applies.
* Unigram chooses the path of highest score, which stays the best when other tokens are removed. An unknown character
  costs 10 more than the lowest score of the vocabulary, so a token with the lowest score is kept too.
* WordPiece chooses the longest token that matches, which stays the longest.

All single characters and bytes stay, so any text can still be spelled, with more tokens. A corpus determines the
tokens; the part of it that is held out shows the cost of other text.
"""

import json
import re
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from ..data.sources import ModelInputs, describe, open_source, render, short_name
from ..data.text import all_texts
from ..errors import MoonshotError, reason, require

KINDS = ("BPE", "Unigram", "WordPiece")
TOKENIZER_FILE, SETTINGS_FILE = "tokenizer.json", "tokenizer_config.json"
OTHER_FILES = (
    "added_tokens.json", "special_tokens_map.json", "vocab.json", "merges.txt", "vocab.txt", "tokenizer.model",
    "spiece.model", "sentencepiece.bpe.model", "tiktoken.model", "tekken.json",
)  # fmt: skip
BYTES = frozenset(f"<0x{byte:02X}>" for byte in range(256))
# Products on GPUs are fastest with sizes that 64 divides, and tensor parallelism divides the vocabulary further.
MULTIPLE = 64
# Text is tokenized in pieces of this many characters, or of a 20th of a short text, which end with a line.
PIECE, PIECES = 10_000, 20
HELD_OUT = 10  # one piece of 10 is not counted, and shows the cost of other text
# A conversation shows the words that a chat template writes; others are in the template itself, between quotes.
CONVERSATION = [{"role": role, "content": "a"} for role in ("system", "user", "assistant", "user")]


@dataclass(frozen=True)
class Tokens:
    """The tokens of a fast tokenizer, by their ids, and how they are made of each other."""

    spec: Mapping[str, Any]  # the content of tokenizer.json
    embedded: int  # number of embeddings; a token with a higher id has none

    @classmethod
    def of(cls, tokenizer: Any, embedded: int) -> "Tokens":
        """The tokens of a tokenizer of transformers.

        Raises:
            MoonshotError: it has no tokenizer.json, another kind of model, or tokens without embeddings.
        """
        name, backend = type(tokenizer).__name__, getattr(tokenizer, "backend_tokenizer", None)
        hint = "load the fast tokenizer of the model, with its tokenizer.json"
        require(hasattr(backend, "to_str"), f"{name} has no tokenizer.json", field="tokenizer", hint=hint)
        try:
            spec = json.loads(tokenizer.backend_tokenizer.to_str())
        except Exception as error:  # tokenizers raises a plain Exception for components in Python
            raise MoonshotError(f"{name} cannot be saved ({reason(error)})", field="tokenizer") from error
        kind = spec["model"].get("type")
        why = "a word that is removed cannot be spelled by others" if kind == "WordLevel" else "its kind is unknown"
        require(kind in KINDS, f"{name} is a {kind} tokenizer: {why}", field="tokenizer", hint=f"use {KINDS}")
        tokens = cls(spec, embedded)
        beyond = next((piece for number, piece in tokens.pieces.items() if number >= embedded), None)
        require(beyond is None, f"the model has no embedding of the token {beyond!r}", field="tokenizer")
        return tokens

    @property
    def _model(self) -> Mapping[str, Any]:
        return self.spec["model"]

    @cached_property
    def pieces(self) -> dict[int, str]:
        """The tokens into which the model divides text."""
        vocabulary = self._model["vocab"]
        if isinstance(vocabulary, list):
            return {number: piece for number, (piece, _) in enumerate(vocabulary)}
        return {number: piece for piece, number in vocabulary.items()}

    @cached_property
    def added(self) -> dict[int, str]:
        """Special tokens, and others that are found in the text before it is divided."""
        return {token["id"]: token["content"] for token in self.spec["added_tokens"]}

    @property
    def ids(self) -> list[int]:
        """The ids of all tokens with an embedding: first the tokens of the model, then added ones."""
        added = sorted(number for number in self.added if number not in self.pieces and number < self.embedded)
        return [*sorted(self.pieces), *added]

    @cached_property
    def _merges(self) -> list[tuple[str, str, str]]:
        """The two sides of every merge and the token that it makes."""
        prefix = len(self._model.get("continuing_subword_prefix") or "")
        pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in self._model.get("merges", ()))
        return [(left, right, left + right[prefix:]) for left, right in pairs]

    @cached_property
    def _made_of(self) -> dict[int, set[int]]:
        """Token → both sides of all merges that make it."""
        made_of: dict[int, set[int]] = {}
        vocabulary = self._model["vocab"] if self._merges else {}
        for left, right, merged in self._merges:
            made_of.setdefault(vocabulary[merged], set()).update((vocabulary[left], vocabulary[right]))
        return made_of

    def _units(self, piece: str) -> list[str]:
        """The single characters of a token, with the marks that they have at their places in a word."""
        names = ("continuing_subword_prefix", "end_of_word_suffix")
        prefix, suffix = (self._model.get(name) or "" for name in names)
        continues = bool(prefix) and len(piece) > len(prefix) and piece.startswith(prefix)
        ends = bool(suffix) and len(piece) > len(suffix) and piece.endswith(suffix)
        body = piece[len(prefix) * continues : len(piece) - len(suffix) * ends]
        units = [prefix * (index > 0 or continues) + letter for index, letter in enumerate(body)]
        return [*units[:-1], units[-1] + suffix * ends] if units else [piece]

    @cached_property
    def base(self) -> set[int]:
        """The tokens of every smaller vocabulary, without the tokens that they are made of."""
        texts, bytes_too = set(self.pieces.values()), bool(self._model.get("byte_fallback"))
        base = {number for number in self.added if number < self.embedded}
        for number, piece in self.pieces.items():
            units = self._units(piece)
            spelled = len(units) > 1 and (bytes_too or texts.issuperset(units))
            if not spelled or (bytes_too and piece in BYTES) or piece == self._model.get("unk_token"):
                base.add(number)
        if self._model["type"] == "Unigram":
            scores = [score for _, score in self._model["vocab"]]
            base.add(scores.index(min(scores)))
            base.update([] if self._model["unk_id"] is None else [self._model["unk_id"]])
        return base

    def with_parts(self, tokens: Iterable[int], present: frozenset[int] | set[int] = frozenset()) -> set[int]:
        """Tokens and all tokens that they are made of, except the tokens that are `present` already."""
        result, stack = set[int](), [token for token in tokens if token not in present]
        while stack:
            token = stack.pop()
            if token not in result:
                result.add(token)
                stack += self._made_of.get(token, set()) - present
        return result

    def choose(self, counts: Mapping[int, int], always: Iterable[int], count: int | None) -> list[int]:
        """The tokens of a smaller vocabulary, in the order of `ids`.

        Args:
            counts: how often text uses each token.
            always: tokens that remain in any case, beside `base`.
            count: number of tokens: the most frequent ones. None: all that the text uses, rounded up to a multiple of
                `MULTIPLE` by the next ones of the vocabulary, since a row without a token would be wasted.

        Raises:
            MoonshotError: no token would be removed, or the tokens that always remain are more than `count`.
        """
        everything = self.ids
        remaining = self.with_parts(chain(self.base, always))
        fewer = count is None or count < self.embedded
        require(fewer, f"the model has {self.embedded:,} tokens", field="vocabulary", value=count, hint="give fewer")
        if count is None:
            remaining |= self.with_parts(counts, remaining)
            count = -(-len(remaining) // MULTIPLE) * MULTIPLE
        message = f"characters, bytes and special tokens, which always remain, are {len(remaining):,} tokens"
        require(len(remaining) <= count, message, field="vocabulary", value=count, hint="give more")
        frequent = sorted(counts, key=lambda token: (-counts[token], token))
        for token in chain(frequent, everything):
            if len(remaining) == count:
                break
            missing = self.with_parts([token], remaining)
            if len(remaining) + len(missing) <= count:
                remaining |= missing
        message = "the text uses almost all tokens of the vocabulary"
        require(len(remaining) < self.embedded, message, field="vocabulary", hint="give less text, or a number")
        return [token for token in everything if token in remaining]

    def renumbered(self, tokens: list[int]) -> dict[int, int]:
        """Old → new ids of the tokens of a smaller vocabulary; tokens without an embedding follow."""
        without = sorted(number for number in self.added if number >= self.embedded)
        return {old: new for new, old in enumerate([*tokens, *without])}

    def smaller(self, tokenizer: Any, tokens: list[int]) -> Any:
        """The tokenizer with some of the tokens, as `from_pretrained` loads it from its files.

        Raises:
            MoonshotError: its class does not load the smaller vocabulary as it was saved.
        """
        numbers = self.renumbered(tokens)
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            tokenizer.save_pretrained(folder)
            for path in folder.iterdir():  # such as vocab.txt, from which some classes would load instead
                if path.name in vocabulary_files(tokenizer) - {TOKENIZER_FILE, SETTINGS_FILE}:
                    path.unlink()
            (folder / TOKENIZER_FILE).write_text(json.dumps(self._spec(numbers), ensure_ascii=False), encoding="utf-8")
            settings = json.loads((folder / SETTINGS_FILE).read_text(encoding="utf-8"))
            if "added_tokens_decoder" in settings:
                named = settings["added_tokens_decoder"].items()
                settings["added_tokens_decoder"] = {str(numbers[int(old)]): token for old, token in named}
                (folder / SETTINGS_FILE).write_text(json.dumps(settings, ensure_ascii=False), encoding="utf-8")
            loaded = type(tokenizer).from_pretrained(folder)
        loaded.name_or_path = tokenizer.name_or_path
        names = self.pieces | self.added
        expected = {names[old]: new for old, new in numbers.items()}
        message = f"{type(tokenizer).__name__} gives the tokens of a smaller vocabulary other ids"
        require(loaded.get_vocab() == expected, message, field="tokenizer")
        return loaded

    def _spec(self, numbers: Mapping[int, int]) -> dict[str, Any]:
        """The content of tokenizer.json with the tokens that have new numbers."""
        model = dict(self._model)
        remaining = {piece: numbers[number] for number, piece in self.pieces.items() if number in numbers}
        if isinstance(model["vocab"], list):
            model["vocab"] = [entry for number, entry in enumerate(model["vocab"]) if number in numbers]
            model["unk_id"] = numbers.get(model["unk_id"])
        else:
            model["vocab"] = remaining
        if self._merges:
            merges = zip(model["merges"], self._merges, strict=True)
            model["merges"] = [merge for merge, three in merges if remaining.keys() >= set(three)]
        added = [{**token, "id": numbers[token["id"]]} for token in self.spec["added_tokens"]]
        rest = {name: _renumbered(value, numbers) for name, value in self.spec.items() if name != "model"}
        return {**rest, "added_tokens": added, "model": model}


def _renumbered(value: Any, numbers: Mapping[int, int], name: str = "") -> Any:
    """A post-processor or padding with new ids: in lists `ids`, in `pad_id`, and in pairs of a token and its id."""
    if isinstance(value, dict):
        return {key: _renumbered(entry, numbers, key) for key, entry in value.items()}
    if name == "ids":
        return [numbers[number] for number in value]
    if name == "pad_id":
        return numbers.get(value, 0)
    if name in ("sep", "cls") and isinstance(value, list):
        return [value[0], numbers[value[1]]]
    return [_renumbered(entry, numbers) for entry in value] if isinstance(value, list) else value


def vocabulary_files(tokenizer: Any) -> frozenset[str]:
    """The files of a tokenizer's vocabulary, also in formats of other libraries, which name its tokens by ids."""
    return frozenset((TOKENIZER_FILE, SETTINGS_FILE, *OTHER_FILES, *tokenizer.vocab_files_names.values()))


def token_ids(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    """Token ids of whole texts, without BOS; the truncation and padding of the tokenizer's files stay set."""
    backend = tokenizer.backend_tokenizer
    truncation, padding = backend.truncation, backend.padding
    options = dict(add_special_tokens=False, truncation=False, padding=False, return_attention_mask=False)
    ids: list[list[int]] = tokenizer(texts, **options, verbose=False)["input_ids"]
    if truncation is not None:
        backend.enable_truncation(**truncation)
    if padding is not None:
        backend.enable_padding(**padding)
    return ids


@dataclass(frozen=True)
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

    def held_out_lengths(self, tokenizer: Any, numbers: dict[int, int]) -> tuple[int, int, int]:
        """The characters of the text that is held out, and its tokens before and after.

        Raises:
            MoonshotError: a smaller tokenizer divides a text of its own tokens in another way.
        """
        characters = before = after = 0
        for index in self.held_out:
            piece, ids = self.pieces[index], self.ids[index]
            (smaller,) = token_ids(tokenizer, [piece])
            equal = not numbers.keys() >= set(ids) or [numbers[token] for token in ids] == smaller
            message = f"{type(tokenizer).__name__} divides a text of its tokens in another way: nothing changed"
            require(equal, message, field="tokenizer")
            characters, before, after = characters + len(piece), before + len(ids), after + len(smaller)
        return characters, before, after


def _pieces(text: str, length: int) -> Iterator[str]:
    start = 0
    while start < len(text):
        end = text.find("\n", start + length) + 1 or len(text)
        yield text[start:end]
        start = end


def check_calibration(calibration: Any) -> None:
    """Check that calibration data can be tokenized again, by a smaller tokenizer.

    Raises:
        MoonshotError: they are model inputs, or cannot be read.
    """
    text = not isinstance(open_source(calibration), ModelInputs)
    message = "token ids are those of all tokens; give text"
    require(text, message, field="calibration", value=describe(calibration))


def template_ids(tokenizer: Any) -> set[int]:
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
