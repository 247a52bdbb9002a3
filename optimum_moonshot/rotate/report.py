"""The report of a rotation."""

import dataclasses
from pathlib import Path
from typing import Any

from ..reports.json_files import Amount, Count, JsonFields, load_json, save_json

ROTATION_NAME = "moonshot_rotation.json"


@dataclasses.dataclass(frozen=True)
class RotationReport(JsonFields):
    """The report of a change of basis that preserves the model's function.

    The objective is the fraction of a matrix's scores that pruning would remove, averaged over the matrices with the
    weights that `weighted` names.
    """

    spaces: dict[str, tuple[int, int]]  # name → number and width of rotations
    refused: dict[str, str]  # name → reason why it is not rotated
    objective_before: float
    objective_learned: float  # before the channel permutations
    objective_after: float  # never more than before
    steps: Count
    seconds: Amount
    weighted: str  # "fisher": by each matrix's absolute Fisher loss; "equal"
    untied_bytes: Count  # of a head that was tied to the embeddings
    rotated: bool = True  # False if no basis is better than the original
    notes: tuple[str, ...] = ()
    permuted: dict[str, int] = dataclasses.field(default_factory=dict)  # name → number of permuted channels
    scales: dict[str, float] = dataclasses.field(default_factory=dict)  # name → maximum / minimum of its factors

    @property
    def rotations(self) -> str:
        """The numbers of rotations by width, such as "1 of 256, 8 of 64"."""
        counts: dict[int, int] = {}
        for count, width in self.spaces.values():
            counts[width] = counts.get(width, 0) + count
        return ", ".join(f"{count} of {width}" for width, count in sorted(counts.items(), reverse=True))

    @property
    def changes(self) -> str:
        """All changes, such as "1 of 256, 8 of 64, and channel permutations of 4 layers"."""
        permuted = f"channel permutations of {len(self.permuted)} layers" if self.permuted else ""
        scaled = f"{len(self.scales)} layers in units of the loss" if self.scales else ""
        return ", and ".join(change for change in (self.rotations, permuted, scaled) if change)

    def line(self) -> str:
        """Summarize the rotation in one line of text."""
        change = f"objective {self.objective_before:.4f} → {self.objective_after:.4f}"
        refused = "".join(f"; not the {name}: {why}" for name, why in self.refused.items())
        untied = f"; the untied head takes {self.untied_bytes / 2**20:.2f} MiB more" if self.untied_bytes else ""
        notes = "".join(f"; {note}" for note in self.notes)
        head = f"rotations: {self.changes}" if self.rotated else "nothing was rotated"
        permuted = f" ({self.objective_learned:.4f} without the permutations)" if self.permuted else ""
        return f"{head}; {change}{permuted} in {self.steps} steps, {self.seconds:.1f} s{untied}{refused}{notes}"

    def summary(self) -> dict[str, Any]:
        """The entry in a model's configuration."""
        names = ("objective_before", "objective_after", "steps", "weighted", "untied_bytes")
        changed = {"layers_permuted": len(self.permuted), "layers_scaled": len(self.scales)}
        changed = {name: count for name, count in changed.items() if count}
        return {"rotations": self.rotations, **changed, **{name: getattr(self, name) for name in names}}

    def save(self, folder: str | Path) -> Path:
        """Write moonshot_rotation.json into a folder."""
        return save_json(self.to_dict(), Path(folder) / ROTATION_NAME)

    @classmethod
    def load(cls, folder: str | Path) -> "RotationReport":
        """Read a saved report.

        Raises:
            MoonshotError: there is no such file, or it is damaged.
        """
        return load_json(cls.from_dict, "a rotation", Path(folder) / ROTATION_NAME)
