"""The parts of the build that setup.cfg cannot express: the C library, the optimum-cli command, the index page."""

import configparser
import os
import re
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

ROOT = Path(__file__).parent
LINK = re.compile(r"(?P<picture>!?)\[(?P<text>[^\]]*)\]\((?!https?://|#)(?P<path>[^)]+)\)")

KERNELS = Path("optimum_moonshot", "kernels")
WIDE = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mfma", "-mf16c", "-mpopcnt", "-mbmi"]
# Compiler flags by file, each of one instruction set; a file is empty without them, or if the compiler lacks them.
INSTRUCTIONS = {
    "amx.c": [*WIDE, "-mavx512vbmi2", "-mavx512bf16", "-mamx-tile", "-mamx-bf16"],
    "avx2.c": ["-mavx2", "-mfma", "-mf16c", "-mpopcnt", "-mbmi"],
    "avx512.c": WIDE,
    "quantized_amx.c": [*WIDE, "-mavx512vbmi", "-mavx512vbmi2", "-mavx512vnni", "-mamx-tile", "-mamx-int8"],
    "quantized_avx2.c": ["-mavx2", "-mfma", "-mf16c", "-mpopcnt", "-mbmi"],
    "quantized_vnni.c": [*WIDE, "-mavx512vbmi", "-mavx512vbmi2", "-mavx512vnni"],
    "vbmi2.c": [*WIDE, "-mavx512vbmi2"],
}
ARM_INSTRUCTIONS = {"quantized_neon.c": ["-march=armv8.2-a+dotprod"]}
EXACT = {"columns.c": ["-ffp-contract=off"]}  # fused operations would round otherwise than torch
MACHINES = {"x86_64": INSTRUCTIONS, "aarch64": ARM_INSTRUCTIONS, "arm64": ARM_INSTRUCTIONS}
# Wheels for an index are built with MOONSHOT_BUILD=complete: a missing compiler or instruction set is then an error.
COMPLETE = os.environ.get("MOONSHOT_BUILD") == "complete"


class BuildKernels(build_ext):
    """Compiles the C library, each file with the flags of its instruction set; without a compiler it is left out."""

    def get_ext_filename(self, fullname: str) -> str:
        return f"{fullname.replace('.', '/')}.so"  # it is no module of Python's: ctypes loads it

    def build_extension(self, ext: Extension) -> None:
        objects = [self._compile(source, ext) for source in ext.sources]
        path = self.get_ext_fullpath(ext.name)
        self.mkpath(str(Path(path).parent))
        self.compiler.link_shared_object(objects, path)

    def _compile(self, source: str, ext: Extension) -> str:
        machine = self.plat_name.rpartition("-")[2]  # of the wheel, which a cross compiler builds on another machine
        flags = {**EXACT, **MACHINES.get(machine, {})}.get(Path(source).name, [])
        settings = {"output_dir": self.build_temp, "depends": ext.depends}
        try:
            made = self.compiler.compile([source], extra_postargs=[*ext.extra_compile_args, *flags], **settings)
        except CompileError:  # perhaps it does not know the flags
            if COMPLETE or not flags:
                raise
            self.warn(f"{source} is left empty: the compiler does not support {' '.join(flags)}")
            made = self.compiler.compile([source], extra_postargs=ext.extra_compile_args, **settings)
        return made[0]


class AnyPython(bdist_wheel):
    """A wheel for every Python of this system, since the library has nothing of Python's."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


def index_page(readme: str, repository: str | None) -> str:
    """The README as a package index shows it, where a link into the repository leads nowhere.

    Args:
        readme: Markdown, whose links into the repository are relative.
        repository: the address of the repository; links then lead to its files. Without one a link is its text, and
            a picture is left out.
    """

    def absolute(link: re.Match[str]) -> str:
        if repository is None:
            return "" if link["picture"] else link["text"]
        place = "raw" if link["picture"] else "blob"
        return f"{link['picture']}[{link['text']}]({repository.rstrip('/')}/{place}/main/{link['path']})"

    return LINK.sub(absolute, readme)


def repository() -> str | None:
    """`Source` of `project_urls` in setup.cfg."""
    metadata = configparser.ConfigParser()
    metadata.read(ROOT / "setup.cfg", encoding="utf-8")
    addresses = metadata.get("metadata", "project_urls", fallback="").strip().splitlines()
    named = dict(re.split(r"\s*=\s*", address.strip(), maxsplit=1) for address in addresses)
    return named.get("Source")


if __name__ == "__main__":
    setup(
        long_description=index_page((ROOT / "README.md").read_text(encoding="utf-8"), repository()),
        long_description_content_type="text/markdown",
        # optimum-cli imports every module of the namespace package optimum.commands.register.
        packages=[*find_packages(include=["optimum_moonshot", "optimum_moonshot.*"]), "optimum.commands.register"],
        package_dir={"optimum.commands.register": "optimum_moonshot/commands/register"},
        ext_modules=[
            Extension(
                "optimum_moonshot.kernels.libmoonshot",
                sorted(path.as_posix() for path in KERNELS.glob("*.c")),
                depends=sorted(path.as_posix() for path in KERNELS.glob("*.h")),
                extra_compile_args=["-std=gnu11", "-O3", "-g0", "-fvisibility=hidden"],
                optional=not COMPLETE,
            )
        ],
        cmdclass={"build_ext": BuildKernels, "bdist_wheel": AnyPython},
    )
