"""A model without the wrappers of other programs, while a run or an evaluation lasts.

A `Trainer` with mixed precision leaves a forward under autocast behind, and the hooks of a run would be traced into
compiled graphs.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import MethodType
from typing import Any

from torch import nn

from ..errors import require
from ..torch_settings import change_once, use_usual_settings
from .calls import CALL, model_device, replace_call

# Modules whose wrappers around a forward are removed; functools.wraps gives a wrapper the name of what it wraps.
_WRAPPERS = ("accelerate.utils.", "torch._dynamo.", "torch.amp.")
_ATTENTION = "_attn_implementation_internal"  # of a configuration of transformers, without those inside it
_ORIGINAL = "_orig_mod"  # where torch.compile keeps the module that it was given


@contextmanager
def isolated(model: nn.Module) -> Iterator[nn.Module]:
    """Yield a model that is not compiled; inside, it computes in its own dtype, with torch's usual settings.

    Raises:
        MoonshotError: a module inside was replaced by a compiled one.
    """
    with ExitStack() as undo:
        yield isolate(model, undo)


def isolate(model: nn.Module, undo: ExitStack) -> nn.Module:
    """Like `isolated`, until `undo` closes."""
    model = uncompiled(model)
    use_usual_settings(undo)
    change_once(model, partial(_leave_out_wrappers, model), undo)
    return model


def uncompiled(model: nn.Module) -> nn.Module:
    """The module that `torch.compile(module)` was given, whose weights the compiled one shares, or the model itself.

    Raises:
        MoonshotError: a module inside was replaced by a compiled one, which changes the names of its weights.
    """
    while (original := model._modules.get(_ORIGINAL, vars(model).get(_ORIGINAL))) is not None:
        model = original
    inside = next((name for name, _ in model.named_modules() if name.rpartition(".")[2] == _ORIGINAL), "")
    message = f"{inside.rpartition('.')[0]} was replaced by torch.compile(module), so its weights have other names"
    require(not inside, message, field="model", hint="compile it in place by module.compile(), or after the pruning")
    return model


def use_differentiable_attention(model: nn.Module, undo: ExitStack) -> tuple[str, ...]:
    """Let a model on the CPU compute attention without flex attention, which has no backward there.

    Closing `undo` restores it. Returns a note for the report, if that changes anything.
    """
    configs = {id(config): config for module in model.modules() if (config := vars(module).get("config")) is not None}
    flex = [config for config in configs.values() if getattr(config, _ATTENTION, None) == "flex_attention"]
    flex = flex if flex and model_device(model).type == "cpu" else []
    other = "sdpa" if getattr(model, "_supports_sdpa", False) else "eager"
    for config in flex:
        undo.callback(setattr, config, _ATTENTION, "flex_attention")
        setattr(config, _ATTENTION, other)
    return (f"attention was computed by {other!r}: flex attention has no backward pass on CPUs",) if flex else ()


def _leave_out_wrappers(model: nn.Module, stack: ExitStack) -> None:
    """Let the modules of a model call their forward without mixed precision and compilation, until the stack closes.

    A hook of accelerate around a forward stays.
    """
    for module in model.modules():
        for attribute in ("forward", CALL):
            call: Any = vars(module).get(attribute)
            bound, inner = False, call
            while True:
                bound = bound or isinstance(inner, MethodType)
                function = getattr(inner, "__func__", inner)
                home = getattr(function, "__globals__", {}).get("__name__") or type(function).__module__
                if not home.startswith(_WRAPPERS) or not hasattr(function, "__wrapped__"):
                    break
                inner = function.__wrapped__
            if inner is call:
                continue
            unbound = bound and not isinstance(inner, MethodType) and hasattr(type(inner), "__get__")
            replace_call(module, MethodType(inner, module) if unbound else inner, stack, attribute)
