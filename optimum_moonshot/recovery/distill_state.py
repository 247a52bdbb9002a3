"""The state of a distillation, from which a killed run continues bit for bit."""

import math
from dataclasses import dataclass, field, fields
from typing import Any

from ..distributed.ranks import Ranks
from ..results.store import ResultStore
from .masters import Optimizer, StudentModel
from .student import Tensors
from .tuning import PATIENCE

_PARTS = ("value", "first", "second", "best")  # prefixes of the names of its tensors


@dataclass
class DistillState:
    """Where the training is. Losses are held-out divergences from the teacher, in nats per row of logits."""

    first: float  # of the pruned weights
    best: float
    last: float  # of the latest evaluation
    samples: int  # of a pass, at most
    recomputes: bool = False  # whether blocks compute their activations again in the backward pass
    step: int = 0  # steps taken; the next samples and learning rate follow from it
    since: int = 0  # evaluations since the best
    kept: Tensors = field(default_factory=dict)  # masters of the best state, in host memory

    def evaluated(self, loss: float, student: StudentModel) -> None:
        """Note a loss of the student; a new best state is copied."""
        self.last, self.since = loss, self.since + 1
        if loss < self.best:
            self.best, self.since, self.kept = loss, 0, student.snapshot()

    @property
    def stopped(self) -> bool:
        """Whether the loss no longer falls, or is not finite."""
        return self.since >= PATIENCE or not math.isfinite(self.last)

    def save(self, store: ResultStore, student: StudentModel, optimizer: Optimizer) -> None:
        """Store the state in the run's folder, if there is one."""
        if store.folder is not None:
            parts = zip(_PARTS, (student.snapshot(), *optimizer.moments(), self.kept), strict=True)
            tensors = {f"{part} {name}": tensor for part, values in parts for name, tensor in values.items()}
            store.put_training(tensors, self._numbers())

    def _numbers(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name != "kept"}

    @classmethod
    def resumed(
        cls, store: ResultStore, ranks: Ranks, student: StudentModel, optimizer: Optimizer
    ) -> "DistillState | None":
        """The state of an interrupted run in all processes, of which the first has the folder; None without one."""
        saved = store.training() if ranks.is_main else None
        numbers = ranks.broadcast_object(None if saved is None else saved[1])
        if numbers is None:
            return None
        state, tensors = cls(**numbers), {} if saved is None else saved[0]

        def part(prefix: str) -> Tensors:
            return {
                name: ranks.broadcast(tensors.get(f"{prefix} {name}"), value.to("meta"), 0)
                for name, value in student.named()
            }

        student.restore(part("value"))
        optimizer.restore(part("first"), part("second"), state.step)
        state.kept = part("best")
        return state
