"""The project for kernel-builder in hub/: its configuration names the sources, and the operator that they make."""

import os
import re
import runpy
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch

from optimum_moonshot.objective.patterns import NM
from optimum_moonshot.packing.bitmask import find_offsets, find_window, pack

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / "optimum_moonshot" / "kernels"
# kernel-builder generates these two.
REGISTRATION = (
    "#define TORCH_LIBRARY_EXPAND(NAME, MODULE) TORCH_LIBRARY(NAME, MODULE)\n#define REGISTER_EXTENSION(NAME)\n"
)
OPS = """
import torch
ops = torch.ops.{name}
def add_op_namespace_prefix(name):
    return f"{name}::{{name}}"
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub") / "project"
    runpy.run_path(str(ROOT / "hub" / "assemble.py"))["assemble"](folder)
    return folder


def test_the_configuration_names_every_source_and_nothing_else(project):
    tomllib = pytest.importorskip("tomllib")
    build = tomllib.loads((project / "build.toml").read_text(encoding="utf-8"))
    assert build["general"]["edition"] == 5 and build["general"]["license"] == "Apache-2.0"
    assert build["general"]["backends"] == ["cpu", "cuda", "rocm"]
    package = build["general"]["name"].replace("-", "_")
    assert (project / "torch-ext" / package / "__init__.py").exists()
    (kernel,) = build["kernel"].values()
    named = [*build["torch"]["src"], *kernel["src"]]
    assert all((project / path).is_file() for path in named)
    sources = {path.stem if path.suffix == ".c" else path.name for path in KERNELS.glob("*.[ch]")}
    assert {Path(path).name.removesuffix(".cpp") for path in kernel["src"]} == sources


def test_the_card_names_the_operators(project):
    (operator,) = re.findall(r'ops\.def\("(\w+)\(', (project / "torch-ext" / "torch_binding.cpp").read_text())
    card = (project / "CARD.md").read_text(encoding="utf-8")
    assert f"`{operator}`" in card and "the only operator" in " ".join(card.split())


def test_each_source_is_the_file_of_the_package(project):
    for source in KERNELS.glob("*.c"):
        assert (project / "packed_linear_cpu" / f"{source.stem}.cpp").read_text().endswith(source.read_text())
    assert '#pragma GCC target("avx2,fma,f16c,popcnt,bmi")' in (project / "packed_linear_cpu" / "avx2.cpp").read_text()
    triton = project / "torch-ext" / "moonshot_kernels" / "triton_bitmask.py"
    assert triton.read_bytes() == (KERNELS / "triton_bitmask.py").read_bytes()


def cases():
    """Packed matrices at 2:4 and unstructured, with inputs, as arguments of the operator."""
    for pattern, kept in ((NM(2, 4), torch.arange(64) % 4 < 2), (None, torch.arange(64) % 3 > 0)):
        weight = torch.randn(24, 64) * kept
        values, meta = pack(weight, pattern)
        offsets = find_offsets(values, meta, 64) if values.ndim == 1 else None
        for bias in (None, torch.randn(24)):
            arguments = torch.randn(2, 3, 64), values, meta, offsets, bias, find_window(values, meta, 64)
            yield arguments, torch.nn.functional.linear(arguments[0], weight, bias)


def check_operator(packed_linear):
    for arguments, expected in cases():
        torch.testing.assert_close(packed_linear(*arguments), expected)
        torch.library.opcheck(packed_linear, arguments)


def load(project, name):
    """The package of the project, with the operators of a library of this name."""
    package = project / "torch-ext" / "moonshot_kernels"
    (package / "_ops.py").write_text(OPS.format(name=name))
    spec = spec_from_file_location(name, package / "__init__.py", submodule_search_locations=[str(package)])
    sys.modules[name] = module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.release
def test_the_operator_for_cpus_passes_opcheck(project, tmp_path):
    """Compiled with the flags of build.toml, as kernel-builder does."""
    cpp_extension, tomllib = pytest.importorskip("torch.utils.cpp_extension"), pytest.importorskip("tomllib")
    name = "hub_cpu_test"
    (tmp_path / "registration.h").write_text(REGISTRATION)
    (kernel,) = tomllib.loads((project / "build.toml").read_text())["kernel"].values()
    sources = [project / path for path in kernel["src"] if path.endswith(".cpp")]
    includes = [f"-I{path}" for path in [tmp_path, *cpp_extension.include_paths()]]
    objects = [tmp_path / f"{source.stem}.o" for source in [*sources, Path("binding.cpp")]]
    for source, made in zip(sources, objects, strict=False):
        flags = ["-std=gnu++20", *kernel["cxx-flags"], "-O3", "-fPIC"]
        subprocess.run(["g++", *flags, "-c", source, "-o", made], check=True, capture_output=True)
    binding = project / "torch-ext" / "torch_binding.cpp"
    flags = ["-std=gnu++20", "-O0", "-fPIC", "-DCPU_KERNEL", f"-DTORCH_EXTENSION_NAME={name}", *includes]
    subprocess.run(["g++", *flags, "-c", binding, "-o", objects[-1]], check=True, timeout=300)
    library = [f"-L{path}" for path in cpp_extension.library_paths()]
    command = ["g++", "-shared", *objects, *library, "-ltorch_cpu", "-ltorch", "-lc10", "-o", tmp_path / "op.so"]
    subprocess.run(command, check=True)
    torch.ops.load_library(tmp_path / "op.so")
    check_operator(load(project, name).ops.packed_linear.default)
    (arguments, _), *_ = cases()
    with pytest.raises(RuntimeError, match="meta must be uint8"):
        torch.ops.hub_cpu_test.packed_linear(*arguments[:2], arguments[2][:, :-1], *arguments[3:])


@pytest.mark.slow
def test_the_operator_for_gpus_passes_opcheck(project):
    """With Triton's interpreter, registered for tensors in host memory."""
    pytest.importorskip("triton")
    code = f"""
import sys, torch
sys.path[:0] = [{str(Path(__file__).parent)!r}]
import test_kernel_project
from pathlib import Path
library = torch.library.Library("hub_gpu_test", "DEF")
matrix = "Tensor values, Tensor meta, Tensor? offsets"
library.define(f"packed_linear(Tensor inputs, {{matrix}}, Tensor? bias, int window) -> Tensor")
module = test_kernel_project.load(Path({str(project)!r}), "hub_gpu_test")
from hub_gpu_test.triton_linear import packed_linear
library.impl("packed_linear", packed_linear, "CPU")
test_kernel_project.check_operator(module.ops.packed_linear.default)
"""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=240)
