"""Linear layers in 16 bits on CPUs without instructions for them: their products are computed in float32.

torch's own kernels then take 6 times as long as in float32, and 18 times in a backward pass. The inputs, weights and
outputs stay in 16 bits, also those that a backward pass needs, so that no more memory is held.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


@cache
def slow_dtypes() -> frozenset[torch.dtype]:
    """The 16-bit types for which oneDNN, torch's library of products on CPUs, has no instructions here."""
    supported = {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
    }
    return frozenset(dtype for dtype, has in supported.items() if torch.backends.mkldnn.is_available() and not has())


def wide_products(model: nn.Module) -> AbstractContextManager[Any]:
    """A context in which `functional.linear` of 16-bit tensors on such a CPU computes in float32, for such a model.

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
        # `types` has the subclasses of Tensor that intercept functions themselves.
        if func is nn.functional.linear and not types and len(args) >= 2 and _is_slow(*args[:2]):
            bias = args[2] if len(args) == 3 else (kwargs or {}).get("bias")
            return _Linear.apply(*args[:2], bias)
        return func(*args, **(kwargs or {}))


def _is_slow(inputs: Tensor, weight: Tensor) -> bool:
    """Whether a product is slow; subclasses that wrap others, such as shards, compute theirs."""
    slow = inputs.dtype in slow_dtypes() and inputs.device.type == "cpu" and weight.dtype == inputs.dtype
    return slow and not is_traceable_wrapper_subclass(weight)


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
