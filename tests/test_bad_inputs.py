"""Bad inputs: each gets one line that names the field, the value and the mend; the model stays as it was."""

import json
import re
import shutil
from functools import partial

import pytest
import torch
from bad_inputs_page import PAGE, page
from command_line import DEMO, failure
from datasets import Dataset
from models import make, token_batches
from PIL import Image
from torch import nn
from transformers import ViTImageProcessorPil

from optimum_moonshot import MoonshotConfig, MoonshotError, MoonshotPruner, SweepReport, perplexity, prune_weight
from optimum_moonshot import prune_weight_path as weight_path
from optimum_moonshot.evaluation.report import EvalReport
from optimum_moonshot.reports.prune_report import PruneReport
from optimum_moonshot.results.run_folder import RunFolder

WEIGHT, GRAM = torch.ones(8, 16), torch.eye(16)
GRADIENTS = torch.ones(2, 8, 16)
BATCHES = token_batches()
IDS = torch.ones(2, 8, dtype=torch.long)
NAN = float("nan")


def config(**changes):
    usual = {"solver": "wanda", "pattern": "2:4", "lam": 1.0}
    return MoonshotConfig(**{**usual, "num_samples": 4, "sequence_length": 12, "batch_size": 2, **changes})


def one_line(error):
    return len(str(error).splitlines()) == 1


# ---------------------------------------------------------------- one matrix
HALF, OBC = config(lam=0.5), {"solver": "obc", "pattern": "unstructured", "sparsity": 0.5}
MATRICES = [
    ((WEIGHT.to("meta"), GRAM), config(), "weight is on the meta device, which has no values"),
    ((WEIGHT, GRAM.to("meta")), config(), "gram is on the meta device"),
    ((WEIGHT, GRAM, GRADIENTS.to("meta")), HALF, "gradients is on the meta device"),
    ((WEIGHT.to_sparse(), GRAM), config(), "weight is of layout torch.sparse_coo: give a plain, dense tensor"),
    ((WEIGHT, GRAM.to_sparse_csr()), config(), "gram is of layout torch.sparse_csr"),
    ((WEIGHT, GRAM, GRADIENTS.to_sparse()), HALF, "gradients is of layout torch.sparse_coo"),
    ((torch.nested.nested_tensor([WEIGHT[0], WEIGHT[1]]), GRAM), config(), "weight is nested"),
    ((torch.quantize_per_tensor(WEIGHT, 0.1, 0, torch.qint8), GRAM), config(), "weight is quantized"),
    ((WEIGHT.int(), GRAM), config(), "weight has dtype torch.int32: give a floating-point tensor"),
    ((WEIGHT.to(torch.complex64), GRAM), config(), "weight has dtype torch.complex64"),
    ((WEIGHT, GRAM.bool()), config(), "gram has dtype torch.bool"),
    ((WEIGHT * NAN, GRAM), config(), "weight holds NaN or infinite values"),
    ((WEIGHT, GRAM / 0), config(), "gram holds NaN or infinite values"),
    ((WEIGHT, GRAM, GRADIENTS * NAN), HALF, "gradients holds NaN"),
    ((torch.zeros(0, 16), GRAM), config(), "weight has shape [0, 16]: it must be [any, any] and not empty"),
    ((WEIGHT, torch.zeros(0, 0)), config(), "gram has shape [0, 0]: it must be [16, 16]"),
    ((WEIGHT, GRAM, torch.zeros(0, 8, 16)), HALF, "gradients has shape [0, 8, 16]"),
    ((WEIGHT, GRAM[:8, :8]), config(), "gram has shape [8, 8]: it must be [16, 16]"),
    ((WEIGHT[0], GRAM), config(), "weight has shape [16]: it must be [any, any]"),
    ((WEIGHT, GRAM), HALF, "gradients=None: lam=0.5 needs them"),
    ((WEIGHT,), config(), "gram=None: solver='wanda' needs"),
    (([[1.0]], GRAM), config(), "weight is a list: give a torch.Tensor"),
    ((WEIGHT, "gram"), config(), "gram is a str: give a torch.Tensor"),
    ((WEIGHT[:, :15], GRAM[:15, :15]), config(), "d_in=15 is not a multiple of 4"),
    ((WEIGHT, -GRAM), config(solver="sparsegpt"), "gram"),
    ((WEIGHT, GRAM), {"pattern": "2:4"}, "config is a dict: give a MoonshotConfig"),
    ((WEIGHT, GRAM), None, "config is a NoneType: give a MoonshotConfig"),
]


@pytest.mark.parametrize("arguments, settings, words", MATRICES, ids=[words[:40] for *_, words in MATRICES])
def test_matrices(arguments, settings, words):
    with pytest.raises(MoonshotError, match=re.escape(words)) as error:
        prune_weight(*arguments, config=settings)
    assert one_line(error.value)


PATHS = [
    (config(**OBC), [[0.5]], "sparsities=[0.5]: give a number"),
    (config(**OBC), ["0.5"], "sparsities='0.5': give a number"),
    (config(**OBC), [NAN], "sparsities=nan: give a number"),
    (config(**OBC), [0.5, 0.5], "a value is given twice"),
    (config(**OBC), 0.5, "sparsities=0.5: give a list of numbers"),
    (config(**OBC), [1.5], "sparsity=1.5"),
    ({}, [0.5], "config is a dict"),
    (config(), [0.5], "solver='wanda': it does not support several sparsities"),
]


@pytest.mark.parametrize("settings, sparsities, words", PATHS)
def test_paths_of_one_matrix(settings, sparsities, words):
    with pytest.raises(MoonshotError, match=re.escape(words)):
        weight_path(WEIGHT, GRAM, config=settings, sparsities=sparsities)


# ---------------------------------------------------------------- sizes and whole numbers
LONG = "9" * 400
NUMBERS = [
    *(("max_memory", value, "give between 1 and 9223372036854775807 bytes") for value in (
        LONG, f"{LONG}TB", int(LONG), 0, "0", 0.0, "0.5", "9223372036854775808", "8388608TiB",
    )),
    *(("max_memory", value, 'give bytes or a size such as "8GiB"') for value in (
        -1, "-5GiB", "1e30", "", [], NAN, float("inf"), True, "inf", "½GiB", "٣GiB", b"1GiB", "8 GiB x", {}, 10**5000,
    )),
    ("num_samples", 2**63, "give a whole number of at most 9223372036854775807"),
    ("num_samples", 10**5000, "num_samples=a int: give a whole number of at most"),
    ("num_samples", -(10**5000), "num_samples=a int: give a whole number of at least 1"),
    ("seed", 2**64, "seed=18446744073709551616: give a whole number of at most"),
    ("batch_size", int(LONG), "batch_size=999"),
    ("sequence_length", 2**80, "sequence_length=1208925819614629174706176: give a whole number of at most"),
    ("offload_dir", "", "offload_dir='': give a path"),
    ("offload_dir", "a\0b", "offload_dir='a\\x00b': give a path"),
]  # fmt: skip


@pytest.mark.parametrize("field, value, words", NUMBERS, ids=range(len(NUMBERS)))
def test_sizes(field, value, words):
    with pytest.raises(MoonshotError, match=re.escape(words)) as error:
        config(**{field: value})
    assert str(error.value).startswith(f"{field}=") and one_line(error.value) and len(str(error.value)) < 200


# ---------------------------------------------------------------- what a model is pruned with
def broken_off():
    yield BATCHES[0]
    raise RuntimeError("the network is gone")


class Broken:
    def __iter__(self):
        raise OSError("the disk is gone")


def keys_of(*names):
    return {name: IDS for name in names}


DATA = [
    ([], "the data is an empty list; use c4"),
    (iter([]), "num_samples=4: the data has 0 samples; give more"),
    ({}, "item 0 of the data is empty"),
    (broken_off(),
     "item 1 of the data cannot be read (RuntimeError: the network is gone); fix the code that produces it"),
    (Broken(), "item 0 of the data cannot be read (OSError: the disk is gone)"),
    ([keys_of("input_ids"), keys_of("input_ids", "token_type_ids")],
     "item 1 of the data has input_ids, token_type_ids, item 0 input_ids; give all the same inputs"),
    ([keys_of("input_ids", "labels"), keys_of("input_ids")], "item 1 of the data has input_ids, item 0 input_ids, lab"),
    ([keys_of("foo")] * 2, "LlamaForCausalLM cannot be called with foo [1, 8]"),
    ([{"input_ids": torch.ones(2, 3, 4).long()}] * 2, "LlamaForCausalLM cannot be called with input_ids [1, 3, 4]"),
    ([{"input_ids": torch.rand(2, 3)}] * 2, "input_ids: token ids are torch.float32; use integers"),
    ([{"input_ids": IDS * 10**6}] * 2, "token 1000000 is outside of the vocabulary of LlamaForCausalLM, which has"),
    ([{"input_ids": -IDS}] * 2, "token -1 is outside"),
    ([{"input_ids": IDS.to_sparse()}], "input_ids is of layout torch.sparse_coo; give a dense tensor"),
    ([{"input_ids": IDS.to("meta")}], "item 0 of the data: input_ids: give a tensor"),
    ([{"input_ids": IDS[:0]}], "which is empty; leave it out"),
    ([{"inputs_embeds": torch.full((2, 3, 16), NAN)}], "inputs_embeds contains NaN; give finite numbers"),
    ([{"input_ids": IDS, "attention_mask": IDS[:, :5]}],
     "attention_mask of (2, 5) for input_ids of (2, 8); give one entry for each token"),
    ([{"input_ids": IDS, "attention_mask": IDS * 0}],
     "attention_mask hides all tokens of a sample; leave that sample out"),
    ("lorem ipsum " * 10_000, '"lorem ipsum lorem ipsum'),
    ("a\0b", "is neither the name of a data set nor a file"),
    ("wikitext3", '"wikitext3" is neither the name of a data set nor a file; use c4, wikitext2'),
    ("~nobody-of-this-name/a.txt", '"~nobody-of-this-name/a.txt" is neither'),
    ("nowhere/at-all", '"nowhere/at-all" is neither'),
    (5, "data of type int; use c4"),
    (lambda: BATCHES, "data of type function; use c4"),
    ({1, 2}, "item 0 of the data is a int; give dictionaries"),
    (["text"], "tokenizer=None: text calibration needs one"),
    (None, "calibration"),
]  # fmt: skip
LOSSES = [
    (lambda output, batch: torch.zeros(len(batch["input_ids"])), "has no gradient; compute it from the output"),
    (lambda output, batch: output.logits.detach().mean((1, 2)), "loss: its result has no gradient"),
    (lambda output, batch: torch.ones(1, requires_grad=True), "loss: its result has no gradient"),
    (
        lambda output, batch: 1.0,
        "loss: it returned a float; return one loss per sample, a floating-point tensor of shape [1]",
    ),
    (lambda output, batch: None, "loss: it returned a NoneType"),
    (lambda output, batch: output.logits.mean(), "loss: it returned shape []; return one loss per sample"),
    (lambda output, batch: output.logits.mean(2), "loss: it returned shape [1, 12]"),
    (lambda output, batch: output.logits.mean()[None, None], "loss: it returned shape [1, 1]"),
    (lambda output, batch: output.logits.mean((1, 2)) * NAN, "loss: it returned [nan]; check it"),
    (lambda output, batch: output.logits.mean((1, 2)) / 0, "inf]; check it"),
    (lambda output, batch: output.logits.mean((1, 2)).to(torch.complex64), "loss: it returned torch.complex64"),
    (lambda output, batch: torch.zeros(1, dtype=torch.long), "loss: it returned torch.int64"),
    ("cross-entropy", "loss='cross-entropy': give a function"),
]
ARGUMENTS = [
    *(({"calibration": data}, words) for data, words in DATA),
    *(({"loss": loss, "lam": 0.5}, words) for loss, words in LOSSES),
    ({"forward": "forward"}, "forward='forward': pass a function of model and inputs"),
    ({"forward": lambda model, batch: None}, "no calibration data reached any chosen layer"),
    ({"targets": ["nothing"]}, "targets: 'nothing' matches no module name"),
    ({"ignore": [".*"]}, "nothing to prune: targets and ignore leave nothing"),
    ({"max_memory": 1}, "max_memory: model.layers.0"),
    ({"resume_dir": 5}, "resume_dir=5: give a path"),
    ({"resume_dir": ""}, "resume_dir='': give a path"),
    ({"resume_dir": "a\0b"}, "resume_dir='a\\x00b': give a path"),
    ({"resume_dir": "x" * 260}, "cannot be written: [Errno 36] File name too long"),
    ({"resume_dir": "FILE"}, "is a file; give a folder"),
    ({"resume_dir": "FILE/in"}, "cannot be written: [Errno 20] Not a directory"),
    ({"resume_dir": "LINK"}, "is a link to a folder that does not exist; create that folder, or give another"),
    ({"offload_dir": "FILE", "max_memory": 1}, "offload_dir="),
]


@pytest.mark.parametrize("given, words", ARGUMENTS, ids=[words[:50] for _, words in ARGUMENTS])
def test_arguments_of_a_run(tmp_path, monkeypatch, given, words):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    places = {"FILE": tmp_path / "file", "FILE/in": tmp_path / "file" / "in", "LINK": tmp_path / "link"}
    monkeypatch.setattr("optimum_moonshot.calibration.storage.DEFAULT_SHARE", 0.0 if "max_memory" in given else 0.6)
    given = {"calibration": BATCHES, "progress": False, **given}
    given = {k: places.get(v, v) if isinstance(v, str) else v for k, v in given.items()}
    settings = {name: given.pop(name) for name in list(given) if name in MoonshotConfig.__dataclass_fields__}
    data = settings.pop("calibration")
    settings = {name: str(value) if name == "offload_dir" else value for name, value in settings.items()}
    model = make("llama")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(MoonshotError, match=re.escape(words)) as error:
        MoonshotPruner(model, config(**settings)).prune(data, **given)
    assert one_line(error.value) and len(str(error.value)) < 620
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not hasattr(model.config, "moonshot")
    assert {path.name for path in tmp_path.iterdir()} == {"file", "link"}


def test_an_error_in_a_loss_keeps_its_own_type():
    with pytest.raises(ZeroDivisionError):
        MoonshotPruner(make("llama"), config(lam=0.5)).prune(BATCHES, loss=lambda output, batch: 1 / 0, progress=False)


def test_a_batch_without_padding_needs_no_mask():
    data = [{"input_ids": IDS}, {"input_ids": IDS, "attention_mask": IDS}]
    MoonshotPruner(make("llama"), config()).prune(data, progress=False)


def meta(whole):
    model = make("llama")
    (model if whole else model.model.layers[0].mlp.up_proj).to("meta")
    return model


OBJECTS = [
    (partial(meta, True), "model.layers.0.self_attn.q_proj: its weight is on the meta device; load the model"),
    (partial(meta, False), "model.layers.0.mlp.up_proj: its weight is on the meta device"),
    (lambda: nn.Sequential(nn.ReLU()), "nothing to prune: the model has no Linear or Conv2d"),
    (nn.Sequential, "nothing to prune: the model has no Linear or Conv2d"),
    (lambda: "gpt2", "model is a str: give a PreTrainedModel"),
]


@pytest.mark.parametrize("model, words", OBJECTS)
def test_models(model, words):
    with pytest.raises(MoonshotError, match=re.escape(words)):
        MoonshotPruner(model(), config()).prune(BATCHES, progress=False)


# ---------------------------------------------------------------- folders of models
def changed(name, content):
    def change(folder):
        (folder / name).write_text(content, encoding="utf-8")

    return change


def configured(**changes):
    def change(folder):
        values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        (folder / "config.json").write_text(json.dumps({**values, **changes}), encoding="utf-8")

    return change


def cut(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100_000])


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
MODELS = [
    (configured(quantization_config=GPTQ), MoonshotError, "its weights are quantized (gptq) and cannot be loaded"),
    (configured(quantization_config={"quant_method": "awq", "bits": 4}), MoonshotError, "quantized (awq) and"),
    (configured(quantization_config={"quant_method": "moonshot"}), MoonshotError, "this release reads format 'packed'"),
    (configured(hidden_size=-4), MoonshotError, "cannot be loaded (Trying to create tensor with negative dimension"),
    (configured(hidden_size="x"), MoonshotError, "hidden_size"),
    (configured(hidden_size=512, intermediate_size=64), MoonshotError, "cannot be loaded"),
    (configured(model_type="nothing"), MoonshotError, "does not recognize this architecture"),
    (cut, MoonshotError, "cannot be loaded (Error while deserializing header"),
    (changed("config.json", "[]"), MoonshotError, "model: cannot be loaded ("),
    (changed("config.json", "{"), OSError, "is not a valid JSON file"),
    (changed("tokenizer.json", '{"broken"'), MoonshotError, "its tokenizer (tokenizer.json, tokenizer_"),
    (changed("tokenizer.json", "{}"), MoonshotError, "cannot be loaded"),
    (changed("tokenizer.json", ""), MoonshotError, "repair or remove these files, and pass a tokenizer"),
    (changed("tokenizer_config.json", "[]"), MoonshotError, "its tokenizer (tokenizer.json, tokenizer_"),
]  # fmt: skip


@pytest.mark.parametrize("change, kind, words", MODELS, ids=[words[:40] for *_, words in MODELS])
def test_folders_of_models(tmp_path, capsys, change, kind, words):
    folder = tmp_path / "model"
    shutil.copytree(DEMO, folder)
    change(folder)
    with pytest.raises(kind, match=re.escape(words)) as error:
        MoonshotPruner.from_pretrained(folder, config())
    assert str(folder) in str(error.value) or "moonshot" in str(error.value) or "mismatched" in str(error.value)
    status, lines = failure(
        capsys, "prune", folder, "--pattern", "2:4", "--solver", "magnitude", "--output", tmp_path / "o"
    )
    assert status == 1 and words.split("(")[0].strip() in lines[-1]
    assert {path.name for path in tmp_path.iterdir()} == {"model"}


@pytest.mark.parametrize("name", [None, 5, "", b"model"])
def test_names_of_models(name):
    with pytest.raises(MoonshotError, match=re.escape(f"name_or_path={name!r}: give a path")):
        MoonshotPruner.from_pretrained(name, config())
    with pytest.raises(MoonshotError, match="config is a dict: give a MoonshotConfig"):
        MoonshotPruner.from_pretrained(DEMO, {"pattern": "2:4"})


def test_a_model_without_a_tokenizer_loads(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(DEMO, folder, ignore=lambda *_: ["tokenizer.json", "tokenizer_config.json"])
    pruner = MoonshotPruner.from_pretrained(folder, config())
    with pytest.raises(MoonshotError, match="tokenizer=None: text calibration needs one"):
        pruner.prune(DEMO / "calibration.txt", progress=False)


@pytest.mark.parametrize("name", ["llama", "gpt2", "bloom", "bert"])
def test_a_tokenizer_that_transformers_makes_up_is_none(tmp_path, name):
    make(name).save_pretrained(tmp_path)
    assert MoonshotPruner.from_pretrained(tmp_path, config()).tokenizer is None
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(MoonshotError, match=r"its tokenizer \(tokenizer_config.json\) cannot be loaded"):
        MoonshotPruner.from_pretrained(tmp_path, config())


@pytest.fixture(scope="module")
def pruned():
    found = MoonshotPruner(make("llama"), config())
    found.prune(BATCHES, progress=False)
    return found


PLACES = [
    ("file", "is a file; give a folder"),
    ("file/in", "cannot be written: [Errno 20] Not a directory"),
    ("link", "is a link to a folder that does not exist; create that folder, or give another"),
    ("x" * 300, "cannot be written: [Errno 36] File name too long"),
    ("a\0b", "give a path"),
    (5, "directory=5: give a path"),
    (None, "directory=None: give a path"),
    ("", "directory='': give a path"),
    (b"x", "directory=b'x': give a path"),
]


@pytest.mark.parametrize("directory, words", PLACES)
def test_where_models_are_saved(tmp_path, pruned, directory, words):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    place = tmp_path / directory if isinstance(directory, str) and directory else directory
    with pytest.raises(MoonshotError, match=re.escape(words)) as error:
        pruned.save_pretrained(place)
    assert str(error.value).startswith("directory=")
    assert {path.name for path in tmp_path.iterdir()} == {"file", "link"}


# ---------------------------------------------------------------- JSON files
REPORTS = [
    ("config", None), ("layers", None), ("layers", []), ("layers", [5]), ("skipped", "x"), ("skipped", {"a": 1}),
    ("calibration", "x"), ("seconds", "x"), ("seconds", {"total": "1"}), ("seconds", [1]), ("peak_memory", "x"),
    ("peak_memory", 1.5), ("versions", {"torch": 2}), ("notes", 5), ("notes", "x"), ("notes", [1]),
    ("evaluations", {"a": 1}), ("evaluations", {"a": {"pruned": 1.0}}),
    ("evaluations", {"a": {"pruned": "1", "dense": 1}}),
    ("recovery", [{"name": "x"}]), ("compaction", {"a": 1}), ("compaction", []), ("extra", 1),
]  # fmt: skip
LAYERS = [
    ("name", None), ("shape", [1]), ("shape", "x"), ("shape", [1, 2, 3]), ("shape", [1.5, 2]), ("lam", "x"),
    ("sparsity", None), ("sparsity", True), ("sparsity", "0.5"), ("reconstruction", [1]), ("fisher", {}), ("loss", "x"),
    ("damping", None), ("seconds", None), ("peak_memory", "x"), ("notes", [1]), ("target_sparsity", [1]), ("extra", 1),
]  # fmt: skip


def read(kind, path, values):
    path.write_text(json.dumps(values), encoding="utf-8")
    return kind.load(path)


@pytest.mark.parametrize("field, value", REPORTS)
def test_fields_of_a_report(tmp_path, pruned, field, value):
    good, path = json.loads(json.dumps(pruned.report.to_dict())), tmp_path / "report.json"
    assert read(PruneReport, path, good).to_dict() == pruned.report.to_dict()
    with pytest.raises(
        MoonshotError, match=rf"report\.json is damaged: it is not the report of a run \({field}"
    ) as error:
        read(PruneReport, path, {**good, field: value})
    assert one_line(error.value)


@pytest.mark.parametrize("field, value", LAYERS)
def test_fields_of_a_layers_report(tmp_path, pruned, field, value):
    good, path = json.loads(json.dumps(pruned.report.to_dict())), tmp_path / "report.json"
    layers = [{**good["layers"][0], field: value}, *good["layers"][1:]]
    with pytest.raises(MoonshotError, match=rf"it is not the report of a run \(layers\[0\]\.{field}"):
        read(PruneReport, path, {**good, "layers": layers})


def test_fields_that_are_missing(tmp_path, pruned):
    good, path = json.loads(json.dumps(pruned.report.to_dict())), tmp_path / "report.json"
    for field in ("config", "layers", "skipped", "calibration", "seconds", "peak_memory", "versions"):
        with pytest.raises(MoonshotError, match=rf"\({field} is missing\)"):
            read(PruneReport, path, {name: value for name, value in good.items() if name != field})
    for field in ("name", "shape", "lam", "sparsity"):
        layer = {name: value for name, value in good["layers"][0].items() if name != field}
        with pytest.raises(MoonshotError, match=rf"\(layers\[0\]\.{field} is missing\)"):
            read(PruneReport, path, {**good, "layers": [layer]})


SWEEP = {
    "solver": "wanda", "metric": "loss", "maximize": False, "dense": 1.0, "config": {"seed": 0}, "calibration": None,
    "entries": [{"pattern": "2:4", "sparsity": 0.5, "lam": 1.0, "metric": 2.0, "loss": 0.1, "seconds": 1.0}],
    "seconds": {"total": 1.0}, "versions": {},
}  # fmt: skip


SWEEPS = [
    ("solver", 5), ("maximize", 1), ("dense", "x"), ("entries", None), ("entries", [5]), ("entries", [{}]),
    ("entries", [{**SWEEP["entries"][0], "lam": "x"}]), ("seconds", 1), ("extra", 1),
]  # fmt: skip


@pytest.mark.parametrize("field, value", SWEEPS)
def test_fields_of_a_sweeps_report(tmp_path, field, value):
    path = tmp_path / "sweep.json"
    assert read(SweepReport, path, {**SWEEP, "dense": None}).entries
    with pytest.raises(MoonshotError, match=rf"sweep\.json is damaged: it is not the report of a sweep \({field}"):
        read(SweepReport, path, {**SWEEP, field: value})


EVALUATIONS = [
    [], 5, {}, {"perplexity": {"a": 1.0}}, {"perplexity": {"a": "x"}, "measured_on": {"a": {}}},
    {"accuracy": {"a": None}, "measured_on": {"a": {"images": 1}}}, {"zero_shot": {"accuracy": {"a": 1.0}}},
    {"zero_shot": {"accuracy": {"a": "x"}, "stderr": {}, "num_fewshot": 0, "limit": None, "versions": {}}},
]  # fmt: skip


@pytest.mark.parametrize("values", EVALUATIONS)
def test_results_of_an_evaluation(tmp_path, values):
    with pytest.raises(MoonshotError, match=r"result\.json contains no results of an evaluation"):
        read(EvalReport, tmp_path / "result.json", values)


@pytest.mark.parametrize("kind", [PruneReport, SweepReport])
def test_reports_that_are_no_files(tmp_path, kind):
    with pytest.raises(MoonshotError, match=r"nothing\.json is not a file"):
        kind.load(tmp_path / "nothing.json")
    with pytest.raises(MoonshotError, match="is not a file"):
        kind.load(tmp_path)
    with pytest.raises(MoonshotError, match="path=5: give a path"):
        kind.load(5)
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(MoonshotError, match=r"binary\.json is damaged"):
        kind.load(tmp_path / "binary.json")


def test_a_broken_manifest_is_named_as_an_option(tmp_path, capsys):
    argv = ["prune", DEMO, "--output", tmp_path / "out", "--solver", "magnitude", "--pattern", "2:4", "--device", "cpu"]
    folder = RunFolder(tmp_path / "out.partial" / "run", "resume_dir")
    folder.open("theirs")
    folder.release()
    (tmp_path / "out.partial" / "command.json").write_text("{}")
    for content in ("", "[1]", '{"fingerprint"', "\x00"):
        (tmp_path / "out.partial" / "run" / "run.json").write_text(content)
        status, lines = failure(capsys, *argv)
        assert status == 1 and lines[-1].startswith(f"error: --output {tmp_path / 'out'}: ")
        assert "run.json is damaged" in lines[-1] and "remove the folder to start again" in lines[-1]


# ---------------------------------------------------------------- texts and images
@pytest.fixture(scope="module")
def processor():
    return ViTImageProcessorPil(size={"height": 16, "width": 16})


def pictures(folder, damage):
    for name in ("a", "b"):
        (folder / name).mkdir(parents=True)
        for index in range(2):
            Image.new("RGB", (8, 8), (index, 0, 0)).save(folder / name / f"{index}.jpg")
    path = folder / "b" / "1.jpg"
    path.write_bytes(path.read_bytes()[: len(path.read_bytes()) // 2] if damage == "cut" else b"")


@pytest.mark.parametrize("damage", ["cut", "empty"])
def test_damaged_pictures(tmp_path, processor, damage):
    pictures(tmp_path / "images", damage)
    model = make("vit")
    with pytest.raises(MoonshotError, match=r"image [0-3] of .*images \(1\.jpg\) cannot be processed \(.*\)") as error:
        MoonshotPruner(model, config(lam=1), None, processor).prune(str(tmp_path / "images"), progress=False)
    assert one_line(error.value)


def test_folders_without_pictures(tmp_path, processor):
    (tmp_path / "empty").mkdir()
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.csv").write_text("a,b\n1,2\n")
    for name in ("empty", "texts", "nothing"):
        with pytest.raises(MoonshotError, match=rf"{name}.*(cannot be read|has the columns)"):
            MoonshotPruner(make("vit"), config(), None, processor).prune(str(tmp_path / name), progress=False)


class Untouched:
    """A tokenizer that nobody is to call."""

    def __call__(self, *arguments, **options):
        raise AssertionError("tokenized")


@pytest.mark.parametrize("kind", ["list", "Dataset", "json", "jsonl", "parquet"])
def test_far_too_many_samples_are_refused_before_tokenizing(tmp_path, kind):
    texts = [f"document {index}" for index in range(50)]
    data = texts if kind == "list" else Dataset.from_dict({"text": texts})
    if kind in ("json", "jsonl", "parquet"):
        path = tmp_path / f"a.{kind}"
        data = str(path) if data.to_parquet(path) and kind == "parquet" else str(path)
        if kind != "parquet":
            path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    pruner = MoonshotPruner(make("llama"), config(num_samples=10**9), Untouched())
    with pytest.raises(MoonshotError, match=r"num_samples=1000000000: the data has 50 documents.*=50"):
        pruner.prune(data, progress=False)


def test_far_too_many_images_are_refused_before_reading(tmp_path, processor):
    pictures(tmp_path / "images", "cut")
    with pytest.raises(MoonshotError, match="num_samples=1000000: .* has 4 images; give more or set num_samples=4"):
        MoonshotPruner(make("vit"), config(num_samples=10**6), None, processor).prune(
            str(tmp_path / "images"), progress=False
        )


def test_texts_that_hold_nothing(tmp_path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "lines.txt").write_text("\n\n")
    for name, words in (("empty.txt", "is empty; give a file that contains text"), ("lines.txt", "fewer than")):
        for run in (
            lambda path: MoonshotPruner(make("llama"), config(), tokenizer).prune(path, progress=False),
            lambda path: perplexity(make("llama"), tokenizer, path, sequence_length=12),
        ):
            with pytest.raises(MoonshotError, match=words):
                run(str(tmp_path / name))


# ---------------------------------------------------------------- the command line
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
    found, lines = failure(capsys, command, DEMO, "--output", tmp_path / "out", *options)
    assert lines[-1].startswith(f"error: {words}") and len([line for line in lines if "error" in line]) == 1, lines[-1]
    assert found == status and len(lines[-1]) < 800
    assert not list(tmp_path.iterdir())


VALUES = [
    ("--lam", "much"), ("--sparsity", "half"), ("--num-samples", "1.5"), ("--seed", "x"), ("--format", "gguf"),
    ("--dtype", "int8"), ("--no-such-option", "1"),
]  # fmt: skip


@pytest.mark.parametrize("option, value", VALUES)
def test_values_that_are_no_numbers(tmp_path, capsys, option, value):
    from optimum_moonshot.__main__ import main

    with pytest.raises(SystemExit) as caught:
        main(["prune", "model", "--output", str(tmp_path / "out"), option, value])
    told = capsys.readouterr().err
    assert caught.value.code == 2 and option in told.splitlines()[-1] and value in told.splitlines()[-1]
    assert "Traceback" not in told and not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_page_of_bad_inputs_says_what_the_tests_say():
    """`python tests/support/bad_inputs_page.py` writes it."""
    assert PAGE.read_text(encoding="utf-8") == page()
    rows = [line for line in page().splitlines() if line.startswith("| `") and not line.endswith("| message |")]
    assert len(rows) >= 200 and f"messages for {len(rows)} wrong inputs" in page()
