"""Calling a model or one of its blocks: inputs in, outputs out, its modes and gradients as they were."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from transformers import Cache

from ..data.batches import Batch
from ..devices import is_out_of_memory
from ..errors import MoonshotError, reason, require, shown

Forward = Callable[[nn.Module, Batch], Any]  # from a model's inputs to its outputs


_FORWARDS: dict[nn.Module, Forward] = {}  # of models that are called in a way of their own


@dataclass
class BlockCall:
    """The arguments of a block's call on one batch, without its hidden state."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    hidden: Tensor  # cached input of the block


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode; every module's mode is as before on exit."""
    training = {module: module.training for module in model.modules()}
    try:
        model.eval()
        yield
    finally:
        for module, mode in training.items():
            module.training = mode


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, no parameter asks for a gradient; everything is as before on exit."""
    # By name: a parameter that is brought for a call is another one each time.
    wanted = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    try:
        _require_gradients(model, wanted, False)
        with evaluation_mode(model), torch.enable_grad():
            yield
    finally:
        _require_gradients(model, wanted, True)


def _require_gradients(model: nn.Module, names: set[str], wanted: bool) -> None:
    for name, parameter in model.named_parameters():
        if name in names:
            parameter.requires_grad_(wanted)


@contextmanager
def calling(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """The module's `forward` is another one; hooks around it still run."""
    own = module.__dict__.get("forward")  # device placement puts one there
    module.forward = forward
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own


def first_tensor(output: Any) -> Tensor:
    """The hidden state in what a block returns."""
    return output if isinstance(output, Tensor) else output[0]


def split_hidden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, tuple[Any, ...], dict[str, Any]]:
    """The hidden state of a block's call, and the arguments with None in its place.

    Args:
        args: of the call; the hidden state is the first of them, if that is a tensor.
        kwargs: of the call; otherwise it is there, as `hidden_states`.
    """
    if args and isinstance(args[0], Tensor):
        return args[0], (None, *args[1:]), kwargs
    return kwargs["hidden_states"], args, {**kwargs, "hidden_states": None}


def join_hidden(hidden: Tensor, call: BlockCall) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a block's call with a hidden state in its place: the inverse of `split_hidden`.

    Args:
        hidden: [B, T, d], or of any shape that the block reads.
        call: whose other arguments are taken.
    """
    if call.args:
        return (hidden, *call.args[1:]), call.kwargs
    return call.args, {**call.kwargs, "hidden_states": hidden}


def close(found: Tensor, expected: Tensor) -> bool:
    """Whether two ways to compute a hidden state agree: ‖found - expected‖ is within rounding of ‖expected‖.

    Args:
        found: of any shape.
        expected: of the same shape; its dtype says what rounding explains, 0.1% in float32, 5% in narrower ones.
    """
    tolerance = 1e-3 if expected.dtype == torch.float32 else 5e-2
    difference = (found.float() - expected.float()).norm()
    return bool(difference <= tolerance * expected.float().norm() + 1e-30)


@contextmanager
def called_by(model: nn.Module, forward: Forward | None) -> Iterator[None]:
    """Meanwhile `run_model` calls the model through `forward`, where one is given.

    Args:
        model: any.
        forward: (model, inputs) → output, or None for a plain call.

    Raises:
        MoonshotError: `forward` cannot be called.
    """
    if forward is None:
        yield
        return
    require(callable(forward), f"forward={shown(forward)}: give a function of model and inputs")
    _FORWARDS[model] = forward
    try:
        yield
    finally:
        del _FORWARDS[model]


def run_model(model: nn.Module, batch: Batch) -> Any:
    """The model's outputs; labels stay out unless the model makes its decoder's inputs from them.

    A plain module whose parameters have other names than the batch's tensors gets these by position, in their order.
    Floating-point inputs go in the model's dtype: images come as float32.

    Args:
        model: in any mode.
        batch: its inputs, on its device.

    Raises:
        MoonshotError: the model does not take these inputs.
    """
    if model in _FORWARDS:
        return _FORWARDS[model](model, batch)
    config = getattr(model, "config", None)
    inputs = dict(batch)
    if not getattr(config, "is_encoder_decoder", False):
        inputs.pop("labels", None)
    if _may_cache(model, config):
        inputs.setdefault("use_cache", False)
    dtype = next(model.parameters()).dtype
    inputs = {name: value.to(dtype) if _is_floating(value) else value for name, value in inputs.items()}
    parameters = inspect.signature(model.forward).parameters.values()
    named = any(p.name in inputs or p.kind is p.VAR_KEYWORD for p in parameters)
    try:
        return model(**inputs) if named else model(*inputs.values())
    except MoonshotError:
        raise
    except (TypeError, ValueError, RuntimeError, LookupError, AttributeError, AssertionError) as error:
        if is_out_of_memory(error):
            raise
        shapes = ", ".join(f"{name} {list(value.shape)}" for name, value in batch.items())
        raise MoonshotError(f"{type(model).__name__} cannot be called with {shapes} ({reason(error)})") from error


def _may_cache(model: nn.Module, config: Any) -> bool:
    """Whether a model, or a part of it, has a cache of keys and values that a word of the call switches off."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    if hasattr(config, "use_cache"):
        return True
    parameters = inspect.signature(model.forward).parameters
    named = "use_cache" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return hasattr(text, "use_cache") and named


def without_caches(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a block's call without caches: what they hold is of the call that was, not of another."""
    return {name: None if isinstance(value, Cache) else value for name, value in kwargs.items()}


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def model_device(model: nn.Module) -> torch.device:
    """Where the model's inputs go: the device of its first parameter."""
    return next(model.parameters()).device


def to_device(tree: Any, device: torch.device) -> Any:
    """A tree of lists, tuples and dictionaries with all its tensors on a device."""
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), tree)
