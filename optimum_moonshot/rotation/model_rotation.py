"""The rotation of a model as a whole, written into its weights or undone."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor

from ..reports.rotation_report import RotationReport
from .basis import Basis
from .spaces import Space


class ModelRotation:
    """The rotations of a model, which can be written into its weights and undone.

    Args:
        report: on how they were learned.
        basis: of the model, which stores the dense weights while they are rotated.
        rotations: by space, [count, width, width] each; empty if no basis improves the objective.
        written: whether the weights are in the new basis.
    """

    def __init__(self, report: RotationReport, basis: Basis, rotations: Mapping[Space, Tensor], written: bool):
        self.report, self.basis, self.rotations, self.written = report, basis, rotations, written

    def write(self) -> None:
        """Write the new basis into the weights, unless it is written; on failure, restore the model."""
        if self.written or not self.rotations:
            return
        try:
            self.basis.keep()
            self.basis.write(self.rotations)
        except BaseException:
            self.basis.restore()
            raise
        self.written = True

    def undo(self) -> None:
        """Restore the dense weights, bit by bit."""
        if self.written:
            self.basis.restore()
            self.written = False

    def forget(self) -> None:
        """Free the copies of the dense weights; the model keeps its basis."""
        self.basis.forget()

    @contextmanager
    def applied(self) -> Iterator[None]:
        """A context in which the weights are in the new basis."""
        before = self.written
        self.write()
        try:
            yield
        finally:
            if not before:
                self.undo()
