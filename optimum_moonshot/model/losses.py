"""The calibration loss ℓ_n of every sample, and its gradient at the model's logits.

ℓ_n is the mean cross-entropy of sample n over its labelled positions: the next tokens of a causal language model, the
masked tokens of a masked one, the class of an image. The gradient is computed sample by sample, so that a large
vocabulary needs a float32 copy of one sample's logits only.
"""

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..data.batches import IGNORED
from ..errors import NO_BACKWARD, MoonshotError, Text, require

Loss = Callable[[Any, dict[str, Tensor]], Tensor]  # from a model's output and inputs to its samples' losses, [B]
# Gradients below 6e-8 underflow in float16. A constant factor of the loss cancels in L_F(W)/L_F(0).
HALF_SCALE = 1024.0
MASKED_FRACTION = 0.15


def token_mask(batch: dict[str, Tensor]) -> Tensor | None:
    """Bool [B, T], True for tokens that are not padding; None if every position counts."""
    if "attention_mask" in batch and batch["attention_mask"].ndim == 2:
        return batch["attention_mask"].bool()
    if "input_ids" in batch:
        return torch.ones_like(batch["input_ids"], dtype=torch.bool)
    return None


def is_causal(model: nn.Module) -> bool:
    """Whether the model predicts the next token of its own input."""
    config = getattr(model, "config", None)
    can_generate = getattr(model, "can_generate", lambda: False)()
    return bool(can_generate) and not getattr(config, "is_encoder_decoder", False)


def labels_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Labels aligned with the logits: [B] classes, or [B, T] tokens with -100 at positions without a prediction.

    A causal language model predicts its own input, one position ahead; other models need `labels` ([B] or [B, T]) in
    the batch, or `MoonshotError` is raised.
    """
    if "labels" in batch:
        labels = batch["labels"]
    else:
        message, hint = f"{type(model).__name__} needs them for its loss", "give calibration data with labels, or {}"
        able = is_causal(model) and "input_ids" in batch
        require(able, message, field="labels", hint=Text(hint, NO_BACKWARD))
        mask = token_mask(batch)
        assert mask is not None
        seen = mask & functional.pad(mask[:, :-1], (1, 0), value=True)  # padding predicts nothing
        labels = batch["input_ids"].masked_fill(~seen, IGNORED)
        config = getattr(model, "config", None)
        for kind, field in itertools.product(("image", "video", "audio"), ("id", "index")):
            token = getattr(config, f"{kind}_token_{field}", None)
            if isinstance(token, int):  # a placeholder for features, which is not predicted
                labels = labels.masked_fill(batch["input_ids"] == token, IGNORED)
    if is_causal(model) and labels.ndim == 2:
        labels = functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
    return labels


def labelled(model: nn.Module, batch: dict[str, Tensor], required: bool) -> Tensor:
    """Bool [B], True for samples with a label, by which they have a loss.

    All, if the batch has no labels and these are not `required`, or do not follow from its tokens.
    """
    if "labels" not in batch and not (required and is_causal(model) and "input_ids" in batch):
        first = batch.get("input_ids", next(iter(batch.values())))
        return torch.ones(len(first), dtype=torch.bool)
    labels = labels_of(model, batch)
    return (labels != IGNORED).reshape(len(labels), -1).any(1)


def loss_gradient(
    model: nn.Module, output: Any, batch: dict[str, Tensor], loss: Loss | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The start of the backward pass: a tensor of the graph and the gradient of Σ_n ℓ_n at it; and every ℓ_n, [B].

    `loss` is a function (output, batch) → [B] losses to use instead of the cross-entropy of the output's logits. Raises
    `MoonshotError` for no logits, no labels, or losses that are NaN.
    """
    if loss is not None:
        total = _checked_losses(loss, output, batch)
        differentiable = total.grad_fn is not None
        hint = "compute it from the output, without detach()"
        require(differentiable, "its result has no gradient", field="loss", hint=hint)
        return total.sum(), torch.ones((), dtype=total.dtype, device=total.device), total.detach().float()
    logits, labels = _logits_and_labels(model, output, batch)
    scale = HALF_SCALE if logits.dtype == torch.float16 else 1.0
    gradient, losses = torch.empty_like(logits, requires_grad=False), []
    for sample, label, out in zip(logits.detach(), labels, gradient, strict=True):
        single = sample.float().requires_grad_(True)
        with torch.enable_grad():
            value = _cross_entropy(single, label)
        message = f"the calibration loss is {value.item()}"
        require(bool(torch.isfinite(value)), message, hint="check the model's weights")
        (step,) = torch.autograd.grad(value, single)
        out.copy_(step * scale)
        losses.append(value.detach())
    return logits, gradient, torch.stack(losses)


@torch.no_grad()
def sample_losses(model: nn.Module, output: Any, batch: dict[str, Tensor], loss: Loss | None = None) -> Tensor:
    """ℓ_n of a batch's samples, [B] in float32; the arguments are those of `loss_gradient`."""
    if loss is not None:
        return _checked_losses(loss, output, batch).float()
    logits, labels = _logits_and_labels(model, output, batch)
    return torch.stack([_cross_entropy(sample.float(), label) for sample, label in zip(logits, labels, strict=True)])


def _checked_losses(loss: Loss, output: Any, batch: dict[str, Tensor]) -> Tensor:
    """The result of a user's loss function, [B]."""
    losses, count = loss(output, batch), len(next(iter(batch.values())))
    hint = f"return one loss per sample, a floating-point tensor of shape [{count}]"
    require(isinstance(losses, Tensor), f"it returned a {type(losses).__name__}", field="loss", hint=hint)
    require(losses.shape == (count,), f"it returned shape {list(losses.shape)}", field="loss", hint=hint)
    require(losses.is_floating_point(), f"it returned {losses.dtype}", field="loss", hint=hint)
    wrong = losses.detach()[~torch.isfinite(losses.detach())]
    require(not len(wrong), f"it returned {wrong[:1].tolist()}", field="loss", hint="check it, and the model's weights")
    return losses


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean over one sample's labelled positions."""
    hint = f"leave it out: a label is a token behind another, other than {IGNORED}"
    require(bool((labels != IGNORED).any()), "a calibration sample has no label", hint=hint)
    return functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), ignore_index=IGNORED)


def _logits_and_labels(model: nn.Module, output: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The logits of an output, a tensor or an object with that attribute, and a label for each of their rows."""
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if not isinstance(logits, Tensor):
        hint = Text("load it with a head, or {}", NO_BACKWARD)
        raise MoonshotError(f"{type(model).__name__} returns no logits for the Fisher loss", hint=hint)
    return logits, checked_labels(labels_of(model, batch).to(logits.device), logits)


def checked_labels(labels: Tensor, logits: Tensor) -> Tensor:
    """Labels ([B] or [B, T], -100 at positions without a prediction) as int64, one class for each row of logits."""
    hint = "give one integer class per row of logits, or pass a loss function"
    require(not labels.is_floating_point(), f"labels of {labels.dtype}", hint=hint)
    shapes = f"labels of shape {list(labels.shape)} for logits of shape {list(logits.shape)}"
    require(labels.shape == logits.shape[:-1], shapes, hint=hint)
    labels, classes = labels.long(), logits.shape[-1]
    wrong = labels[(labels != IGNORED) & ((labels < 0) | (labels >= classes))]
    require(not len(wrong), f"label {wrong[:1].tolist()}: the model has the classes 0 to {classes - 1}")
    return labels


def needs_its_text(model: nn.Module, batch: dict[str, Tensor]) -> bool:
    """Whether the data has tokens alone for a model whose decoder writes what its encoder reads."""
    config = getattr(model, "config", None)
    writes = getattr(config, "is_encoder_decoder", False) and getattr(model, "can_generate", lambda: False)()
    given = {"labels", "decoder_input_ids", "decoder_inputs_embeds"} & batch.keys()
    return bool(writes) and "input_ids" in batch and not given


def add_text_labels(batches: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """Add each sample's tokens as its labels: the decoder reproduces the text, as a denoiser such as BART does."""
    masked = [(batch, token_mask(batch)) for batch in batches]
    return [
        {**batch, "labels": batch["input_ids"] if mask is None else batch["input_ids"].masked_fill(~mask, IGNORED)}
        for batch, mask in masked
    ]


def needs_masked_labels(model: nn.Module, batch: dict[str, Tensor]) -> bool:
    """Whether the model predicts masked tokens, by the name of its class, and the data has no labels."""
    return type(model).__name__.endswith("ForMaskedLM") and "labels" not in batch and "input_ids" in batch


def add_masked_labels(batches: list[dict[str, Tensor]], tokenizer: Any, seed: int) -> list[dict[str, Tensor]]:
    """Mask 15% of each sample's tokens (at least one), and add them as labels, as in BERT's training.

    (Devlin et al., arXiv 1810.04805, section 3.1; only the mask token of its three replacements is used.) The batches
    stay unchanged. Raises `MoonshotError` if the tokenizer has no mask token.
    """
    mask_token = getattr(tokenizer, "mask_token_id", None)
    if mask_token is None:
        hint = Text("give calibration data with labels, or {}", NO_BACKWARD)
        raise MoonshotError("the tokenizer has no mask token", hint=hint)
    generator = torch.Generator().manual_seed(seed)
    labelled = []
    for batch in batches:
        ids, mask = batch["input_ids"], token_mask(batch)
        assert mask is not None
        chance = torch.rand(ids.shape, generator=generator).masked_fill(~mask, 2.0)
        chosen = (chance < MASKED_FRACTION) | (chance == chance.amin(1, keepdim=True))
        labels = ids.masked_fill(~chosen, IGNORED)
        labelled.append({**batch, "input_ids": ids.masked_fill(chosen, mask_token), "labels": labels})
    return labelled
