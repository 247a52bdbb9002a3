"""Text tables for terminals."""

import textwrap
from collections.abc import Sequence
from itertools import zip_longest


def text_table(headers: Sequence[str], rows: Sequence[Sequence[str]], width: int, left: Sequence[str] = ()) -> str:
    """Format a table in lines of at most `width` characters, without rules.

    The widest columns become narrower until the table fits: their cells wrap at spaces, and longer words are broken in
    the first column, truncated in others. The first column and the columns in `left` are left-aligned.
    """
    widths = [max(map(len, column)) for column in zip(headers, *rows, strict=True)]
    while sum(widths) + 2 * (len(widths) - 1) > width and max(widths) > 1:
        widths[widths.index(max(widths))] -= 1
    lines = []
    for row in (headers, *rows):
        cells = [_wrap(cell, most, number == 0) for number, (cell, most) in enumerate(zip(row, widths, strict=True))]
        for line in zip_longest(*cells, fillvalue=""):
            aligned = [
                cell.ljust(size) if number == 0 or headers[number] in left else cell.rjust(size)
                for number, (cell, size) in enumerate(zip(line, widths, strict=True))
            ]
            lines.append("  ".join(aligned).rstrip())
    return "\n".join(lines)


def _wrap(cell: str, width: int, break_words: bool) -> list[str]:
    if len(cell) <= width and cell.isprintable():
        return [cell]
    lines = textwrap.wrap(cell, max(1, width), break_long_words=break_words, break_on_hyphens=False)
    return [line if len(line) <= width else f"{line[: width - 1]}…" for line in lines]
