"""The residual stream of a model, and how important its directions are: statistics of a smaller hidden size.

With the d' remaining directions in the columns of P [d, d'], a matrix W behind an RMS norm n with gain γ becomes
``W diag(γ) M`` on the coordinates Pᵀ n(P Pᵀ x) of the stream x. M = P is exact for x in the span of P; otherwise the
least-squares readout is better: with C = Σ n(x) n(x)ᵀ of a norm's outputs over the calibration tokens, and the share
e = tr(Pᵀ C P) / tr C of their variance,

    M = √e · C P (Pᵀ C P)⁻¹,

where √e is the mean factor by which the norm enlarges the remaining coordinates. P has the leading eigenvectors of

    B^½ (B^-½ F B^-½)^(1 − λ) B^½,    B = Σ C,    F = Σ δ δᵀ

over all norms, with the gradients δ of the model's loss at n(x): a geometric mean of the two objectives of MOONSHOT
(arXiv 2604.13287), variance and Fisher loss. The loss E (δᵀ Π x)² of removing directions is a product of both, so that
neither a direction without variance nor one without a gradient has importance, as in balanced truncation.

The gain of the last norm cannot be folded into a head that shares the weights of the embeddings. P may have any basis
of its span: the one that makes ``Pᵀ diag(γ) P`` diagonal gives the smaller norm its gains, and the weights stay shared.
"""

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..data.batches import Batch, split_batches
from ..errors import NOT_FINITE, MoonshotError, require
from ..model.calls import frozen, model_device, run_model, to_device
from ..model.layers import find_blocks, require_resident
from ..model.losses import Loss, loss_gradient, token_mask
from ..model.structured_groups import probe_inputs
from ..objective.linalg import all_finite
from ..rotate.spaces import RESIDUAL, Folding, Space, find_spaces
from ..rotate.trace import Trace

# Ridge of the readout, relative to the mean variance of a direction.
DAMPING = 1e-3
# Least variance of a direction, relative to the largest: below, it is rounding.
FLOOR = 1e-10


@dataclass(eq=False)
class Stream:
    """The residual stream of a model, with the second moments of its norms' outputs once they are collected."""

    model: PreTrainedModel
    space: Space
    tied: Folding | None  # the norm before a head that shares the weights of the embeddings
    inputs: Batch  # of the forward passes that compare models
    lam: float  # λ
    moments: dict[Folding, Tensor] = field(default_factory=dict)  # C, [d, d], without the gain, in host memory
    fisher: dict[Folding, Tensor] = field(default_factory=dict)  # F, [d, d]; empty at λ = 1

    def eigen(self) -> tuple[Tensor, Tensor]:
        """The importance [d] of the directions, descending, and the directions [d, d] in the columns."""
        total = _mean(self.moments)
        if self.lam < 1:
            total = _geometric_mean(total, _mean(self.fisher), 1 - self.lam)
        values, vectors = torch.linalg.eigh(total)
        return values.flip(0), vectors.flip(1)

    def directions(self, hidden_size: int) -> Tensor:
        """P [d, d'] in float64, with the remaining directions in the columns."""
        leading = self.eigen()[1][:, :hidden_size]
        if self.tied is None:
            return leading
        return leading @ torch.linalg.eigh(leading.T @ (gain_of(self.tied, len(leading))[:, None] * leading))[1]

    def projection(self, hidden_size: int) -> Tensor:
        """a P, [d, d'] in float64: a hidden state x is ``x @ projection`` in the smaller model (hidden_size.py)."""
        directions = self.directions(hidden_size)
        return (hidden_size / len(directions)) ** 0.5 * directions

    def readout(self, norm: Folding, directions: Tensor) -> Tensor:
        """The readout M [d, d'] of a norm in float64; √e · P for the norm before a tied head."""
        moment = self.moments[norm].double()
        across = moment @ directions
        within = directions.T @ across
        scale = (within.trace() / moment.trace()).sqrt()
        if norm is self.tied:
            return scale * directions
        ridge = DAMPING * within.diagonal().mean()
        damped = within + ridge * torch.eye(len(within), dtype=within.dtype)
        return scale * torch.linalg.solve(damped, across + ridge * directions, left=False)

    def removed_variance(self, directions: Tensor) -> float:
        """The share of the removed directions, all but P, in the variance of the norms' outputs."""
        return 1 - float((directions.T @ _mean(self.moments) @ directions).trace())

    def tied_gain(self, directions: Tensor, readout: Tensor) -> Tensor:
        """The gain [d'] of the norm before a tied head, up to a²: the diagonal of √e · Pᵀ diag(γ) P."""
        assert self.tied is not None
        return (readout * (gain_of(self.tied, len(directions)).to(directions)[:, None] * directions)).sum(0)

    @property
    def axes(self) -> dict[int, int]:
        """The number of axes with the width of the stream, by the id of the parameter."""
        places = {(id(place.at.parameter), place.at.axis) for place in self.space.places}
        norms = [norm.norm for norm in self.space.norms]
        gains = {(id(norm.module._parameters[norm.weight]), 0) for norm in norms if norm.weight is not None}
        return Counter(parameter for parameter, _ in places | gains)

    @contextmanager
    def narrowed(self, hidden_size: int) -> Iterator[None]:
        """A context in which the model computes what the smaller model does.

        The norms use the remaining directions alone; the weights do not change.
        """
        directions = self.directions(hidden_size)
        double = next(self.model.parameters()).dtype == torch.float64
        dtype = torch.float64 if double else torch.float32  # the dtype of `wide` below
        readouts = {norm: self.readout(norm, directions).to(dtype) for norm in self.moments}

        def without(norm: Folding, hidden: Tensor, bare: nn.Module) -> Tensor:
            wide = hidden if hidden.dtype == torch.float64 else hidden.float()
            projection, readout = directions.to(wide), readouts[norm].to(wide)
            values = bare(wide @ projection @ projection.T) @ projection
            if norm is self.tied:
                values = (values * self.tied_gain(projection, readout)) @ projection.T
            else:
                values = values @ readout.T * gain_of(norm, len(directions)).to(wide)
            return values.to(hidden.dtype)

        with _at_norms(self.space, without):
            yield


def observe_stream(
    model: PreTrainedModel,
    samples: Iterable[Batch],
    inputs: Batch | None = None,
    lam: float = 0.5,
    loss: Loss | None = None,
) -> Stream:
    """Find the residual stream of a model, and collect its statistics in one pass over the calibration data.

    Args:
        model: see `find_stream`.
        samples: see `collect_moments`.
        inputs: see `find_stream`.
        lam: see `find_stream`.
        loss: see `collect_moments`.

    Returns:
        The stream, with statistics for every width.

    Raises:
        MoonshotError: like `find_stream` and `collect_moments`.
    """
    stream = find_stream(model, inputs, lam)
    collect_moments(stream, samples, loss)
    return stream


def find_stream(model: PreTrainedModel, inputs: Batch | None = None, lam: float = 0.5) -> Stream:
    """Find the residual stream of a model, without calibration data.

    Args:
        model: unchanged, on one device.
        inputs: for the probes, in place of random tokens or pixels.
        lam: λ, the exponent of the variance; 1 − λ is the exponent of the Fisher loss. λ = 1 needs no backward pass.

    Returns:
        The stream, without statistics.

    Raises:
        MoonshotError: the model has no residual stream whose basis may change, or uses it other than through RMS
            norms.
    """
    require(isinstance(model, PreTrainedModel), f"model is a {type(model).__name__}", hint="pass a PreTrainedModel")
    require(0 <= lam <= 1, "use a number from 0 to 1", field="lam", value=lam)
    require_resident(model)
    devices = sorted({str(parameter.device) for parameter in model.parameters()})
    require(len(devices) == 1, f"its weights are on {', '.join(devices)}", field="model", hint="load it on one device")
    inputs = inputs or probe_inputs(model)
    space = _find_space(model, inputs)
    return Stream(model, space, _tied(model, space), inputs, lam)


def collect_moments(
    stream: Stream, samples: Iterable[Batch], loss: Loss | None = None, together: int | None = None
) -> None:
    """Add the statistics of all samples to a stream.

    Args:
        stream: changed.
        samples: batches of calibration data; padding does not count.
        loss: function (output, batch) → [B] losses, in place of the cross-entropy.
        together: the most samples of a pass; None passes whole batches.

    Raises:
        MoonshotError: there is no data.
    """
    samples = samples if together is None else split_batches(samples, together)
    model, fisher = stream.model, stream.lam < 1
    mask: Tensor | None = None

    def add(sums: dict[Folding, Tensor], norm: Folding, values: Tensor) -> None:
        values = values if values.dtype == torch.float64 else values.float()
        values = values[mask] if mask is not None else values.flatten(0, -2)
        moment = (values.T @ values).cpu()
        sums[norm] = sums[norm] + moment if norm in sums else moment

    def see(norm: Folding, hidden: Tensor, bare: nn.Module) -> Tensor | None:
        values = bare(hidden)
        add(stream.moments, norm, values.detach())
        if not fisher:
            return None
        if not values.requires_grad:
            values = values.detach().requires_grad_(True)
        values.register_hook(partial(add, stream.fisher, norm))
        gain = gain_of(norm, values.shape[-1])
        return (values * gain.to(values)).to(hidden.dtype)

    with frozen(model), torch.set_grad_enabled(fisher), _at_norms(stream.space, see):
        for batch in samples:
            batch = to_device(batch, model_device(model))
            mask = token_mask(batch)
            output = run_model(model, batch)
            if fisher:
                start, gradient, _ = loss_gradient(model, output, batch, loss)
                torch.autograd.backward(start, gradient)
    require(bool(stream.moments), "there is no calibration data", field="samples")
    finite = all(map(all_finite, (*stream.moments.values(), *stream.fisher.values())))
    require(finite, "the residual stream or its gradients contain NaN or infinite values", hint=NOT_FINITE)


def _mean(moments: Mapping[Folding, Tensor]) -> Tensor:
    """The sum of second moments, [d, d] in float64, divided by its trace."""
    first, *others = moments.values()
    total = first.to(torch.float64, copy=True)
    # One by one: in float64, all moments of a bfloat16 model would need more memory than the model.
    for moment in others:
        total += moment
    return total / total.trace()


def _find_space(model: PreTrainedModel, inputs: Batch) -> Space:
    """The residual stream of a model, which all matrices use through RMS norms."""
    spaces, refused = find_spaces(Trace(model, inputs), [name for name, _ in find_blocks(model)])
    space, name = next((space for space in spaces if space.name == RESIDUAL), None), type(model).__name__
    if space is None:
        message = f"the residual stream of {name} has a fixed basis: {refused.get(RESIDUAL)}"
        raise MoonshotError(message, field="hidden_size")
    rms = not space.fixes_ones and all(norm.norm.bias is None for norm in space.norms)
    require(rms, f"{name} has layer norms; only behind RMS norms can directions be removed", field="hidden_size")
    behind = {axis for norm in space.norms for axis in norm.readers}
    reading = {place.at for place in space.places if not place.writes}
    read = all(norm.readers for norm in space.norms) and reading == behind
    require(read, f"{name} uses its residual stream other than by matrices behind norms", field="hidden_size")
    return space


def _tied(model: PreTrainedModel, space: Space) -> Folding | None:
    writers = {id(place.at.parameter) for place in space.places if place.writes}
    shared = [norm for norm in space.norms if any(id(axis.parameter) in writers for axis in norm.readers)]
    alone = all(len(norm.readers) == 1 and norm.norm.weight is not None for norm in shared)
    message = f"{type(model).__name__} shares weights other than those of its embeddings with its head"
    require(len(shared) <= 1 and alone, message, field="hidden_size")
    return shared[0] if shared else None


def gain_of(norm: Folding, width: int) -> Tensor:
    """The gain [d] of a norm, in float64 in host memory."""
    gain = norm.norm.gain
    return torch.ones(width, dtype=torch.float64) if gain is None else gain.double().cpu()


@contextmanager
def _at_norms(space: Space, see: Callable[[Folding, Tensor, nn.Module], Tensor | None]) -> Iterator[None]:
    """Call `see` at every call of a norm, with its inputs and the norm without gain; a result replaces its output."""

    def hook(norm: Folding, bare: nn.Module, _: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
        return see(norm, args[0], bare)

    with ExitStack() as stack:
        for folding in space.norms:
            bare = copy.deepcopy(folding.norm.module)
            bare._forward_hooks.clear()
            for parameter in bare.parameters():
                parameter.data.fill_(folding.norm.neutral)
            stack.callback(folding.norm.module.register_forward_hook(partial(hook, folding, bare)).remove)
        yield


def _geometric_mean(first: Tensor, second: Tensor, share: float) -> Tensor:
    """``A^½ (A^-½ B A^-½)^share A^½`` of positive semidefinite matrices (Kubo and Ando 1980)."""
    root = _power(first, 0.5)
    inverse = _power(first, -0.5)
    return root @ _power(inverse @ second @ inverse, share) @ root


def _power(matrix: Tensor, exponent: float) -> Tensor:
    values, vectors = torch.linalg.eigh((matrix + matrix.mT) / 2)
    return (vectors * values.clamp(min=FLOOR * float(values[-1])) ** exponent) @ vectors.mT
