"""The compiled library: every instruction set of this CPU against float64, and no access outside of buffers."""

import logging
import os
import platform
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import reference_packing as reference
import torch
from torch.nn import functional

from optimum_moonshot import MoonshotError
from optimum_moonshot.kernels import library
from optimum_moonshot.kernels.library import Library, find_library
from optimum_moonshot.objective.patterns import NM
from optimum_moonshot.packing.bitmask import pack, unpack, unpack_by_torch

LIBRARY = find_library()
needs_library = pytest.mark.skipif(LIBRARY is None, reason="installed without a C compiler")
SETS = LIBRARY.instruction_sets if LIBRARY else ()
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
ROWS = [*range(1, 18), 30, 40, 60, 70, 90, 100, 120, 150]  # few, and chunks of every width
NMS = [NM(2, 4), NM(4, 8), NM(8, 16), NM(16, 32), NM(1, 4)]
GUARDED = Path(__file__).parents[1] / "support" / "guarded_kernels.py"
ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "optimum_moonshot" / "kernels").glob("*.c"))


@pytest.fixture(params=SETS)
def kernels(request):
    """The library, with each instruction set in turn."""
    LIBRARY.use(request.param)
    yield LIBRARY
    LIBRARY.use(os.environ.get("MOONSHOT_KERNELS"))


def matrix(d_out, d_in, kind, dtype):
    """An n:m or unstructured matrix with an empty row and a full one."""
    if isinstance(kind, NM):
        return reference.random_matrix(d_out, d_in, kind, dtype)
    generator = torch.Generator().manual_seed(d_in)
    keep = torch.rand(d_out, d_in, generator=generator) >= kind
    keep[d_out // 2] = True
    keep[-1] = False
    return torch.where(keep, torch.randn(d_out, d_in, generator=generator), 0).to(dtype)


def packed(dense, kind):
    values, meta = pack(dense, kind if isinstance(kind, NM) else None)
    return values, meta, LIBRARY.offsets(meta, dense.shape[1]) if values.ndim == 1 else None


def cases():
    """Every n:m and sparsity in a few sizes, including ragged ones."""
    yield from ((9, 4 * kind.m if kind.m < 16 else 288, kind) for kind in NMS)
    yield 6, 2 * 2048 + 96, NM(2, 4)  # more than one strip
    yield 300, 64, NM(2, 4)  # more than one group of rows
    for d_in in (1, 7, 33, 100, 257):
        yield from ((9, d_in, sparsity) for sparsity in (0.0, 0.5, 0.9, 1.0))
    yield 3, 4200, 0.7


def assert_exact(outputs, inputs, dense, bias):
    """The error to float64 is at most twice that of torch's product, plus the rounding of one sum."""
    exact = inputs.double() @ dense.double().T
    size = inputs.double().abs() @ dense.double().abs().T
    if bias is not None:
        exact, size = exact + bias.double(), size + bias.double().abs()
    theirs = functional.linear(inputs, dense, bias)
    error, allowed = (outputs.double() - exact).abs(), 2 * (theirs.double() - exact).abs().max()
    assert (error <= allowed + size * torch.finfo(torch.float32).eps + exact.abs() * torch.finfo(dense.dtype).eps).all()


@needs_library
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_are_as_exact_as_torchs(kernels, dtype):
    generator = torch.Generator().manual_seed(1)
    for number, (d_out, d_in, kind) in enumerate(cases()):
        dense = matrix(d_out, d_in, kind, dtype)
        parts = packed(dense, kind)
        bias = torch.randn(d_out, generator=generator).to(dtype) if number % 2 else None
        for rows in ROWS:
            inputs = torch.randn(rows, d_in, generator=generator).to(dtype)
            assert_exact(kernels.product(inputs, *parts, bias), inputs, dense, bias)


@needs_library
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_unpacking_is_bit_for_bit_that_of_torch(kernels, dtype):
    for d_out, d_in, kind in cases():
        dense = matrix(d_out, d_in, kind, dtype)
        values, meta, offsets = packed(dense, kind)
        ours, theirs = unpack(values, meta, d_in), unpack_by_torch(values, meta, d_in)
        integer = torch.int32 if dtype == torch.float32 else torch.int16
        assert torch.equal(ours.view(integer), theirs.view(integer))
        assert torch.equal(ours, dense)
        last_rows = torch.full((2, d_in), torch.nan, dtype=dtype)
        assert torch.equal(kernels.unpack(last_rows, values, meta, offsets, first=d_out - 2), dense[-2:])


@needs_library
def test_every_bit_of_a_value_survives_unpacking(kernels):
    everything = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.bfloat16, torch.float16):
        values = everything.view(dtype).reshape(1024, 64)
        meta = torch.full((1024, 16), 0b01011010, dtype=torch.uint8)
        dense = unpack(values, meta, 128).view(torch.int16)
        keep = torch.tensor([bit in "1346" for bit in "01234567"] * 16)
        assert torch.equal(dense[:, keep].flatten(), everything) and not dense[:, ~keep].any()


@needs_library
def test_infinities_and_nans_propagate_as_in_a_dense_product(kernels):
    for dtype in DTYPES:
        dense = matrix(9, 300, 0.5, dtype)
        special = dense.clone()
        special[0, 2], special[1, 299], special[5, 270] = torch.inf, -torch.inf, torch.nan
        for value in (torch.inf, -torch.inf, torch.nan, 1.0):
            for rows in (1, 4, 40):
                inputs = torch.ones(rows, 300, dtype=dtype)
                inputs[rows // 2, 150] = value
                for weight in (dense, special):  # zero times infinity is NaN
                    ours = kernels.product(inputs, *packed(weight, 0.5), None).float()
                    theirs = inputs.float() @ weight.float().T
                    assert torch.equal(ours.isnan(), theirs.isnan()) and torch.equal(ours.isinf(), theirs.isinf())
                    assert torch.equal(ours[ours.isinf()], theirs[theirs.isinf()])
                    assert (ours[rows // 2].isnan() | ours[rows // 2].isinf()).all() or value == 1


@needs_library
def test_the_smallest_and_the_largest_numbers(kernels):
    """Products of float16 outside the range of float16, and their sums; bfloat16 has fewer bits."""
    for dtype in (torch.float16, torch.bfloat16):
        info = torch.finfo(dtype)
        ends = torch.tensor([info.tiny, info.max / 2, 1 + info.eps, 2 - info.eps, -1.0])
        numbers = torch.cat(
            [ends, torch.tensor([2.0**-24, 2.0**-14 - 2.0**-24] if dtype == torch.float16 else [0.5, 3.0])]
        )
        numbers = numbers.to(dtype)
        inputs = torch.diag(numbers.repeat(8)[:56]).to(dtype)
        dense = numbers.repeat(8)[:56].repeat(33, 1)
        exact = (inputs.double() @ dense.double().T).float().to(dtype)
        assert torch.equal(kernels.product(inputs, *packed(dense, 0.5), None), exact)


@needs_library
def test_more_rows_than_one_chunk(kernels):
    for dtype in DTYPES:
        dense = matrix(9, 100, 0.5, dtype)
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(513, 100, generator=generator).to(dtype)  # one row remains
        bias = torch.randn(9, generator=generator).to(dtype)
        ours = kernels.product(inputs, *packed(dense, 0.5), bias)
        exact = functional.linear(inputs.double(), dense.double(), bias.double())
        size = functional.linear(inputs.double().abs(), dense.double().abs(), bias.double().abs())
        assert ((ours.double() - exact).abs() <= 2 * torch.finfo(dtype).eps * size).all()


@needs_library
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_row_groups_input_strips_and_many_rows(kernels, dtype):
    """Integers have exact sums, so that a missing or repeated term is noticed."""
    generator = torch.Generator().manual_seed(0)
    few = ((300, 600, 2), (97, 777, 5), (70, 512, 16), (130, 1100, 30), (75, 600, 47), (99, 300, 64), (50, 3000, 9))
    for d_out, d_in, rows in (*few, (300, 600, 70), (33, 777, 530), (600, 90, 81), (260, 1100, 140)):
        dense = torch.randint(-1, 2, (d_out, d_in), generator=generator).to(dtype)
        inputs = torch.randint(-1, 2, (rows, d_in), generator=generator).to(dtype)
        bias = torch.randint(-9, 9, (d_out,), generator=generator).to(dtype)
        exact = (inputs.double() @ dense.double().T + bias.double()).to(dtype)
        assert torch.equal(kernels.product(inputs, *packed(dense, 0.5), bias), exact)


@needs_library
def test_threads_change_no_bit(kernels):
    threads = torch.get_num_threads()
    try:
        for kind, rows in ((NM(2, 4), 3), (0.7, 3), (0.7, 70)):
            dense = matrix(2000, 512, kind, torch.bfloat16)
            parts, inputs = packed(dense, kind), torch.randn(rows, 512).bfloat16()
            result = []
            for count in (1, 2, 5):
                torch.set_num_threads(count)
                result.append((kernels.product(inputs, *parts, None), unpack(*parts[:2], 512)))
            for outputs, unpacked in result:
                assert torch.equal(outputs, result[0][0]) and torch.equal(unpacked, dense)
    finally:
        torch.set_num_threads(threads)


@needs_library
def test_a_forked_process_computes_with_one_thread():
    """Like the workers of a DataLoader, after the parent has used its threads."""
    code = """
import os, torch
from optimum_moonshot.kernels.library import find_library
from optimum_moonshot.objective.patterns import NM
from optimum_moonshot.packing.bitmask import pack
torch.set_num_threads(2)
parts, inputs = (*pack(torch.ones(4096, 512) * (torch.arange(512) % 4 < 2), NM(2, 4)), None), torch.ones(1, 512)
before = find_library().product(inputs, *parts, None)
if not os.fork():
    torch.set_num_threads(1)
    os._exit(not torch.equal(before, find_library().product(inputs, *parts, None)))
assert os.wait()[1] == 0 and (before == 256).all()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.slow
@needs_library
def test_nothing_is_read_or_written_outside_the_buffers():
    """Every buffer ends or begins at a protected page; also with corrupted metadata."""
    subprocess.run([sys.executable, str(GUARDED), str(library._PATH), *SETS], check=True, timeout=120)


@pytest.mark.slow
@needs_library
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the sanitizer is loaded as on Linux")
def test_the_sanitizers_report_nothing(tmp_path):
    """The same, compiled with the address and undefined-behaviour sanitizers."""
    compiler, path = shutil.which("gcc"), tmp_path / "libmoonshot.so"
    runtime = compiler and subprocess.check_output([compiler, "-print-file-name=libasan.so"], text=True).strip()
    if not runtime or not Path(runtime).exists() or not SOURCES:
        pytest.skip("no gcc with an address sanitizer, or no sources")
    flags = runpy.run_path(str(ROOT / "setup.py"))["INSTRUCTIONS"] if platform.machine() == "x86_64" else {}
    checks = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fPIC", "-O0", "-std=gnu11"]
    objects = [tmp_path / f"{source.stem}.o" for source in SOURCES]
    for source, made in zip(SOURCES, objects, strict=True):
        subprocess.run([compiler, *checks, *flags.get(source.name, []), "-c", source, "-o", made], check=True)
    subprocess.run([compiler, "-shared", *checks, *objects, "-o", path], check=True)
    settings = {**os.environ, "LD_PRELOAD": os.path.realpath(runtime), "ASAN_OPTIONS": "detect_leaks=0"}
    subprocess.run([sys.executable, str(GUARDED), str(path), *SETS], env=settings, check=True, timeout=300)


@needs_library
def test_an_instruction_set_is_chosen_by_name(monkeypatch):
    assert SETS[0] == "portable"
    with pytest.raises(MoonshotError, match="MOONSHOT_KERNELS='sse9': use one of portable"):
        LIBRARY.use("sse9")
    find_library.cache_clear()
    try:
        monkeypatch.setenv("MOONSHOT_KERNELS", "none")
        assert find_library() is None
        find_library.cache_clear()
        monkeypatch.setenv("MOONSHOT_KERNELS", "sse9")
        with pytest.raises(MoonshotError, match="sse9"):
            find_library()
    finally:
        find_library.cache_clear()


def test_a_missing_library_is_logged_in_one_line(monkeypatch, tmp_path, caplog):
    monkeypatch.delenv("MOONSHOT_KERNELS", raising=False)
    (tmp_path / "damaged.so").write_text("no library")
    for name, words in (("missing.so", "installed without a C compiler"), ("damaged.so", "damaged.so")):
        monkeypatch.setattr(library, "_PATH", tmp_path / name)
        find_library.cache_clear()
        caplog.clear()
        try:
            with caplog.at_level(logging.WARNING):
                assert find_library() is None and find_library() is None
            (record,) = caplog.records
            assert words in record.getMessage() and record.name.startswith("optimum_moonshot")
        finally:
            find_library.cache_clear()


@needs_library
def test_a_library_of_another_release_is_not_used(monkeypatch):
    monkeypatch.setattr(library, "_VERSION", 0)
    with pytest.raises(OSError, match="compiled for another release; install the package again"):
        Library(library._PATH)
