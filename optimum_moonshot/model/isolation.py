"""Settings of a program around a run that would change its results, left out while the run lasts.

A default dtype or device, autocast, disabled gradients and the state of random number generators belong to the program.
So do wrappers around a model's forward: the mixed precision of accelerate, which a `Trainer` leaves behind, and
compilation, under whose graphs the hooks of a run would be traced.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import MethodType
from typing import Any

import torch
from torch import nn

from ..devices import preserved_random_state
from ..errors import require
from .calls import CALL, calling
from .wide_products import wide_products

# Modules whose wrappers around a forward are left out; functools.wraps hides them behind the name of what they wrap.
_WRAPPERS = ("accelerate.utils.", "torch._dynamo.", "torch.amp.")
_ORIGINAL = "_orig_mod"  # where torch.compile keeps the module that it was given
_LOCK = threading.Lock()
_SHARED: dict[Any, tuple[int, ExitStack]] = {}  # contexts that several threads are in, and how many are


@contextmanager
def isolated(model: nn.Module) -> Iterator[nn.Module]:
    """Yield a model without compilation, called inside as in a new process: in its own dtype, with gradients enabled.

    The default dtype, the random state and the model's wrappers are shared by all threads: the first of several that
    are inside changes them, and the last one restores them.

    Raises:
        MoonshotError: as `uncompiled`.
    """
    model = uncompiled(model)
    autocast = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    with ExitStack() as stack:
        stack.enter_context(_shared("process", lambda: [_float32_by_default(), preserved_random_state()]))
        stack.enter_context(_shared(model, lambda: _without_wrappers(model)))
        for kind in autocast:
            stack.callback(torch.clear_autocast_cache)  # it may have copies of weights that the run has changed
            stack.enter_context(torch.autocast(kind, enabled=False))
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(wide_products(model))
        yield model


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


@contextmanager
def _shared(key: Any, contexts: Callable[[], Iterable[AbstractContextManager[None]]]) -> Iterator[None]:
    """Contexts that the first of several threads enters and the last one leaves."""
    with _LOCK:
        inside, stack = _SHARED.get(key) or (0, ExitStack())
        if not inside:
            with ExitStack() as entering:
                for each in contexts():
                    entering.enter_context(each)
                stack = entering.pop_all()
        _SHARED[key] = inside + 1, stack
    try:
        yield
    finally:
        with _LOCK:
            inside, stack = _SHARED.pop(key)
            if inside > 1:
                _SHARED[key] = inside - 1, stack
            else:
                stack.close()


@contextmanager
def _float32_by_default() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _without_wrappers(model: nn.Module) -> Iterator[AbstractContextManager[None]]:
    """Contexts in which the modules of a model call their own forward."""
    for module in model.modules():
        for attribute in ("forward", CALL):
            wrapped = vars(module).get(attribute)
            original = _unwrapped(wrapped, module)
            if original is not wrapped:
                yield calling(module, original, attribute)


def _unwrapped(call: Any, module: nn.Module) -> Any:
    """A call without the wrappers of mixed precision and compilation; a hook of accelerate around it stays."""
    bound, inner = False, call
    while True:
        bound = bound or isinstance(inner, MethodType)
        function = getattr(inner, "__func__", inner)
        home = getattr(function, "__globals__", {}).get("__name__") or type(function).__module__
        if not home.startswith(_WRAPPERS) or not hasattr(function, "__wrapped__"):
            break
        inner = function.__wrapped__
    unbound = bound and not isinstance(inner, MethodType) and hasattr(type(inner), "__get__")
    return MethodType(inner, module) if unbound and inner is not call else inner
