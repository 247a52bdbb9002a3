"""Escape names, notes and cells inside Markdown, so that they neither break it nor act as markup."""

import re
from typing import Any

# Characters that start markup inside a line; an underscore does so only at the edge of a word.
_MARKUP = re.compile(r"[\\`*\[\]<>|~&#]|(?<!\w)_|_(?!\w)")
_ESCAPED = re.compile(r"\\([^\w\s])|\\(_)")


def printable(value: Any) -> str:
    """Text in one line, without unprintable characters."""
    return " ".join("".join(sign if sign.isprintable() else " " for sign in str(value)).split())


def escaped(value: Any) -> str:
    """Text that Markdown shows literally, in one line or one cell of a table; `unescaped` is the inverse."""
    return _MARKUP.sub(lambda match: "\\" + match[0], printable(value))


def unescaped(text: str) -> str:
    """The inverse of `escaped`, except for spaces."""
    return _ESCAPED.sub(lambda match: match[1] or match[2], text)


def code(value: Any) -> str:
    """Text as inline code."""
    text = printable(value)
    fence = "`" * (_longest_run(text) + 1)
    space = " " if text.startswith("`") or text.endswith("`") or not text else ""
    return f"{fence}{space}{text}{space}{fence}"


def code_block(text: str, language: str) -> str:
    """Lines as a code block, with a fence longer than any in them.

    Args:
        text: the lines.
        language: of the code, such as "yaml"; may be empty.
    """
    fence = "`" * max(4, _longest_run(text) + 1)
    return f"{fence}{language}\n{text}\n{fence}"


def _longest_run(text: str) -> int:
    """The length of the longest run of backticks."""
    return max(map(len, re.findall("`+", text)), default=0)
