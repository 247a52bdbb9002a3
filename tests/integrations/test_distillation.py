"""Distillation under the Trainer: the loss equals its formula, and the student approaches its teacher."""

import pytest
import torch
from masked_models import pruned
from models import make
from torch.nn import functional
from training_runs import samples, trainer

from optimum_moonshot import MoonshotCallback, MoonshotError
from optimum_moonshot.integrations.trainer import Distillation


def test_the_distillation_loss_equals_its_formula():
    student, teacher = pruned().train(), make("llama")
    ids = torch.randint(3, 96, (2, 10))
    labels = ids.clone()
    labels[0, :4] = -100
    plain = student(input_ids=ids, labels=labels)
    distillation = Distillation(teacher, temperature=3.0, weight=0.3)
    distillation.attach(student)
    mixed = student(input_ids=ids, labels=labels).loss
    scaled = student(input_ids=ids, labels=labels, num_items_in_batch=torch.tensor(40)).loss
    student.eval()
    assert torch.equal(student(input_ids=ids, labels=labels).loss, plain.loss)
    distillation.detach()
    student.train()
    assert torch.equal(student(input_ids=ids, labels=labels).loss, plain.loss)
    target = teacher(input_ids=ids).logits
    divergences = []
    for sample in range(2):
        for position in range(9):
            if labels[sample, position + 1] != -100:
                p = functional.softmax(target[sample, position] / 3.0, -1)
                q = functional.softmax(plain.logits[sample, position] / 3.0, -1)
                divergences.append((p * (p / q).log()).sum())
    expected = 0.7 * plain.loss + 0.3 * 9 * torch.stack(divergences).mean()
    assert mixed.item() == pytest.approx(expected.item(), rel=1e-5)
    summed = 0.7 * plain.loss * len(divergences) / 40 + 0.3 * 9 * torch.stack(divergences).sum() / 40
    assert scaled.item() == pytest.approx(summed.item(), rel=1e-5)


def test_a_student_learns_from_its_teacher(tmp_path):
    """On random labels the teacher alone (weight 1) draws the student to the dense model's logits."""
    dense = make("llama")
    inputs = {"input_ids": torch.stack([sample["input_ids"] for sample in samples()])}

    def distance(model):
        with torch.no_grad():
            return (model.eval()(**inputs).logits - dense(**inputs).logits).square().mean().item()

    model = pruned()
    before = distance(model)
    callback = MoonshotCallback(teacher=dense, teacher_weight=1.0)
    trainer(tmp_path, model.train(), callback, max_steps=40, learning_rate=3e-3, weight_decay=0.0).train()
    assert distance(model) < 0.5 * before
    assert not model._forward_hooks and not dense.training


def test_an_unsuitable_teacher_is_refused(tmp_path):
    model = pruned()
    with pytest.raises(MoonshotError, match="it is the model that trains"):
        trainer(tmp_path, model, MoonshotCallback(teacher=model)).train()
    other = make("gpt2")
    other.resize_token_embeddings(100)
    with pytest.raises(MoonshotError, match="its logits have shape"):
        trainer(tmp_path, pruned(), MoonshotCallback(teacher=other)).train()
    smoothed = trainer(tmp_path, pruned(), MoonshotCallback(teacher=make("llama")), label_smoothing_factor=0.1)
    with pytest.raises(MoonshotError, match="distillation adds to a loss that the student computes"):
        smoothed.train()
