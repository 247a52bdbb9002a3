"""Assembles the project that kernel-builder builds, from this folder and the sources in optimum_moonshot/kernels.

kernel-builder compiles C++ files alone and gives all of a backend the same flags on every processor. So the C sources
are named .cpp, compiled by the flag -xc as C, and begin with their instruction set, of the table in setup.py, as a
pragma of gcc.

Usage: python hub/assemble.py FOLDER    which is made, or replaced
"""

import runpy
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KERNELS = ROOT / "optimum_moonshot" / "kernels"
PROCESSORS = {"x86_64": "__x86_64__", "aarch64": "__aarch64__"}


def target(flags: list[str]) -> str:
    """The argument of gcc's pragma that has the effect of flags: -mavx2 is "avx2", -march=… "arch=…"."""
    return ",".join(flag.removeprefix("-m") for flag in flags)


def as_cpp(source: Path, machines: dict[str, dict[str, list[str]]]) -> str:
    lines = []
    for machine, macro in PROCESSORS.items():
        if flags := machines[machine].get(source.name):
            lines += [f"#if defined({macro})", f'#pragma GCC target("{target(flags)}")', "#endif"]
    return "\n".join([*lines, f'#line 1 "{source.name}"', source.read_text(encoding="utf-8")])


def assemble(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "hub", folder, ignore=shutil.ignore_patterns("__pycache__", Path(__file__).name))
    compiled = folder / "packed_linear_cpu"
    compiled.mkdir()
    machines = runpy.run_path(str(ROOT / "setup.py"))["MACHINES"]
    for source in sorted(KERNELS.glob("*.c")):
        (compiled / f"{source.stem}.cpp").write_text(as_cpp(source, machines), encoding="utf-8")
    for header in KERNELS.glob("*.h"):
        shutil.copy(header, compiled)
    shutil.copy(KERNELS / "triton_bitmask.py", folder / "torch-ext" / "moonshot_kernels")


if __name__ == "__main__":
    assemble(Path(sys.argv[1]))
