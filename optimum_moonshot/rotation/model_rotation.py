"""A model in another basis, and back."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor

from ..reports.rotation_report import RotationReport
from .basis import Basis
from .spaces import Space


class ModelRotation:
    """The rotations of a model, which may be written into its weights and taken out again.

    Args:
        report: of how they were learned.
        basis: of the model, which keeps its weights as they were while they are rotated.
        rotations: of the spaces, [count, width, width] each; none where no basis is better than the one that was.
        written: whether the model is in the new basis now.
    """

    def __init__(self, report: RotationReport, basis: Basis, rotations: Mapping[Space, Tensor], written: bool):
        self.report, self.basis, self.rotations, self.written = report, basis, rotations, written

    def write(self) -> None:
        """Bring the model into the new basis, unless it is there; if that fails, it is as it was."""
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
        """The weights as they were, bit by bit."""
        if self.written:
            self.basis.restore()
            self.written = False

    def forget(self) -> None:
        """Give the memory of the weights as they were back: the model stays as it is."""
        self.basis.forget()

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Meanwhile the model is in the new basis."""
        before = self.written
        self.write()
        try:
            yield
        finally:
            if not before:
                self.undo()
