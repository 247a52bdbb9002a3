"""How the reference reads what the code says shortly.

Docstrings say "loss, forward: as for `prune`" once for several arguments: each gets a row. Attributes are described by
a comment, behind them or on the lines before: the class gets a table of them.
"""

import re
from functools import cache
from pathlib import Path

import griffe

SECTION = re.compile(r"^(?P<indent> *)Args:\n(?P<body>(?:(?P=indent) +.*\n|\n)+)", re.MULTILINE)
SHARED = re.compile(r"^(?P<indent> +)(?P<names>\w+(?:, \w+)+): (?P<text>.*(?:\n(?P=indent) +.*)*)", re.MULTILINE)


class Docstrings(griffe.Extension):
    """Mends docstrings before they are parsed."""

    def on_object(self, *, obj: griffe.Object, **kwargs) -> None:
        """Called for every object of the package."""
        if obj.docstring is None:
            return
        text = SECTION.sub(_section, obj.docstring.value + "\n").rstrip()
        if obj.is_class and not SECTION.search(text + "\n"):
            text += _attributes(obj)
        obj.docstring.value = text


def _attributes(cls: griffe.Object) -> str:
    """A section on the attributes of a class that have comments."""
    own = [member for member in cls.members.values() if member.is_attribute and not member.docstring and member.lineno]
    described = {member.name: _comment(member) for member in own if not member.name.startswith("_")}
    lines = [f"    {name}: {text}" for name, text in described.items() if text]
    return "\n\nAttributes:\n" + "\n".join(lines) if lines else ""


def _section(found: re.Match[str]) -> str:
    return f"{found['indent']}Args:\n{SHARED.sub(_entries, found['body'])}"


def _entries(found: re.Match[str]) -> str:
    return "\n".join(f"{found['indent']}{name}: {found['text']}" for name in found["names"].split(", "))


def _comment(attribute: griffe.Object) -> str:
    lines = _lines(attribute.filepath)
    behind = re.search(r"  # (.+)$", lines[attribute.endlineno - 1])
    if behind:
        return behind[1]
    above = []
    for line in reversed(lines[: attribute.lineno - 1]):
        if not line.strip().startswith("# "):
            break
        above.insert(0, line.strip()[2:])
    return " ".join(above)


@cache
def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()
