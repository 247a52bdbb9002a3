"""The plan of a run: memory at its peaks, calibration passes, seconds, and what does not fit."""

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..reports.json_files import save_json
from ..reports.tables import text_table

PLAN_NAME = "moonshot_plan.json"
DISK, HOST = "disk", "cpu"
Bytes = dict[str, int]  # by place: a device, HOST or DISK


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """Memory at a peak of the run."""

    phase: str  # "rotation", "allocation", "calibration", "solver", "recovery", "writing", "saving"
    where: str  # the block or the layer
    items: dict[str, Bytes]  # by purpose: "caches", "statistics", "activations", …

    def total(self, place: str) -> int:
        """Bytes at a place."""
        return sum(sizes.get(place, 0) for sizes in self.items.values())

    def line(self, place: str) -> str:
        """One line of text, with the largest items first."""
        items = sorted(((sizes.get(place, 0), name) for name, sizes in self.items.items()), reverse=True)
        parts = ", ".join(f"{name} {gib(size)}" for size, name in items if size)
        return f"{gib(self.total(place))} of {place} at {self.where} ({parts})"


@dataclasses.dataclass(frozen=True)
class BlockPlan:
    """One block, or the layers outside of all blocks."""

    name: str
    layers: int
    rounds: int  # groups of layers whose statistics are in memory together
    passes: int  # calibration passes, after the one that fills the caches
    parts: dict[str, int]  # layer → number of parts, for layers solved in several parts of rows or experts
    bytes: Bytes  # at the peak, by place
    seconds: float | None  # None without weights to measure on


@dataclasses.dataclass(frozen=True)
class Overflow:
    """Memory that exceeds a limit."""

    place: str
    phase: str
    where: str
    needs: int  # bytes
    has: int
    hint: str  # the option that fixes it

    def line(self) -> str:
        """One line of text."""
        return (
            f"does not fit: {self.where} ({self.phase}) needs {gib(self.needs)} of {self.place}, which has "
            f"{gib(self.has)}: {self.hint}"
        )


@dataclasses.dataclass(frozen=True, repr=False)
class Plan:
    """The result of `MoonshotPruner.plan`, which prunes nothing."""

    config: dict[str, Any]
    model: dict[str, Any]  # class, parameters, bytes, whether it has weights, offloaded bytes
    data: dict[str, Any]  # num_samples, sequence_length, batches, batch_size
    device: str
    available: Bytes  # free by place when the plan was made, without the model; the disk has no limit
    budget: Bytes  # limits of statistics and caches
    blocks: tuple[BlockPlan, ...]
    snapshots: tuple[Snapshot, ...]  # the peak of every phase, at every place
    seconds: dict[str, float]  # by phase, and "total"; empty without weights
    overflows: tuple[Overflow, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether the run fits in memory."""
        return not self.overflows

    @property
    def places(self) -> list[str]:
        """The places that the run uses."""
        places = dict.fromkeys([self.device, *self.available])
        return [*places, *([DISK] if any(snapshot.total(DISK) for snapshot in self.snapshots) else [])]

    def peak(self, place: str | None = None) -> Snapshot:
        """The snapshot with the most memory, without the model.

        Args:
            place: of the memory; None: the model's device.
        """
        return max(self.snapshots, key=lambda snapshot: snapshot.total(place or self.device))

    @property
    def peaks(self) -> Bytes:
        """The most memory at each place, without the model."""
        return {place: self.peak(place).total(place) for place in self.places}

    def to_dict(self) -> dict[str, Any]:
        """Convert the plan to JSON types."""
        return {**dataclasses.asdict(self), "peaks": self.peaks, "fits": self.fits}

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write JSON to a file, or to moonshot_plan.json in a folder."""
        return save_json(self.to_dict(), path, PLAN_NAME)

    def __repr__(self) -> str:
        """One line: the peaks, the time, and whether it fits."""
        held = ", ".join(f"{place} {gib(size)}" for place, size in self.peaks.items())
        time = f", {duration(self.seconds['total'])}" if self.seconds else ""
        return f"{type(self).__name__}({held}{time}, {'fits' if self.fits else 'does not fit'})"

    def table(self, width: int = 120) -> str:
        """A text table: a row per block, the peak of every phase, and what does not fit.

        Args:
            width: characters of a line of the table.
        """
        headers = ["block", "layers", "rounds", "passes", *self.places, "s"]
        rows = [
            [
                block.name,
                str(block.layers),
                str(block.rounds),
                str(block.passes),
                *(gib(block.bytes.get(place, 0)) for place in self.places),
                "" if block.seconds is None else f"{block.seconds:.1f}",
            ]
            for block in self.blocks
        ]
        return "\n".join([text_table(headers, rows, width), "", *self._summary()])

    def __str__(self) -> str:
        return self.table()

    def _summary(self) -> list[str]:
        model, data = self.model, self.data
        kind = "" if model["weights"] else ", without its weights"
        offloaded = model["offloaded"]
        location = f"{gib(model['bytes'])} on {self.device}"
        if offloaded:
            location = (
                f"{gib(model['bytes'] - offloaded['total'])} on {self.device}, {gib(offloaded['total'])} offloaded to "
                f"{'host memory' if offloaded['place'] == 'cpu' else 'files'}, onloaded block by block"
            )
        lines = [f"model: {model['class']}, {model['parameters']:,} parameters, {location}{kind}"]
        tokens = f" of {data['sequence_length']} tokens" if data["sequence_length"] else ""
        lines += [f"data: {data['num_samples']} samples{tokens} in {data['batches']} batches"] if data else []
        for phase in dict.fromkeys(snapshot.phase for snapshot in self.snapshots):
            of_phase = [snapshot for snapshot in self.snapshots if snapshot.phase == phase]
            peaks = ((place, max(of_phase, key=lambda snapshot: snapshot.total(place))) for place in self.places)
            lines += [f"{phase}: {peak.line(place)}" for place, peak in peaks if peak.total(place)]
        lines += [f"{name}: in {count} parts" for block in self.blocks for name, count in block.parts.items()]
        lines += [f"note: {note}" for note in self.notes]
        if self.seconds:
            lines.append("; ".join(f"{name} {duration(value)}" for name, value in self.seconds.items()))
        lines += [overflow.line() for overflow in self.overflows]
        summary = ", ".join(
            f"{place} {gib(size)}" + (f" of {gib(self.available[place])} free" if place in self.available else "")
            for place, size in self.peaks.items()
        )
        model_part = "the resident part of the model" if offloaded else "the model"
        lines.append(f"{'fits' if self.fits else 'DOES NOT FIT'}: besides {model_part}, at most {summary}")
        return lines


def peaks_of(snapshots: Sequence[Snapshot], places: Sequence[str]) -> tuple[Snapshot, ...]:
    """The peaks of every phase at each place, in the order of the snapshots."""
    peaks: set[int] = set()
    for phase in dict.fromkeys(snapshot.phase for snapshot in snapshots):
        of_phase = [snapshot for snapshot in snapshots if snapshot.phase == phase]
        peaks |= {id(max(of_phase, key=lambda snapshot: snapshot.total(place))) for place in places}
    return tuple(snapshot for snapshot in snapshots if id(snapshot) in peaks)


def gib(size: int) -> str:
    """Format bytes."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def duration(seconds: float) -> str:
    """Format seconds."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
