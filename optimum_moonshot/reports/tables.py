"""Tables as text for terminals, and as HTML for notebooks."""

import io
from collections.abc import Sequence
from html import escape
from typing import Any

from rich.console import Console, JustifyMethod
from rich.table import Table

# Limit of rows and lines in HTML, half of them from either end.
MOST_ROWS = 60

Rows = Sequence[Sequence[str]]


def text_table(headers: Sequence[str], rows: Rows, width: int, left: Sequence[str] = ()) -> str:
    """Format a table in lines of `width` characters, without rules; the first column wraps.

    That column and those with headers in `left` are left-aligned.
    """
    table = Table(title=None, box=None, pad_edge=False)
    for number, header in enumerate(headers):
        justify: JustifyMethod = "left" if number == 0 or header in left else "right"
        table.add_column(header, justify=justify, overflow="fold" if number == 0 else "ellipsis")
    for row in rows:
        table.add_row(*row)
    # Its defaults would print to a notebook, or add colours in a terminal.
    text = io.StringIO()
    plain: dict[str, Any] = {"color_system": None, "highlight": False, "markup": False, "emoji": False}
    Console(file=text, width=width, force_terminal=False, force_jupyter=False, **plain).print(table)
    return text.getvalue().rstrip()


def html_table(headers: Sequence[str], rows: Rows, lines: Sequence[str] = (), left: Sequence[str] = ()) -> str:
    """Format a table with paragraphs of text below it; the middle of long ones is omitted.

    The first column and those with headers in `left` are left-aligned.
    """
    shift = [number for number, header in enumerate(headers) if number == 0 or header in left]
    parts = ['<div><table style="text-align:right">', "<thead>", _row(headers, shift, "th"), "</thead>", "<tbody>"]
    for row in _ends(rows):
        if isinstance(row, int):
            parts.append(f'<tr><td colspan="{len(headers)}" style="text-align:left">… {row} more …</td></tr>')
        else:
            parts.append(_row(row, shift, "td"))
    parts.append("</tbody></table>")
    parts += [f"<div>{f'… {line} more …' if isinstance(line, int) else escape(line)}</div>" for line in _ends(lines)]
    return "\n".join([*parts, "</div>"])


def _row(cells: Sequence[str], shift: Sequence[int], tag: str) -> str:
    styles = [' style="text-align:left"' if number in shift else "" for number in range(len(cells))]
    parts = (f"<{tag}{style}>{escape(cell)}</{tag}>" for cell, style in zip(cells, styles, strict=True))
    return f"<tr>{''.join(parts)}</tr>"


def _ends(items: Sequence[Any]) -> list[Any]:
    """A short sequence; of a long one both ends, with the number of omitted items between them."""
    half, omitted = MOST_ROWS // 2, len(items) - MOST_ROWS
    return list(items) if omitted <= 1 else [*items[:half], omitted, *items[-half:]]
