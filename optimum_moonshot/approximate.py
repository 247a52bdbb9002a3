"""Texts of numbers that are equal up to a tolerance, which they state.

The parts of a run are texts. A model's outputs depend on the device and on the number of threads by rounding; rounded
digits would still differ for a number between two of them.
"""

import math
from collections.abc import Sequence

_PREFIX = "within "


def approximate(numbers: Sequence[float], tolerance: float) -> str:
    """A text that equals another one whose difference has a norm of at most `tolerance` times its norm."""
    return f"{_PREFIX}{tolerance:g}: " + " ".join(f"{number:.6g}" for number in numbers)


def same_text(text: str | None, other: str | None) -> bool:
    """Whether two texts are equal, those of `approximate` up to their tolerance."""
    if text == other or text is None or other is None:
        return text == other
    head, _, numbers = text.partition(": ")
    other_head, _, other_numbers = other.partition(": ")
    if head != other_head or not head.startswith(_PREFIX):
        return False
    ours, theirs = ([float(number) for number in line.split()] for line in (numbers, other_numbers))
    tolerance = float(head.removeprefix(_PREFIX))
    return len(ours) == len(theirs) and math.dist(ours, theirs) <= tolerance * math.hypot(*theirs)
