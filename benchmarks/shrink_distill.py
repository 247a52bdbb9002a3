"""Distillation of a smaller model, the same for every method of the comparison in shrink_methods.py."""

import copy
import math

import torch
from torch.nn.functional import kl_div, log_softmax
from transformers import PreTrainedModel

# As the distillation of the package: Adam, cosine decay to 0, one in so many samples held out, as many evaluations.
STEPS, STEP_SAMPLES, RATE, HELDOUT, EVALUATIONS = 300, 8, 5e-4, 8, 10


def distill(student: PreTrainedModel, teacher: PreTrainedModel, batches: list[dict], seed: int) -> None:
    """Train all parameters towards the teacher's distributions; keep the state that is best on the held-out samples.

    Args:
        student: changed in place.
        teacher: the dense model, with the same vocabulary.
        batches: with `input_ids`; one in `HELDOUT` samples, the last, is not trained on.
        seed: of the order of the samples.
    """
    ids = torch.cat([batch["input_ids"] for batch in batches])
    trained, held = ids[: -len(ids) // HELDOUT], ids[-len(ids) // HELDOUT :]
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(student.parameters(), lr=RATE, betas=(0.9, 0.95))
    best, kept = _heldout(student, teacher, held), copy.deepcopy(student.state_dict())
    order = torch.empty(0, dtype=torch.long)
    student.train()
    for step in range(STEPS):
        if len(order) < STEP_SAMPLES:
            order = torch.cat([order, torch.randperm(len(trained), generator=generator)])
        chosen, order = order[:STEP_SAMPLES], order[STEP_SAMPLES:]
        optimizer.param_groups[0]["lr"] = RATE * (1 + math.cos(math.pi * step / STEPS)) / 2
        optimizer.zero_grad()
        _divergence(student, teacher, trained[chosen]).backward()
        optimizer.step()
        if (step + 1) % (STEPS // EVALUATIONS) == 0:
            loss = _heldout(student, teacher, held)
            if loss < best:
                best, kept = loss, copy.deepcopy(student.state_dict())
    student.load_state_dict(kept)
    student.eval()


def _divergence(student: PreTrainedModel, teacher: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        target = log_softmax(teacher(ids, use_cache=False).logits.flatten(0, 1), -1)
    return kl_div(
        log_softmax(student(ids, use_cache=False).logits.flatten(0, 1), -1),
        target,
        reduction="batchmean",
        log_target=True,
    )


@torch.no_grad()
def _heldout(student: PreTrainedModel, teacher: PreTrainedModel, held: torch.Tensor) -> float:
    return float(sum(_divergence(student, teacher, part) * len(part) for part in held.split(STEP_SAMPLES)) / len(held))
