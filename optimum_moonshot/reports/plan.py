"""What a run would take, before it: bytes by place and moment, passes over the data, seconds; what would not fit."""

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..files import replace_file
from .tables import html_table, text_table

PLAN_NAME = "moonshot_plan.json"
DISK = "disk"
Bytes = dict[str, int]  # by place: a device, "cpu" or "disk"


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """A point of the run at which memory is at its most."""

    phase: str  # "rotation", "allocation", "calibration", "solver", "recovery", "writing", "saving"
    where: str  # the block or the layer
    items: dict[str, Bytes]  # what takes it: "caches", "statistics", "activations", …

    def total(self, place: str) -> int:
        """Bytes at a place."""
        return sum(found.get(place, 0) for found in self.items.values())


@dataclasses.dataclass(frozen=True)
class BlockPlan:
    """One block, or the layers outside of all, as `name` says."""

    name: str
    layers: int
    rounds: int  # of layers whose statistics are in memory together
    passes: int  # of all samples through it, after the one that fills the caches
    parts: dict[str, int]  # layer → in how many parts of rows or experts it is solved, where it is not whole
    bytes: Bytes  # at its peak, by place
    seconds: float | None  # None without weights to measure on


@dataclasses.dataclass(frozen=True)
class Overflow:
    """What would not fit."""

    place: str
    phase: str
    where: str
    needs: int  # bytes
    has: int
    mend: str  # which option mends it

    def line(self) -> str:
        """For people."""
        return (
            f"does not fit: {self.where} ({self.phase}) needs {gib(self.needs)} of {self.place}, which has "
            f"{gib(self.has)}: {self.mend}"
        )


@dataclasses.dataclass(frozen=True, repr=False)
class Plan:
    """What `MoonshotPruner.plan` found; nothing was pruned."""

    config: dict[str, Any]
    model: dict[str, Any]  # class, parameters, bytes; whether its weights are there; "away": bytes that are elsewhere
    data: dict[str, Any]  # num_samples, sequence_length, batches, batch_size
    device: str
    room: Bytes  # free by place when the plan was made, without the model; of the disk None asks nobody
    budget: Bytes  # what statistics and caches may take
    blocks: tuple[BlockPlan, ...]
    moments: tuple[Snapshot, ...]  # the most of every phase, at every place
    seconds: dict[str, float]  # by phase, and their total; empty without weights
    overflows: tuple[Overflow, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether everything does."""
        return not self.overflows

    @property
    def places(self) -> list[str]:
        """Where something is held."""
        found = dict.fromkeys([self.device, *self.room])
        return [*found, *([DISK] if any(moment.total(DISK) for moment in self.moments) else [])]

    def peak(self, place: str | None = None) -> Snapshot:
        """The moment at which the most is held, beside the model.

        Args:
            place: where; None is the model's device.
        """
        return max(self.moments, key=lambda moment: moment.total(place or self.device))

    @property
    def peaks(self) -> Bytes:
        """The most that is held at each place, beside the model."""
        return {place: self.peak(place).total(place) for place in self.places}

    def to_dict(self) -> dict[str, Any]:
        """As JSON types."""
        return {**dataclasses.asdict(self), "peaks": self.peaks, "fits": self.fits}

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write JSON to a file, or to moonshot_plan.json in a folder."""
        path = Path(path)
        path = path / PLAN_NAME if path.is_dir() else path
        replace_file(path, json.dumps(self.to_dict(), indent=2, ensure_ascii=False) + "\n")
        return path

    def __repr__(self) -> str:
        """One line: the peaks, the time, and whether it fits."""
        held = ", ".join(f"{place} {gib(size)}" for place, size in self.peaks.items())
        time = f", {duration(self.seconds['total'])}" if self.seconds else ""
        return f"{type(self).__name__}({held}{time}, {'fits' if self.fits else 'does not fit'})"

    def table(self, width: int = 120) -> str:
        """For people: a row per block, the peak of every phase, and what would not fit.

        Args:
            width: characters of a line of the table.
        """
        return "\n".join([text_table(*self._cells(), width), "", *self._summary()])

    def __str__(self) -> str:
        return self.table()

    def _repr_html_(self) -> str:
        """The same for a notebook."""
        return html_table(*self._cells(), self._summary())

    def _cells(self) -> tuple[list[str], list[list[str]]]:
        headers = ["block", "layers", "rounds", "passes", *self.places, "s"]
        rows = [
            [
                each.name,
                str(each.layers),
                str(each.rounds),
                str(each.passes),
                *(gib(each.bytes.get(place, 0)) for place in self.places),
                "" if each.seconds is None else f"{each.seconds:.1f}",
            ]
            for each in self.blocks
        ]
        return headers, rows

    def _summary(self) -> list[str]:
        model, data = self.model, self.data
        kind = "" if model["weights"] else ", without its weights"
        away = model["away"]
        there = f"{gib(model['bytes'])} on {self.device}"
        if away:
            there = (
                f"{gib(model['bytes'] - away['total'])} on {self.device}, {gib(away['total'])} in "
                f"{'host memory' if away['place'] == 'cpu' else 'files'}, of which a block at a time comes to it"
            )
        lines = [f"model: {model['class']}, {model['parameters']:,} parameters, {there}{kind}"]
        tokens = f" of {data['sequence_length']} tokens" if data["sequence_length"] else ""
        lines += [f"data: {data['num_samples']} samples{tokens} in {data['batches']} batches"] if data else []
        for phase in dict.fromkeys(moment.phase for moment in self.moments):
            lines += [self._peak_line(phase, place) for place in self.places if self._most(phase, place).total(place)]
        lines += [f"{name}: in {count} parts" for each in self.blocks for name, count in each.parts.items()]
        lines += [f"note: {note}" for note in self.notes]
        if self.seconds:
            lines.append("; ".join(f"{name} {duration(value)}" for name, value in self.seconds.items()))
        lines += [misfit.line() for misfit in self.overflows]
        peaks = ", ".join(
            f"{place} {gib(size)}" + (f" of {gib(self.room[place])} free" if place in self.room else "")
            for place, size in self.peaks.items()
        )
        beside = "what is always there of the model" if away else "the model"
        lines.append(f"{'fits' if self.fits else 'DOES NOT FIT'}: beside {beside}, at most {peaks}")
        return lines

    def _most(self, phase: str, place: str) -> Snapshot:
        return max((m for m in self.moments if m.phase == phase), key=lambda moment: moment.total(place))

    def _peak_line(self, phase: str, place: str) -> str:
        moment = self._most(phase, place)
        found = sorted(((sizes.get(place, 0), name) for name, sizes in moment.items.items()), reverse=True)
        parts = ", ".join(f"{name} {gib(size)}" for size, name in found if size)
        return f"{phase}: {gib(moment.total(place))} of {place} at {moment.where} ({parts})"


def most_of(moments: Sequence[Snapshot], places: Sequence[str]) -> tuple[Snapshot, ...]:
    """Of every phase, the moments that hold the most at some place.

    Args:
        moments: of a run, in their order.
        places: devices, and the disk.
    """
    chosen: dict[int, Snapshot] = {}
    for phase in dict.fromkeys(moment.phase for moment in moments):
        of_phase = [moment for moment in moments if moment.phase == phase]
        for place in places:
            found = max(of_phase, key=lambda moment: moment.total(place))
            chosen[id(found)] = found
    return tuple(moment for moment in moments if id(moment) in chosen)


def gib(size: int) -> str:
    """Bytes for people."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def duration(seconds: float) -> str:
    """Seconds for people."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
