"""Calls of a model or one of its blocks, and contexts that restore its modes and gradients."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import Cache, GenerationConfig, PreTrainedModel

from ..data.batches import Batch
from ..devices import is_out_of_memory
from ..errors import MoonshotError, reason, require
from .model_info import text_config

Forward = Callable[[nn.Module, Batch], Any]  # from a model's inputs to its outputs
Arguments = tuple[tuple[Any, ...], dict[str, Any]]  # of a call: positional, and by name

# Where `module.compile()` stores the function that replaces all calls of a module; copies of the module are without it.
CALL = "_compiled_call_impl"
_SEQUENCE_HEAD = "ForSequenceClassification"  # ends the name of a class
_FORWARDS: dict[nn.Module, Forward] = {}  # of models with a custom call


@dataclass
class BlockCall:
    """The arguments of a block's call on one batch, without its hidden state."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    hidden: Tensor  # cached input of the block; on the meta device while there is none


def evaluation_mode(model: nn.Module) -> ExitStack:
    """Put a model in evaluation mode; exiting the returned context restores every module's mode."""
    with ExitStack() as stack:
        for module in model.modules():
            stack.callback(setattr, module, "training", module.training)
        model.eval()
        return stack.pop_all()


def frozen(model: nn.Module) -> ExitStack:
    """Put a model in evaluation mode without parameter gradients; exiting the returned context restores both."""
    # By name: accelerate creates another parameter object for each call.
    names = {name for name, parameter in model.named_parameters() if parameter.requires_grad}

    def restore() -> None:
        for name, parameter in model.named_parameters():
            if name in names:
                parameter.requires_grad_(True)

    with ExitStack() as stack:
        stack.callback(restore)
        model.requires_grad_(False)
        stack.enter_context(evaluation_mode(model))
        stack.enter_context(torch.enable_grad())
        return stack.pop_all()


def replace_call(module: nn.Module, call: Callable[..., Any], undo: ExitStack, attribute: str = "forward") -> None:
    """Replace the module's `forward`, around which hooks still run, or `CALL`, which they are a part of.

    Closing `undo` restores it.
    """
    original = vars(module).get(attribute)  # accelerate sets one
    setattr(module, attribute, call)
    if original is None:
        undo.callback(delattr, module, attribute)
    else:
        undo.callback(setattr, module, attribute, original)


@contextmanager
def recorded(modules: Mapping[str, nn.Module]) -> Iterator[dict[str, Arguments]]:
    """The arguments of each module's first call inside the context, by name."""
    calls: dict[str, Arguments] = {}

    def record(name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.setdefault(name, (args, kwargs))

    with ExitStack() as hooks:
        for name, module in modules.items():
            hooks.callback(module.register_forward_pre_hook(partial(record, name), with_kwargs=True).remove)
        yield calls


def hook_gradient(output: Tensor, see: Callable[[Tensor], None]) -> Tensor | None:
    """Pass the gradient at a module's output to a callback; a new output if the autograd graph begins with it."""
    begins = not output.requires_grad
    if begins:  # a clone, since an activation may change it in place, which a leaf does not allow
        output = output.detach().requires_grad_(True).clone()
    output.register_hook(see)
    return output if begins else None


def first_tensor(output: Any) -> Tensor:
    """The hidden state in a block's output."""
    return output if isinstance(output, Tensor) else output[0]


def split_hidden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, tuple[Any, ...], dict[str, Any]]:
    """The hidden state of a block's call, and the arguments with None in its place."""
    if args and isinstance(args[0], Tensor):
        return args[0], (None, *args[1:]), kwargs
    return kwargs["hidden_states"], args, {**kwargs, "hidden_states": None}


def join_hidden(hidden: Tensor, call: BlockCall) -> Arguments:
    """The arguments of a block's call with a hidden state, of any shape that the block reads, in its place."""
    if call.args:
        return (hidden, *call.args[1:]), call.kwargs
    return call.args, {**call.kwargs, "hidden_states": hidden}


def close(output: Tensor, expected: Tensor) -> bool:
    """Whether two hidden states are equal up to rounding."""
    difference = (output.float() - expected.float()).norm()
    return bool(difference <= tolerance_of(expected.dtype) * expected.float().norm() + 1e-30)


def tolerance_of(dtype: torch.dtype) -> float:
    """The relative norm of rounding in a model's hidden states: 0.1% in float32, 5% in narrower dtypes."""
    return 1e-3 if dtype in (torch.float32, torch.float64) else 5e-2


def called_by(model: nn.Module, forward: Forward | None) -> ExitStack:
    """Let `run_model` call the model through `forward`, if it is not None, until the returned context exits."""
    stack = ExitStack()
    if forward is not None:
        require(callable(forward), "pass a function of model and inputs", field="forward", value=forward)
        _FORWARDS[model] = forward
        stack.callback(_FORWARDS.pop, model)
    return stack


def forward_of(model: nn.Module) -> Forward | None:
    """The function through which `run_model` calls a model, for a copy of it; None: directly."""
    return _FORWARDS.get(model)


def run_model(model: nn.Module, batch: Batch) -> Any:
    """The model's outputs; labels are dropped unless the model derives its decoder's inputs from them.

    A plain module whose parameters have other names than the batch's tensors gets them by position, in their order.
    Floating-point inputs are converted to the model's dtype. Raises `MoonshotError` if the model does not accept them.
    """
    if model in _FORWARDS:
        return _FORWARDS[model](model, batch)
    config: Any = getattr(model, "config", None)
    inputs: dict[str, Any] = dict(batch)
    if not getattr(config, "is_encoder_decoder", False):
        inputs.pop("labels", None)
    parameters = inspect.signature(model.forward).parameters.values()
    any_name = any(p.kind is p.VAR_KEYWORD for p in parameters)
    takes_flag = any_name or any(p.name == "use_cache" for p in parameters)
    if hasattr(config, "use_cache") or (hasattr(text_config(model), "use_cache") and takes_flag):
        inputs.setdefault("use_cache", False)  # of keys and values, which no pass reads
    dtype = next(model.parameters()).dtype
    for name, value in inputs.items():
        inputs[name] = value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
    named = any_name or any(p.name in inputs for p in parameters)
    try:
        with _pad_token(model, inputs) if type(model).__name__.endswith(_SEQUENCE_HEAD) else nullcontext():
            return model(**inputs) if named else model(*inputs.values())
    except MoonshotError:
        raise
    except (TypeError, ValueError, RuntimeError, LookupError, AttributeError, AssertionError) as error:
        if is_out_of_memory(error):
            raise
        shapes = ", ".join(f"{name} {list(value.shape)}" for name, value in batch.items())
        raise MoonshotError(f"{type(model).__name__} cannot be called with {shapes} ({reason(error)})") from error


def model_result(model: nn.Module, batch: Batch) -> Tensor:
    """The first floating-point tensor of a model's output: logits, or hidden states of a model without a head."""
    leaves = tree_leaves(run_model(model, batch))
    return next(leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point())


@contextmanager
def _pad_token(model: nn.Module, inputs: dict[str, Any]) -> Iterator[None]:
    """Let a head for sequences without a pad token read several samples.

    Without a pad token, by which it finds the last token of a sample, it accepts a single sample. In this context it
    has a pad token that no sample contains and that replaces hidden tokens, so that it reads each sample as if alone.
    """
    config = text_config(model)
    if "input_ids" not in inputs or getattr(config, "pad_token_id", 0) is not None:
        yield
        return
    ids: Tensor = inputs["input_ids"]
    visible = inputs.get("attention_mask", torch.ones_like(ids)).bool()
    present = set(ids[visible].tolist())
    absent = -1 if bool(visible.all()) else min(set(range(len(present) + 1)) - present)
    inputs["input_ids"], config.pad_token_id = ids.masked_fill(~visible, absent), absent
    try:
        yield
    finally:
        config.pad_token_id = None


@torch.no_grad()
def check_usable(model: PreTrainedModel, small: PreTrainedModel, inputs: Batch) -> None:
    """Check that a smaller model can be called as users do: with its cache, and to generate text.

    The other passes of a run use no cache, so they would not notice that the only blocks whose cache counts tokens were
    removed.

    Raises:
        MoonshotError: a call fails that succeeds with the larger model.
    """
    inputs = {name: value for name, value in inputs.items() if name != "labels"}
    options = GenerationConfig.from_model_config(small.config)
    options.update(max_new_tokens=2, min_new_tokens=2, do_sample=False, pad_token_id=options.pad_token_id or 0)

    def failure(of: Any, generates: bool) -> str | None:
        try:
            with evaluation_mode(of):
                of.generate(**inputs, generation_config=options) if generates else of(**inputs)
        except Exception as error:  # of any type, in code of the architecture
            if is_out_of_memory(error):
                raise
            return reason(error)
        return None

    for generates in (False, True) if small.can_generate() else (False,):
        why = failure(small, generates)
        usable = why is None or failure(model, generates) is not None
        call = "generate text" if generates else "be called with its cache"
        require(usable, f"the smaller {type(model).__name__} cannot {call}: {why}")


def without_caches(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a block's call without caches, which hold the state of that call."""
    return {name: None if isinstance(value, Cache) else value for name, value in kwargs.items()}


def model_device(model: nn.Module) -> torch.device:
    """The device of the model's first parameter, and so of its inputs."""
    return next(model.parameters()).device


def to_device(tree: Any, device: torch.device) -> Any:
    """A tree of lists, tuples and dictionaries with all its tensors on a device."""
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), tree)
