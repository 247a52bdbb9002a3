"""A smaller hidden size: the least important directions of the residual stream are removed.

SliceGPT (arXiv 2401.15024) removes the principal directions of least variance in a basis per block, and needs
additional matrices between blocks. Here one basis P [d, d'] serves all blocks (stream.py), and the result is a stock
model. With a = √(d'/d), every matrix that writes to the stream x computes the coordinates

    z = a Pᵀ x,    n'(z) = a Pᵀ n(x)    for an RMS norm n and any x in the span of P, with the same ε,

and a matrix W behind a norm with gain γ becomes ``W diag(γ) M / a``, without a gain.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from ..config import MoonshotConfig
from ..errors import MoonshotError, reason, require
from ..model.calls import check_usable, close, evaluation_mode, model_device, model_result, to_device
from ..model.compaction import build_smaller
from ..model.model_info import edited, on_meta_device, whole_numbers
from ..pipeline.inputs import prepare
from ..pipeline.selection import Subject, check_dense, select
from ..rotate.spaces import Folding
from .stream import Stream, gain_of, observe_stream

# The most fields of a configuration, all equal to the hidden size, that change together.
MOST_FIELDS = 3


@dataclass(frozen=True)
class WidthReduction:
    """The changes by a smaller hidden size."""

    hidden_size: tuple[int, int]  # before and after
    variance: float  # share of the removed directions in the variance of the norms' outputs
    config: dict[str, tuple[int | None, int | None]]  # changed field → value before and after
    parameters: tuple[int, int]  # before and after

    def to_dict(self) -> dict[str, Any]:
        """Convert the changes to JSON types."""
        config = {name: list(change) for name, change in self.config.items()}
        return {**vars(self), "hidden_size": [*self.hidden_size], "config": config, "parameters": [*self.parameters]}


@torch.no_grad()
def cut_stream(stream: Stream, hidden_size: int) -> tuple[PreTrainedModel, WidthReduction]:
    """A model of the same class with a smaller hidden size, without the least important directions of its stream.

    Embeddings, the head and all matrices become smaller in proportion; heads and neurons keep their number and size.

    Args:
        stream: the result of `observe_stream`; its model is unchanged.
        hidden_size: of the smaller model.

    Returns:
        A new model with the same dtype and device, which `save_pretrained` and `from_pretrained` support, and the
        changes. It equals the model up to rounding if the stream has no component in the removed directions.

    Raises:
        MoonshotError: a width that the architecture does not support, or the smaller model does not compute what the
            model computes without the directions.
    """
    model, width = stream.model, stream.space.width
    valid = type(hidden_size) is int and 0 < hidden_size <= width
    require(valid, f"{type(model).__name__} has {width}", field="hidden_size", value=hidden_size)
    directions = stream.directions(hidden_size)
    state = _state(stream, directions)
    config = _configuration(model, width, hidden_size, {name: tensor.shape for name, tensor in state.items()})
    small = build_smaller(model, config, state)
    _verify(stream, small, hidden_size)
    before, after = dict(whole_numbers(model.config)), dict(whole_numbers(config))
    changes = {name: (before.get(name), value) for name, value in after.items() if before.get(name) != value}
    parameters = (model.num_parameters(), small.num_parameters())
    return small, WidthReduction((width, hidden_size), stream.removed_variance(directions), changes, parameters)


def _state(stream: Stream, directions: Tensor) -> dict[str, Tensor]:
    """The tensors of the smaller model; tied ones are computed once."""
    width, size = directions.shape
    factor = (size / width) ** 0.5  # a
    changes: dict[Any, dict[int, Callable[[], Tensor]]] = {}  # id of a parameter → axis → its change [d, d']
    values: dict[Any, Tensor] = {}  # of norms

    @lru_cache(maxsize=1)  # in float64, the matrices of all norms would need more memory than a bfloat16 model
    def reading(norm: Folding) -> Tensor:
        return gain_of(norm, width)[:, None] * stream.readout(norm, directions) / factor

    for norm in stream.moments:
        rms = norm.norm
        if norm is not stream.tied:
            for axis in norm.readers:
                changes.setdefault(id(axis.parameter), {})[axis.axis] = partial(reading, norm)
        if rms.weight is not None:
            new = torch.ones(size)
            if norm is stream.tied:
                new = stream.tied_gain(directions, stream.readout(norm, directions)) / factor**2
            values[id(rms.module._parameters[rms.weight])] = (new - rms.offset) / rms.slope
    writing = factor * directions
    for place in stream.space.places:
        if place.writes:
            changes.setdefault(id(place.at.parameter), {})[place.at.axis] = lambda: writing
    parameters = {name: id(parameter) for name, parameter in stream.model.named_parameters(remove_duplicate=False)}
    state: dict[str, Tensor] = {}
    done: dict[Any, Tensor] = {}
    for name, tensor in stream.model.state_dict().items():
        key = parameters.get(name, (tensor.data_ptr(), tensor.shape))
        if key not in done and key in values:
            done[key] = values[key].to(tensor)
        elif key not in done:
            done[key] = _changed(tensor, changes.get(key, {}))
        state[name] = done[key]
    return state


def _changed(tensor: Tensor, changes: Mapping[int, Callable[[], Tensor]]) -> Tensor:
    """A copy of a tensor, with some axes multiplied by matrices [d, d'] from the right."""
    work = torch.float32 if tensor.dtype.itemsize <= 2 or tensor.device.type == "mps" else torch.float64
    value = tensor.to(work) if changes else tensor
    for axis, change in changes.items():
        value = (value.movedim(axis, -1) @ change().to(value)).movedim(-1, axis)
    return value.to(tensor.dtype, copy=True, memory_format=torch.contiguous_format)


def _configuration(
    model: PreTrainedModel, width: int, hidden_size: int, shapes: Mapping[str, torch.Size]
) -> PreTrainedConfig:
    """The configuration whose model has the given shapes, found by changing fields that equal the width."""
    if hidden_size == width:
        return edited(model.config, {})
    why = ""
    for edit in _edits(model.config, width, hidden_size):
        try:
            trial = edited(model.config, edit)
            small = on_meta_device(type(model), trial)
        except Exception as error:  # the model's class may raise anything
            why = why or reason(error)
            continue
        actual = {name: tensor.shape for name, tensor in small.state_dict().items()}
        if actual == shapes:
            return trial
        wrong = next((name for name in shapes if actual.get(name) != shapes[name]), "")
        why = why or f"{wrong} would be {list(actual.get(wrong, ()))} instead of {list(shapes.get(wrong, ()))}"
    message = f"{type(model.config).__name__} has no setting for it ({why})"
    raise MoonshotError(message, field="hidden_size", value=hidden_size, hint="try a multiple of the number of heads")


def _edits(config: PreTrainedConfig, width: int, hidden_size: int) -> Iterator[dict[str, int]]:
    """Candidate changes of the fields that equal the hidden size, also with an explicit head size if it is derived."""
    fields = dict(whole_numbers(config))
    equal = [name for name, value in fields.items() if value == width]
    for together in range(1, MOST_FIELDS + 1):
        for chosen in itertools.combinations(equal, together):
            edit = dict.fromkeys(chosen, hidden_size)
            yield edit
            prefix = chosen[0].rpartition(".")[0]
            name = f"{prefix}.head_dim" if prefix else "head_dim"
            counts = ((key, value) for key, value in fields.items() if "head" in key and "dim" not in key)
            heads = {value for key, value in counts if value and width % value == 0}
            yield from ({**edit, name: width // count} for count in sorted(heads) if not fields.get(name))


def _verify(stream: Stream, small: PreTrainedModel, hidden_size: int) -> None:
    """Compare the outputs of the smaller model and of the larger one without the removed directions."""
    model = stream.model
    inputs = to_device(stream.inputs, model_device(model))
    with evaluation_mode(model), evaluation_mode(small):
        with stream.narrowed(hidden_size):
            expected = model_result(model, inputs)
        result = model_result(small, inputs)
    message = f"the smaller {type(model).__name__} does not compute what the model does without the directions"
    require(close(result, expected), f"{message}: nothing changed", field="hidden_size")
    check_usable(model, small, inputs)


# λ if the configuration has none: equal exponents for both objectives.
LAM = 0.5


def narrow_model(
    subject: Subject, config: MoonshotConfig, hidden_size: int, calibration: Any
) -> tuple[PreTrainedModel, WidthReduction]:
    """Implement `MoonshotPruner.reduce_width`.

    Raises:
        MoonshotError: bad data, or like `observe_stream` and `cut_stream`; the model is unchanged.
    """
    calibration = config.calibration if calibration is None else calibration
    require(calibration is not None, "directions are ranked on data; give some", field="calibration", value=None)
    check_dense(subject.model, "a smaller hidden size", "narrow")
    subject.require_one_process("reduce_width")
    prepared = prepare(subject, select(subject.model, config), calibration)
    assert isinstance(prepared.model, PreTrainedModel)
    lam = LAM if config.lam is None else config.lam
    stream = observe_stream(prepared.model, prepared.batches, prepared.probe, lam, subject.loss)
    return cut_stream(stream, hidden_size)
