"""Convert a saved checkpoint to another format, or to a GGUF file by the converter and the quantizer of llama.cpp."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from ..errors import UNSET, MoonshotError, check_choice, check_path, require
from ..files import STAGING_PREFIX, check_folder, read_json, staged, temporary_folder, writing
from ..reports.prune_report import REPORT_NAME, PruneReport
from .card import Facts, write_card
from .compressed_tensors import export_files
from .declared_metadata import read_declared_metadata
from .folder import HUB_OPTIONS, Checkpoint
from .loading import checkpoint_meta_model
from .origin import copy_side_files
from .packed_files import FORMATS, pack_files, unpack_files
from .weight_files import EXPORT

CONVERTER = "convert_hf_to_gguf.py"
CONVERTER_VARIABLE = "LLAMA_CPP_CONVERTER"
CONVERTED = ("f32", "f16", "bf16", "q8_0")  # types that the converter writes
QUANTIZED = (
    "q6_k", "q5_k_m", "q5_k_s", "q5_1", "q5_0", "q4_k_m", "q4_k_s", "q4_1", "q4_0", "q3_k_l", "q3_k_m", "q3_k_s",
    "q2_k",
)  # fmt: skip
GGUF_TYPES = (*CONVERTED, *QUANTIZED)
_GET_CONVERTER = (
    "llama-cpp-python's source distribution has it in vendor/llama.cpp: "
    "pip download llama-cpp-python --no-deps --no-binary llama-cpp-python"
)
_SHOWN = 4  # last lines of a failed program, without the indented frames of a traceback
_QUANTIZE = """
import ctypes, os, sys
import llama_cpp
source, target, name = sys.argv[1:]
options = llama_cpp.llama_model_quantize_default_params()
options.ftype = getattr(llama_cpp, "LLAMA_FTYPE_MOSTLY_" + name.upper())
llama_cpp.llama_backend_init()
sys.exit(llama_cpp.llama_model_quantize(os.fsencode(source), os.fsencode(target), ctypes.byref(options)))
"""


def convert(source: str | os.PathLike[str], output: str | os.PathLike[str], format: str, **loading: Any) -> None:
    """Convert a pruned checkpoint to another format, with its other files, and update the card.

    The weights are verified first, like in `load_pruned`. Links to files outside the folder are not copied.

    Args:
        source: folder of a checkpoint that this package pruned, or its name on the Hub.
        output: folder of the new one; may be the same.
        format: "dense", "packed" or "compressed-tensors", which is not converted back.
        loading: for the configuration, such as `trust_remote_code`, and `revision`, `token`, … for the Hub.

    Raises:
        MoonshotError: the checkpoint is not pruned, has the format already, or is damaged.
    """
    check_choice("format", format, (*FORMATS, EXPORT))
    check_path("source", source)
    check_path("output", output)
    hub = {name: loading.pop(name) for name in HUB_OPTIONS if name in loading}
    checkpoint = Checkpoint.find(source, whole=True, **hub)
    folder, stored, packed = checkpoint.folder, checkpoint.format, checkpoint.packed
    require(stored != format, f"{source} is a {format} checkpoint already")
    require(stored != EXPORT, f"{source} is a {EXPORT} checkpoint", hint="convert the dense or the packed one instead")
    checkpoint.check_files()
    checkpoint.check_no_other_weights()
    model = None if packed else checkpoint_meta_model(folder, **loading)
    with staged("output", output) as staging:
        copy_side_files(folder, staging)
        if model is None:
            unpack_files(folder, staging)
        elif format == "packed":
            pack_files(folder, staging, model)
        if format == EXPORT:
            dense = staging if packed else folder
            export_files(dense, staging, model or checkpoint_meta_model(dense, **loading))
        facts = Facts.read(staging, Path(output).resolve().name, format)
        if facts is not None and (staging / REPORT_NAME).is_file():
            write_card(staging, PruneReport.load(staging), facts)


def export_gguf(
    source: str | os.PathLike[str],
    path: str | os.PathLike[str],
    type: str = "q8_0",
    *,
    converter: str | os.PathLike[str] | None = None,
    python: str | None = None,
    overwrite: bool = False,
    trust_remote_code: bool = False,
    **hub: Any,
) -> list[str]:
    """Export a model as a GGUF file for llama.cpp, which appears once it is complete.

    llama.cpp's ``convert_hf_to_gguf.py`` converts the folder, if it supports the architecture and the tokenizer. A
    packed checkpoint is converted to a dense one first, in a temporary folder beside the file.

    Args:
        source: folder of a dense or packed checkpoint, pruned or not, or its name on the Hub.
        path: the file.
        type: "f32", "f16", "bf16" or "q8_0"; or one that llama-cpp-python quantizes to, from 16 bits: "q6_k",
            "q5_k_m", "q5_k_s", "q5_1", "q5_0", "q4_k_m", "q4_k_s", "q4_1", "q4_0", "q3_k_l", "q3_k_m", "q3_k_s",
            "q2_k".
        converter: path of ``convert_hf_to_gguf.py``; default: the environment variable LLAMA_CPP_CONVERTER, else the
            one on the PATH.
        python: the interpreter that runs converter and quantizer; default: this one.
        overwrite: replace an existing file.
        trust_remote_code: let the converter run code that comes with the model, which it does without asking.
        hub: `revision`, `token`, … for a name on the Hub.

    Returns:
        A note if the model is sparse, since GGUF stores zeros like other weights; else none.

    Raises:
        MoonshotError: the file exists; converter, interpreter or llama-cpp-python are missing; the source is damaged,
            has the compressed-tensors format, or comes with code; or a program fails, with its last messages.
    """
    command = _check_request(path, type, converter, python, overwrite)
    check_path("source", source)
    unknown = ", ".join(sorted(set(hub) - set(HUB_OPTIONS)))
    require(not unknown, f"{unknown}: not an argument of export_gguf")
    checkpoint = Checkpoint.find(source, whole=True, **hub)
    stored, hint = checkpoint.format, "export the dense or the packed one instead"
    require(stored != EXPORT, f"{source} is a {EXPORT} checkpoint", hint=hint)
    code = [file.name for file in checkpoint.folder.glob("*config.json") if "auto_map" in read_json(file)]
    message = f"{source}: the converter would run the code that {' and '.join(sorted(code))} names"
    trust = "read it, and set trust_remote_code=True"
    require(trust_remote_code or not code, message, hint=trust)
    declared = read_declared_metadata(checkpoint)
    with writing("path", path):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with temporary_folder(STAGING_PREFIX, Path(path).parent) as staging:
            folder = _dense(checkpoint, staging)
            os.replace(_write(folder, staging, command, type), path)
    sparse = declared.record is not None and declared.record.sparsity > 0 and not declared.compacted
    return ["GGUF stores zeros like other weights: the file is as large as that of the dense model"] if sparse else []


def _dense(checkpoint: Checkpoint, staging: Path) -> Path:
    """The folder of a checkpoint, or for a packed one of a dense copy, which has the name of the model."""
    if not checkpoint.packed:
        return checkpoint.folder
    dense = staging / (checkpoint.folder.resolve().name or "dense")
    convert(checkpoint.folder, dense, "dense")
    return dense


def _write(folder: Path, staging: Path, command: list[str], type: str) -> Path:
    """Convert a folder to a file in `staging`, and quantize it if the converter does not write the type."""
    file, quantized = staging / "converted.gguf", staging / "quantized.gguf"
    outtype = type if type in CONVERTED else "auto"  # 16 bits
    _run(CONVERTER, [*command, folder, "--outtype", outtype, "--outfile", file], file)
    if type in CONVERTED:
        return file
    _run("llama_model_quantize", [command[0], "-c", _QUANTIZE, file, quantized, type], quantized)
    return quantized


def _check_request(
    path: str | os.PathLike[str],
    type: str,
    converter: str | os.PathLike[str] | None,
    python: str | None,
    overwrite: bool,
) -> list[str]:
    """Check the arguments of `export_gguf`, before any work, and return the interpreter and the converter."""
    check_choice("type", type, GGUF_TYPES)
    check_path("path", path)
    file = Path(path)
    check_folder("path", file.parent)
    require(not file.is_dir(), "is a folder", field="path", value=file, hint="give a file")
    replace = "overwrite=True replaces it"
    require(overwrite or not os.path.lexists(file), "exists", field="path", value=file, hint=replace)
    interpreter = shutil.which(python or sys.executable)
    if interpreter is None:
        raise MoonshotError("is not a program", field="python", value=python or sys.executable)
    command = [interpreter, _find_converter(converter)]
    if type in QUANTIZED and _completed([interpreter, "-c", "import llama_cpp"]).returncode:
        message = f"{interpreter} cannot import llama_cpp, which quantizes to it"
        hint = f"install llama-cpp-python there, or give {', '.join(CONVERTED)}"
        raise MoonshotError(message, field="type", value=type, hint=hint)
    return command


def _find_converter(converter: str | os.PathLike[str] | None) -> str:
    """The absolute path of the converter: the given one, the environment variable's, or the one on the PATH."""
    variable = os.environ.get(CONVERTER_VARIABLE)
    script = os.fspath(converter) if converter is not None else variable or shutil.which(CONVERTER)
    if script is None or not os.path.isfile(script):
        value = UNSET if converter is None else converter
        message = "is not a file" if converter is not None else f"{CONVERTER_VARIABLE}={variable} is not a file"
        message = f"there is no {CONVERTER} on the PATH" if script is None else message
        raise MoonshotError(message, field="converter", value=value, hint=_GET_CONVERTER)
    return os.path.abspath(script)


def _run(name: str, command: list[Any], file: Path) -> None:
    """Run a program that writes a file; `MoonshotError` with its last messages if it fails."""
    done = _completed(command)
    if done.returncode or not file.is_file():
        lines = [line for line in done.stdout.splitlines() if line.strip() and not line.startswith((" ", "Traceback"))]
        status = f"exit status {done.returncode}" if done.returncode else "it wrote no file"
        raise MoonshotError(": ".join([f"{name} failed ({status})", *filter(None, ["\n".join(lines[-_SHOWN:])])]))


def _completed(command: list[Any]) -> "subprocess.CompletedProcess[str]":
    """Run a program to its end, with messages and errors in `stdout`."""
    output: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "encoding": "utf-8"}
    return subprocess.run(list(map(os.fspath, command)), stdin=subprocess.DEVNULL, errors="replace", **output)
