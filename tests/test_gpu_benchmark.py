"""The benchmark for GPUs runs on a CPU with tiny shapes; a piece that fails or hangs does not stop the others."""

import json
import sys

import gpu
import gpu_pieces
import pytest
import torch
from marks import slow_but

from optimum_moonshot import devices

PIECES = gpu_pieces.pieces()
# One of each kind; the others differ in their shapes and settings.
RUNS = ["1b-2:4-0.9", "1b-0.5-1", "1b-one-shot", "resnet-50", "deit-base"]
PRODUCTS = ["kernels-bitmask", "kernels-quantized"]
OTHERS = ["nccl", "rotation-8b", "generate"]


@pytest.mark.parametrize("name", slow_but({"1b-2:4-0.9", "1b-0.5-1"}, RUNS))
def test_a_run_is_planned_and_measured(name):
    *_, row = PIECES[name].run(True)
    json.dumps(row)
    assert row["seconds"] > 0 and row["peak"] > 0 and row["planned_seconds"] > 0 and row["planned_peak"] > 0
    assert row["sparsity"] == pytest.approx(0.5, abs=1e-3)


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_are_checked_and_timed(name):
    *_, row = PIECES[name].run(True)
    assert row["summary"].endswith(" 0 of them wrong") and len(row["cells"]) >= 12
    assert all(cell["eager_us"] > 0 for cell in row["cells"])


def test_a_wrong_product_is_reported_without_a_speed(monkeypatch):
    copies_of = gpu_pieces.runtime.copies_of

    def wrong(*arguments):
        calls, size = copies_of(*arguments)
        return [lambda x, call=call: 1.1 * call(x) for call in calls], size

    monkeypatch.setattr(gpu_pieces.runtime, "copies_of", wrong)
    *_, row = gpu_pieces.kernels(["2:4"], True)
    assert row["summary"] == "4 products, 2 of them wrong"
    assert [cell["kind"] for cell in row["cells"] if "eager_us" in cell] == ["dense"] * 2


@pytest.mark.parametrize("name", OTHERS)
def test_other_pieces_run(name):
    *_, row = PIECES[name].run(True)
    assert row["summary"] and row.get("equal", True)


def test_a_plan_that_fails_does_not_prevent_the_run(monkeypatch):
    monkeypatch.setattr(gpu_pieces.MoonshotPruner, "plan", lambda *_: 1 / 0)
    *_, row = PIECES["1b-2:4-1"].run(True)
    assert row["seconds"] > 0 and row["plan_error"].startswith("ZeroDivisionError")


def test_the_peak_includes_the_memory_before_a_reset(monkeypatch):
    peaks = iter([5, 9, 7])
    for name in ("release_unused", "reset_peak"):
        monkeypatch.setattr(devices, name, lambda device: None)
    monkeypatch.setattr(devices, "peak_bytes", lambda device: next(peaks))
    resets = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", resets.append)
    with gpu_pieces.device_peak() as measured:
        torch.cuda.reset_peak_memory_stats("cuda")
        torch.cuda.reset_peak_memory_stats("cuda")
    assert max(measured) == 9 and resets == ["cuda", "cuda"]


def test_seconds_of_all_layers_are_linear_in_the_depth():
    whole = gpu_pieces.extrapolated((4, 12), [{"seconds": 7.0}, {"seconds": 15.0}], 40)
    assert whole["seconds"] == 43 and whole["planned_seconds"] is None
    *_, row = PIECES["13b-2:4-1"].run(True)
    assert row["seconds"] == pytest.approx(row["runs"][1]["seconds"]) and row["planned_seconds"] > 0


ROW = """print('{"first": 1}', flush=True); print("text"); print('{"first": 2}', flush=True)"""


@pytest.mark.parametrize(
    ("program", "limit", "error"),
    [
        ("", 60, None),
        ("; raise SystemExit('no memory')", 60, "no memory\n"),
        ("; import os; os.kill(os.getpid(), 9)", 60, "exit status -9"),
        ("; import time; time.sleep(60)", 1, "it exceeded 1 s"),
    ],
)
def test_figures_of_a_process_survive_its_failure(program, limit, error):
    row = gpu.run_child([sys.executable, "-c", ROW + program], limit)
    assert row["first"] == 2 and row.get("error") == error and row["took"] < 30


def test_pieces_are_resumed(monkeypatch, tmp_path, capsys):
    first, second, third = list(PIECES)[:3]
    called, rows = [], {second: {"error": "Traceback\nValueError: no"}, third: {"error": "it exceeded 60 s"}}

    def run_child(command, limit):
        called.append(command[command.index("--piece") + 1])
        assert "--tiny" in command and limit <= 60
        return {"seconds": 2.0, **rows.get(called[-1], {})}

    monkeypatch.setattr(gpu, "run_child", run_child)
    output = ["--tiny", "--output", str(tmp_path / "new" / "gpu.json")]
    only = ["--only", first, second, third]
    results = gpu.main([*output, "--minutes", "1", *only])
    assert called == [first, second, third] and set(results) == {first, second}  # the third lacked time
    assert json.loads((tmp_path / "new" / "gpu.json").read_text())["results"] == results
    assert f"| {second} | 2.0 |  |  |  |  | error: ValueError: no |" in capsys.readouterr().out
    del called[:], rows[second]
    gpu.main([*output, "--minutes", "1"])
    assert called == list(PIECES)[2:]  # a failed piece is run again by name alone
    del called[:]
    assert "error" not in gpu.main([*output, "--minutes", "1", *only])[second]
    assert called == [second, third]
    assert gpu.main([*output, "--minutes", "0.1"]) and gpu.main([*output, "--show"])
    assert called == [second, third]


@pytest.mark.slow
def test_the_command_runs_a_piece_in_a_process(tmp_path):
    results = gpu.main(["--tiny", "--only", "nccl", "--output", str(tmp_path / "gpu.json")])
    assert results["nccl"]["equal"] and "error" not in results["nccl"]


@pytest.mark.release
def test_the_command_runs_all_other_pieces(tmp_path):
    rest = [name for name in PIECES if name not in {*RUNS, *PRODUCTS, *OTHERS}]
    results = gpu.main(["--tiny", "--output", str(tmp_path / "gpu.json"), "--only", *rest])
    assert set(rest) <= set(results)
    assert not {name: row["error"] for name, row in results.items() if "error" in row}


def test_tests_are_counted(tmp_path):
    (tmp_path / "tests").mkdir()
    program = "import pytest\ndef test_a(): pass\ndef test_b(): assert 0\n@pytest.mark.skip\ndef test_c(): pass\n"
    (tmp_path / "tests" / "test_it.py").write_text(program)
    few = ["--rootdir", str(tmp_path), "-c", "/dev/null", str(tmp_path / "tests")]
    *_, row = gpu_pieces.tests([], few, True)
    assert row["summary"] == "1 failed, 1 passed, 1 skipped" and len(row["failures"]) == 1
    assert "test_b" in row["failures"][0] and any("assert 0" in line for line in row["tail"])
