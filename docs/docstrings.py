"""Griffe extension for docstring conventions of this package.

An entry such as "loss, forward: as for `prune`" becomes one row per argument. Attributes documented by a comment, on
their line or above, become an `Attributes:` section of the class. The arguments of `MoonshotConfig`, which are derived
from the declarations of its fields, become one table per group of the command line's help.
"""

import dataclasses
import inspect
import re
from functools import cache
from pathlib import Path

import griffe

from optimum_moonshot import MoonshotConfig
from optimum_moonshot.options import OPTIONS

SECTION = re.compile(r"^(?P<indent> *)Args:\n(?P<body>(?:(?P=indent) +.*\n|\n)+)", re.MULTILINE)
SHARED = re.compile(r"^(?P<indent> +)(?P<names>\w+(?:, \w+)+): (?P<text>.*(?:\n(?P=indent) +.*)*)", re.MULTILINE)
GROUP = re.compile(r"^(?:Args:\n)? {4}\[(\w+)\]$", re.MULTILINE)


class Docstrings(griffe.Extension):
    """Expands docstrings before they are parsed."""

    def on_object(self, *, obj: griffe.Object, **kwargs) -> None:
        """Griffe's hook, called for every object of the package."""
        if obj.docstring is None:
            return
        if obj.path == "optimum_moonshot.config.MoonshotConfig":
            obj.docstring.value = grouped(inspect.getdoc(MoonshotConfig))
            for parameter in obj.members["__init__"].parameters:
                if parameter.name in OPTIONS:  # griffe has the declaration
                    default = OPTIONS[parameter.name].default
                    parameter.default = "{}" if default is dataclasses.MISSING else repr(default)
            return
        text = SECTION.sub(_section, obj.docstring.value + "\n").rstrip()
        if obj.is_class and not SECTION.search(text + "\n"):
            text += _attributes(obj)
        obj.docstring.value = text


def grouped(docstring: str) -> str:
    """Divide the `Args:` of `MoonshotConfig` into one section per group."""
    return GROUP.sub(r"\nArgs: \1", docstring)


def _attributes(cls: griffe.Object) -> str:
    """The `Attributes:` section of a class, from comments."""
    described = {
        member.name: _comment(member)
        for member in cls.members.values()
        if member.is_attribute and not member.docstring and member.lineno and not member.name.startswith("_")
    }
    lines = [f"    {name}: {text}" for name, text in described.items() if text]
    return "\n\nAttributes:\n" + "\n".join(lines) if lines else ""


def _section(match: re.Match[str]) -> str:
    return f"{match['indent']}Args:\n{SHARED.sub(_entries, match['body'])}"


def _entries(match: re.Match[str]) -> str:
    return "\n".join(f"{match['indent']}{name}: {match['text']}" for name in match["names"].split(", "))


def _comment(attribute: griffe.Object) -> str:
    lines = _lines(attribute.filepath)
    trailing = re.search(r"  # (.+)$", lines[attribute.endlineno - 1])
    if trailing:
        return trailing[1]
    above = []
    for line in reversed(lines[: attribute.lineno - 1]):
        if not line.strip().startswith("# "):
            break
        above.insert(0, line.strip()[2:])
    return " ".join(above)


@cache
def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()
