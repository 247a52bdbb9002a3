"""Text of others inside our Markdown: names, notes and cells that must neither break it nor become part of it."""

import re
from typing import Any

# What begins markup inside a line; an underscore does so at the edge of a word alone.
_MARKUP = re.compile(r"[\\`*\[\]<>|~&#]|(?<!\w)_|_(?!\w)")
_ESCAPED = re.compile(r"\\([^\w\s])|\\(_)")


def printable(value: Any) -> str:
    """Text in one line, without what no file or terminal can show."""
    return " ".join("".join(sign if sign.isprintable() else " " for sign in str(value)).split())


def escaped(value: Any) -> str:
    """Text that Markdown shows as it is, in one line or one cell of a table; `unescaped` is the inverse."""
    return _MARKUP.sub(lambda found: "\\" + found[0], printable(value))


def unescaped(text: str) -> str:
    """What `escaped` was given, but for its spaces."""
    return _ESCAPED.sub(lambda found: found[1] or found[2], text)


def code(value: Any) -> str:
    """Text as code inside a line."""
    text = printable(value)
    fence = "`" * (_longest_run(text) + 1)
    space = " " if text.startswith("`") or text.endswith("`") or not text else ""
    return f"{fence}{space}{text}{space}{fence}"


def code_block(text: str, language: str) -> str:
    """Lines as a block of code, with a fence that is not among them.

    Args:
        text: the lines.
        language: of the code, such as "yaml"; may be empty.
    """
    fence = "`" * max(4, _longest_run(text) + 1)
    return f"{fence}{language}\n{text}\n{fence}"


def _longest_run(text: str) -> int:
    """Of backticks."""
    return max(map(len, re.findall("`+", text)), default=0)
