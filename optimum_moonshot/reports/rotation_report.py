"""What a rotation did to a model."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from ..errors import MoonshotError
from ..files import read_json, replace_file
from .conform import check_fields

ROTATION_NAME = "moonshot_rotation.json"


@dataclasses.dataclass(frozen=True)
class RotationReport:
    """One change of a model's basis, after which it computes what it did.

    The objective is the share of the scores of all weights that pruning would remove: a mean over the matrices, each
    relative to its own sum, weighed as `weighted` says.
    """

    spaces: dict[str, tuple[int, int]]  # name → how many rotations, and their width
    refused: dict[str, str]  # what keeps its basis, with the reason
    objective_before: float
    objective_after: float  # never more than before
    steps: int
    seconds: float
    weighted: str  # "fisher": by each matrix's absolute Fisher loss; "equal"
    untied_bytes: int  # of a head that shared the embeddings' weights before
    rotated: bool = True  # False where no basis is better than the one that was
    notes: tuple[str, ...] = ()
    orders: dict[str, int] = dataclasses.field(default_factory=dict)  # name → neurons that have another order
    scales: dict[str, float] = dataclasses.field(default_factory=dict)  # name → its largest factor over its least
    objective_learned: float | None = None  # before that order; None in reports of earlier versions

    @property
    def rotations(self) -> str:
        """How many of which width, such as "1 of 256, 8 of 64"."""
        counts: dict[int, int] = {}
        for count, width in self.spaces.values():
            counts[width] = counts.get(width, 0) + count
        return ", ".join(f"{count} of {width}" for width, count in sorted(counts.items(), reverse=True))

    @property
    def changes(self) -> str:
        """What was done, such as "1 of 256, 8 of 64, and the neurons of 4 layers in another order"."""
        ordered = f"the neurons of {len(self.orders)} layers in another order" if self.orders else ""
        scaled = f"{len(self.scales)} layers in units of the loss" if self.scales else ""
        return ", and ".join(part for part in (self.rotations, ordered, scaled) if part)

    def line(self) -> str:
        """For people."""
        change = f"objective {self.objective_before:.4f} → {self.objective_after:.4f}"
        kept = "".join(f"; not the {name}: {why}" for name, why in self.refused.items())
        untied = f"; the untied head takes {self.untied_bytes / 2**20:.2f} MiB more" if self.untied_bytes else ""
        notes = "".join(f"; {note}" for note in self.notes)
        done = f"rotations: {self.changes}" if self.rotated else "nothing was rotated"
        ordered = f" ({self.objective_learned:.4f} without that order)" if self.orders else ""
        return f"{done}; {change}{ordered} in {self.steps} steps, {self.seconds:.1f} s{untied}{kept}{notes}"

    def summary(self) -> dict[str, Any]:
        """What a model's configuration keeps of it."""
        names = ("objective_before", "objective_after", "steps", "weighted", "untied_bytes")
        changed = {"neurons_ordered": len(self.orders), "layers_scaled": len(self.scales)}
        changed = {name: count for name, count in changed.items() if count}
        return {"rotations": self.rotations, **changed, **{name: getattr(self, name) for name in names}}

    def to_dict(self) -> dict[str, Any]:
        """As JSON types; `from_dict` is its inverse."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "RotationReport":
        """From what `to_dict` gave.

        Raises:
            MoonshotError: a field that is missing, unknown, or of another type.
        """
        check_fields(cls, values)
        spaces = {name: (count, width) for name, (count, width) in values["spaces"].items()}
        return cls(**{**values, "spaces": spaces, "notes": tuple(values.get("notes", ()))})

    def save(self, folder: str | Path) -> Path:
        """Write moonshot_rotation.json into a folder."""
        path = Path(folder) / ROTATION_NAME
        replace_file(path, json.dumps(self.to_dict(), indent=2, ensure_ascii=False) + "\n")
        return path

    @classmethod
    def load(cls, folder: str | Path) -> "RotationReport":
        """Read what `save` wrote.

        Raises:
            MoonshotError: there is no such file, or it is damaged.
        """
        path = Path(folder) / ROTATION_NAME
        try:
            return cls.from_dict(read_json(path))
        except MoonshotError as error:
            raise MoonshotError(f"{path} is damaged: it is no report of a rotation ({error})") from None
