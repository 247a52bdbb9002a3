"""Calibration on samples that the dense model generates: the prompts and the sampling settings.

This is for models whose training data are not available. A sample is generated token by token from the BOS token or
from a prompt; if the model ends a text early, the sample continues with the next prompt. "Reasoning Models Can be
Accurately Pruned Via Chain-of-Thought Reconstruction" (arXiv 2509.12464) calibrates reasoning models on their own
chains of thought.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import MoonshotError, check_number, check_path, check_whole, require, truncated_repr
from .sources import as_messages, file_rows, has_template, render, short_name
from .text import tokenize, tokenize_chat

SELF = "self"
# Columns of prompts, in order of preference.
COLUMNS = ("messages", "conversations", "prompt", "question", "problem", "instruction", "text")
Prompt = str | Sequence[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class SelfCalibration:
    """Samples that the dense model generates; ``calibration="self"`` uses the defaults.

    Args:
        prompts: strings, conversations (lists of messages with role and content), or the path of a .txt file with a
            prompt on every line, or of a JSON (lines), CSV or Parquet file with a column of prompts. Prompts are
            used repeatedly, in an order that follows from the seed. None generates from the model's BOS token.
        chat: format prompts by the tokenizer's chat template; None does so if it has one.
        thinking: the template's `enable_thinking`; None leaves it to the template.
        temperature: of the sampling; 1 is the model's distribution.
        top_p: sample from the most likely tokens with this total probability; 1: from all tokens.
        batch_size: samples generated at a time. The samples depend on it.

    Raises:
        MoonshotError: a value of the wrong type or out of range.
    """

    prompts: str | os.PathLike[str] | Sequence[Prompt] | None = None
    chat: bool | None = None
    thinking: bool | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    batch_size: int = 32

    def __post_init__(self) -> None:
        check_number("temperature", self.temperature)
        require(self.temperature > 0, "it must be above 0", field="temperature", value=self.temperature)
        check_number("top_p", self.top_p)
        require(0 < self.top_p <= 1, "it must be above 0 and at most 1", field="top_p", value=self.top_p)
        check_whole("batch_size", self.batch_size, least=1)
        for name in ("chat", "thinking"):
            value = getattr(self, name)
            require(value is None or isinstance(value, bool), "use True, False or None", field=name, value=value)
        if isinstance(self.prompts, str | os.PathLike):
            check_path("prompts", self.prompts)
            path, hint = os.fspath(self.prompts), "give its path, or prompts in a list"
            require(os.path.isfile(os.path.expanduser(path)), "no such file", field="prompts", value=path, hint=hint)
        elif self.prompts is not None:
            listed = isinstance(self.prompts, Sequence) and len(self.prompts) > 0
            accepted = "give a list of strings or of conversations, or a path"
            require(listed, accepted, field="prompts", value=self.prompts)
            object.__setattr__(self, "prompts", tuple(map(_checked, self.prompts)))

    @classmethod
    def of(cls, calibration: Any) -> "SelfCalibration | None":
        """The settings, if `calibration` requests generated data; None for other data."""
        if isinstance(calibration, cls):
            return calibration
        return cls() if isinstance(calibration, str) and calibration == SELF else None

    def describe(self) -> str:
        """The description in reports, without private paths."""
        sampling = f"temperature {self.temperature:g}" + (f", top_p {self.top_p:g}" if self.top_p < 1 else "")
        if isinstance(self.prompts, str | os.PathLike):
            start = f"prompts of {short_name(os.fspath(self.prompts))}"
        else:
            start = "its BOS token" if self.prompts is None else f"{len(self.prompts)} prompts"
        return f"{SELF} ({sampling}, from {start})"

    def beginnings(self, tokenizer: Any, bos: int | None, length: int) -> list[list[int]]:
        """The tokens of the prompts, fewer than `length`, or the BOS token without prompts.

        Raises:
            MoonshotError: no BOS token and no prompts, no tokenizer or chat template for prompts, or prompts that
                cannot be read or are too long.
        """
        if self.prompts is None:
            if bos is None:
                hint = "give prompts, SelfCalibration(prompts=[...])"
                raise MoonshotError("the model has no BOS token", field="calibration", value=SELF, hint=hint)
            return [[bos]]
        give = "give the model's tokenizer"
        require(tokenizer is not None, "prompts need one", field="tokenizer", value=None, hint=give)
        template = has_template(tokenizer)
        missing = "the tokenizer has no chat template"
        require(template or not self.chat, missing, field="chat", value=self.chat, hint="leave it out")
        beginnings = []
        for number, prompt in enumerate(self._read()):
            tokens = self._tokens(tokenizer, prompt, template and self.chat is not False, number)
            require(len(tokens) > 0, f"number {number} has no tokens", field="prompts", hint="leave it out")
            if len(tokens) >= length:
                message = (
                    f"number {number} has {len(tokens)} tokens, and sequence_length={length} has no room for an answer"
                )
                raise MoonshotError(message, field="prompts", hint="give shorter prompts, or longer samples")
            beginnings.append(tokens)
        return beginnings

    def _read(self) -> Sequence[Prompt]:
        if not isinstance(self.prompts, str | os.PathLike):
            return self.prompts or ()
        path, prompts = os.fspath(self.prompts), []
        for row in file_rows(path):
            column = next((name for name in COLUMNS if name in row), None)
            if column is None:
                message, hint = f"the data has the columns {', '.join(row)}", "rename the one with prompts to prompt"
                raise MoonshotError(message, field="prompts", value=path, hint=hint)
            if row[column]:
                prompts.append(_checked(row[column]))
        give = "give some, or leave it out"
        require(len(prompts) > 0, "it has no prompts", field="prompts", value=path, hint=give)
        return prompts

    def _tokens(self, tokenizer: Any, prompt: Prompt, chat: bool, number: int) -> list[int]:
        if not chat:
            if not isinstance(prompt, str):
                message = f"number {number} is a conversation, which needs a chat template"
                raise MoonshotError(message, field="prompts", hint="give strings")
            return list(tokenize(tokenizer, prompt))
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*map(dict, prompt)]
        options = {} if self.thinking is None else {"enable_thinking": self.thinking}
        options |= {"add_generation_prompt": True}
        return tokenize_chat(tokenizer, [render(tokenizer, messages, f"number {number}", "prompts", **options)])[0]


def _checked(prompt: Any) -> Prompt:
    """A string, or a list of messages."""
    if isinstance(prompt, str):
        return prompt
    try:
        if isinstance(prompt, Sequence) and len(prompt) > 0:
            return as_messages(prompt, "it")
    except MoonshotError:
        pass
    raise MoonshotError(f"{truncated_repr(prompt)} is neither a string nor a list of messages", field="prompts")
