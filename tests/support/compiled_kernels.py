"""Triton kernels compiled for GPUs that need not be present."""

import os
import subprocess
import sys

HEADER = """
import itertools
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from optimum_moonshot.kernels import {module} as kernels

def compiled(kernel, tensors, constants, capability):
    types = {{name: tensors.get(name, "constexpr" if name in constants else "i32") for name in kernel.arg_names}}
    warps = {{"num_warps": constants.pop("num_warps")}}
    source = ASTSource(fn=kernel, signature=types, constexprs=constants)
    binary = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=warps)
    assert "cubin" in binary.asm
    print(kernel.__name__, capability, binary.metadata.shared)
"""


def compiled_lines(module, program, folder):
    """The lines that a program prints, one for each kernel of a module that it compiles."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(folder)}
    command = [sys.executable, "-c", HEADER.format(module=module) + program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()
