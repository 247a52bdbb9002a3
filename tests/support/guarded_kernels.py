"""A program that calls the compiled library with buffers next to protected memory pages.

Arguments: the library, and instruction sets. A read or write outside of a buffer ends the process.
"""

import ctypes
import random
import struct
import sys
from ctypes import c_char_p, c_float, c_int, c_int64, c_size_t, c_void_p

PAGE = 1 << 14
libc = ctypes.CDLL(None)
libc.mmap.restype, libc.mmap.argtypes = c_void_p, [c_void_p, c_size_t, c_int, c_int, c_int, c_int64]
libc.mprotect.argtypes, libc.munmap.argtypes = [c_void_p, c_size_t, c_int], [c_void_p, c_size_t]
ANONYMOUS = 0x1000 if sys.platform == "darwin" else 0x20


class Guarded:
    """Bytes that end at a protected page, or begin after one."""

    def __init__(self, content: bytes, at_end: bool):
        self.pages = -(-len(content) // PAGE) + 2
        self.base = libc.mmap(None, self.pages * PAGE, 3, 2 | ANONYMOUS, -1, 0)
        libc.mprotect(self.base, PAGE, 0)
        libc.mprotect(self.base + (self.pages - 1) * PAGE, PAGE, 0)
        inside = (self.pages - 2) * PAGE
        self.address = self.base + PAGE + (inside - len(content) if at_end else 0)
        ctypes.memmove(self.address, content, len(content))

    def __del__(self):
        libc.munmap(self.base, self.pages * PAGE)


def row_bits(d_in: int, count: int) -> bytes:
    chosen = set(random.sample(range(d_in), count))
    return bytes(sum(1 << j for j in range(8) if 8 * b + j in chosen) for b in range(-(-d_in // 8)))


def check(library: ctypes.CDLL, dtype: int, shape: tuple[int, int], rows: int, counts: list[int], damage: bool) -> None:
    (d_out, d_in), size = shape, 4 if dtype == 2 else 2
    bits, starts = b"".join(row_bits(d_in, count) for count in counts), [sum(counts[:o]) for o in range(d_out + 1)]
    if damage:  # more values than exist, and columns beyond the last
        bits = b"\xff" * len(bits)
    equal = len(set(counts)) == 1
    for at_end in (True, False):
        guarded = [
            Guarded(bytes(random.randrange(64) for _ in range(amount)), at_end)
            for amount in (
                sum(counts) * size,
                rows * d_in * size,
                d_out * size,
                rows * d_out * size,
                d_out * d_in * size,
            )
        ]
        values, inputs, bias, outputs, dense = (buffer.address for buffer in guarded)
        meta = Guarded(bits, at_end)
        offsets = Guarded(b"".join(start.to_bytes(8, "little") for start in starts), at_end)
        places = None if equal else offsets.address
        matrix = dtype, d_out, d_in, values, sum(counts), meta.address, places
        assert library.moonshot_product(*matrix, inputs, rows, bias, outputs, 1) == 0
        for first in range(d_out):
            library.moonshot_unpack(*matrix, first, d_out, dense + first * d_in * size, 1)
        if not damage:
            library.moonshot_offsets(d_out, d_in, meta.address, offsets.address)
            assert list((c_int64 * (d_out + 1)).from_address(offsets.address)) == starts


def check_quantized(
    library: ctypes.CDLL, bits: int, dtype: int, shape: tuple[int, int], rows: int, stored: int, dense: bool
) -> None:
    """A matrix of random codes, bits and offsets, of which only the sizes of the buffers hold; d_in / 64 groups."""
    (d_out, d_in), size = shape, 4 if dtype == 2 else 2
    groups = -(-d_in // 64)
    sizes = (stored, d_out * groups * size, rows * d_in * size, rows * d_out * size, d_out * d_in * size)
    for at_end in (True, False):
        guarded = [Guarded(bytes(random.randrange(64) for _ in range(amount)), at_end) for amount in sizes]
        codes, scale, inputs, outputs, unpacked = (buffer.address for buffer in guarded)
        meta = Guarded(bytes(random.choice((0, 85, 255)) for _ in range(d_out * -(-d_in // 8))), at_end)
        starts = sorted(random.randint(0, 2 * stored) for _ in range(d_out + 1))
        offsets = Guarded(b"".join(start.to_bytes(8, "little") for start in starts), at_end)
        places = (None, None) if dense else (meta.address, offsets.address)
        matrix = bits, 64, dtype, d_out, d_in, codes, stored, *places, scale
        counts = (c_int64 * d_out)(rows - rows // 2, *[0] * (d_out - 2), *[rows // 2] * (d_out > 1))
        for wide in (0, 1):
            assert library.moonshot_quantized_grouped(*matrix, d_out, counts, inputs, outputs, wide, 1) == 0
            assert library.moonshot_quantized_product(*matrix, inputs, rows, None, outputs, wide, 1) == 0
        library.moonshot_quantized_unpack(*matrix, 0, d_out, unpacked, 1)
        length = stored
        if not dense:  # the offsets are those of the bits now
            library.moonshot_quantized_offsets(bits, d_out, d_in, meta.address, offsets.address)
            length = (c_int64 * (d_out + 1)).from_address(offsets.address)[d_out]
        written, zeros = Guarded(bytes(length), at_end), Guarded(bytes(d_out * d_in * size), at_end)
        target = *matrix[:5], written.address, length, *places, scale
        library.moonshot_quantized_pack(*target, unpacked, 1)  # stops where these are not on the grid
        assert library.moonshot_quantized_pack(*target, zeros.address, 1) == 0


def check_all_quantized(library: ctypes.CDLL) -> None:
    matrix = [c_int, c_int64, c_int, c_int64, c_int64, c_void_p, c_int64, c_void_p, c_void_p, c_void_p]
    library.moonshot_quantized_product.argtypes = [*matrix, c_void_p, c_int64, c_void_p, c_void_p, c_int, c_int]
    library.moonshot_quantized_grouped.argtypes = [*matrix, c_int64, c_void_p, c_void_p, c_void_p, c_int, c_int]
    library.moonshot_quantized_unpack.argtypes = [*matrix, c_int64, c_int64, c_void_p, c_int]
    library.moonshot_quantized_pack.argtypes = [*matrix, c_void_p, c_int]
    library.moonshot_quantized_offsets.argtypes = [c_int, c_int64, c_int64, c_void_p, c_void_p]
    for bits in (8, 4, 3):
        for d_out, d_in in ((1, 1), (3, 200), (5, 128), (37, 320)):
            whole = d_out * ((d_in // 64) * 8 * bits + (d_in % 64 * bits + 7) // 8)
            for number, rows in enumerate((1, 2, 3, 4, 30)):
                check_quantized(library, bits, number % 3, (d_out, d_in), rows, whole // 2, False)
                check_quantized(library, bits, number % 3, (d_out, d_in), rows, whole, True)


def check_columns(library: ctypes.CDLL) -> None:
    """The loops over columns, with matrices of ones: rows that fill no tile, and blocks of every width."""
    block = [c_int64, c_int64, c_void_p, c_void_p, c_int64]
    numbers = [c_int64, c_int64, c_int64, c_void_p, c_void_p, c_float, c_int, c_int]
    library.moonshot_sweep.argtypes = [*block, c_void_p, c_void_p, *numbers]
    library.moonshot_descend.argtypes = [*block, c_void_p, c_void_p, c_void_p, c_float, c_int, c_int]
    for rows, width, m in ((1, 4, 4), (15, 32, 2), (16, 1, 0), (33, 64, 64), (20, 256, 0)):
        for at_end in (True, False):
            ones = struct.pack("f", 1) * (rows * width)
            weight, slopes, step, errors = (Guarded(ones, at_end) for _ in range(4))
            matrix = Guarded(struct.pack("f", 1) * width**2, at_end)
            keep, alive = (Guarded(b"\1" * (rows * width), at_end) for _ in range(2))
            values = rows, width, weight.address, keep.address, width
            for places in ((None, None), (alive.address, step.address)):
                options = errors.address, width, m // 2, m, *places, 7, 0, 1
                assert library.moonshot_sweep(*values, matrix.address, *options) == 0
            addresses = slopes.address, matrix.address, step.address
            assert library.moonshot_descend(*values, *addresses, 7, 1, 1) == 0


ROWS = (1, 2, 17, 70, 150)


def main(path: str, *sets: str) -> None:
    library = ctypes.CDLL(path)
    matrix = [c_int, c_int64, c_int64, c_void_p, c_int64, c_void_p, c_void_p]
    library.moonshot_product.argtypes = [*matrix, c_void_p, c_int64, c_void_p, c_void_p, c_int]
    library.moonshot_unpack.argtypes = [*matrix, c_int64, c_int64, c_void_p, c_int]
    library.moonshot_offsets.argtypes = [c_int64, c_int64, c_void_p, c_void_p]
    library.moonshot_use.argtypes = [c_char_p]
    random.seed(0)
    check_columns(library)
    for name in sets:
        assert library.moonshot_use(name.encode()) == 0
        check_all_quantized(library)
        for dtype in range(3):
            for d_in, shapes in ((7, ROWS), (257, ROWS), (1100, (70,))):  # the last is summed in parts
                for counts in ([d_in // 2] * 3, [d_in, 0, random.randint(0, d_in)]):
                    for rows in shapes:
                        for damage in (False, True):
                            check(library, dtype, (3, d_in), rows, counts, damage)
            many = [random.randint(0, 520) for _ in range(37)]  # rows of W that are unpacked together
            for counts in ([260] * 37, many):
                for rows in (2, 17):
                    for damage in (False, True):
                        check(library, dtype, (37, 520), rows, counts, damage)


if __name__ == "__main__":
    main(*sys.argv[1:])
    print("nothing outside was touched")
