"""The report of a decision: the parts of a model to remove, their predicted loss, and the alternatives."""

import dataclasses
from typing import Any

from ..reports.json_files import JsonFields, Size
from ..reports.tables import text_table


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A combination of parts to remove."""

    allowed: tuple[str, ...]  # the dimensions among which it is the best
    removed: dict[str, int]  # dimension → number removed: blocks, or neurons or heads of every block
    loss: float  # predicted increase of the mean calibration loss
    cost: float  # in the unit of the target


@dataclasses.dataclass(frozen=True)
class ShrinkReport(JsonFields):
    """The decision of `MoonshotPruner.shrink`.

    Losses are increases of the mean loss on the calibration data, in nats per token for a language model.
    """

    unit: str  # of the target: "parameters", "bytes" or "seconds"
    budget: float  # in this unit
    dense: float  # cost of the dense model
    chosen: Candidate
    blocks: tuple[int, ...]  # indices of the removed blocks
    widths: dict[str, tuple[int, int]]  # name → neurons or heads of a block before and after
    considered: tuple[Candidate, ...]  # the best of each set of dimensions that reach the budget
    measured: dict[str, float]  # every measurement, by its name
    parameters: tuple[Size, Size]  # before and after
    bytes: tuple[int, int]  # of the parameters
    refused: dict[str, str] = dataclasses.field(default_factory=dict)  # part that cannot be removed → reason
    hidden_size: tuple[int, int] | None = None  # before and after, if it changes
    batch_shape: tuple[int, int] | None = None  # samples and tokens, for a target in seconds
    merged: tuple[int, ...] = ()  # removed blocks that the blocks before them replace by a linear map
    seconds: tuple[float, float] | None = None  # of a forward pass before and after, for a target in seconds

    def line(self) -> str:
        """One line of text."""
        changes = [f"{name} {before} → {after}" for name, (before, after) in self.widths.items() if before != after]
        changes += [] if self.hidden_size is None else ["hidden size {} → {}".format(*self.hidden_size)]
        deleted = [block for block in self.blocks if block not in self.merged]
        changes += [f"without blocks {', '.join(map(str, deleted))}"] if deleted else []
        changes += [f"blocks {', '.join(map(str, self.merged))} merged into those before them"] if self.merged else []
        before, after = self.parameters
        latency = (
            "" if self.seconds is None else "; {:.3g} → {:.3g} ms".format(*(1e3 * seconds for seconds in self.seconds))
        )
        share = f"{before:,} → {after:,} parameters ({after / before:.4f})"
        return f"{share}: {', '.join(changes)}; predicted loss +{self.chosen.loss:.4f}{latency}"

    def table(self, width: int = 120) -> str:
        """A text table with the best of each set of dimensions, the least loss first.

        Args:
            width: characters per line.
        """
        names = list(dict.fromkeys(name for candidate in self.considered for name in candidate.removed))
        headers = ["removing", *(f"{name} removed" for name in names), self.unit, "predicted loss"]
        number = (lambda cost: f"{1e3 * cost:.3f} ms") if self.unit == "seconds" else (lambda cost: f"{cost:,.0f}")
        rows = [
            [
                " + ".join(candidate.allowed),
                *(str(candidate.removed.get(name, 0)) for name in names),
                number(candidate.cost),
                f"+{candidate.loss:.4f}",
            ]
            for candidate in sorted(self.considered, key=lambda candidate: candidate.loss)
        ]
        refused = [f"not removed: {name} ({reason})" for name, reason in self.refused.items()]
        return "\n".join([text_table(headers, rows, width, left=headers[:1]), *refused, self.line()])

    def summary(self) -> dict[str, Any]:
        """The entry in a model's configuration."""
        widths = {name: list(change) for name, change in self.widths.items()}
        target = {"unit": self.unit, "budget": self.budget, "dense": self.dense}
        hidden = {} if self.hidden_size is None else {"hidden_size": list(self.hidden_size)}
        parts = {"blocks": list(self.blocks), "merged": list(self.merged), "widths": widths, **hidden}
        return {**target, **parts, "predicted_loss": self.chosen.loss}
