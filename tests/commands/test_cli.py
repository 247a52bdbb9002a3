"""The command line: options match the configuration; an error is one line and an exit status."""

import argparse
import copy
import dataclasses
import inspect
import json
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import DEMO, ROOT, failure

from optimum_moonshot import MoonshotConfig
from optimum_moonshot.__main__ import main
from optimum_moonshot.commands import common, launch
from optimum_moonshot.commands import moonshot as cli
from optimum_moonshot.commands.launch import guard
from optimum_moonshot.errors import NO_BACKWARD, MoonshotError
from optimum_moonshot.objective.patterns import Experts
from optimum_moonshot.solvers import solver_class, solver_names

WITHOUT_OPTION = {"calibration"}  # fields of MoonshotConfig that only Python code can set


def parse(*argv):
    parser = argparse.ArgumentParser()
    cli.add_prune_options(parser)
    return parser.parse_args(["some/model", "--output", "out", *argv])


def test_every_field_has_an_option():
    fields = {field.name for field in dataclasses.fields(MoonshotConfig)}
    assert set(common.CONFIG_OPTIONS) == fields - WITHOUT_OPTION


def test_help_and_reference_have_every_field_in_the_same_groups():
    reference = inspect.getdoc(MoonshotConfig).partition("Raises:")[0]
    documented = re.findall(r"^ {4}(?:\[(\w+)\]|(\w+): )", reference, re.M)
    assert [name for _, name in documented if name] == [field.name for field in dataclasses.fields(MoonshotConfig)]
    parser = argparse.ArgumentParser()
    common.add_method_options(parser)
    groups = {group.title: [action.dest for action in group._group_actions] for group in parser._action_groups}
    expected = {"method: target": ["recipe"]}
    for heading, name in documented:
        if heading:
            names = expected.setdefault(f"method: {heading.lower()}", [])
        elif name not in WITHOUT_OPTION:
            names.append(name)
    assert {title: names for title, names in groups.items() if title in expected} == expected


def test_help_names_every_solver():
    ours = [
        name
        for name in {*solver_names(), *solver_names(Experts)}
        if solver_class(name).__module__.startswith("optimum_moonshot.")
    ]
    assert all(name in common.CONFIG_OPTIONS["solver"]["help"] for name in ours)


@pytest.mark.parametrize("name", ["group_size", "quant_group", "damping", "num_samples", "batch_size", "seed"])
def test_help_states_the_default(name):
    assert f"({getattr(MoonshotConfig(pattern='2:4'), name)})" in common.CONFIG_OPTIONS[name]["help"]


def test_only_explicit_options_reach_the_config(toy):
    assert common.make_config(parse("--pattern", "2:4")) == MoonshotConfig(pattern="2:4")
    settings = {
        "solver": "toy",
        "pattern": "structured",
        "sparsity": 0.6,
        "group_size": 2,
        "allocation": "uniform",
        "owl_threshold": 4.0,
        "owl_lambda": 0.1,
        "alpha_tau": 0.2,
        "recompute": True,
        "lam": 0.25,
        "fisher": "shared",
        "fisher_layers": "attention",
        "under_calibrated_experts": "magnitude",
        "damping": 0.1,
        "block_size": 64,
        "solver_options": {"power": 0.5, "largest": True},
        "targets": ("q_proj", "k_proj"),
        "ignore": (r"layers\.0\.", "down"),
        "num_samples": 32,
        "sequence_length": 128,
        "batch_size": 2,
        "seed": 7,
        "max_memory": "2GiB",
        "offload_dir": "spill",
        "recover": "blockwise",
        "recover_steps": 20,
        "recover_lr": 0.002,
        "rotation_weights": "equal",
        "rotation_steps": 30,
        "rotation_lr": 0.02,
        "rotation_rows": 512,
    }
    quantizing = {"bits", "quant_group", "embedding_bits", "target_bytes", "bits_per_weight"}
    excluded = {"rotation", *quantizing}  # by pattern="structured"
    assert set(settings) == set(common.CONFIG_OPTIONS) - excluded
    quantized = common.make_config(parse("--pattern", "2:4", "--bits", "4", "--quant-group", "64"))
    assert quantized == MoonshotConfig(pattern="2:4", bits=4, quant_group=64)
    quantized = common.make_config(parse("--bits", "4", "--embedding-bits", "16"))
    assert quantized == MoonshotConfig(bits=4, embedding_bits=None) and quantized.embedding_grid is None
    assert common.make_config(parse("--sparsity", "0.5", "--rotation")).rotation == "learned"
    assert common.make_config(parse("--sparsity", "0.5", "--rotation", "heads")).rotation == "heads"
    argv = []
    for name, value in settings.items():
        if isinstance(value, dict):
            argv += [f"{common.flag(name)}={option}={setting}" for option, setting in value.items()]
            continue
        values = value if isinstance(value, tuple) else [] if value is True else [value]
        argv += [common.flag(name), *map(str, values)]
    assert common.make_config(parse(*argv)) == MoonshotConfig(**settings)


def test_an_allocation_is_read_from_a_file(tmp_path):
    path = tmp_path / "rules.json"
    path.write_text(json.dumps({"mlp": 0.7, "attn": "2:4"}))
    assert common.make_config(parse("--allocation", str(path))) == MoonshotConfig(
        allocation={"mlp": 0.7, "attn": "2:4"}
    )
    for content, words in (("[1]", "object of layers"), ("{", "Expecting"), ('{"mlp": 2}', "allocation['mlp']=2")):
        path.write_text(content)
        with pytest.raises(cli.UsageError, match=re.escape(words)):
            common.make_config(parse("--allocation", str(path)))
    with pytest.raises(cli.UsageError, match="allocation='nowhere': neither one of uniform, owl, alpha, fisher nor"):
        common.make_config(parse("--allocation", "nowhere"))


def test_options_with_several_values_repeat():
    args = parse("--eval", "a", "b", "--eval", "c", "--ignore", "x", "--ignore", "y")
    assert args.eval == ["a", "b", "c"]
    assert args.ignore == ["x", "y"]
    assert parse().eval == []


@pytest.mark.parametrize(
    "argv, words",
    [
        (["--solver", "nope", "--pattern", "2:4"], "--solver nope: "),
        (["--pattern", "5:4"], "5:4"),
        (["--pattern", "2:4", "--lam", "1.5"], "--lam 1.5: "),
        (["--pattern", "2:4", "--targets", "("], "--targets: '(' is not a regular expression"),
        (["--pattern", "2:4", "--calibration", "missing.txt"], "--calibration missing.txt"),
        (["--pattern", "2:4", "--eval", "wikitext2", "missing.txt"], "--eval missing.txt"),
        (["--pattern", "2:4", "--compact"], "--compact: only --pattern structured"),
        (["--pattern", "2:4", "--device", "abacus"], "--device abacus"),
        (["--pattern", "2:4", "--device", "cuda:99"], "--device cuda:99"),
    ],
)
def test_invalid_option_is_rejected_before_loading(capsys, tmp_path, argv, words):
    status, lines = failure(capsys, "prune", "no/such/model", "--output", tmp_path / "out", *argv)
    assert status == 2
    assert len(lines) == 1
    assert words in lines[0]
    assert not list(tmp_path.iterdir())


def test_output_folder_is_not_overwritten_by_default(capsys, tmp_path):
    (tmp_path / "keep.txt").write_text("mine")
    prune = ["prune", tmp_path / "no-model", "--pattern", "2:4", "--output"]
    status, lines = failure(capsys, *prune, tmp_path)
    assert status == 2 and len(lines) == 1 and "--overwrite" in lines[0]
    status, lines = failure(capsys, *prune, tmp_path / "keep.txt")
    assert status == 2 and len(lines) == 1 and "is a file; give a folder" in lines[0]


def test_a_refused_command_removes_the_lock_of_a_killed_one(capsys, tmp_path):
    """That was killed at its very end, when only its lock was left."""
    output, partial = tmp_path / "out", tmp_path / "out.partial"
    for folder, name in ((output, "config.json"), (partial, "command.lock")):
        folder.mkdir()
        (folder / name).touch()
    status, lines = failure(capsys, "prune", DEMO, "--pattern", "2:4", "--output", output)
    assert status == 2 and len(lines) == 1 and "it is not empty" in lines[0]
    assert list(tmp_path.iterdir()) == [output]


def test_model_is_not_pruned_into_its_own_folder(capsys):
    status, lines = failure(capsys, "prune", DEMO, "--pattern", "2:4", "--output", DEMO, "--overwrite")
    assert status == 2 and len(lines) == 1 and "the model's own folder" in lines[0]


@pytest.mark.parametrize("argv", [["prune", "--pattern", "2:4", "--output", "out"], ["eval", "--dataset", "ptb"]])
def test_model_that_cannot_be_loaded(capsys, tmp_path, monkeypatch, argv):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    command, *options = argv
    status, lines = failure(capsys, command, tmp_path / "empty", *options)
    assert status == 1
    assert len(lines) == 1 and str(tmp_path / "empty") in lines[0] and "cannot be loaded" in lines[0]
    assert not (tmp_path / "out").exists()


def test_eval_validates_numbers_before_loading(capsys):
    status, lines = failure(capsys, "eval", "no/such/model", "--dataset", "x", "--batch-size", "0")
    assert status == 2 and len(lines) == 1 and "--batch-size 0" in lines[0]


@pytest.mark.parametrize(
    "error, status, message",
    [
        (MoonshotError("two\nlines"), 1, "error: two lines\n"),
        (OSError(28, "No space left on device"), 1, "error: [Errno 28] No space left on device\n"),
        (KeyboardInterrupt(), 130, "error: interrupted\n"),
    ],
)
def test_failure_is_one_line(capsys, monkeypatch, error, status, message):
    def work(args):
        raise error

    with pytest.raises(SystemExit) as caught:
        guard(work, None)
    assert caught.value.code == status
    assert capsys.readouterr().err == message
    monkeypatch.setenv("MOONSHOT_DEBUG", "1")
    with pytest.raises(type(error)):
        guard(work, None)


ARGS = {"output": "out", "model": "m", "calibration": None}


@pytest.mark.parametrize(
    "error, expected",
    [
        (MoonshotError("it must be in [0, 1]", field="lam", value=1.5), "--lam 1.5: it must be in [0, 1]"),
        (MoonshotError("too small", field="lam", value=1), "--lam 1: too small"),
        (MoonshotError("x", field="num_samples", value=20, hint="set num_samples=9"),
         "--num-samples 20: x; set --num-samples 9"),
        (MoonshotError("lower num_samples, set lam=1", field="max_memory"),
         "--max-memory: lower --num-samples, set --lam 1"),
        (MoonshotError("cannot be written", field="resume_dir", value="/a/run"), "--output out: cannot be written"),
        (MoonshotError("another run", field="work_dir", value=Path("/a b/c")), "--output out: another run"),
        (MoonshotError("full", field="directory"), "--output: full"),
        (MoonshotError("the output of layer 0: a directory"), "the output of layer 0: a directory"),
        (MoonshotError("/a/offload_dir/x: full, lower the seed"), "/a/offload_dir/x: full, lower the seed"),
        (MoonshotError("lam=1.5.2 or targets=[<x>]"), "--lam 1.5.2 or targets=[<x>]"),
        (MoonshotError("leave it out", field="recompute", value=True), "--recompute: leave it out"),
        (MoonshotError("give some", field="calibration", value=None), "--calibration: give some"),
        (MoonshotError("'(' is no expression", field="targets"), "--targets: '(' is no expression"),
        (MoonshotError("bad", field="targets", value=["a", "b c"]), "--targets a 'b c': bad"),
        (MoonshotError("give a number", field="power", value=-1).within("solver_options"),
         "--solver-option: power=-1: give a number"),
        (MoonshotError("a sparsity", field="allocation['mlp']", value=2), "--allocation['mlp'] 2: a sparsity"),
        (MoonshotError("x", field="offload_dir", value=""), "--offload-dir '': x"),
        (MoonshotError("x", field="tokenizer", value=None).within("layers.0"), "layers.0: tokenizer=None: x"),
        (MoonshotError("x", field="model", value="m"), "model='m': x"),
        (MoonshotError("x", hint=f"or {NO_BACKWARD}"), "x; or set --lam 1, without --allocation fisher"),
    ],
)  # fmt: skip
def test_fields_are_formatted_as_options(error, expected):
    assert launch.shell_message(error, argparse.Namespace(**ARGS)) == expected
    for copied in (copy.copy(error), copy.deepcopy(error), pickle.loads(pickle.dumps(error))):
        assert launch.shell_message(copied, argparse.Namespace(**ARGS)) == expected


def test_the_other_processes_of_a_launcher_leave_the_first_time_to_print(monkeypatch, capsys):
    waited = []
    monkeypatch.setattr(launch.time, "sleep", waited.append)
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, seconds in (("0", []), ("1", [launch.PATIENCE])):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit) as ended:
            guard(lambda args: None, argparse.Namespace())
        assert ended.value.code == 2 and waited == seconds
        assert ("2 processes: this command runs in one" in capsys.readouterr().err) == (rank == "0")


def test_fields_with_several_values_are_named_by_their_plural():
    from optimum_moonshot.sweep.command import SWEPT

    error = MoonshotError("of lambdas=[0.5, 2], patterns=['2:4', '4:8']", field="lam", value=2)
    args = argparse.Namespace(lambdas=[0.5, 2], patterns=["2:4", "4:8"])
    assert launch.shell_message(error, args, SWEPT) == "--lambdas 2: of --lambdas 0.5 2, --patterns 2:4 4:8"


def test_only_options_of_the_command_are_named():
    directory, limit = MoonshotError(field="directory", value="a"), MoonshotError(field="limit", value=0)
    assert launch.shell_message(directory) == launch.shell_message(directory, argparse.Namespace()) == "directory='a'"
    assert launch.shell_message(limit, argparse.Namespace(limit=0)) == "--limit 0"


def test_an_internal_error_keeps_its_traceback():
    def work(args):
        raise TypeError("a bug")

    with pytest.raises(TypeError):
        guard(work, None)


def test_registration_imports_no_torch():
    code = (
        "import sys, runpy, optimum_moonshot, optimum_moonshot.__main__\n"
        f"found = runpy.run_path({str(ROOT / 'optimum_moonshot/commands/register/register_moonshot.py')!r})\n"
        "assert found['REGISTER_COMMANDS'][0].COMMAND.name == 'moonshot'\n"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
    assert not (ROOT / "optimum_moonshot" / "commands" / "register" / "__init__.py").exists()


def test_function_survives_the_import_of_its_module():
    import optimum_moonshot
    import optimum_moonshot.functional

    assert optimum_moonshot.prune_weight is optimum_moonshot.functional.prune_weight
    assert set(optimum_moonshot.__all__) <= set(dir(optimum_moonshot))
    assert all(getattr(optimum_moonshot, name) is not None for name in optimum_moonshot.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = optimum_moonshot.nothing


def test_module_runs_as_a_program(tmp_path):
    argv = ["prune", "m", "--output", str(tmp_path / "o"), "--pattern", "9"]
    command = [sys.executable, "-m", "optimum_moonshot", *argv]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env={**os.environ, "MOONSHOT_DEBUG": ""})
    assert done.returncode == 2
    assert done.stdout == "" and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "argv, words",
    [
        ([], "--sparsities"),
        (["--sparsities", "0.5", "0.7", "--save"], "--save"),
        (["--sparsities", "0.5", "--lambdas", "1.5"], "--lambdas 1.5: "),
        (["--sparsities", "0.5", "--recover", "blockwise"], "--recover blockwise: "),
        (["--sparsities", "0.5", "--metric", "nowhere"], "--metric nowhere"),
    ],
)
def test_invalid_options_of_a_sweep_are_rejected_before_loading(capsys, tmp_path, argv, words):
    status, lines = failure(capsys, "sweep", "no/such/model", "--output", tmp_path / "out", *argv)
    assert status == 2 and len(lines) == 1 and words in lines[0]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", ["prune", "rotate", "sweep", "eval", "convert", "verify"])
def test_options_cannot_be_abbreviated(command, tmp_path, capsys):
    """Abbreviations would turn a missing option into another one."""
    whole = {"convert": ["--format", "packed"], "verify": ["--revision", "main"], "eval": ["--runtime", "auto"]}
    flag, *value = whole.get(command, ["--offload-dir", "spill"])
    output = [] if command in ("eval", "convert", "verify") else ["--output", tmp_path / "out"]
    with pytest.raises(SystemExit) as caught:
        main([command, str(DEMO), *map(str, output), flag[:-2], *value])
    assert caught.value.code == 2 and flag[:-2] in capsys.readouterr().err
