"""What the texts of a folder claim about its weights: config.json, the report of the run, and the model card."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard

from ..errors import MoonshotError, check_number, reason, require
from ..objective.allocation_rules import PatternRules
from ..reports.prune_report import REPORT_NAME, PruneReport
from ..reports.record import KEY, PruningRecord
from .card import claims as card_claims
from .weight_files import read_config

CONFIG, CARD = "config.json", "README.md"


@dataclass(frozen=True)
class Claim:
    """What one text says."""

    source: str  # its file
    pattern: str  # "n:m", "unstructured" or "structured"
    sparsity: float | None  # of all pruned layers together
    rules: PatternRules | None = None  # the pattern of every layer; None: `pattern` is what all of them have
    layers: Mapping[str, float] = field(default_factory=dict)  # the sparsity of every pruned layer
    shapes: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # d_out, d_in of every pruned layer
    format: str | None = None  # of the checkpoint
    compacted: bool = False  # the model was made smaller: its zeros are gone

    def line(self) -> str:
        """For people."""
        known = [self.format, self.pattern, None if self.sparsity is None else f"sparsity {self.sparsity:.4f}"]
        known += ["compacted"] if self.compacted else []
        return f"{self.source}: {', '.join(each for each in known if each is not None)}"


@dataclass(frozen=True)
class Claims:
    """Those of a folder, and the texts that are damaged."""

    found: Mapping[str, Claim]  # by their source
    damaged: tuple[str, ...]
    record: PruningRecord | None

    @property
    def compacted(self) -> bool:
        """Whether the model was made smaller, so that no zeros are claimed."""
        return any(claim.compacted for claim in self.found.values())

    @property
    def report(self) -> Claim | None:
        """That of the report, which knows every layer."""
        return self.found.get(REPORT_NAME)


def read_claims(folder: Path) -> Claims:
    """What a folder's texts say of it.

    Raises:
        MoonshotError: there is no config.json, or it is no JSON object.
    """
    entry, record, damaged = read_config(folder).get(KEY), None, []
    found: dict[str, Claim] = {}

    def read(source: str, reading: Callable[[], Claim | None]) -> None:
        try:
            claim = reading()
        except Exception as error:  # anything may stand there
            named = isinstance(error, MoonshotError) and source in str(error)
            damaged.append(reason(error) if named else f"{source} is damaged: {reason(error)}")
        else:
            found.update({} if claim is None else {source: claim})

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
    return Claims(found, tuple(damaged), record)


def _of_record(record: PruningRecord) -> Claim:
    rules, compacted = record.pattern_rules, record.compaction is not None
    return Claim(CONFIG, _named(record.config), record.sparsity, rules, compacted=compacted)


def _of_report(report: PruneReport) -> Claim:
    config = report.config
    settings = (config["pattern"], config.get("sparsity"), config.get("group_size", 1), config.get("allocation"))
    for layer in report.layers:
        check_number(f"sparsity of {layer.name}", layer.sparsity)
        require(len(layer.shape) == 2 and min(layer.shape) > 0, f"shape of {layer.name}: {layer.shape}")
    return Claim(
        REPORT_NAME,
        _named(config),
        report.sparsity if report.layers else None,
        PatternRules.parse(
            *settings[:3],
            settings[3] or "uniform",
            {layer.name: layer.asked for layer in report.layers if layer.asked is not None},
        ),
        {layer.name: layer.sparsity for layer in report.layers},
        {layer.name: layer.shape for layer in report.layers},
        compacted=report.compaction is not None,
    )


def _of_card(folder: Path) -> Claim | None:
    """None for a card without an entry of ours."""
    card = ModelCard.load(folder / CARD, ignore_metadata_errors=True)
    if KEY not in card.data:
        return None
    told = card_claims(card)
    sparsity = told.get("sparsity")
    check_number("moonshot: sparsity", sparsity, optional=True)
    return Claim(CARD, str(told["pattern"]), sparsity, format=told.get("format"))


def _named(config: Mapping[str, Any]) -> str:
    """The pattern of a configuration; "by layer" where an allocation gives every layer its own."""
    return "by layer" if isinstance(config.get("allocation"), Mapping) else str(config["pattern"])
