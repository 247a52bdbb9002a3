"""Commands that are killed, fail, or run concurrently: a rerun resumes without `--overwrite`, and results never mix."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from command_line import DEMO, ROOT, failure
from safetensors.torch import load_file

from optimum_moonshot import SweepReport
from optimum_moonshot.__main__ import main
from optimum_moonshot.commands import moonshot as cli
from optimum_moonshot.commands.output import open_output
from optimum_moonshot.recover.blockwise import STAGES

pytestmark = pytest.mark.slow

DATA = ["--calibration", DEMO / "calibration.txt", "--num-samples", "4", "--sequence-length", "16", "--device", "cpu"]
PRUNE = ["--solver", "wanda", "--pattern", "2:4", "--lam", "1", "--targets", r"layers\.[01]\.", *DATA]
SWEEP = ["--solver", "wanda", "--patterns", "2:4", "--lambdas", "0.5", "1", "--targets", r"layers\.0\.", *DATA]

# One process for each moment of the save; it is killed then.
KILLED = """
import os, signal, sys
from optimum_moonshot import files
from optimum_moonshot.__main__ import main
from optimum_moonshot.commands.output import Output
from optimum_moonshot.pruner import MoonshotPruner

def die(*arguments):
    os.kill(os.getpid(), signal.SIGKILL)

def die_in_the_middle(source, target, real=os.replace):
    (die if ".saving-" in str(source) and "model" in str(source) else real)(source, target)

moments = sys.argv[1].split(",")
for moment in moments:
    if not os.fork():
        if moment == "written":
            files._move = die
        elif moment == "half moved":
            os.replace = die_in_the_middle
        else:
            Output.finish = die
        main([part.replace("MOMENT", moment) for part in sys.argv[2:]])
        os._exit(0)
    print("status", os.wait()[1])
"""


def command(name, output, *options):
    return [str(part) for part in (name, DEMO, "--output", output, *options)]


def weights(folder):
    return load_file(folder / "model.safetensors")


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(tensor, b[name]) for name, tensor in a.items())


def left(folder):
    return {path.name for path in folder.iterdir()}


def kill(argv, *moments):
    """Kill the command at each of these moments, in a folder named after it."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, "-c", KILLED, ",".join(moments), *argv], capture_output=True, text=True, env=environment
    )
    assert run.stdout.count(f"status {int(signal.SIGKILL)}\n") == len(moments), run.stderr


def test_a_kill_while_saving_loses_no_results(capsys, tmp_path):
    kill(command("prune", tmp_path / "MOMENT", *PRUNE), "written", "half moved", "moved")
    assert any(name.startswith(".saving-") for name in left(tmp_path / "half moved"))
    assert "config.json" not in left(tmp_path / "half moved") and "config.json" in left(tmp_path / "moved")
    main(command("prune", tmp_path / "whole", *PRUNE))
    # A different command is refused, and deletes nothing.
    status, lines = failure(capsys, *command("prune", tmp_path / "moved", *PRUNE, "--damping", "0.02"))
    assert status == 2 and "--overwrite" in lines[-1]
    for moment in ("written", "half moved", "moved"):
        main(command("prune", tmp_path / moment, *PRUNE))
        assert same(weights(tmp_path / moment), weights(tmp_path / "whole")), moment
        assert left(tmp_path / moment) == left(tmp_path / "whole")
        assert not (tmp_path / f"{moment}.partial").exists()
        notes = json.loads((tmp_path / moment / "moonshot_report.json").read_text())["notes"]
        # The results are deleted once the model is saved.
        assert any("14 layers were reused" in note for note in notes) == (moment != "moved")
    status, lines = failure(capsys, *command("prune", tmp_path / "moved", *PRUNE))  # it is complete now
    assert status == 2 and "--overwrite" in lines[-1]


# Killed in the second block of a gradual recovery, between two stages.
KILLED_RECOVERING = """
import os, signal, sys
from optimum_moonshot.__main__ import main
from optimum_moonshot.recover.tuning import Tuner

real, calls = Tuner.settle, []

def settle(*arguments):
    calls.append(1)
    if len(calls) == int(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGKILL)
    real(*arguments)

Tuner.settle = settle
main(sys.argv[2:])
"""


def test_a_recovery_killed_midway_resumes_at_its_block(tmp_path):
    options = [*PRUNE, "--recover", "gradual", "--recover-steps", "4"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    argv = command("prune", tmp_path / "out", *options)
    run = subprocess.run(
        [sys.executable, "-c", KILLED_RECOVERING, str(STAGES + 1), *argv],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert run.returncode == -signal.SIGKILL, run.stderr
    assert left(tmp_path) == {"out.partial"}
    assert len(list((tmp_path / "out.partial").glob("**/recovered/*.safetensors"))) == 1
    main(argv)
    main(command("prune", tmp_path / "whole", *options))
    reports = [json.loads((tmp_path / name / "moonshot_report.json").read_text()) for name in ("out", "whole")]
    assert any("14 layers, 1 recovered blocks were reused" in note for note in reports[0]["notes"])
    blocks = [[{**block, "seconds": 0} for block in report["recovery"]] for report in reports]
    assert blocks[0] == blocks[1] and len(blocks[0]) == 2
    assert same(weights(tmp_path / "out"), weights(tmp_path / "whole"))
    assert left(tmp_path) == {"out", "whole"}


def test_a_kill_while_the_chosen_model_is_saved(capsys, tmp_path, monkeypatch):
    """Finished seeds are not repeated, and the same model is chosen."""
    options = [*SWEEP, "--seeds", "0", "1", "--save"]
    kill(command("sweep", tmp_path / "MOMENT", *options), "half moved", "moved")
    main(command("sweep", tmp_path / "whole", *options))
    printed = capsys.readouterr().out.partition("saved")[0]
    monkeypatch.setattr("optimum_moonshot.solvers.wanda.Wanda.solve", None)  # no layer may be solved again
    for moment in ("half moved", "moved"):
        output = tmp_path / moment
        before = [SweepReport.load(output / f"seed-{seed}") for seed in (0, 1)]
        assert not list((tmp_path / f"{moment}.partial" / "seed-0").glob("**/*.safetensors"))
        if moment == "moved":  # the results were deleted after the save
            monkeypatch.undo()
        main(command("sweep", output, *options))
        assert capsys.readouterr().out.partition("saved")[0] == printed
        assert [SweepReport.load(output / f"seed-{seed}") for seed in (0, 1)] == before
        assert same(weights(output / "model"), weights(tmp_path / "whole" / "model"))
        assert left(output / "model") == left(tmp_path / "whole" / "model")
        assert not (tmp_path / f"{moment}.partial").exists()


def test_a_sweep_killed_between_seeds_keeps_the_finished_ones(capsys, tmp_path, monkeypatch):
    from optimum_moonshot.solvers.wanda import Wanda

    real, calls = Wanda.solve, []

    def solve(self, *arguments):
        calls.append(1)
        if len(calls) == 17:
            raise KeyboardInterrupt
        return real(self, *arguments)

    monkeypatch.setattr(Wanda, "solve", solve)
    argv = command("sweep", tmp_path / "out", *SWEEP, "--seeds", "0", "1")
    assert failure(capsys, *argv)[0] == 130
    partial = tmp_path / "out.partial"
    first = json.loads((partial / "seed-0.json").read_text())["report"]
    (partial / "mine.txt").write_text("precious")
    main(argv)
    assert len(calls) == 1 + 4 * 7
    assert SweepReport.load(tmp_path / "out" / "seed-0").to_dict() == first
    assert left(partial) == {"mine.txt"}
    (partial / "mine.txt").unlink()
    partial.rmdir()


def test_a_report_of_another_request_is_not_reused(tmp_path):
    parser = cli.argparse.ArgumentParser()
    cli.add_prune_options(parser)
    data = tmp_path / "data.txt"
    data.write_text("one")

    def request(*options):
        return parser.parse_args(command("prune", tmp_path / "out", "--calibration", data, *options)[1:])

    with open_output(request()) as output:
        output.keep_report(0, {"value": 1})
    with open_output(request("--device", "cpu", "--batch-size", "2")) as output:
        assert output.report(0) == {"value": 1} and output.report(1) is None
    stored = tmp_path / "out.partial" / "seed-0.json"
    stored.with_name("seed-1.json").write_text(stored.read_text())
    with open_output(request()) as output:
        assert output.report(0) == {"value": 1} and output.report(1) is None
    with open_output(request("--lam", "0.5")) as output:
        assert output.report(0) is None
    data.write_text("another")
    with open_output(request()) as output:
        assert output.report(0) is None
    (tmp_path / "out.partial" / "seed-0.json").write_text("{")
    with open_output(request()) as output:
        assert output.report(0) is None
        output.finish()
    assert left(tmp_path) == {"data.txt"}


def test_one_command_at_a_time_writes_to_a_folder(capsys, tmp_path):
    parser = cli.argparse.ArgumentParser()
    cli.add_prune_options(parser)
    argv = command("prune", tmp_path / "out", *PRUNE)
    with open_output(parser.parse_args(argv[1:])):
        status, lines = failure(capsys, *argv, "--overwrite")
        assert status == 2 and len(lines) == 1
        assert f"--output {tmp_path / 'out'}: another command writes there; wait for its end" in lines[0]
        status, lines = failure(capsys, "convert", tmp_path, "--format", "dense", "--output", tmp_path / "other" / "..")
        assert status == 2 and "the model's own folder" in lines[0]
        assert left(tmp_path) == {"out.partial"}
    assert not left(tmp_path)


def test_a_kill_before_the_first_complete_file_can_be_resumed(tmp_path):
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "command.json.partial").write_text("{")
    main(command("prune", tmp_path / "out", *PRUNE))
    assert not (tmp_path / "out.partial").exists()


def test_a_command_that_fails_before_it_writes_leaves_nothing(capsys, tmp_path):
    main(command("prune", tmp_path / "packed", *PRUNE, "--format", "packed"))
    status, lines = failure(capsys, "convert", tmp_path / "packed", "--format", "packed", "--output", tmp_path / "out")
    assert status == 1 and lines[-1].endswith("is a packed checkpoint already")
    assert left(tmp_path) == {"packed"}


def test_foreign_files_in_the_partial_folder_are_named(capsys, tmp_path):
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "mine.txt").write_text("precious")
    status, lines = failure(capsys, *command("prune", tmp_path / "out", *PRUNE))
    assert status == 2 and "out.partial has other files" in lines[-1]
    assert left(tmp_path) == {"out.partial"} and left(tmp_path / "out.partial") == {"mine.txt"}


@pytest.mark.parametrize("more", [[], ["--eval", "HELDOUT"]])
def test_a_full_disk_loses_nothing(capsys, tmp_path, monkeypatch, more):
    from transformers import PreTrainedModel

    heldout = tmp_path / "heldout.txt"
    heldout.write_text((DEMO / "heldout.txt").read_text(encoding="utf-8")[:3000], encoding="utf-8")
    options = ["--solver", "magnitude", "--pattern", "structured", "--sparsity", "0.25", "--group-size", "8"]
    options += ["--device", "cpu", "--compact", *(heldout if part == "HELDOUT" else part for part in more)]
    argv, real = command("prune", tmp_path / "out", *options), PreTrainedModel.save_pretrained

    def full(self, folder, **arguments):
        real(self, folder, **arguments)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", full)
    status, lines = failure(capsys, *argv)
    assert status == 1 and len([line for line in lines if line.startswith("error")]) == 1
    assert f"--output {tmp_path / 'out'}: cannot be written: [Errno 28] No space left" in lines[-1]
    assert left(tmp_path / "out") == set()
    monkeypatch.undo()
    main(argv)
    printed = capsys.readouterr().out
    assert "intermediate_size 704 → 528" in printed and "8 layers were reused" in printed
    assert ("perplexity" in printed) == bool(more)
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="only root mounts a small disk")
def test_a_real_full_disk(capsys, tmp_path):
    """Any part of the save may exceed the space: weights, tokenizer, report or card."""
    small = tmp_path / "small"
    small.mkdir()
    options = [*PRUNE[:-2], "--device", "cpu"]

    def mount(size, *more):
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}k{','.join(more)}", "tmpfs", str(small)])
        if done.returncode:
            pytest.skip("no disk can be mounted here")

    needed = 0
    try:
        mount(20_000)
        main(command("prune", small, *options))
        needed = sum(-(-path.stat().st_size // 4096) * 4 for path in small.iterdir())
        capsys.readouterr()
        for short in (4, 16, 60, 130, 3000):
            subprocess.run(["umount", str(small)], check=True)
            mount(needed - short)
            status, lines = failure(capsys, *command("prune", small, *options))
            assert status == 1 and lines[-1].startswith(f"error: --output {small}: cannot be written: "), lines[-1]
            assert not left(small)
            assert (tmp_path / "small.partial" / "run").is_dir()
    finally:
        subprocess.run(["umount", str(small)])


@pytest.mark.parametrize("name", ["in", "in/deeper"])
def test_nothing_is_written_to_the_folder_of_the_model(capsys, tmp_path, name):
    model = tmp_path / "in"
    model.mkdir()
    (model / "config.json").write_text("{}")
    for start in (["prune", "--pattern", "2:4"], ["sweep", "--patterns", "2:4"]):
        argv = [start[0], model, "--output", tmp_path / name, "--overwrite", *start[1:]]
        status, lines = failure(capsys, *argv)
        assert status == 2 and lines[-1].endswith("it is the model's own folder, or in it; choose another")
    assert left(tmp_path) == {"in"} and left(model) == {"config.json"}


def test_links_and_files_as_output(capsys, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    (tmp_path / "file").write_text("mine")
    status, lines = failure(capsys, *command("prune", tmp_path / "link", *PRUNE))
    assert status == 2 and f"--output {tmp_path / 'link'}: is a link to a folder that does not exist" in lines[-1]
    status, lines = failure(capsys, *command("prune", tmp_path / "file" / "out", *PRUNE))
    assert status == 1 and f"--output {tmp_path / 'file' / 'out'}: cannot be written" in lines[-1]
    assert left(tmp_path) == {"link", "file"} and Path(tmp_path / "file").read_text() == "mine"
