"""Logits distillation: a pruned model learns from the dense one and from the labels."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.hooks import RemovableHandle

from ..data.batches import IGNORED
from ..errors import check_number, require
from ..model.calls import evaluation_mode, model_device, to_device
from ..model.losses import labels_of

# Inputs of the student's loss, which are not passed to the teacher.
_LOSS_INPUTS = ("labels", "num_items_in_batch")


class Distillation:
    """A forward hook on the student that mixes the teacher's loss into the model's own, in training mode only:

        (1 - weight) · loss + weight · T² · KL(softmax(teacher / T) ‖ softmax(student / T))

    (Hinton et al., arXiv 1503.02531). KL is summed over the positions with labels and, like the model's loss, divided
    by `num_items_in_batch` if the Trainer passes it, else by the number of these positions. The teacher, a model with
    the same vocabulary, runs in evaluation mode, without gradients; T > 0, and the weight is in [0, 1].
    """

    def __init__(self, teacher: nn.Module, temperature: float = 2.0, weight: float = 0.5):
        require(isinstance(teacher, nn.Module), f"teacher is a {type(teacher).__name__}: give the dense model")
        check_number("temperature", temperature)
        check_number("teacher_weight", weight)
        require(temperature > 0, "give a number above 0", field="temperature", value=temperature)
        require(0 <= weight <= 1, "give a number from 0 to 1", field="teacher_weight", value=weight)
        self.teacher, self.temperature, self.weight = teacher, temperature, weight
        self._handle: RemovableHandle | None = None

    def attach(self, student: nn.Module) -> None:
        """Add the hook to a student, which must not be the teacher, and move the teacher to the student's device."""
        require(self.teacher is not student, "it is the model that trains; give a dense copy", field="teacher")
        self.detach()
        self.teacher.to(model_device(student))
        self._handle = student.register_forward_hook(self._mix, with_kwargs=True)

    def detach(self) -> None:
        """Remove the hook, if any."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _mix(self, student: nn.Module, args: tuple[Any, ...], inputs: dict[str, Any], output: Any) -> Any:
        if not student.training:
            return output
        usable = all(getattr(output, name, None) is not None for name in ("loss", "logits")) and "labels" in inputs
        text = "distillation adds to a loss that the student computes from labels and logits, and this one returns none"
        fix = "use transformers.Trainer (TRL's SFTTrainer forms no logits) without compute_loss_func or label smoothing"
        require(usable, text, field="teacher", hint=fix)
        teacher_inputs = {name: value for name, value in inputs.items() if name not in _LOSS_INPUTS}
        with torch.no_grad(), evaluation_mode(self.teacher):
            targets = self.teacher(*to_device(args, model_device(self.teacher)), **teacher_inputs).logits
        labels = labels_of(student, {"labels": inputs["labels"]}).to(output.logits.device)
        divergence = self.divergence(output.logits, targets.to(output.logits.device), labels)
        items = inputs.get("num_items_in_batch")
        count = (labels != IGNORED).sum() if items is None else items
        output["loss"] = (1 - self.weight) * output.loss + self.weight * divergence / count
        return output

    def divergence(self, student: Tensor, teacher: Tensor, labels: Tensor) -> Tensor:
        """Return the scalar T² · Σ KL over the labelled positions; logits are [..., V], labels [...], -100 for none."""
        message = f"its logits have shape {list(teacher.shape)}, the student's {list(student.shape)}"
        hint = "give the model that the student was pruned from"
        require(student.shape == teacher.shape, message, field="teacher", hint=hint)
        rows = labels != IGNORED
        student, teacher = (
            functional.log_softmax(logits[rows].float() / self.temperature, -1) for logits in (student, teacher)
        )
        return self.temperature**2 * functional.kl_div(student, teacher, reduction="sum", log_target=True)
