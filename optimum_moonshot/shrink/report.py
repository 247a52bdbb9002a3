"""The target of a smaller model, and its report: vocabulary, removed parts, their predicted loss, the alternatives."""

import dataclasses
import math
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..config import memory_size
from ..errors import MoonshotError, check_number, check_whole, require
from ..reports.json_files import Amount, JsonFields, Size, load_json, save_json
from ..reports.tables import text_table

SHRINK_NAME = "moonshot_shrink.json"  # of a model in which nothing but the vocabulary is smaller
VOCABULARY = "vocabulary"
UNITS = {"parameters": "parameters", "bytes": "bytes", "latency": "seconds"}
# The most parts that an error gives reasons for, and the characters of each reason.
REASONS, LONGEST = 4, 100


@dataclasses.dataclass(frozen=True)
class VocabularyReport(JsonFields):
    """A smaller vocabulary, with which text of the remaining tokens is tokenized as before."""

    source: str  # of the text whose tokens were counted
    tokens: tuple[Size, Size]  # embeddings before and after
    parameters: tuple[Size, Size]  # of the whole model, before and after
    bytes: tuple[Size, Size]
    characters: Size  # of the tenth of the text that was not counted, to measure the cost of other text
    tokens_per_character: tuple[float, float]  # of that tenth, before and with the tokens of the other nine
    seconds: Amount

    def line(self) -> str:
        """One line of text."""
        (old, new), (before, after) = self.tokens, self.tokens_per_character
        cost = f"{before:.4f} → {after:.4f} tokens per character ({after / before - 1:+.1%})"
        return f"vocabulary {old:,} → {new:,} tokens of {self.source}; {cost} on other text"

    def alone(self) -> "ShrinkReport":
        """The report of a model in which nothing else is smaller, without a target.

        Text of the remaining tokens loses nothing.
        """
        (before, after), (old, new) = self.parameters, self.tokens
        chosen = Candidate((VOCABULARY,), {VOCABULARY: old - new}, 0.0, after)
        sizes: dict[str, Any] = {"parameters": self.parameters, "bytes": self.bytes, VOCABULARY: self}
        return ShrinkReport("parameters", after, before, chosen, (), {}, (chosen,), {}, **sizes)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A combination of parts to remove."""

    allowed: tuple[str, ...]  # the dimensions among which it is the best
    removed: dict[str, int]  # dimension → number removed: blocks, or neurons or heads of every block
    loss: float  # predicted
    cost: float  # in the unit of the target


@dataclasses.dataclass(frozen=True)
class ShrinkReport(JsonFields):
    """The decision of `MoonshotPruner.shrink`.

    Losses are divergences from the dense model's predictions, in nats per token, or increases of a caller's loss.
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
    vocabulary: VocabularyReport | None = None  # if it changes

    def line(self) -> str:
        """One line of text."""
        changes = [] if self.vocabulary is None else [self.vocabulary.line()]
        changes += [f"{name} {before} → {after}" for name, (before, after) in self.widths.items() if before != after]
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
        vocabulary = {} if self.vocabulary is None else {VOCABULARY: list(self.vocabulary.tokens)}
        blocks = {"blocks": list(self.blocks), "merged": list(self.merged)}
        parts = {**blocks, "widths": widths, **hidden, **vocabulary}
        return {**target, **parts, "predicted_loss": self.chosen.loss}

    def save(self, folder: Path) -> Path:
        """Write moonshot_shrink.json into a folder."""
        return save_json(self.to_dict(), folder / SHRINK_NAME)

    @classmethod
    def load(cls, folder: str | Path) -> "ShrinkReport":
        """Read a saved report.

        Raises:
            MoonshotError: there is no such file, or it is damaged.
        """
        return load_json(cls.from_dict, "a smaller vocabulary", Path(folder) / SHRINK_NAME)


@dataclasses.dataclass(frozen=True)
class Target:
    """One of "parameters", "bytes" and "latency", with its value.

    A value of at most 1 is a fraction of the dense model's, another a number of parameters, bytes or milliseconds.
    """

    field: str
    value: float
    dense: float | None = None  # cost of the dense model, where the model is smaller already

    @classmethod
    def of(cls, **values: Any) -> "Target":
        """The target by the only keyword argument that is not None, whose name is the kind of the target.

        Raises:
            MoonshotError: no or several values, or a value that is not positive; bytes may also be text such as "2GB".
        """
        given = {name: value for name, value in values.items() if value is not None}
        message = "give exactly one of `parameters`, `bytes` and `latency`"
        require(len(given) == 1, message, field=None if not given else list(given)[-1])
        ((field, value),) = given.items()
        if field == "bytes" and isinstance(value, str):
            return cls(field, memory_size(field, value))
        check_number(field, value)
        hint = "give a fraction of the dense model's, or a number"
        require(0 < value < math.inf, hint, field=field, value=value)
        return cls(field, value)

    @classmethod
    def optional(cls, required: bool, **values: Any) -> "Target | None":
        """Like `of`, but None without a value, unless one is required."""
        return cls.of(**values) if required or any(value is not None for value in values.values()) else None

    @property
    def unit(self) -> str:
        return UNITS[self.field]

    def budget(self, dense: float) -> float:
        """The target in its `unit`, by the cost of the dense model; parameters and bytes are rounded down.

        Raises:
            MoonshotError: the target is not below the dense model's cost.
        """
        dense, timed = self._dense(dense), self.field == "latency"
        budget = self.value * dense if self.value <= 1 else self.value / (1000 if timed else 1)
        budget = budget if timed else math.floor(budget)
        hint = f"the dense model has {self.with_unit(dense)}"
        require(budget < dense, "the model is small enough", field=self.field, value=self.value, hint=hint)
        return budget

    def unreachable(self, least: float, dense: float, refused: Mapping[str, str]) -> MoonshotError:
        """The error for a target below the least reachable cost; `refused` has irreducible parts with the reasons."""
        share = least / self._dense(dense)
        message = f"the smallest configuration has {self.with_unit(least)}, {share:.4f} of the dense model"
        reasons = [f"{name} ({textwrap.shorten(why, LONGEST, placeholder='…')})" for name, why in refused.items()]
        reasons[REASONS:] = [f"{len(reasons) - REASONS} more"] if len(reasons) > REASONS else []
        because = f", since these cannot be reduced: {', '.join(reasons)}" if reasons else ""
        return MoonshotError(message + because, field=self.field, value=self.value, hint="give at least that")

    def _dense(self, cost: float) -> float:
        return cost if self.dense is None else self.dense

    def with_unit(self, cost: float) -> str:
        return f"{1e3 * cost:.4g} ms" if self.field == "latency" else f"{cost:,.0f} {self.unit}"


def check_batch_shape(batch_shape: tuple[int, int]) -> None:
    """Raise `MoonshotError` unless this is a pair of a number of samples and one of tokens."""
    pair = isinstance(batch_shape, tuple | list) and len(batch_shape) == 2
    require(pair, "give samples and tokens", field="batch_shape", value=batch_shape)
    for size in batch_shape:
        check_whole("batch_shape", size, 1)
