"""Conversations: found in the columns of a row, and rendered by the chat template of a tokenizer."""

from collections.abc import Mapping
from typing import Any

from ..errors import MoonshotError, reason, truncated_repr

Messages = list[dict[str, Any]]  # each with role and content

# The columns of a conversation, in order of preference: one column, or a prompt and its answer.
CONVERSATIONS = ("messages", "conversations", "conversation")
LAYOUTS = (*((name,) for name in CONVERSATIONS), ("prompt", "completion"), ("prompt", "chosen"), ("chosen",))
ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "model": "assistant"}


def chat_columns(row: Mapping[str, Any]) -> tuple[str, ...]:
    """The columns of a row that contain a conversation; empty without one."""
    for names in LAYOUTS:
        values = [row[name] for name in names if name in row]
        strings = len(names) > 1  # a single string is text
        if len(values) == len(names) and all(_may_be_messages(value, strings) for value in values):
            return names
    return ()


def conversation(row: Mapping[str, Any], columns: tuple[str, ...]) -> Messages:
    """The messages in the columns of a row; an empty list if it has none."""
    messages: Messages = []
    for column in columns:
        value = row[column]
        if isinstance(value, str):
            value = [{"role": "user" if column == "prompt" else "assistant", "content": value}]
        more = as_messages(value or [], f'column "{column}"')
        # Preference data often repeat the prompt at the beginning of the answer.
        messages = more if more[: len(messages)] == messages else messages + more
    return messages


def as_messages(value: Any, what: str) -> Messages:
    """Messages of role and content, without empty fields; also from messages with the fields from and value.

    Raises:
        MoonshotError: the value, which `what` names, is not a list of messages.
    """
    messages = []
    for message in value if isinstance(value, list | tuple) else [value]:
        fields = {} if not isinstance(message, Mapping) else {k: v for k, v in message.items() if v is not None}
        if "from" in fields and "value" in fields:
            role, content = fields["from"], fields["value"]
            fields = {"role": ROLES.get(role, role), "content": content}
        if "role" not in fields or not ("content" in fields or "content" in message):
            hint = "give lists of messages with role and content, or with from and value"
            raise MoonshotError(f"{what} contains {truncated_repr(message)}, which is not a message", hint=hint)
        messages.append({"content": "", **fields})  # a tool call has no content
    return messages


def has_template(tokenizer: Any) -> bool:
    return getattr(tokenizer, "chat_template", None) is not None


def render(tokenizer: Any, messages: Messages, what: str, field: str | None = None, **options: Any) -> str:
    """The text of a conversation by the tokenizer's chat template, which usually begins with BOS.

    Raises:
        MoonshotError: the tokenizer has no template, or the conversation, which `what` names, does not fit it.
    """
    if not has_template(tokenizer):
        hint = "set tokenizer.chat_template, or give text"
        message = f"{what} is a conversation, which needs a chat template: the tokenizer has none"
        raise MoonshotError(message, field=field, hint=hint)
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))
    except Exception as error:  # a template may raise anything
        message = f"{what} does not fit the chat template ({reason(error)})"
        raise MoonshotError(message, field=field) from error


def _may_be_messages(value: Any, strings: bool) -> bool:
    if isinstance(value, list | tuple):
        return all(isinstance(message, Mapping) for message in value)
    return value is None or (strings and isinstance(value, str))
