"""How many bytes a piece of work needs, found without doing it: on tensors that have shapes and no memory.

`LiveBytes` counts what is alive. Under torch's fake tensors, a block then runs forwards and backwards at the size that
it will have, in milliseconds, and whether its weights are there or not.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..model.offload import bare_copy


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that are made meanwhile, in this thread, by their storages.

    `now` are those alive, `peak` the most at any time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        before = {id(each.untyped_storage()) for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        found = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if id(storage) not in self._known and id(storage) not in before:
                    self._add(storage)
        return found

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = id(storage), storage.nbytes()

        def gone(_: Any) -> None:
            self.now -= size
            self._known.pop(key, None)

        self._known[key] = weakref.ref(storage, gone)
        self.now += size
        self.peak = max(self.peak, self.now)


@contextmanager
def without_memory() -> Iterator[FakeTensorMode]:
    """Tensors that are made meanwhile have shapes and no memory."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        yield mode


def shape_of(module: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """A copy of a module whose tensors have no memory, on the CPU, whatever device its own are on, or none.

    Args:
        module: any; it stays as it is.
        mode: of `without_memory`.
    """
    memo: dict[int, Any] = {}
    with mode:
        for tensor in [*module.parameters(), *module.buffers()]:
            made: Tensor = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
            memo[id(tensor)] = nn.Parameter(made, requires_grad=False) if isinstance(tensor, nn.Parameter) else made
        return bare_copy(module, memo)
