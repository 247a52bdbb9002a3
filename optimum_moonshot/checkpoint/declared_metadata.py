"""The metadata that a folder declares about its weights: in config.json, the report of the run, and the model card."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard

from ..errors import MoonshotError, check_number, reason, require
from ..objective.allocation_rules import PatternRules
from ..reports.prune_report import REPORT_NAME, PruneReport
from ..reports.record import KEY, PruningRecord
from .card import read_entry
from .weight_files import read_config

CONFIG, CARD = "config.json", "README.md"


@dataclass(frozen=True)
class Declaration:
    """The metadata of one file."""

    source: str  # name of the file
    pattern: str  # "n:m", "unstructured" or "structured"
    sparsity: float | None  # of all pruned layers together
    rules: PatternRules | None = None  # the pattern of every layer; None: `pattern` for all
    layers: Mapping[str, float] = field(default_factory=dict)  # the sparsity of every pruned layer
    shapes: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # d_out, d_in of every pruned layer
    format: str | None = None  # of the checkpoint
    compacted: bool = False  # the zeros were removed

    def line(self) -> str:
        """One line of text."""
        parts = [self.format, self.pattern, None if self.sparsity is None else f"sparsity {self.sparsity:.4f}"]
        parts += ["compacted"] if self.compacted else []
        return f"{self.source}: {', '.join(part for part in parts if part is not None)}"


@dataclass(frozen=True)
class DeclaredMetadata:
    """The declarations of a folder."""

    declarations: Mapping[str, Declaration]  # by their source
    damaged: tuple[str, ...]  # errors of files that cannot be read
    record: PruningRecord | None

    @property
    def compacted(self) -> bool:
        """Whether the zeros were removed from the model, so that none are declared."""
        return any(each.compacted for each in self.declarations.values())

    @property
    def report(self) -> Declaration | None:
        """The declaration of the report, the only one with every layer."""
        return self.declarations.get(REPORT_NAME)


def read_declared_metadata(folder: Path) -> DeclaredMetadata:
    """Read the metadata that a folder declares.

    Raises:
        MoonshotError: there is no config.json, or it is not a JSON object.
    """
    entry, record, damaged = read_config(folder).get(KEY), None, []
    declarations: dict[str, Declaration] = {}

    def read(source: str, reading: Callable[[], Declaration | None]) -> None:
        try:
            declaration = reading()
        except Exception as error:  # the file may contain anything
            named = isinstance(error, MoonshotError) and source in str(error)
            damaged.append(reason(error) if named else f"{source} is damaged: {reason(error)}")
        else:
            declarations.update({} if declaration is None else {source: declaration})

    if entry is not None:
        try:
            record = PruningRecord.from_dict(entry)
        except MoonshotError as error:
            damaged.append(reason(error))
        else:
            read(CONFIG, lambda: _of_record(record))
    if (folder / REPORT_NAME).is_file():
        read(REPORT_NAME, lambda: _of_report(PruneReport.load(folder)))
    if (folder / CARD).is_file():
        read(CARD, lambda: _of_card(folder))
    return DeclaredMetadata(declarations, tuple(damaged), record)


def _of_record(record: PruningRecord) -> Declaration:
    rules, compacted = record.pattern_rules, record.compaction is not None
    return Declaration(CONFIG, _pattern_name(record.config), record.sparsity, rules, compacted=compacted)


def _of_report(report: PruneReport) -> Declaration:
    config = report.config
    settings = (config["pattern"], config.get("sparsity"), config.get("group_size", 1), config.get("allocation"))
    for layer in report.layers:
        check_number(f"sparsity of {layer.name}", layer.sparsity)
        require(len(layer.shape) == 2 and min(layer.shape) > 0, f"shape of {layer.name}: {layer.shape}")
    return Declaration(
        REPORT_NAME,
        _pattern_name(config),
        report.sparsity if report.layers else None,
        PatternRules.parse(
            *settings[:3],
            settings[3] or "uniform",
            {layer.name: layer.target_sparsity for layer in report.layers if layer.target_sparsity is not None},
        ),
        {layer.name: layer.sparsity for layer in report.layers},
        {layer.name: layer.shape for layer in report.layers},
        compacted=report.compaction is not None,
    )


def _of_card(folder: Path) -> Declaration | None:
    """The declaration of a card; None without an entry of this package."""
    card = ModelCard.load(folder / CARD, ignore_metadata_errors=True)
    if KEY not in card.data:
        return None
    entry = read_entry(card)
    sparsity = entry.get("sparsity")
    check_number("moonshot: sparsity", sparsity, optional=True)
    return Declaration(CARD, str(entry["pattern"]), sparsity, format=entry.get("format"))


def _pattern_name(config: Mapping[str, Any]) -> str:
    """The pattern of a configuration; "by layer" if an allocation gives every layer its own."""
    return "by layer" if isinstance(config.get("allocation"), Mapping) else str(config["pattern"])
