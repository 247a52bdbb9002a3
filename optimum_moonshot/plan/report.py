"""The plan of a run: memory at its peaks, calibration passes, seconds, and everything that does not fit."""

import dataclasses
import os
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from ..reports.json_files import save_json

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
        listed = ", ".join(f"{name} {gib(size)}" for size, name in items if size)
        return f"{self.phase}: {gib(self.total(place))} of {place} at {self.where} ({listed})"


@dataclasses.dataclass(frozen=True)
class BlockPlan:
    """The passes over the calibration data at one block, or for the layers outside of all blocks."""

    name: str
    rounds: int  # groups of layers whose statistics are in memory together
    passes: int  # after the one that fills the caches
    parts: dict[str, int]  # layer → number of slices of its rows or experts, for layers that exceed the memory


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
        needed = f"{self.where} ({self.phase}) needs {gib(self.needs)} of {self.place}"
        return f"does not fit: {needed}, which has {gib(self.has)}: {self.hint}"


@dataclasses.dataclass(frozen=True, repr=False)
class Plan:
    """The result of `MoonshotPruner.plan`, which prunes nothing."""

    config: dict[str, Any]
    model: dict[str, Any]  # class, parameters, bytes, whether it has weights, offloaded bytes
    data: dict[str, Any]  # num_samples, sequence_length, batches, batch_size
    device: str
    available: Bytes  # free by place when the plan was made, without the model; the disk has no limit
    blocks: tuple[BlockPlan, ...]  # in the model's order; layers outside of all blocks are last
    snapshots: tuple[Snapshot, ...]  # the peak of every phase, at every place
    seconds: dict[str, float]  # by phase, and "total"; empty without weights
    overflows: tuple[Overflow, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether the run fits in memory."""
        return not self.overflows

    @property
    def peaks(self) -> Bytes:
        """The most memory at each place that the run uses, without the model."""
        places = dict.fromkeys([self.device, *self.available, DISK])
        most = {place: self.peak(place).total(place) for place in places}
        return {place: size for place, size in most.items() if size or place != DISK}

    def peak(self, place: str | None = None) -> Snapshot:
        """The snapshot with the most memory, without the model.

        Args:
            place: of the memory; None: the model's device.
        """
        return max(self.snapshots, key=lambda snapshot: snapshot.total(place or self.device))

    def to_dict(self) -> dict[str, Any]:
        """Convert the plan to JSON types."""
        return {**dataclasses.asdict(self), "peaks": self.peaks, "fits": self.fits}

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write JSON to a file, or to moonshot_plan.json in a folder."""
        return save_json(self.to_dict(), path, PLAN_NAME)

    def __repr__(self) -> str:
        """One line: the peaks, the time, and whether it fits."""
        peaks = ", ".join(f"{place} {gib(size)}" for place, size in self.peaks.items())
        time = f", {duration(self.seconds['total'])}" if self.seconds else ""
        return f"Plan({peaks}{time}, {'fits' if self.fits else 'does not fit'})"

    def __str__(self) -> str:
        """The model and the data, the passes at the blocks, the peak and the time of every phase, the verdict."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        model, data = self.model, self.data
        weights = "" if model["weights"] else ", without its weights"
        yield f"model: {model['class']}, {model['parameters']:,} parameters, {self._location()}{weights}"
        tokens = f" of {data['sequence_length']} tokens" if data["sequence_length"] else ""
        yield f"data: {data['num_samples']} samples{tokens} in {data['batches']} batches"
        for (rounds, passes), equal in groupby(self.blocks, lambda block: (block.rounds, block.passes)):
            names = [block.name for block in equal]
            first_to_last = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
            yield f"{first_to_last}: passes {passes}, groups of layers {rounds}"
        yield from (f"{name}: in {count} slices" for block in self.blocks for name, count in block.parts.items())
        for snapshots in _by_phase(self.snapshots):
            peaks = ((place, max(snapshots, key=lambda snapshot: snapshot.total(place))) for place in self.peaks)
            yield from (peak.line(place) for place, peak in peaks if peak.total(place))
        yield from (f"note: {note}" for note in self.notes)
        if self.seconds:
            yield "; ".join(f"{name} {duration(value)}" for name, value in self.seconds.items())
        yield from (overflow.line() for overflow in self.overflows)
        resident = "the resident part of the model" if model["offloaded"] else "the model"
        sizes = [
            f"{place} {gib(size)}" + (f" of {gib(self.available[place])} free" if place in self.available else "")
            for place, size in self.peaks.items()
        ]
        yield f"{'fits' if self.fits else 'DOES NOT FIT'}: besides {resident}, at most {', '.join(sizes)}"

    def _location(self) -> str:
        """The places of the model."""
        size, blocks = self.model["bytes"], self.model["offloaded"]
        if not blocks:
            return f"{gib(size)} on {self.device}"
        place = "host memory" if blocks["place"] == HOST else "files"
        resident = f"{gib(size - blocks['total'])} on {self.device}"
        return f"{resident}, {gib(blocks['total'])} offloaded to {place}, onloaded block by block"


def _by_phase(snapshots: Sequence[Snapshot]) -> list[list[Snapshot]]:
    phases = dict.fromkeys(snapshot.phase for snapshot in snapshots)
    return [[snapshot for snapshot in snapshots if snapshot.phase == phase] for phase in phases]


def peaks_of(snapshots: Sequence[Snapshot], places: Sequence[str]) -> tuple[Snapshot, ...]:
    """The peaks of every phase at each place, in the order of the snapshots."""
    peaks = {id(max(s, key=lambda snapshot: snapshot.total(place))) for s in _by_phase(snapshots) for place in places}
    return tuple(snapshot for snapshot in snapshots if id(snapshot) in peaks)


def gib(size: int) -> str:
    """Format bytes."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def duration(seconds: float) -> str:
    """Format seconds."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
