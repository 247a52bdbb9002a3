"""Bad options of the command line: one line, exit status 1 or 2, and nothing is written. Their number in the guide."""

import pytest
from bad_inputs_page import tables
from command_line import DEMO, failure
from invalid_inputs import LONG

TEXT = ["--calibration", DEMO / "calibration.txt", "--device", "cpu"]
COMMANDS = [
    ("prune", ["--pattern", "5:4"], 2, "--pattern 5:4"),
    ("prune", ["--pattern", "2:4", "--sparsity", "0.7"], 2, "--sparsity 0.7"),
    ("prune", ["--sparsity", "1.5"], 2, "--sparsity 1.5"),
    ("prune", ["--sparsity", "nan"], 2, "--sparsity nan: give a number"),
    ("prune", [], 2, "--sparsity"),
    ("prune", ["--pattern", "2:4", "--lam", "-1"], 2, "--lam -1"),
    ("prune", ["--pattern", "2:4", "--num-samples", "0"], 2, "--num-samples 0: give a whole number of at least 1"),
    ("prune", ["--pattern", "2:4", "--num-samples", LONG], 2, "--num-samples 999"),
    ("prune", ["--pattern", "2:4", "--batch-size", "-1"], 2, "--batch-size -1: give a whole number"),
    ("prune", ["--pattern", "2:4", "--seed", "-1"], 2, "--seed -1: give a whole number"),
    ("prune", ["--pattern", "2:4", "--sequence-length", "1"], 2, "--sequence-length 1: give a whole number"),
    ("prune", ["--pattern", "2:4", "--max-memory", "lots"], 2, "--max-memory lots: give bytes"),
    ("prune", ["--pattern", "2:4", "--max-memory", LONG], 2, "--max-memory "),
    ("prune", ["--pattern", "2:4", "--max-memory", "0"], 2, "--max-memory 0: give between 1"),
    ("prune", ["--pattern", "2:4", "--offload-dir", ""], 2, "--offload-dir "),
    ("prune", ["--pattern", "2:4", "--damping", "0"], 2, "--damping 0"),
    ("prune", ["--pattern", "2:4", "--block-size", "0"], 2, "--block-size 0"),
    ("prune", ["--pattern", "2:4", "--fisher", "none"], 2, "--fisher none"),
    ("prune", ["--pattern", "2:4", "--recover", "magic"], 2, "--recover magic"),
    ("prune", ["--pattern", "2:4", "--recover-lr", "2"], 2, "--recover-lr 2"),
    ("prune", ["--pattern", "2:4", "--solver-option", "power=1"], 2, "--solver-option power=1"),
    ("prune", ["--pattern", "2:4", "--targets", "("], 2, "--targets: '('"),
    ("prune", ["--pattern", "2:4", "--import", "no.such.module"], 2, "--import no.such.module: it cannot be imported"),
    ("prune", ["--pattern", "2:4", "--calibration", "~nobody-of-this-name/a.txt"], 2, "--calibration ~nobody"),
    ("prune", ["--pattern", "2:4", "--calibration", "x" * 5000], 2, "--calibration xxx"),
    ("prune", ["--pattern", "2:4", "--targets", "nothing", *TEXT], 1, "--targets: 'nothing' matches no module"),
    ("prune", ["--pattern", "2:4", "--num-samples", "1000000000", *TEXT], 1, "--num-samples 1000000000: the text has"),
    ("prune", ["--pattern", "2:4", "--sequence-length", "100000", *TEXT], 1, "--sequence-length 100000: give at most"),
    ("prune", ["--pattern", "2:4", "--max-memory", "1", "--lam", "1", *TEXT], 1, "--max-memory: "),
    ("shrink", [], 2, "give exactly one of --parameters, --bytes and --latency"),
    ("shrink", ["--parameters", "0.5", "--latency", "5"], 2, "--latency: give exactly one of"),
    ("shrink", ["--parameters", "0"], 2, "--parameters 0.0: give a fraction of the dense model's"),
    ("shrink", ["--bytes", "much"], 2, "--bytes much: give bytes or a size"),
    ("shrink", ["--latency", "0.9", "--batch-shape", "0", "0"], 2, "--batch-shape 0: give a whole number of at least"),
    ("shrink", ["--parameters", "1", *TEXT], 1, "--parameters 1.0: the model is small enough; the dense model has"),
    ("shrink", ["--parameters", "0.01", *TEXT], 1, "--parameters 0.01: the smallest configuration has"),
    ("shrink", ["--latency", "0.9", "--batch-shape", "1", "9999", *TEXT], 1, "--batch-shape 1 9999: the model has"),
    ("sweep", ["--sparsities", "0.5", "--lambdas", "2"], 2, "--lambdas 2.0: "),
    ("sweep", ["--sparsities", "0.5", "--lambdas", "1", "1"], 2, "--lambdas 1.0 1.0: a value is given twice"),
    ("sweep", ["--sparsities", "2"], 2, "--sparsities 2.0"),
    ("sweep", ["--patterns", "2/4"], 2, "--patterns"),
    ("sweep", ["--patterns", "2:4", "--seeds", "-1"], 2, "--seeds -1: give a whole number"),
    ("sweep", ["--patterns", "2:4", "--recompute"], 2, "--recompute: statistics on pruned layers differ"),
]  # fmt: skip


@pytest.mark.parametrize("command, options, status, words", COMMANDS, ids=range(len(COMMANDS)))
def test_options(tmp_path, capsys, monkeypatch, command, options, status, words):
    monkeypatch.setattr("optimum_moonshot.calibration.storage.DEFAULT_SHARE", 0.0 if "1" in options else 0.6)
    exit_status, lines = failure(capsys, command, DEMO, "--output", tmp_path / "out", *options)
    assert lines[-1].startswith(f"error: {words}") and len([line for line in lines if "error" in line]) == 1, lines[-1]
    assert exit_status == status and len(lines[-1]) < 800
    assert not list(tmp_path.iterdir())


VALUES = [
    ("--lam", "much"), ("--sparsity", "half"), ("--num-samples", "1.5"), ("--seed", "x"), ("--format", "gguf"),
    ("--dtype", "int8"), ("--no-such-option", "1"),
]  # fmt: skip


@pytest.mark.parametrize("option, value", VALUES)
def test_values_of_the_wrong_type(tmp_path, capsys, option, value):
    from optimum_moonshot.__main__ import main

    with pytest.raises(SystemExit) as caught:
        main(["prune", "model", "--output", str(tmp_path / "out"), option, value])
    message = capsys.readouterr().err
    assert caught.value.code == 2 and option in message.splitlines()[-1] and value in message.splitlines()[-1]
    assert "Traceback" not in message and not list(tmp_path.iterdir())


def test_the_guide_has_the_number_of_bad_inputs_and_rows_of_their_tables():
    guide = (DEMO.parents[1] / "docs" / "reliability.md").read_text(encoding="utf-8").partition("## Bad inputs")[2]
    rows = [line for line in tables().splitlines() if line.startswith("| `") and not line.endswith("| message |")]
    shown = [line for line in guide.splitlines() if line.startswith("| `")]
    assert len(rows) >= 200 and f"{len(rows)} invalid inputs" in " ".join(guide.split())
    assert len(shown) >= 5 and set(shown) <= set(rows) and "<!-- bad inputs -->" in guide
