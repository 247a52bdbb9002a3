"""The library beside this file, without torch's ABI: one serves every release of torch.

It is compiled when the package is installed, for several instruction sets, and takes the fastest that the processor
has. Its threads are those of torch.
"""

import ctypes
import logging
import os
import sys
from ctypes import c_char_p, c_int, c_int64, c_void_p
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from ..errors import require

_log = logging.getLogger(__name__)
_PATH = Path(__file__).with_name("libmoonshot.so")
_SWITCH = "MOONSHOT_KERNELS"
_VERSION = 1  # of moonshot_version in library.c
_DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}


class Library:
    """The functions of the compiled library, for tensors in host memory; `takes` says for which.

    W [d_out, d_in] is given by its values, its bits (uint8 [d_out, ⌈d_in/8⌉]) and the values before each row, int64
    [d_out + 1], which is None where every row has as many: as the format "bitmask" has them, contiguous. Nothing is
    read outside of them, whatever the bits say. `instruction_set` is the one in use, `most_rows` for how many rows
    of inputs it is faster than torch's dense product.

    Args:
        path: of the library.

    Raises:
        OSError: it is no library for this machine, or one of another release.
    """

    def __init__(self, path: Path):
        functions = ctypes.CDLL(str(path))
        if not hasattr(functions, "moonshot_version") or functions.moonshot_version() != _VERSION:
            raise OSError(f"{path} was compiled for another release; install the package again")
        self._product, self._unpack = functions.moonshot_product, functions.moonshot_unpack
        self._offsets, self._use, self._name = (
            functions.moonshot_offsets,
            functions.moonshot_use,
            functions.moonshot_set_name,
        )
        matrix = [c_int, c_int64, c_int64, c_void_p, c_int64, c_void_p, c_void_p]
        self._product.argtypes = [*matrix, c_void_p, c_int64, c_void_p, c_void_p, c_int]
        self._unpack.argtypes = [*matrix, c_int64, c_int64, c_void_p, c_int]
        self._unpack.restype = None
        self._offsets.argtypes, self._offsets.restype = [c_int64, c_int64, c_void_p, c_void_p], None
        self._use.argtypes, self._name.argtypes, self._name.restype = [c_char_p], [c_int], c_char_p
        self.use(None)

    @property
    def instruction_sets(self) -> tuple[str, ...]:
        """Those of the library that this processor has, the slowest first; "portable" is always there."""
        names: list[str] = []
        while name := self._name(len(names)):
            names.append(name.decode())
        return tuple(names)

    def use(self, instruction_set: str | None) -> None:
        """Compute with another instruction set from now on, in all threads; None takes the fastest.

        Raises:
            MoonshotError: this processor lacks it, or the library.
        """
        name = None if instruction_set is None else instruction_set.encode()
        known = self.instruction_sets
        others = f"here are {', '.join(known)}, and none for torch's own"
        require(self._use(name) == 0, f"{_SWITCH}={instruction_set!r}: {others}")
        self.instruction_set = instruction_set or known[-1]
        self.most_rows = 16 if self.instruction_set == known[0] else sys.maxsize

    @staticmethod
    def takes(values: Tensor) -> bool:
        """Whether these values are ones that the library reads: 16 or 32 bits, in host memory, contiguous."""
        return Library.computes(values.dtype) and values.device.type == "cpu" and values.is_contiguous()

    @staticmethod
    def computes(dtype: torch.dtype) -> bool:
        """Whether the library has functions for a dtype."""
        return dtype in _DTYPES

    def product(
        self, inputs: Tensor, values: Tensor, meta: Tensor, offsets: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        """x Wᵀ + bias, summed in float32.

        Args:
            inputs: x [rows, d_in], of the dtype of the values, contiguous.
            values: [d_out, d_in·n/m], or flat.
            meta: uint8 [d_out, ⌈d_in/8⌉].
            offsets: int64 [d_out + 1], or None.
            bias: [d_out], or None.

        Returns:
            [rows, d_out].

        Raises:
            MemoryError: none is left for a copy of the inputs.
        """
        (rows, d_in), d_out = inputs.shape, meta.shape[0]
        outputs = inputs.new_empty(rows, d_out)
        failed = self._product(
            _DTYPES[values.dtype],
            d_out,
            d_in,
            values.data_ptr(),
            values.numel(),
            meta.data_ptr(),
            None if offsets is None else offsets.data_ptr(),
            inputs.data_ptr(),
            rows,
            None if bias is None else bias.data_ptr(),
            outputs.data_ptr(),
            torch.get_num_threads(),
        )
        if failed:
            raise MemoryError(f"no memory for a copy of {rows}×{d_in} inputs")
        return outputs

    def unpack(self, dense: Tensor, values: Tensor, meta: Tensor, offsets: Tensor | None, first: int = 0) -> Tensor:
        """Dense rows of W, from `first` on.

        Args:
            dense: [rows, d_in], contiguous, to write into.
            values: [d_out, d_in·n/m], or flat.
            meta: uint8 [d_out, ⌈d_in/8⌉].
            offsets: int64 [d_out + 1], or None.
            first: row of W that the first row of `dense` is.

        Returns:
            `dense`.
        """
        self._unpack(
            _DTYPES[values.dtype],
            meta.shape[0],
            dense.shape[1],
            values.data_ptr(),
            values.numel(),
            meta.data_ptr(),
            None if offsets is None else offsets.data_ptr(),
            first,
            first + dense.shape[0],
            dense.data_ptr(),
            torch.get_num_threads(),
        )
        return dense

    def offsets(self, meta: Tensor, d_in: int) -> Tensor:
        """int64 [d_out + 1]: how many values the rows before each row have.

        Args:
            meta: uint8 [d_out, ⌈d_in/8⌉].
            d_in: inputs of a row.
        """
        offsets = torch.empty(meta.shape[0] + 1, dtype=torch.int64, device="cpu")
        self._offsets(meta.shape[0], d_in, meta.data_ptr(), offsets.data_ptr())
        return offsets


@lru_cache
def find_library() -> Library | None:
    """The library, or None where there is none, which is said once, or where MOONSHOT_KERNELS=none in the environment.

    MOONSHOT_KERNELS is otherwise the instruction set to use.

    Raises:
        MoonshotError: MOONSHOT_KERNELS is something else.
    """
    wanted = os.environ.get(_SWITCH)
    if wanted == "none":
        return None
    try:
        library = Library(_PATH)
    except OSError as error:
        reason = error if _PATH.exists() else "it was installed without a C compiler"
        _log.warning("packed matrices are multiplied without the package's C kernels, slowly: %s", reason)
        return None
    if wanted:
        library.use(wanted)
    return library
