"""How a model computes during a run or an evaluation: without other programs' wrappers, and without slow products.

A `Trainer` with mixed precision leaves a forward under autocast behind, and the hooks of a run would be traced into
compiled graphs.

On CPUs without instructions for 16 bits, products in 16 bits are computed in float32. For linear layers torch's own
kernels take 6 times as long as in float32, and 18 times in a backward pass; for products of batches, as in eager
attention, 5 to 10 times; and for the backward pass of fused attention 5 times. The inputs, weights and outputs stay in
16 bits, also those that a backward pass needs, so memory use does not grow.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache, partial
from itertools import chain
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint

from ..devices import change_once, use_usual_settings
from ..errors import require
from .calls import CALL, model_device, replace_call

# Modules whose wrappers around a forward are removed; functools.wraps gives a wrapper the name of what it wraps.
_WRAPPERS = ("accelerate.utils.", "torch._dynamo.", "torch.amp.")
_ATTENTION = "_attn_implementation_internal"  # of a configuration of transformers; nested ones have their own
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


@cache
def slow_dtypes() -> frozenset[torch.dtype]:
    """The 16-bit types for which oneDNN, torch's library of products on CPUs, has no instructions here."""
    supported = {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
    }
    return frozenset(dtype for dtype, has in supported.items() if torch.backends.mkldnn.is_available() and not has())


def wide_products(model: nn.Module) -> AbstractContextManager[Any]:
    """A context in which products of 16-bit tensors on such a CPU are computed in float32, for such a model.

    Enter it outside of modes that look at the operands of `functional.linear`. It intercepts all functions, which
    slows loops of small operations: those enter `plain_functions`.
    """
    slow = slow_dtypes()  # often empty, which saves a visit of the many tensors of a large model
    narrow = slow and not slow.isdisjoint(tensor.dtype for tensor in chain(model.parameters(), model.buffers()))
    return _WideProducts() if narrow else nullcontext()


@contextmanager
def plain_functions() -> Iterator[None]:
    """A context, or a decorator, in which nothing intercepts torch's functions."""
    with torch._C.DisableTorchFunction():
        yield


class _WideProducts(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # `types` has the subclasses of Tensor that intercept functions themselves; of functions in Python Tensor, too.
        if func not in _PRODUCTS or not {Tensor}.issuperset(types):
            return func(*args, **kwargs)
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        dtypes = {tensor.dtype for tensor in tensors if tensor.dtype.is_floating_point}
        # Wrapping subclasses, such as shards, compute their own products.
        narrow = len(dtypes) == 1 and dtypes <= slow_dtypes() and all(tensor.device.type == "cpu" for tensor in tensors)
        if not narrow or any(map(is_traceable_wrapper_subclass, tensors)):
            return func(*args, **kwargs)
        if func is nn.functional.linear and len(args) >= 2:
            return _Linear.apply(*args[:2], args[2] if len(args) == 3 else kwargs.get("bias"))
        operands = func, dtypes.pop(), args, kwargs
        return (
            checkpoint(_in_float32, *operands, use_reentrant=False)
            if torch.is_grad_enabled()
            else _in_float32(*operands)
        )


# Their backward passes compute the product once more, so that they hold the operands in 16 bits; `linear` does not.
_PRODUCTS = frozenset({
    nn.functional.linear, nn.functional.scaled_dot_product_attention, torch.matmul, Tensor.matmul, Tensor.__matmul__,
    torch.bmm, Tensor.bmm, torch.addmm, torch.baddbmm, torch.einsum,
})  # fmt: skip


def _in_float32(func: Any, dtype: torch.dtype, args: Any, kwargs: Any) -> Tensor:
    """The result of a product, in its dtype, computed from operands in float32."""
    wide = lambda tensor: tensor.float() if tensor.dtype == dtype else tensor  # noqa: E731
    args, kwargs = tree_map_only(Tensor, wide, (args, kwargs))
    return func(*args, **kwargs).to(dtype)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        wide = None if bias is None else bias.float()
        return nn.functional.linear(inputs.float(), weight.float(), wide).to(inputs.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        output, (of_inputs, of_weight, of_bias) = grads[0].float(), ctx.needs_input_grad
        rows = output.flatten(0, -2) if output.ndim > 1 else output[None]
        return (
            (output @ weight.float()).to(inputs.dtype) if of_inputs else None,
            (rows.T @ inputs.reshape(-1, weight.shape[1]).float()).to(weight.dtype) if of_weight else None,
            rows.sum(0).to(weight.dtype) if of_bias else None,
        )
