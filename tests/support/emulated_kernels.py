"""Quantized kernels compiled as for another CPU.

Those for AMX have tiles in plain C (`emulated_tiles.h`), for CPUs that have only the rest. In the portable ones the
compiler may fuse multiplications and additions, as on Arm.
"""

import copy
import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from optimum_moonshot.kernels import library as module
from optimum_moonshot.kernels.library import Library

SHARED = ("quantized.c", "quantized_pack.c", "parallel.c")
AMX = ("quantized_amx.c", "quantized_vnni.c", *SHARED)
PORTABLE = ("quantized_portable.c", *SHARED)


def build(folder: Path, sources: tuple[str, ...]) -> Path:
    """Compile the kernels in `AMX` or `PORTABLE` for this CPU; skips the test without a compiler or sources."""
    compiler, kernels = shutil.which("gcc"), Path(module.__file__).parent
    if compiler is None or not (kernels / sources[0]).exists():
        pytest.skip("no gcc, or no sources")
    path, tiles = folder / "emulated.so", Path(__file__).with_name("emulated_tiles.h")
    command = [compiler, "-std=gnu11", "-O2", "-fPIC", "-shared", "-march=native", "-ffp-contract=fast"]
    command += ["-include", str(tiles)] if sources is AMX else []
    linker = ["-Wl,-z,defs"]  # fails for a missing source, not when the library is loaded
    subprocess.run([*command, *(str(kernels / name) for name in sources), *linker, "-o", str(path)], check=True)
    return path


def emulated(library: Library, path: Path, kernel: str) -> Library:
    """A library whose products are those of "amx", "vnni" or "portable" in a file of `build`."""
    functions, copied = ctypes.CDLL(str(path)), copy.copy(library)
    copied.functions = dict(library.functions)
    for name in ("quantized_product", "quantized_grouped", "quantized_unpack"):
        copied.functions[name] = functions[f"moonshot_{name}"]
        copied.functions[name].argtypes = library.functions[name].argtypes
    used = ctypes.c_void_p.in_dll(functions, "moonshot_quantized")
    used.value = ctypes.addressof(ctypes.c_char.in_dll(functions, f"moonshot_quantized_{kernel}"))
    return copied
