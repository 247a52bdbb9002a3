"""Third-party solvers and their hyperparameters in Python, in files and on the command line."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers as hf
import yaml
from checkpoints import INPUTS
from models import make, token_batches

from optimum_moonshot import (
    MoonshotConfig,
    MoonshotError,
    MoonshotPruner,
    PruneReport,
    convert,
    load_pruned,
    prune_weight,
)
from optimum_moonshot.commands import common
from optimum_moonshot.commands import moonshot as cli
from optimum_moonshot.reports.record import PruningRecord
from optimum_moonshot.solvers import base

ROOT = Path(__file__).parents[2]
SUPPORT = ROOT / "tests" / "support"
DEMO = ROOT / "examples" / "demo_model"
OPTIONS = {"power": 0.5, "spare": 2, "largest": True}


def prune(**settings):
    pruner = MoonshotPruner(make("llama"), MoonshotConfig(solver="toy", num_samples=6, **settings))
    pruner.prune(token_batches(), progress=False)
    return pruner


def weights(model):
    return model.model.layers[1].mlp.up_proj.weight


def test_hyperparameters_reach_the_solver(toy):
    config = MoonshotConfig(solver="toy", sparsity=0.5, solver_options={"largest": True, "power": 1, "spare": 2})
    assert config.make_solver() == toy.Toy(power=1, spare=2, largest=True)
    assert list(config.solver_options) == ["power", "spare", "largest"]  # in the order of the solver's fields
    assert config.damping is None and config.block_size is None
    assert MoonshotConfig(solver="toy", sparsity=0.5).make_solver() == toy.Toy()
    weight, gram = torch.randn(6, 8), torch.eye(8)
    result = prune_weight(weight, gram, config=dataclasses.replace(config, lam=1))
    assert result.keep[:, :2].all() and (result.keep.sum(1) == 4).all() and result.damping == 0
    rest = weight[:, 2:].abs()
    assert (rest[~result.keep[:, 2:]].view(6, 4).amin(1) > (rest * result.keep[:, 2:]).amax(1)).all()


def test_every_hyperparameter_changes_the_pruning(toy):
    plain = prune(sparsity=0.5).model
    as_wanda = MoonshotPruner(make("llama"), MoonshotConfig(solver="wanda", num_samples=6, sparsity=0.5))
    as_wanda.prune(token_batches(), progress=False)
    assert torch.equal(weights(plain), weights(as_wanda.model))
    for name, value in OPTIONS.items():
        changed = prune(sparsity=0.5, solver_options={name: value}).model
        assert not torch.equal(weights(changed), weights(plain)), name


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"power": 3}, "power=3: give a number of at least 0 and at most 2"),
        ({"power": "1"}, "power='1': give a number"),
        ({"spare": 1.5}, "spare=1.5: give a whole number of at least 0"),
        ({"largest": 1}, "largest=1: give True or False"),
        ({"strength": 1}, "strength=1: solver='toy' has no such hyperparameter; it has power, spare, largest"),
        ({"damping": 0.1}, "damping=0.1: solver='toy' has no such hyperparameter"),
    ],
)
def test_the_configuration_refuses_a_wrong_hyperparameter(toy, options, words):
    with pytest.raises(MoonshotError, match=f"^solver_options: {words}"):
        MoonshotConfig(solver="toy", sparsity=0.5, solver_options=options)


def test_files_store_the_hyperparameters_and_load_without_the_solver(toy, tmp_path, monkeypatch):
    config = MoonshotConfig(solver="toy", pattern="2:4", num_samples=6, solver_options={"spare": 2, "power": 0.5})
    assert MoonshotConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    pruner = MoonshotPruner(make("llama"), config)
    report = pruner.prune(token_batches(), progress=False)
    assert report.config == {**config.to_dict()}
    pruner.save_pretrained(tmp_path / "packed", format="packed")
    with torch.no_grad():
        expected = pruner.model(INPUTS).logits

    monkeypatch.delitem(base._SOLVERS, "toy")
    with pytest.raises(MoonshotError, match="solver='toy': use one of"):
        MoonshotConfig.from_dict(report.config)
    convert(tmp_path / "packed", tmp_path / "dense", "dense")
    for folder in ("packed", "dense"):
        record = PruningRecord.read(hf.AutoConfig.from_pretrained(tmp_path / folder))
        assert record.config["solver"] == "toy" and record.config["solver_options"] == {"power": 0.5, "spare": 2}
        assert record.solver_options == {"power": 0.5, "spare": 2, "largest": False}
        assert PruneReport.load(tmp_path / folder) == report
        with torch.no_grad():
            assert torch.equal(load_pruned(tmp_path / folder)(INPUTS).logits, expected)
        card = (tmp_path / folder / "README.md").read_text(encoding="utf-8")
        assert "| power | 0.5 |\n| spare | 2 |" in card and "| damping" not in card
        assert yaml.safe_load(card.split("---")[1])["moonshot"]["solver"] == "toy"


@pytest.mark.parametrize(
    ("options", "note"),
    [
        ({"power": 1.0, "spare": 1, "largest": False}, "3 layers were reused from an interrupted run"),
        ({"spare": 2}, 'set aside until this one is done: the configuration differs in solver_options["spare"]'),
    ],
)
def test_an_interrupted_run_resumes_with_equal_hyperparameters_only(options, note, toy, tmp_path, monkeypatch):
    real, calls = toy.Toy.solve, []

    def solve(self, *arguments):
        calls.append(self)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return real(self, *arguments)

    def run(options):
        config = MoonshotConfig(solver="toy", pattern="2:4", num_samples=6, solver_options=options)
        return MoonshotPruner(make("llama"), config).prune(token_batches(), progress=False, resume_dir=tmp_path / "run")

    monkeypatch.setattr(toy.Toy, "solve", solve)
    with pytest.raises(KeyboardInterrupt):
        run({"spare": 1, "power": 1})
    monkeypatch.setattr(toy.Toy, "solve", real)
    assert any(note in each for each in run(options).notes)


def parse(*argv):
    parser = cli.argparse.ArgumentParser()
    cli.add_prune_options(parser)
    return common.make_config(parser.parse_args(["a/model", "--output", "out", "--sparsity", "0.5", *argv]))


def test_command_line_options_have_the_types_of_the_hyperparameters(toy):
    argv = ("--solver-option", "power=1", "--solver-option", "spare=2", "--solver-option", "largest=true")
    result = parse("--solver", "toy", *argv).solver_options
    assert result == {"power": 1.0, "spare": 2, "largest": True}
    assert [type(value) for value in result.values()] == [float, int, bool]
    assert parse("--solver-option", "block_size=64", "--damping", "0.1") == MoonshotConfig(
        sparsity=0.5, block_size=64, damping=0.1
    )


WRONG = {
    "power=3": "power=3.0: give a number of at least 0 and at most 2",
    "power=much": "power='much': give a number",
    "spare=1.5": "spare='1.5': give a whole number",
    "largest=1": "largest='1': give True or False",
    "strength=1": "solver='toy' has power, spare, largest",
    "power": "give NAME=VALUE",
    "=1": "give NAME=VALUE",
}


def test_a_module_in_the_current_folder_can_be_imported(tmp_path, monkeypatch):
    (tmp_path / "beside_me.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])  # as for a script in another folder
    common.import_modules(["beside_me"])
    assert "beside_me" in sys.modules
    del sys.modules["beside_me"]


@pytest.mark.parametrize("option", WRONG)
def test_a_wrong_option_is_a_usage_error(toy, option):
    with pytest.raises(common.UsageError) as error:
        parse("--solver", "toy", "--solver-option", option)
    assert str(error.value).startswith(f"solver_options={option!r}: {WRONG[option]}")


def test_contradicting_options_are_usage_errors(toy):
    with pytest.raises(common.UsageError, match="solver_options='power=2': power is given twice"):
        parse("--solver", "toy", "--solver-option", "power=1", "--solver-option", "power=2")
    with pytest.raises(common.UsageError, match=r"^damping=0.1: solver_options\['damping'\]=0.2 is another value"):
        parse("--damping", "0.1", "--solver-option", "damping=0.2")
    with pytest.raises(common.UsageError, match="solver='wanda' has none"):
        parse("--solver", "wanda", "--solver-option", "damping=0.2")
    with pytest.raises(common.UsageError, match="^solver='nobodys': use one of"):
        parse("--solver", "nobodys", "--solver-option", "damping=0.2")


def command(*argv, folder, **environment):
    """Run `python -m optimum_moonshot` in a subprocess with `folder` as working directory."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MOONSHOT_DEBUG": "", **environment}
    call = [sys.executable, "-m", "optimum_moonshot", *map(str, argv)]
    return subprocess.run(call, capture_output=True, text=True, cwd=folder, env=environment)


SMALL = ("--targets", "layers.0.mlp", "--num-samples", 4, "--sequence-length", 16, "--lam", 1, "--device", "cpu")
DATA = ("--calibration", DEMO / "calibration.txt")


@pytest.mark.slow
def test_a_module_is_imported_and_its_solver_prunes(tmp_path):
    options = [f"--solver-option={name}={value}" for name, value in OPTIONS.items()]
    solver = ("--import", "toy_solver", "--solver", "toy")
    arguments = (*solver, "--pattern", "2:4", *options, *SMALL, *DATA)
    done = command("prune", DEMO, "--output", tmp_path / "out", *arguments, folder=SUPPORT)
    assert done.returncode == 0, done.stderr
    assert "sparsity    0.5000" in done.stdout
    record = PruningRecord.read(hf.AutoConfig.from_pretrained(tmp_path / "out"))
    assert record.config["solver"] == "toy" and record.config["solver_options"] == record.solver_options == OPTIONS
    assert load_pruned(tmp_path / "out") is not None  # in a process without the solver

    small = [each for each in SMALL if each not in ("--lam", 1)]
    arguments = ("--patterns", "2:4", "--lambdas", 1, *solver, *options, *small, *DATA)
    done = command("sweep", DEMO, "--output", tmp_path / "sweep", *arguments, folder=SUPPORT)
    assert done.returncode == 0 and done.stdout.startswith("toy: calibration perplexity"), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (
            ("--import", "toy_solver", "--solver", "toy", "--solver-option", "power=3"),
            f"--solver-option power=3: {WRONG['power=3']}",
        ),
        (
            ("--import", "toy_solver", "--solver", "toy", "--solver-option", "strength=1"),
            "--solver-option strength=1: --solver toy has power",
        ),
        (("--solver", "toy"), "--solver toy: use one of alps, cap, frequency"),
        (("--import", "toy_solver", "--import", "nowhere"), "--import nowhere: it cannot be imported (ModuleNotFound"),
        (("--import", "broken"), "--import broken: it cannot be imported (SyntaxError: "),
        (("--import", "taken"), "--import taken: it cannot be imported (ValueError: solver 'wanda' is already"),
    ],
)
def test_mistakes_are_one_line(argv, words, tmp_path):
    (tmp_path / "broken.py").write_text("def\n")
    (tmp_path / "taken.py").write_text(
        "from optimum_moonshot.solvers import wanda, register_solver\nregister_solver('wanda')(wanda.Wanda)\n"
    )
    (tmp_path / "toy_solver.py").write_text((SUPPORT / "toy_solver.py").read_text())
    done = command("prune", "no/such/model", "--output", "out", "--pattern", "2:4", *argv, folder=tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith(f"error: {words}") and done.stderr.count("\n") == 1


def test_the_help_names_both_options():
    done = command("sweep", "--help", folder=SUPPORT)
    assert "--solver-option NAME=VALUE" in done.stdout and "--import MODULE" in done.stdout


def package(folder, name, module):
    """An installed package whose entry point declares that a module registers the solver `name`."""
    info = folder / f"solver_of_{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: solver-of-{name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[optimum_moonshot.solvers]\n{name} = {module}\n")


@pytest.fixture
def installed(tmp_path, monkeypatch, registry):
    """Three packages with a solver each; two of them are broken."""
    (tmp_path / "toys").mkdir()
    (tmp_path / "toys" / "installed_solver.py").write_text(
        (SUPPORT / "toy_solver.py").read_text().replace('register_solver("toy")', 'register_solver("installed")')
    )
    (tmp_path / "toys" / "missing_part.py").write_text("import part_that_is_not_there\n")
    for name, module in (
        ("installed", "installed_solver"),
        ("broken", "missing_part"),
        ("empty", "installed_solver:Toy.objective"),
    ):
        package(tmp_path / "toys", name, module)
    monkeypatch.syspath_prepend(tmp_path / "toys")
    yield tmp_path / "toys"
    sys.modules.pop("installed_solver", None)


def test_the_solver_of_an_installed_package_is_imported_on_first_use(installed):
    assert "installed" not in base.solver_names() and "installed_solver" not in sys.modules
    config = MoonshotConfig(solver="installed", sparsity=0.5, solver_options={"power": 2})
    assert config.make_solver().power == 2 and "installed" in base.solver_names()
    assert dataclasses.replace(config, solver="wanda", solver_options={}).solver == "wanda"


def test_a_broken_entry_point_is_a_clear_error(installed):
    with pytest.raises(MoonshotError, match="^solver='broken': the entry point 'missing_part' .* cannot be imported"):
        MoonshotConfig(solver="broken", sparsity=0.5)
    with pytest.raises(MoonshotError, match="^solver='nobodys': use one of alps, broken, cap, empty, .*, installed, "):
        MoonshotConfig(solver="nobodys", sparsity=0.5)
    with pytest.raises(MoonshotError, match="^solver='empty': .*registers no solver of this name"):
        MoonshotConfig(solver="empty", sparsity=0.5)


@pytest.mark.slow
def test_the_command_line_finds_installed_solvers_without_import(installed, tmp_path):
    path = os.pathsep.join(map(str, (ROOT, installed)))
    arguments = ("--solver", "installed", "--solver-option", "power=2", "--pattern", "2:4", *SMALL, *DATA)
    done = command("prune", DEMO, "--output", tmp_path / "out", *arguments, folder=tmp_path, PYTHONPATH=path)
    assert done.returncode == 0 and "sparsity    0.5000" in done.stdout, done.stderr
