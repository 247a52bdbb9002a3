"""Commands from start to end on the demo model: prune, eval, compact, convert and sweep."""

import json
import math

import pytest
from command_line import DEMO, failure
from ranks import save_model
from transformers import AutoModelForCausalLM

from optimum_moonshot.__main__ import main


def test_prune_and_eval_end_to_end(capsys, tmp_path):
    heldout = tmp_path / "heldout.txt"
    heldout.write_text((DEMO / "heldout.txt").read_text(encoding="utf-8")[:20_000], encoding="utf-8")
    output = tmp_path / "pruned"
    options = ["--solver", "wanda", "--pattern", "2:4", "--lam", "1", "--num-samples", "16", "--sequence-length", "64"]
    data = ["--calibration", DEMO / "calibration.txt", "--eval", heldout, "--device", "cpu"]
    main([str(part) for part in ("prune", DEMO, "--output", output, *options, *data)])
    printed = capsys.readouterr().out
    report = json.loads((output / "moonshot_report.json").read_text(encoding="utf-8"))
    assert f"sparsity    0.5000 over 28 layers, {report['model_sparsity']:.4f} of the whole model\n" in printed
    assert f"saved       {output}" in printed
    assert not output.with_name("pruned.partial").exists()

    evaluation = json.loads((output / "moonshot_report.json").read_text(encoding="utf-8"))["evaluations"]["heldout.txt"]
    assert evaluation["dense"] < evaluation["pruned"] < math.inf
    main(["eval", str(output), "--dataset", str(heldout), "--sequence-length", "64", "--device", "cpu", "--json"])
    measured = json.loads(capsys.readouterr().out)["perplexity"][str(heldout)]
    assert measured == pytest.approx(evaluation["pruned"], rel=1e-3)


def test_structured_pruning_and_compaction_end_to_end(capsys, tmp_path):
    options = ["--solver", "magnitude", "--pattern", "structured", "--group-size", "8", "--device", "cpu", "--compact"]
    main([str(part) for part in ("prune", DEMO, "--output", tmp_path / "small", "--sparsity", "0.25", *options)])
    printed = capsys.readouterr().out
    assert "intermediate_size 704 → 528" in printed and "parameters  3,475,712 → 2,935,040" in printed
    assert (tmp_path / "small" / "model.safetensors").stat().st_size < 0.85 * (
        DEMO / "model.safetensors"
    ).stat().st_size
    # Without dead neurons, the result is still saved.
    main([str(part) for part in ("prune", DEMO, "--output", tmp_path / "same", "--sparsity", "0", *options)])
    assert "not compacted: nothing to compact" in capsys.readouterr().out
    report = json.loads((tmp_path / "same" / "moonshot_report.json").read_text(encoding="utf-8"))
    assert any("not compacted" in note for note in report["notes"])


def test_shrink_end_to_end(capsys, tmp_path):
    save_model(tmp_path / "model")
    heldout = tmp_path / "heldout.txt"
    heldout.write_text((DEMO / "heldout.txt").read_text(encoding="utf-8")[:5_000], encoding="utf-8")
    options = ["--parameters", "0.8", "--num-samples", "4", "--sequence-length", "32", "--device", "cpu"]
    data = ["--calibration", DEMO / "calibration.txt", "--eval", heldout]
    output = tmp_path / "small"
    main([str(part) for part in ("shrink", tmp_path / "model", "--output", output, *options, *data)])
    printed = capsys.readouterr().out
    sizes = [AutoModelForCausalLM.from_pretrained(folder).num_parameters() for folder in (tmp_path / "model", output)]
    assert sizes[1] <= 0.8 * sizes[0]
    assert f"{sizes[0]:,} → {sizes[1]:,} parameters ({sizes[1] / sizes[0]:.4f})" in printed
    assert "predicted loss" in printed and "perplexity  " in printed and f"saved       {output}" in printed
    record = json.loads((output / "config.json").read_text(encoding="utf-8"))["moonshot"]
    assert record["compaction"]["parameters"] == sizes
    assert {path.name for path in tmp_path.iterdir()} == {"model", "heldout.txt", "small"}


def test_prune_packed_and_convert(capsys, tmp_path):
    packed, dense = tmp_path / "packed", tmp_path / "packed-dense"
    options = ["--solver", "magnitude", "--pattern", "2:4", "--format", "packed", "--device", "cpu"]
    main([str(part) for part in ("prune", DEMO, "--output", packed, *options)])
    capsys.readouterr()
    main(["convert", str(packed), "--format", "dense"])
    printed = capsys.readouterr().out
    assert f"saved       {dense}" in printed and "weights" in printed
    sizes = [next(folder.glob("*.safetensors")).stat().st_size for folder in (packed, dense)]
    assert sizes[0] < 0.8 * sizes[1]
    main(["convert", str(dense), "--format", "packed", "--output", str(tmp_path / "again")])
    assert not list(tmp_path.glob("*/.saving*"))
    status, lines = failure(capsys, "convert", dense, "--format", "dense", "--output", tmp_path / "new")
    assert status == 1 and "is a dense checkpoint already" in lines[-1]
    for arguments, words in [
        ([tmp_path / "nothing", "--format", "dense"], "neither a folder"),
        ([dense, "--format", "packed", "--output", packed], "--overwrite"),
        ([dense, "--format", "packed", "--output", dense, "--overwrite"], "the model's own folder"),
    ]:
        status, lines = failure(capsys, "convert", *arguments)
        assert status == 2 and words in lines[-1]


def test_sweep_writes_table_plots_and_the_best_model(capsys, tmp_path):
    output = tmp_path / "out"
    options = ["--solver", "wanda", "--sparsities", "0.5", "--lambdas", "0.5", "1", "--seeds", "0", "1", "--save"]
    options += ["--num-samples", "4", "--sequence-length", "16", "--calibration", DEMO / "calibration.txt"]
    main([str(part) for part in ("sweep", DEMO, "--output", output, "--device", "cpu", *options)])
    printed = capsys.readouterr().out
    assert "calibration perplexity" in printed and "saved       " in printed
    names = {path.name for path in output.iterdir()}
    assert names == {"seed-0", "seed-1", "sweep.csv", "metric_by_lambda.png", "model"}
    assert not output.with_name("out.partial").exists()
    record = json.loads((output / "model" / "config.json").read_text(encoding="utf-8"))["moonshot"]
    assert f"λ = {record['lam']:g}, seed 1" in printed and record["config"]["seed"] == 1


def test_a_killed_sweep_resumes_with_the_same_command(capsys, tmp_path, monkeypatch):
    from optimum_moonshot.solvers.wanda import Wanda

    options = [
        "--solver",
        "wanda",
        "--patterns",
        "2:4",
        "--lambdas",
        "1",
        "--targets",
        "layers.0",
        "--num-samples",
        "4",
    ]
    options += ["--sequence-length", "16", "--calibration", DEMO / "calibration.txt", "--device", "cpu"]
    argv = [str(part) for part in ("sweep", DEMO, "--output", tmp_path / "out", *options)]
    real, calls = Wanda.solve, []

    def solve(self, *arguments):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return real(self, *arguments)

    monkeypatch.setattr(Wanda, "solve", solve)
    assert failure(capsys, *argv)[0] == 130
    main(argv)
    assert len(calls) == 4 + 7 - 3 and {path.name for path in tmp_path.iterdir()} == {"out"}
