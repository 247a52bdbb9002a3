"""Calibration data that the dense model writes itself: where it begins, and how it chooses its words.

For models whose training data nobody has. A sample is what the model writes, token by token, from its BOS token or from
a prompt; where it ends a text early, the sample goes on with the next beginning. "Reasoning Models Can be Accurately
Pruned Via Chain-of-Thought Reconstruction" (arXiv 2509.12464) calibrates reasoning models so, on their own chains of
thought.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import MoonshotError, check_number, check_path, check_whole, require, shown
from .text import file_rows, short_name, tokenize

SELF = "self"
COLUMNS = ("messages", "prompt", "question", "problem", "instruction")  # of prompts, before those of texts
Prompt = str | Sequence[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class SelfCalibration:
    """Samples that the dense model writes; ``calibration="self"`` is one with the defaults.

    Args:
        prompts: what the model answers: strings, conversations (lists of messages with role and content), or the path
            of a .txt file with a prompt on every line, or of a JSON (lines) or Parquet file with a column of them. They
            are used again and again, in an order that follows from the seed. None begins with the model's BOS token.
        chat: put prompts through the tokenizer's chat template; None where it has one.
        thinking: what the template is told as `enable_thinking`; None leaves it to the template.
        temperature: of the sampling; 1 is the model's own distribution.
        top_p: sample from the most likely tokens with this share of the probability; 1 from all.
        batch_size: samples that are written at a time. They differ with it: it is a part of what is drawn.

    Raises:
        MoonshotError: a value of the wrong type or out of range; it names the field.
    """

    prompts: str | os.PathLike[str] | Sequence[Prompt] | None = None
    chat: bool | None = None
    thinking: bool | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    batch_size: int = 32

    def __post_init__(self) -> None:
        check_number("temperature", self.temperature)
        require(self.temperature > 0, f"temperature={self.temperature}: it lies above 0; 1 is the model's own")
        check_number("top_p", self.top_p)
        require(0 < self.top_p <= 1, f"top_p={self.top_p}: it lies above 0, and is at most 1")
        check_whole("batch_size", self.batch_size, least=1)
        for name in ("chat", "thinking"):
            value = getattr(self, name)
            require(value is None or isinstance(value, bool), f"{name}={shown(value)}: use True, False or None")
        if isinstance(self.prompts, str | os.PathLike):
            check_path("prompts", self.prompts)
            missing = f"prompts={shown(os.fspath(self.prompts))}: no such file; give its path, or prompts in a list"
            require(os.path.isfile(os.path.expanduser(self.prompts)), missing)
        elif self.prompts is not None:
            listed = isinstance(self.prompts, Sequence) and len(self.prompts) > 0
            require(listed, f"prompts={shown(self.prompts)}: give a list of strings or of conversations, or a path")
            object.__setattr__(self, "prompts", tuple(map(_checked, self.prompts)))

    @classmethod
    def of(cls, calibration: Any) -> "SelfCalibration | None":
        """What a caller's calibration data ask for; None where they are other data."""
        if isinstance(calibration, cls):
            return calibration
        return cls() if isinstance(calibration, str) and calibration == SELF else None

    def describe(self) -> str:
        """For reports, which may be published: a file is known by its name."""
        chosen = f"temperature {self.temperature:g}" + (f", top_p {self.top_p:g}" if self.top_p < 1 else "")
        if isinstance(self.prompts, str | os.PathLike):
            start = f"prompts of {short_name(os.fspath(self.prompts))}"
        else:
            start = "its BOS token" if self.prompts is None else f"{len(self.prompts)} prompts"
        return f"{SELF} ({chosen}, from {start})"

    def beginnings(self, tokenizer: Any, bos: int | None, length: int) -> list[list[int]]:
        """The tokens that texts begin with.

        Args:
            tokenizer: the model's; may be None without prompts.
            bos: the model's BOS token, if it has one.
            length: tokens of a sample.

        Raises:
            MoonshotError: no BOS token and no prompts, no tokenizer or chat template for prompts, or prompts that
                cannot be read or leave no room.
        """
        if self.prompts is None:
            needs = "the model has no BOS token to begin with: give prompts, SelfCalibration(prompts=[...])"
            if bos is None:
                raise MoonshotError(f"calibration='self': {needs}")
            return [[bos]]
        require(tokenizer is not None, "tokenizer=None: prompts need one, give the model's tokenizer")
        template = getattr(tokenizer, "chat_template", None) is not None
        require(template or not self.chat, "chat=True: the tokenizer has no chat template; leave it out")
        found = []
        for number, prompt in enumerate(self._read()):
            tokens = self._tokens(tokenizer, prompt, template and self.chat is not False, number)
            require(len(tokens) > 0, f"prompts: number {number} has no tokens, leave it out")
            mend = f"sequence_length={length} leaves no room for an answer: give shorter prompts, or longer samples"
            require(len(tokens) < length, f"prompts: number {number} has {len(tokens)} tokens, {mend}")
            found.append(tokens)
        return found

    def _read(self) -> Sequence[Prompt]:
        if not isinstance(self.prompts, str | os.PathLike):
            return self.prompts or ()
        what, found = f"prompts={os.fspath(self.prompts)!r}", []
        for row in file_rows(self.prompts):
            column = next((name for name in (*COLUMNS, "text") if name in row), "")
            asked = f"rename the one that holds prompts to {COLUMNS[1]}"
            require(bool(column), f"{what}: the data has the columns {', '.join(row)}: {asked}")
            if row[column]:
                found.append(_checked(row[column]))
        require(len(found) > 0, f"{what} holds no prompts: give some, or leave it out")
        return found

    def _tokens(self, tokenizer: Any, prompt: Prompt, chat: bool, number: int) -> list[int]:
        if not chat:
            if not isinstance(prompt, str):
                mend = "is a conversation, which needs a chat template; give strings"
                raise MoonshotError(f"prompts: number {number} {mend}")
            return list(tokenize(tokenizer, prompt))
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*map(dict, prompt)]
        options = {} if self.thinking is None else {"enable_thinking": self.thinking}
        try:
            text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **options)
        except Exception as error:  # whatever a template raises
            raise MoonshotError(f"prompts: number {number} does not fit the chat template ({error})") from error
        return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _checked(prompt: Any) -> Prompt:
    """A prompt as it was given, if it is one."""
    if isinstance(prompt, str):
        return prompt
    talk = isinstance(prompt, Sequence) and all(
        isinstance(m, Mapping) and {"role", "content"} <= set(m) for m in prompt
    )
    require(talk and len(prompt) > 0, f"prompts: {shown(prompt)} is neither a string nor a list of messages")
    return [*map(dict, prompt)]
