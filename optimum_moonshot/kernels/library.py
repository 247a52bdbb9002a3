"""The compiled library in this folder, called by ctypes: without torch's ABI, one build works with all its releases.

It is compiled at installation, if there is a compiler, for several instruction sets, and uses the fastest that the CPU
supports, on torch's OpenMP threads. The GPU kernels need Triton, which is part of torch's CUDA builds.
"""

import ctypes
import logging
import os
import sys
from collections.abc import Callable
from ctypes import c_char_p, c_float, c_int, c_int64, c_void_p
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import require

_log = logging.getLogger(__name__)
_PATH = Path(__file__).with_name("libmoonshot.so")
_SWITCH = "MOONSHOT_KERNELS"
_VERSION = 6  # of moonshot_version in library.c
_DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}


class QuantizedMatrix(NamedTuple):
    """W [d_out, d_in] in the format "int{bits}g{group}", contiguous, in host memory.

    Codes (uint8, all rows in one dimension), scale [d_out, ⌈d_in/group⌉] in a dtype that `Library.computes` accepts,
    meta (uint8 [d_out, ⌈d_in/8⌉]; None if all weights survive) and offsets (int64 [d_out + 1], the index of the first
    byte of codes of each row; None if all rows have the same number). `bits` is 8, 4 or 3, `group` a multiple of 64.
    Damaged codes, bits or offsets never cause reads outside of these tensors; scales must be finite.
    """

    bits: int
    group: int
    codes: Tensor
    scale: Tensor
    meta: Tensor | None
    offsets: Tensor | None
    shape: tuple[int, int]


class Library:
    """The functions of the compiled library, for tensors in host memory that `takes` accepts.

    W [d_out, d_in] is passed as values, bits (uint8 [d_out, ⌈d_in/8⌉]) and offsets (int64 [d_out + 1], the index of the
    first value of each row, or None if all rows have the same number), contiguous, as in the format "bitmask". Damaged
    bits never cause reads outside of these tensors. `instruction_sets` are the supported ones, from slowest to fastest,
    where "portable" is always the first. `instruction_set` is the one in use; up to `most_rows` rows of inputs, it is
    faster than torch's dense product. A library for another machine or release raises `OSError`.
    """

    def __init__(self, path: Path):
        functions = ctypes.CDLL(str(path))
        if not hasattr(functions, "moonshot_version") or functions.moonshot_version() != _VERSION:
            raise OSError(f"{path} was compiled for another release; install the package again")
        matrix = (c_int, c_int64, c_int64, c_void_p, c_int64, c_void_p, c_void_p)
        quantized = (c_int, c_int64, c_int, c_int64, c_int64, c_void_p, c_int64, c_void_p, c_void_p, c_void_p)
        block = c_int64, c_int64, c_void_p, c_void_p, c_int64
        signatures: dict[str, tuple[Any, ...]] = {
            "product": (*matrix, c_void_p, c_int64, c_void_p, c_void_p, c_int),
            "grouped": (*matrix, c_int64, c_void_p, c_void_p, c_void_p, c_int),
            "unpack": (*matrix, c_int64, c_int64, c_void_p, c_int),
            "offsets": (c_int64, c_int64, c_void_p, c_void_p),
            "quantized_product": (*quantized, c_void_p, c_int64, c_void_p, c_void_p, c_int, c_int),
            "quantized_grouped": (*quantized, c_int64, c_void_p, c_void_p, c_void_p, c_int, c_int),
            "quantized_unpack": (*quantized, c_int64, c_int64, c_void_p, c_int),
            "quantized_offsets": (c_int, c_int64, c_int64, c_void_p, c_void_p),
            "quantized_pack": (*quantized, c_void_p, c_int),
            "sweep": (*block, c_void_p, c_void_p, *[c_int64] * 3, c_void_p, c_void_p, c_float, c_int, c_int),
            "descend": (*block, c_void_p, c_void_p, c_void_p, c_float, c_int, c_int),
            "use": (c_char_p,),
            "set_name": (c_int,),
        }
        self.functions = {name: functions[f"moonshot_{name}"] for name in signatures}
        for name, types in signatures.items():
            self.functions[name].argtypes = types
        self.functions["set_name"].restype = c_char_p
        names: list[str] = []
        while name := self.functions["set_name"](len(names)):
            names.append(name.decode())
        self.instruction_sets = tuple(names)
        self.use(None)

    def use(self, instruction_set: str | None) -> None:
        """Switch to an instruction set, for all threads; None selects the fastest.

        Raises:
            MoonshotError: the CPU or the library does not support it.
        """
        name = None if instruction_set is None else instruction_set.encode()
        usage = f"use one of {', '.join(self.instruction_sets)}, or none for torch's dense product"
        require(self.functions["use"](name) == 0, usage, field=_SWITCH, value=instruction_set)
        self.instruction_set = instruction_set or self.instruction_sets[-1]
        self.most_rows = 16 if self.instruction_set == self.instruction_sets[0] else sys.maxsize

    @staticmethod
    def takes(values: Tensor) -> bool:
        """Whether the library supports these values: 16 or 32 bits, contiguous, in host memory."""
        return Library.computes(values.dtype) and values.device.type == "cpu" and values.is_contiguous()

    @staticmethod
    def computes(dtype: torch.dtype) -> bool:
        """Whether the library supports a dtype."""
        return dtype in _DTYPES

    def product(
        self, inputs: Tensor, values: Tensor, meta: Tensor, offsets: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        """x Wᵀ + bias, accumulated in float32, [rows, d_out]; x [rows, d_in] is contiguous, of the dtype of the values.

        Raises:
            MemoryError: the copy of the inputs cannot be allocated.
        """
        return self.direct_product(values, meta, offsets, inputs.shape[1], bias).multiply(inputs)

    def direct_product(
        self, values: Tensor, meta: Tensor, offsets: Tensor | None, d_in: int, bias: Tensor | None
    ) -> "DirectProduct":
        """The function x → `product`, with precomputed arguments; it returns None for more than `most_rows` rows."""
        referenced = values, meta, offsets, bias  # their addresses are used
        matrix, shape = _matrix(values, meta, offsets, d_in), (len(meta), d_in)
        return DirectProduct(self.functions["product"], matrix, shape, referenced, (), self.most_rows)

    def grouped(
        self, outputs: Tensor, inputs: Tensor, counts: Tensor, values: Tensor, meta: Tensor, offsets: Tensor | None
    ) -> None:
        """Multiply each group of consecutive inputs by its own matrix; W is the stack of these matrices.

        `counts`, int64 [groups] and contiguous, are the numbers of rows of each group, in total at most the rows of
        `inputs`. Writes `outputs` [rows, d_out / groups]; other arguments as in `product`.

        Raises:
            MemoryError: the copy of the inputs cannot be allocated.
        """
        matrix = _matrix(values, meta, offsets, inputs.shape[1])
        addresses = counts.data_ptr(), inputs.data_ptr(), outputs.data_ptr()
        if self.functions["grouped"](*matrix, len(counts), *addresses, torch.get_num_threads()):
            raise MemoryError(f"no memory for a copy of {inputs.shape[0]}×{inputs.shape[1]} inputs")

    def unpack(self, dense: Tensor, values: Tensor, meta: Tensor, offsets: Tensor | None, first: int = 0) -> Tensor:
        """Unpack rows of W, from `first` on, to `dense` [rows, d_in], which is contiguous; returns it."""
        matrix = _matrix(values, meta, offsets, dense.shape[1])
        self.functions["unpack"](*matrix, first, first + dense.shape[0], dense.data_ptr(), torch.get_num_threads())
        return dense

    def offsets(self, meta: Tensor, d_in: int) -> Tensor:
        """Index of the first value of each row, and the number of all values: int64 [d_out + 1]."""
        offsets = torch.empty(meta.shape[0] + 1, dtype=torch.int64, device="cpu")
        self.functions["offsets"](meta.shape[0], d_in, meta.data_ptr(), offsets.data_ptr())
        return offsets

    def quantized_product(
        self, inputs: Tensor, matrix: QuantizedMatrix, bias: Tensor | None, wide: bool = False
    ) -> Tensor:
        """x Wᵀ + bias [rows, d_out], with x [rows, d_in] contiguous and x and bias of the dtype of the scales.

        Each row of x is rounded to integers in −127…127 for each group of inputs, times a scale; sums are exact in a
        group, and accumulated in float32. Rows with values that are not finite are multiplied in float32.

        Args:
            inputs: x.
            matrix: W.
            bias: [d_out], or None.
            wide: multiply x as it is, in float32, with the weights of the dense matrix.

        Returns:
            The product in the dtype of x.

        Raises:
            MemoryError: the copy of the inputs cannot be allocated.
        """
        return self.direct_quantized_product(matrix, bias, wide, self.most_rows).multiply(inputs)

    def direct_quantized_product(
        self, matrix: QuantizedMatrix, bias: Tensor | None, wide: bool, most_rows: int
    ) -> "DirectProduct":
        """Like `direct_product`, but x → `quantized_product`."""
        referenced = matrix.codes, matrix.scale, matrix.meta, matrix.offsets, bias
        function = self.functions["quantized_product"]
        return DirectProduct(function, _quantized(matrix), matrix.shape, referenced, (wide,), most_rows)

    def quantized_grouped(
        self, outputs: Tensor, inputs: Tensor, counts: Tensor, matrix: QuantizedMatrix, wide: bool = False
    ) -> None:
        """Like `grouped`, but with a quantized matrix; inputs are rounded as in `quantized_product`, unless `wide`.

        Raises:
            MemoryError: the copy of the inputs cannot be allocated.
        """
        addresses = counts.data_ptr(), inputs.data_ptr(), outputs.data_ptr()
        arguments = *_quantized(matrix), len(counts), *addresses, wide, torch.get_num_threads()
        if self.functions["quantized_grouped"](*arguments):
            raise MemoryError(f"no memory for a copy of {inputs.shape[0]}×{inputs.shape[1]} inputs")

    def quantized_unpack(self, dense: Tensor, matrix: QuantizedMatrix, first: int = 0) -> Tensor:
        """Unpack rows of W, from `first` on, to `dense` [rows, d_in], contiguous, in the scales' dtype; returns it."""
        last = first + dense.shape[0]
        self.functions["quantized_unpack"](*_quantized(matrix), first, last, dense.data_ptr(), torch.get_num_threads())
        return dense

    def quantized_pack(self, matrix: QuantizedMatrix, dense: Tensor) -> bool:
        """Write codes and scales of W, whose bits are given, from `dense` [d_out, d_in], contiguous, in its dtype.

        Returns:
            Whether `dense` is on the grid; if it is not, only a part is written.
        """
        return not self.functions["quantized_pack"](*_quantized(matrix), dense.data_ptr(), torch.get_num_threads())

    def quantized_offsets(self, bits: int, meta: Tensor, d_in: int) -> Tensor:
        """Index of the first byte of codes of each row, and the number of all bytes: int64 [d_out + 1]."""
        offsets = torch.empty(meta.shape[0] + 1, dtype=torch.int64, device="cpu")
        self.functions["quantized_offsets"](bits, meta.shape[0], d_in, meta.data_ptr(), offsets.data_ptr())
        return offsets

    def sweep(
        self,
        weight: Tensor,
        keep: Tensor,
        factor: Tensor,
        errors: Tensor,
        nm: tuple[int, int] = (0, 0),
        alive: Tensor | None = None,
        step: Tensor | None = None,
        top: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> bool:
        """Prune a block of columns like `solvers.sparsegpt`, which documents it, with the same bits.

        Args:
            weight: [rows, columns] in float32, updated.
            keep: bool [rows, columns], with the strides of the weight; written where `nm` is given.
            factor: [columns, columns] in float32.
            errors: [rows, columns] in float32, written.
            nm: n and m of n:m; (0, 0): the mask is given.
            alive: bool [rows, columns], or None.
            step: scales [rows, columns]; None for no grid.
            top: the largest code of the grid.
            dtype: of the values on the grid.

        Returns:
            Whether the block was pruned: False if it is too wide.
        """
        factor, step = factor.contiguous(), None if step is None else step.float().contiguous()
        alive = None if alive is None else alive.contiguous()  # that of a transposed weight is transposed too
        addresses = factor.data_ptr(), errors.data_ptr(), errors.stride(0)
        numbers = *nm, _address(alive), _address(step), top, _DTYPES[dtype], torch.get_num_threads()
        return not self.functions["sweep"](*_block(weight, keep), *addresses, *numbers)

    def descend(
        self,
        weight: Tensor,
        keep: Tensor,
        slopes: Tensor,
        curvature: Tensor,
        step: Tensor,
        top: int,
        dtype: torch.dtype,
    ) -> bool:
        """Change the codes of a block of columns like `solvers.quantization`, which documents it, with the same bits.

        Args:
            weight: [rows, columns] in float32, on the grid; updated.
            keep: bool [rows, columns], with the strides of the weight.
            slopes: half the gradient of the loss, [rows, columns] in float32.
            curvature: the matrix of the quadratic, [columns, columns] in float32.
            step: scales [rows, columns] in float32.
            top: as in `sweep`.
            dtype: as in `sweep`.

        Returns:
            Whether the codes were changed: False if the block is too wide.
        """
        slopes, curvature, step = slopes.contiguous(), curvature.contiguous(), step.contiguous()
        addresses = slopes.data_ptr(), curvature.data_ptr(), step.data_ptr()
        numbers = top, _DTYPES[dtype], torch.get_num_threads()
        return not self.functions["descend"](*_block(weight, keep), *addresses, *numbers)


class DirectProduct:
    """A product by a function of the library, with the arguments of a matrix; the last of its `tensors` is the bias."""

    def __init__(
        self,
        function: Callable[..., int],
        matrix: tuple[int | None, ...],
        shape: tuple[int, int],
        tensors: tuple[Tensor | None, ...],
        options: tuple[Any, ...],
        most_rows: int,
    ):
        self.function, self.matrix, self.tensors, self.options = function, matrix, tensors, options
        self.bias, self.most_rows = _address(tensors[-1]), most_rows
        self.d_out, self.d_in = shape

    def __call__(self, inputs: Tensor) -> Tensor | None:
        """The product, or None for other numbers of rows than 1 to `most_rows`."""
        return self.multiply(inputs) if 0 < inputs.numel() <= self.most_rows * self.d_in else None

    def multiply(self, inputs: Tensor) -> Tensor:
        """x Wᵀ + bias, [..., d_out], of contiguous inputs [..., d_in] in the dtype of the matrix."""
        rows = inputs.numel() // self.d_in
        outputs = inputs.new_empty(*inputs.shape[:-1], self.d_out)
        addresses = inputs.data_ptr(), rows, self.bias, outputs.data_ptr()
        if self.function(*self.matrix, *addresses, *self.options, torch.get_num_threads()):
            raise MemoryError(f"no memory for a copy of {rows}×{self.d_in} inputs")
        return outputs


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _block(weight: Tensor, keep: Tensor) -> tuple[int, ...]:
    """The arguments that describe a block of columns of a weight and of its mask."""
    assert weight.stride() == keep.stride() and weight.stride(1) == 1
    return *weight.shape, weight.data_ptr(), keep.data_ptr(), weight.stride(0)


def _quantized(matrix: QuantizedMatrix) -> tuple[int | None, ...]:
    """The arguments that describe a quantized W, for the functions of the library."""
    codes, scale = matrix.codes, matrix.scale
    sizes = matrix.bits, matrix.group, _DTYPES[scale.dtype], *matrix.shape
    return *sizes, codes.data_ptr(), codes.numel(), _address(matrix.meta), _address(matrix.offsets), scale.data_ptr()


def _matrix(values: Tensor, meta: Tensor, offsets: Tensor | None, d_in: int) -> tuple[int | None, ...]:
    """The arguments that describe W, for the functions of the library."""
    sizes = _DTYPES[values.dtype], len(meta), d_in
    return *sizes, values.data_ptr(), values.numel(), meta.data_ptr(), _address(offsets)


@lru_cache
def find_library() -> Library | None:
    """The library; None, with one warning, if it is missing, and None if the environment has MOONSHOT_KERNELS=none.

    Other values of MOONSHOT_KERNELS select an instruction set.

    Raises:
        MoonshotError: the instruction set in MOONSHOT_KERNELS is not available.
    """
    selected = os.environ.get(_SWITCH)
    if selected == "none":
        return None
    try:
        library = Library(_PATH)
    except OSError as error:
        reason = error if _PATH.exists() else "it was installed without a C compiler"
        _log.warning("the package's C kernels are missing, so packed products and solvers are slow: %s", reason)
        return None
    if selected:
        library.use(selected)
    return library


@lru_cache
def find_gpu_kernels(formats: str) -> ModuleType | None:
    """The module of the kernels for "bitmask" or "quantized" formats; None, with a warning, if Triton is missing."""
    try:
        return import_module(f".triton_{formats}", __package__)
    except ImportError as error:
        _log.warning("%s weights are unpacked at every call: Triton is missing (%s)", formats, error)
        return None
