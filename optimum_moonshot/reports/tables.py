"""Tables for people: as text for a terminal, as HTML for a notebook."""

import io
from collections.abc import Sequence
from html import escape
from typing import Any

from rich.console import Console, JustifyMethod
from rich.table import Table

# What a notebook shows of a long table or list, half of it from either end.
MOST_ROWS = 60

Rows = Sequence[Sequence[str]]


def text_table(headers: Sequence[str], rows: Rows, width: int, left: Sequence[str] = ()) -> str:
    """Columns without lines between them; the first one is to the left and breaks where it is too long.

    Args:
        headers: of the columns.
        rows: cells, as many each as there are headers.
        width: characters of a line.
        left: the headers of further columns to the left; all others are to the right.
    """
    table = Table(title=None, box=None, pad_edge=False)
    for number, header in enumerate(headers):
        justify: JustifyMethod = "left" if number == 0 or header in left else "right"
        table.add_column(header, justify=justify, overflow="fold" if number == 0 else "ellipsis")
    for row in rows:
        table.add_row(*row)
    # A console of its own: in a notebook or a coloured terminal, rich would show the table itself, or colour it.
    text = io.StringIO()
    console = Console(
        file=text,
        width=width,
        force_terminal=False,
        force_jupyter=False,
        color_system=None,
        highlight=False,
        markup=False,
        emoji=False,
    )
    console.print(table)
    return text.getvalue().rstrip()


def html_table(headers: Sequence[str], rows: Rows, lines: Sequence[str] = (), left: Sequence[str] = ()) -> str:
    """A table with lines of text below it, both cut in their middle where they are long.

    Args:
        headers, rows: as for `text_table`.
        lines: text, a paragraph each.
        left: as for `text_table`.
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
    found = (f"<{tag}{style}>{escape(cell)}</{tag}>" for cell, style in zip(cells, styles, strict=True))
    return f"<tr>{''.join(found)}</tr>"


def _ends(items: Sequence[Any]) -> list[Any]:
    """All of a short sequence; of a long one both ends, with the number of what is left out between them."""
    half, left_out = MOST_ROWS // 2, len(items) - MOST_ROWS
    return list(items) if left_out <= 1 else [*items[:half], left_out, *items[-half:]]
