"""A simulated second device: its tensors report "twin:0", compute on the host, and cannot be mixed with host tensors.

A tensor of this device wraps a host tensor, and every operation runs on the host. Operations with tensors of both
devices raise, as with CUDA, except for those that torch allows: zero-dimensional host tensors, host indices, and copies
in both directions.

torch registers such a device for the rest of the process: use it in a separate one.
"""

import sys
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing

from optimum_moonshot import devices
from optimum_moonshot.model import layer_kinds

backend_registration._setup_privateuseone_for_python_backend("twin")
DEVICE = torch.device("twin:0")
torch.twin.get_rng_state = lambda device: torch.get_rng_state()  # operations run on the host, with its generator
torch.twin.set_rng_state = lambda state, device: torch.set_rng_state(state)
_COPIES = {torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default}
_INDEXED = {torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default}


class Elsewhere(torch.Tensor):
    """A tensor of the other device."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=DEVICE,
            requires_grad=inner.requires_grad,
        )

    def __init__(self, inner):
        self.inner = inner

    def __repr__(self):
        return f"Elsewhere({self.inner})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})

    def __deepcopy__(self, memo):
        copied = Elsewhere(self.inner.detach().clone())
        if isinstance(self, torch.nn.Parameter):
            copied = torch.nn.Parameter(copied, self.requires_grad)
        return memo.setdefault(id(self), copied)

    @property
    def data(self):
        return Elsewhere(self.inner.data)

    @data.setter
    def data(self, value):
        torch.Tensor.data.__set__(self, value)  # its shape; without the next line, writes would reach the old memory
        self.inner = value.inner

    def data_ptr(self):
        return self.inner.data_ptr()

    def untyped_storage(self):
        return self.inner.untyped_storage()

    def tolist(self):
        return self.inner.tolist()


def _is_elsewhere(device):
    return device is not None and torch.device(device).type == "twin"


def _run(func, args, kwargs):
    tensors = [value for value in _values(args, kwargs) if isinstance(value, torch.Tensor)]
    here = [tensor for tensor in tensors if not isinstance(tensor, Elsewhere)]
    mixed = len(here) < len(tensors) and any(tensor.ndim for tensor in here)
    if mixed and func not in _COPIES:
        allowed = func in _INDEXED and isinstance(args[0], Elsewhere) and all(not t.is_floating_point() for t in here)
        if not allowed:
            shapes = [list(tensor.shape) for tensor in here]
            raise RuntimeError(f"Expected all tensors to be on the same device: {func} got {shapes} of the host")
    target = kwargs.get("device")
    moves = func in _COPIES or not tensors or target is not None
    elsewhere = _is_elsewhere(target) if target is not None else len(here) < len(tensors)
    if func is torch.ops.aten.copy_.default:
        args[0].inner.copy_(_unwrap(args[1])) if isinstance(args[0], Elsewhere) else args[0].copy_(_unwrap(args[1]))
        return args[0]
    if moves and "device" in kwargs:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    here_args = [_mapped(_unwrap, value) for value in args]
    result = func(*here_args, **{name: _mapped(_unwrap, value) for name, value in kwargs.items()})
    if func is torch.ops.aten._to_copy.default and len(here) < len(tensors) and not elsewhere and result is args[0]:
        result = result.clone()
    if not elsewhere:
        return result
    wrapped = _mapped(_wrap, result)
    return return_and_correct_aliasing(func, args, kwargs, wrapped) if tensors and not moves else wrapped


def _values(args, kwargs):
    """The arguments of an operation, with lists flattened."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, list | tuple):
            yield from value
        else:
            yield value


def _mapped(function, value):
    """Apply a function to a value, or to every item of a list."""
    return type(value)(map(function, value)) if isinstance(value, list | tuple) else function(value)


def _unwrap(value):
    return value.inner if isinstance(value, Elsewhere) else value


def _wrap(value):
    return Elsewhere(value) if isinstance(value, torch.Tensor) else value


def _empty(size, dtype=None, **_):
    return Elsewhere(torch.empty(size, dtype=dtype))


def _empty_strided(size, stride, dtype=None, **_):
    return Elsewhere(torch.empty_strided(size, stride, dtype=dtype))


def _copy_from(source, target, *_):
    _unwrap(target).copy_(_unwrap(source))
    return target


# `torch.tensor(…, device=…)` dispatches below every mode.
_LIBRARY = torch.library.Library("aten", "IMPL")
_LIBRARY.impl("empty.memory_format", _empty, "PrivateUse1")
_LIBRARY.impl("empty_strided", _empty_strided, "PrivateUse1")
_LIBRARY.impl("_copy_from", _copy_from, "PrivateUse1")


class _Factories(TorchDispatchMode):
    """Creates tensors on the other device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        on_device = _is_elsewhere(kwargs.get("device"))
        if on_device or any(isinstance(value, Elsewhere) for value in _values(args, kwargs)):
            return _run(func, args, kwargs)
        return func(*args, **kwargs)


@contextmanager
def other_device(free=2**30):
    """Context in which the device exists, with `free` bytes of memory."""
    patches = {
        "free_bytes": lambda device: free,
        "peak_bytes": lambda device: 0,
        "reset_peak": lambda device: None,
        "wait_for": lambda device: None,
    }
    with ExitStack() as stack:
        for name, function in patches.items():
            original = getattr(devices, name)
            for module in [each for key, each in sys.modules.items() if key.startswith("optimum_moonshot")]:
                if vars(module).get(name) is original:
                    stack.enter_context(mock.patch.object(module, name, function))
        stack.enter_context(mock.patch.object(layer_kinds, "Tensor", Elsewhere))  # plain tensors of this device
        # `Module.to` replaces parameters, because it cannot change the class of their data.
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        stack.callback(torch.__future__.set_overwrite_module_params_on_conversion, False)
        stack.enter_context(_Factories())
        yield DEVICE


def moved(model):
    """Move the parameters and buffers of a model to the other device, in place."""
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                replaced = vars(model).setdefault("_moved", {})
                if id(parameter) not in replaced:
                    replaced[id(parameter)] = torch.nn.Parameter(Elsewhere(parameter.data), parameter.requires_grad)
                module._parameters[key] = replaced[id(parameter)]
        for key, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[key] = Elsewhere(buffer)
    vars(model).pop("_moved", None)
    return model
