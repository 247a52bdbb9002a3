"""The calibration loss ℓ_n of every sample, and its gradient at the model's logits.

ℓ_n is the mean cross-entropy of sample n over its labelled positions: the next tokens of a causal language model, the
masked tokens of a masked one, the class of an image. The gradient is computed sample by sample, so that a large
vocabulary needs a float32 copy of one sample's logits only.

For a model without a head, it is half the squared change of its output (`OutputLoss`).
"""

import hashlib
import itertools
import re
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from ..data.batches import IGNORED, Batch, sample_digests
from ..errors import NO_BACKWARD, MoonshotError, require
from .embeddings import Pooling, find_pooling, output_values

Loss = Callable[[Any, Batch], Tensor]  # from a model's output and inputs to its samples' losses, [B]
# Gradients below 6e-8 underflow in float16. A constant factor of the loss cancels in L_F(W)/L_F(0).
HALF_SCALE = 1024.0
MASKED_FRACTION = 0.15
# Classes that `Divergence` distinguishes, and the least probability of all others together.
TOP, FLOOR = 64, 1e-6
_WITH_HEAD = re.compile("For[A-Z]")  # BertForMaskedLM, not BertModel


def token_mask(batch: Batch) -> Tensor | None:
    """Bool [B, T], True for tokens that are not padding; None if every position counts."""
    if "attention_mask" in batch and batch["attention_mask"].ndim == 2:
        return batch["attention_mask"].bool()
    if "input_ids" in batch:
        return torch.ones_like(batch["input_ids"], dtype=torch.bool)
    return None


def has_head(cls: type[nn.Module]) -> bool:
    """Whether a class of models returns predictions; True for any class that is not of transformers."""
    if not issubclass(cls, PreTrainedModel):
        return True
    return any(_WITH_HEAD.search(base.__name__) for base in cls.__mro__) or bool(cls.can_generate())


class OutputLoss:
    """ℓ_n = ½‖y_n(W) − y_n(Ŵ)‖² / ‖y_n(Ŵ)‖² of the output y of a model without a head, Ŵ its dense weights.

    At Ŵ the gradient of a squared change is zero, and its Hessian is the Gauss–Newton matrix JᵀJ of the output. One
    backward pass per sample estimates it: with random signs r, E[r rᵀ] = I, the gradient g = Jᵀ r of ⟨r, y⟩ has
    E[g gᵀ] = JᵀJ. So the result has the gradient of ⟨r, y⟩, without the constant factor, while its value is ℓ_n, or 0
    unless the dense outputs were remembered. The signs follow from the seed and the sample's content.
    """

    def __init__(self, model: nn.Module, seed: int):
        self.model, self.seed = model, seed
        self.dense: Batch = {}  # y_n(Ŵ) in host memory, by the digest of the sample

    @cached_property
    def pooling(self) -> Pooling:
        return find_pooling(self.model)

    def __str__(self) -> str:
        return f"squared change of the model's {self.pooling} (Gauss–Newton matrix by random signs)"

    def __call__(self, output: Any, batch: Batch) -> Tensor:
        return torch.stack([self._loss(digest, values) for digest, values in self._samples(output, batch)])

    def _loss(self, digest: str, values: Tensor) -> Tensor:
        # As in `loss_gradient`: pooling divides the gradient of each token by the number of tokens.
        scale = HALF_SCALE if self.pooling.modes and next(self.model.parameters()).dtype == torch.float16 else 1.0
        product = scale * (values.float() * random_signs(values.shape, f"{self.seed} {digest}").to(values.device)).sum()
        loss = product - product.detach()
        if digest in self.dense:
            dense = self.dense[digest].to(values.device)
            loss = loss + 0.5 * relative_distance(values.detach().flatten(), dense.flatten())
        return loss

    def remember(self, output: Any, batch: Batch) -> None:
        """Keep the outputs of the dense model on a batch."""
        self.dense.update((digest, values.detach().cpu()) for digest, values in self._samples(output, batch))

    def _samples(self, output: Any, batch: Batch) -> Iterator[tuple[str, Tensor]]:
        """The digest of every sample, and its output without padding, [D] or [T, D]."""
        values, mask = pooled_output(self.model, output, batch, self.pooling)
        for index, digest in enumerate(sample_digests(batch)):
            yield digest, values[index] if mask is None else values[index][mask[index]]


class Divergence:
    """ℓ_n = KL(dense ‖ changed) of a model's predictions, the mean over the labelled positions of sample n, in nats.

    The classes are the `TOP` most probable ones of the dense model, and all others together: a lower bound of the
    divergence over all classes. On equal tokens it has far less variance than a difference of cross-entropies, whose
    standard deviation for a token is about √(2 KL): 0.3 nats where the mean is 0.05.
    """

    def __init__(self, model: nn.Module):
        self.model = model
        self.dense: dict[str, tuple[Tensor, Tensor]] = {}  # by sample: classes and log-probabilities  [T, TOP]

    def __call__(self, output: Any, batch: Batch) -> Tensor:
        losses = []
        for digest, logits in self._samples(output, batch):
            classes, dense = (tensor.to(logits.device) for tensor in self.dense[digest])
            changed = _log_probabilities(logits, classes)
            other, others = (torch.log1p(-each.exp().sum(-1).clamp(max=1 - FLOOR)) for each in (dense, changed))
            terms = (dense.exp() * (dense - changed)).sum(-1) + other.exp() * (other - others)
            losses.append(terms.mean().clamp(min=0.0))
        return torch.stack(losses)

    def remember(self, output: Any, batch: Batch) -> None:
        """Keep the predictions of the dense model on a batch."""
        for digest, logits in self._samples(output, batch):
            classes = logits.topk(min(TOP, logits.shape[-1])).indices
            values = _log_probabilities(logits, classes).cpu()
            message, hint = "the predictions of the dense model contain NaN or infinite values", "check its weights"
            require(bool(torch.isfinite(values).all()), message, hint=hint)
            self.dense[digest] = classes.cpu(), values

    def _samples(self, output: Any, batch: Batch) -> Iterator[tuple[str, Tensor]]:
        """The digest of every sample, and the logits of its labelled positions, [T, classes]."""
        logits_and_labels = _logits_and_labels(self.model, output, batch, None)
        assert logits_and_labels is not None
        for digest, logits, labels in zip(sample_digests(batch), *logits_and_labels, strict=True):
            yield digest, logits.reshape(-1, logits.shape[-1])[labels.reshape(-1) != IGNORED]


def _log_probabilities(logits: Tensor, classes: Tensor) -> Tensor:
    logits = logits.float()
    return logits.gather(-1, classes) - logits.logsumexp(-1, keepdim=True)


def relative_distance(values: Tensor, others: Tensor) -> Tensor:
    """‖values − others‖² / ‖others‖² over the last dimension, in float32."""
    values, others = values.float(), others.float()
    return (values - others).square().sum(-1) / others.square().sum(-1).clamp(min=torch.finfo(torch.float32).tiny)


def random_signs(shape: torch.Size, name: str) -> Tensor:
    """+1 and -1 in float32 in host memory, the same for the same name."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % 2**63
    return torch.randint(2, shape, generator=torch.Generator().manual_seed(seed)).float().mul_(2).sub_(1)


def pooled_output(model: nn.Module, output: Any, batch: Batch, pooling: Pooling) -> tuple[Tensor, Tensor | None]:
    """The output of a model without a head, [B, D] or [B, T, D], and a bool mask [B, T] of the positions that count.

    Raises:
        MoonshotError: the output does not show which positions are padding, or has no embeddings and hidden states.
    """
    values = output_values(model, output)
    mask = batch.get("decoder_attention_mask") if "decoder_input_ids" in batch else token_mask(batch)
    if values.ndim != 3 or mask is None or bool(mask.all()):
        return pooling(values, None)
    shortened: Any = getattr(model, "_get_feature_vector_attention_mask", None)
    if shortened is not None:  # of speech models, whose convolutions skip positions
        mask = shortened(values.shape[1], mask)
        assert isinstance(mask, Tensor)
    shapes = f"an output of shape {list(values.shape)} does not show which of {mask.shape[1]} positions are padding"
    require(mask.shape == values.shape[:2], shapes, hint="use samples of equal length")
    return pooling(values, mask.bool().to(values.device))


def is_causal(model: nn.Module) -> bool:
    """Whether the model predicts the next token of its own input."""
    can_generate: Any = getattr(model, "can_generate", lambda: False)
    return bool(can_generate()) and not getattr(getattr(model, "config", None), "is_encoder_decoder", False)


def labels_of(model: nn.Module, batch: Batch) -> Tensor:
    """Labels aligned with the logits: [B] classes, or [B, T] tokens with -100 at positions without a prediction.

    A causal language model predicts its own input, one position ahead, without padding and placeholders of features;
    other models need `labels` ([B] or [B, T]) in the batch, or `MoonshotError` is raised.
    """
    causal = is_causal(model)
    if "labels" in batch:
        labels = batch["labels"]
    else:
        message, hint = f"{type(model).__name__} needs them for its loss", "give calibration data with labels"
        able = causal and "input_ids" in batch
        require(able, message, field="labels", hint=f"{hint}, or {NO_BACKWARD}")
        mask, ids = token_mask(batch), batch["input_ids"]
        assert mask is not None
        ignored = ~(mask & functional.pad(mask[:, :-1], (1, 0), value=True))  # padding predicts nothing
        for kind, field in itertools.product(("image", "video", "audio"), ("id", "index")):
            token = getattr(getattr(model, "config", None), f"{kind}_token_{field}", None)
            if isinstance(token, int):
                ignored = ignored | (ids == token)
        labels = ids.masked_fill(ignored, IGNORED)
    return functional.pad(labels[:, 1:], (0, 1), value=IGNORED) if causal and labels.ndim == 2 else labels


def labelled(model: nn.Module, batch: Batch, required: bool) -> Tensor:
    """Bool [B], True for samples with a label, and so with a loss.

    All are, if the batch has no labels and these are not `required`, or do not follow from its tokens.
    """
    if "labels" not in batch and not (required and is_causal(model) and "input_ids" in batch):
        first = batch.get("input_ids", next(iter(batch.values())))
        return torch.ones(len(first), dtype=torch.bool)
    labels = labels_of(model, batch)
    return (labels != IGNORED).reshape(len(labels), -1).any(1)


def loss_gradient(
    model: nn.Module, output: Any, batch: Batch, loss: Loss | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The start of the backward pass, a tensor of the graph and the gradient of Σ_n ℓ_n at it, and every ℓ_n, [B].

    `loss` is a function (output, batch) → [B] losses to use instead of the cross-entropy of the output's logits. Raises
    `MoonshotError` for no logits, no labels, or losses that are NaN.
    """
    logits_and_labels = _logits_and_labels(model, output, batch, loss)
    if logits_and_labels is None:
        values = _checked_losses(loss, output, batch)
        hint = "compute it from the output, without detach()"
        require(values.grad_fn is not None, "its result has no gradient", field="loss", hint=hint)
        return values.sum(), torch.ones((), dtype=values.dtype, device=values.device), values.detach().float()
    logits, labels = logits_and_labels
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
def sample_losses(model: nn.Module, output: Any, batch: Batch, loss: Loss | None = None) -> Tensor:
    """ℓ_n of a batch's samples, [B] in float32; arguments as in `loss_gradient`."""
    logits_and_labels = _logits_and_labels(model, output, batch, loss)
    if logits_and_labels is None:
        return _checked_losses(loss, output, batch).float()
    logits, labels = logits_and_labels
    return torch.stack([_cross_entropy(sample.float(), label) for sample, label in zip(logits, labels, strict=True)])


def _logits_and_labels(model: nn.Module, output: Any, batch: Batch, loss: Loss | None) -> tuple[Tensor, Tensor] | None:
    """The logits of an output (a tensor, or its attribute) and a label for each of their rows; None if `loss` applies.

    An `OutputLoss` does not apply to logits with labels, which a caller's `forward` may return.
    """
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    usable = isinstance(logits, Tensor)
    if loss is not None and not (isinstance(loss, OutputLoss) and "labels" in batch and usable):
        return None
    if not isinstance(logits, Tensor):
        hint = f"load it with a head, or {NO_BACKWARD}"
        raise MoonshotError(f"{type(model).__name__} returns no logits for the Fisher loss", hint=hint)
    return logits, checked_labels(labels_of(model, batch).to(logits.device), logits)


def _checked_losses(loss: Loss | None, output: Any, batch: Batch) -> Tensor:
    """The result of a user's loss function, [B]."""
    assert loss is not None
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


def add_labels(
    model: nn.Module, batches: list[Batch], tokenizer: Any, seed: int, masked: bool
) -> tuple[list[Batch], str | None]:
    """Labels for text whose model needs some, and a note about them; other data unchanged.

    A decoder reproduces the text that its encoder reads, as in a denoiser such as BART. With `masked`, a model that
    predicts masked tokens (by the name of its class) gets them as in `masked_labels`.
    """
    given, text = batches[0].keys(), "input_ids" in batches[0]
    can_generate: Any = getattr(model, "can_generate", lambda: False)
    decodes = getattr(getattr(model, "config", None), "is_encoder_decoder", False) and can_generate()
    if decodes and text and not {"labels", "decoder_input_ids", "decoder_inputs_embeds"} & given:
        labelled = []
        for batch in batches:
            mask = token_mask(batch)
            assert mask is not None  # of the input ids
            labelled.append({**batch, "labels": batch["input_ids"].masked_fill(~mask, IGNORED)})
        return labelled, "the decoder's labels are the text that the encoder reads"
    if masked and text and type(model).__name__.endswith("ForMaskedLM") and "labels" not in given:
        return masked_labels(batches, tokenizer, seed), "15% of tokens masked"
    return batches, None


def masked_labels(batches: list[Batch], tokenizer: Any, seed: int) -> list[Batch]:
    """Mask 15% of each sample's tokens (at least one), and add them as labels, as in BERT's training.

    (Devlin et al., arXiv 1810.04805, section 3.1; only the mask token of its three replacements is used.) The batches
    stay unchanged. Raises `MoonshotError` if the tokenizer has no mask token.
    """
    mask_token = getattr(tokenizer, "mask_token_id", None)
    if mask_token is None:
        hint = f"give calibration data with labels, or {NO_BACKWARD}"
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
