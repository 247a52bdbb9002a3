"""The record of a pruning run: one type, written to config.json and read back."""

import ast
import copy
import json
from pathlib import Path

import pytest
import torch
import transformers as hf
from checkpoint_edits import change_json
from checkpoints import INPUTS, pruned
from models import make
from torch import nn

import optimum_moonshot
from optimum_moonshot import MoonshotConfig, MoonshotError, MoonshotPruner, convert, load_pruned
from optimum_moonshot.checkpoint.packed_files import pruned_layers
from optimum_moonshot.integrations.trainer import nm_patterns
from optimum_moonshot.objective.patterns import NM, Unstructured
from optimum_moonshot.reports.record import PruningRecord
from optimum_moonshot.solvers import base

# As in config.json.
FIRST = {
    "version": 1,
    "config": {
        "version": MoonshotConfig.VERSION,
        "solver": "magnitude", "pattern": "unstructured", "sparsity": 0.5, "group_size": 1,
        "allocation": {"up_proj": "2:4", "mlp": 0.25}, "owl_threshold": 5.0, "owl_lambda": 0.08, "alpha_tau": 0.1,
        "recompute": False, "lam": None, "fisher": "all", "damping": 0.01, "block_size": None, "targets": ["layers"],
        "ignore": ["v_proj"], "num_samples": 128, "sequence_length": None, "batch_size": 8, "seed": 0,
        "max_memory": None, "offload_dir": None, "recover": None, "recover_steps": 150, "recover_lr": 0.05,
        "bits": None, "quant_group": 128,
    },
    "lam": 1.0,
    "sparsity": 0.4,
    "solver_options": {},
    "calibration": None,
    "versions": {"torch": "2.13.0"},
}  # fmt: skip


def damaged(path, value):
    """The record with another value at a path such as "config.targets"."""
    record = copy.deepcopy(FIRST)
    *parents, last = path.split(".")
    inner = record
    for parent in parents:
        inner = inner[parent]
    inner[last] = value
    return record


def test_a_run_attaches_its_record_to_the_model(tmp_path):
    config = MoonshotConfig(pattern="2:4", damping=0.02, num_samples=6, offload_dir=str(tmp_path))
    pruner = MoonshotPruner(make("llama"), config)
    report = pruner.prune([{"input_ids": INPUTS}] * 3, progress=False)
    record = PruningRecord.of(pruner.model)
    assert record.config == report.config and record.config["offload_dir"] is None
    assert record.solver_options == {"damping": 0.02, "block_size": 128}
    assert (record.lam, record.sparsity) == (0.9, 0.5)
    assert record.calibration == report.calibration and record.versions == report.versions
    assert record.compaction is None and record.pattern_rules.nm() == [NM(2, 4)]
    values = pruner.model.config.moonshot
    assert values["version"] == PruningRecord.VERSION and "compaction" not in values
    assert json.loads(json.dumps(values)) == values == record.to_dict()
    assert PruningRecord.from_dict(values) == record
    pruner.save_pretrained(tmp_path / "out")
    assert PruningRecord.of(hf.AutoModelForCausalLM.from_pretrained(tmp_path / "out")) == record
    assert PruningRecord.read(hf.AutoConfig.from_pretrained(tmp_path / "out")) == record


def test_the_record_shares_nothing_with_the_report():
    pruner = pruned()
    pruner.report.config["seed"] = 99
    assert PruningRecord.of(pruner.model).config["seed"] == 0
    PruningRecord.of(pruner.model).config["seed"] = 98
    assert PruningRecord.of(pruner.model).config["seed"] == 0


def test_a_record_is_read_from_a_dictionary():
    record = PruningRecord.from_dict(FIRST)
    assert (record.targets, record.ignore) == (("layers",), ("v_proj",))
    assert record.pattern_rules.of(["up_proj", "mlp.down", "q"]) == {
        "up_proj": NM(2, 4), "mlp.down": Unstructured(0.25), "q": Unstructured(0.5),
    }  # fmt: skip
    assert record.pattern_rules.nm() == [NM(2, 4)] and record.solver_options == {}
    written = record.to_dict()
    assert written == FIRST
    assert PruningRecord.from_dict(written) == record


def test_a_setting_that_is_missing_is_named():
    read = ("version", "pattern", "sparsity", "group_size", "allocation", "targets", "ignore", "bits", "quant_group")
    for name in read:
        config = {key: value for key, value in FIRST["config"].items() if key != name}
        with pytest.raises(MoonshotError, match=f"config.json is damaged: moonshot: config.{name}: missing"):
            PruningRecord.from_dict({**FIRST, "config": config})


def test_a_dense_model_has_no_record():
    assert PruningRecord.of(make("llama")) is None and PruningRecord.of(nn.Linear(2, 2)) is None
    with pytest.raises(MoonshotError, match="no entry moonshot: the model is not pruned"):
        PruningRecord.require_of(make("llama"))
    plain = nn.Linear(2, 2)
    plain.config = {"not": "of transformers"}
    PruningRecord.from_dict(FIRST).attach(plain)
    assert plain.config == {"not": "of transformers"}


DAMAGED = [
    ("version", "1", "version='1'"),
    ("version", -1, "version=-1"),
    ("config", [1, 2], r"config=\[1, 2\]: must be an object"),
    ("config", None, "config=None"),
    ("config.version", 99, "config.version=99"),
    ("config.version", [1], r"config.version=\[1\]"),
    ("config.pattern", 24, "config.pattern=24"),
    ("config.pattern", ["2:4"], r"config.pattern=\['2:4'\]"),
    ("config.sparsity", "0.5", "config.sparsity='0.5'"),
    ("config.sparsity", 1.5, "config.sparsity=1.5"),
    ("config.sparsity", [0.5], r"config.sparsity=\[0.5\]"),
    ("config.group_size", {}, "config.group_size={}"),
    ("config.allocation", ["mlp", 0.5], r"config.allocation=\['mlp', 0.5\]"),
    ("config.allocation", {}, "config.allocation={}"),
    ("config.allocation", {"mlp": [2, 4]}, r"config.allocation\['mlp'\]=\[2, 4\]"),
    ("config.targets", "layers", "config.targets='layers'"),
    ("config.targets", {"layers": 1}, "config.targets={'layers': 1}"),
    ("config.targets", [3], "config.targets: 3 is not a string"),
    ("config.ignore", None, "config.ignore=None"),
    ("config.ignore", ["("], r"config.ignore: '\(' is not a regular expression"),
    ("lam", None, "lam=None"),
    ("lam", "0.9", "lam='0.9'"),
    ("lam", 2, "lam=2"),
    ("sparsity", [0.5], r"sparsity=\[0.5\]"),
    ("calibration", ["c4"], r"calibration=\['c4'\]: must be an object or null"),
    ("versions", "torch", "versions='torch'"),
    ("solver_options", [0.01], r"solver_options=\[0.01\]"),
    ("compaction", 3, "compaction=3"),
]


@pytest.mark.parametrize(("path", "value", "words"), DAMAGED, ids=[f"{path}={value}" for path, value, _ in DAMAGED])
def test_a_damaged_record_is_one_clear_error(path, value, words):
    with pytest.raises(MoonshotError, match=f"^config.json is damaged: moonshot: {words}") as error:
        PruningRecord.from_dict(damaged(path, value))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("values", [[], "2:4", 3, True])
def test_a_record_must_be_an_object(values):
    with pytest.raises(MoonshotError, match="^config.json is damaged: moonshot: it is .*, not an object"):
        PruningRecord.from_dict(values)


@pytest.mark.parametrize("field", FIRST)
def test_a_field_that_is_missing_is_named(field):
    with pytest.raises(MoonshotError, match=f"^config.json is damaged: moonshot: {field}: missing"):
        PruningRecord.from_dict({name: value for name, value in FIRST.items() if name != field})


def test_a_newer_record_is_refused():
    with pytest.raises(MoonshotError, match="moonshot: version=2: this release reads 1; update it"):
        PruningRecord.from_dict({**FIRST, "version": 2})


def test_every_reader_names_the_damaged_field(tmp_path):
    pruned().save_pretrained(tmp_path / "dense")
    change_json(
        tmp_path / "dense" / "config.json", lambda config: config["moonshot"]["config"].update(targets="layers")
    )
    model = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "dense")
    for reader in (
        lambda: load_pruned(tmp_path / "dense"),
        lambda: convert(tmp_path / "dense", tmp_path / "packed", "packed"),
        lambda: pruned_layers(model),
        lambda: nm_patterns(None, model),
        lambda: hf.AutoModelForCausalLM.from_pretrained(
            tmp_path / "dense", quantization_config=MoonshotConfig(solver="magnitude", pattern="2:4")
        ),
    ):
        with pytest.raises(MoonshotError, match="moonshot: config.targets='layers'"):
            reader()


def test_reading_needs_no_solver(tmp_path, monkeypatch):
    """The solver of a pruned model may belong to a package that is not installed."""
    model = pruned(allocation={"q_proj": "1:4", "proj": "2:4"}, pattern="2:4").model
    pruner = pruned(pattern="2:4", targets=["mlp"])
    monkeypatch.delitem(base._SOLVERS, "magnitude")
    with pytest.raises(MoonshotError, match="solver='magnitude'"):
        MoonshotConfig(solver="magnitude", pattern="2:4")
    pruner.save_pretrained(tmp_path / "packed", format="packed")
    convert(tmp_path / "packed", tmp_path / "dense", "dense")
    convert(tmp_path / "dense", tmp_path / "again", "packed")
    for folder, runtime in (("packed", "packed"), ("dense", "dense"), ("again", "dense")):
        loaded = load_pruned(tmp_path / folder, runtime=runtime)
        with torch.no_grad():
            logits, expected = loaded(INPUTS).logits, pruner.model(INPUTS).logits
        assert torch.allclose(logits, expected, atol=1e-5) if runtime == "packed" else torch.equal(logits, expected)
    assert nm_patterns(None, model) == [NM(1, 4), NM(2, 4)]


def test_compaction_is_added_to_the_record():
    pruner = pruned(pattern="structured", sparsity=0.5)
    before = PruningRecord.of(pruner.model)
    done = pruner.compact()
    after = PruningRecord.of(pruner.model)
    assert after.compaction == done.to_dict() == pruner.report.compaction
    assert {**after.to_dict(), "compaction": None} == {**before.to_dict(), "compaction": None}


def test_a_model_without_a_record_is_not_partly_compacted():
    pruner = pruned(pattern="structured", sparsity=0.5)
    model = pruner.model
    del model.config.moonshot
    with pytest.raises(MoonshotError, match="not pruned"):
        pruner.compact()
    assert pruner.model is model and pruner.report.compaction is None


def test_no_other_code_reads_the_dictionary():
    package = Path(optimum_moonshot.__file__).parent
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            attribute = isinstance(node, ast.Attribute) and node.attr == "moonshot"
            attribute = attribute and ast.unparse(node) != "torch.ops.moonshot"
            named = isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr", "setattr")
            named = named and getattr(node.args[1], "value", "") == "moonshot"
            assert not attribute and not named, f"{path.name}, line {node.lineno}"
