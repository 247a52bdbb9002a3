"""Repositories of an attacker, whose checksums are right: no code runs, no memory is exhausted, no markup is added."""

import contextlib
import json
import os
import pickle
import resource
import shutil
from pathlib import Path

import pytest
import torch
import transformers as hf
from checkpoint_edits import change_config, change_file, change_json
from damage import make_folder

from optimum_moonshot import MoonshotConfig, MoonshotError, MoonshotPruner, convert, load_pruned, verify
from optimum_moonshot.checkpoint.base_card import find_base
from optimum_moonshot.checkpoint.weight_files import _checksum, kind, tensor_digest

# A few hundred bytes of YAML that would be 10¹² words if its aliases were written out.
BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 12)
)
GIB = 2**30


@pytest.fixture(scope="module", params=["packed", "quantized", "experts"])
def intact(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("intact") / request.param
    make_folder(folder, request.param)
    return folder


@pytest.fixture
def folder(intact, tmp_path):
    return Path(shutil.copytree(intact, tmp_path / "repository"))


@pytest.fixture
def two_gib_more():
    """More address space than that is an error."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2 * GIB, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def forge(folder, change):
    """Call `change(tensors, values)` on the file with the first packed layer, and correct its checksums."""
    path = next(path for path in sorted(folder.glob("*.safetensors")) if b'"layers": {}' not in _description(path))

    def rewrite(tensors, metadata):
        values = json.loads(metadata["moonshot"])
        change(tensors, values)
        values["sha256"] = {name: tensor_digest(tensor) for name, tensor in tensors.items()}
        values["stored"] = {name: kind(tensor) for name, tensor in tensors.items()}
        del values["checksum"]
        metadata["moonshot"] = json.dumps({**values, "checksum": _checksum(values)})

    change_file(path, rewrite)


def _description(path):
    content = path.read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return header["__metadata__"]["moonshot"].encode()


def assert_refused(folder, output):
    """Every reader raises a `MoonshotError`, or `verify` reports it."""
    for read in (
        load_pruned,
        lambda folder: load_pruned(folder, runtime="packed"),
        lambda folder: convert(folder, output, "dense"),
    ):
        with pytest.raises(MoonshotError):
            read(folder)
    with pytest.raises((MoonshotError, OSError, ValueError)):  # transformers looks for the files first
        hf.AutoModelForCausalLM.from_pretrained(folder)
    assert not output.exists()
    with contextlib.suppress(MoonshotError):
        assert not verify(folder)


def first(values):
    name = next(iter(values["layers"]))
    return name, values["layers"][name]


def shaped(*shape, **fields):
    def change(_, values):
        entry = first(values)[1]
        entry.pop("stacked", None)
        entry |= {"shape": list(shape), "pattern": "unstructured", "transposed": False, **fields}

    return change


def empty(tensors, values):
    """A matrix of 2⁴⁰ weights whose packed tensors have no element."""
    shaped(0, 2**40)(tensors, values)
    for name in [name for name in tensors if name.startswith(first(values)[0])]:
        tensors[name] = tensors[name].flatten()[:0].reshape((0,) * tensors[name].ndim)


def spread(tensors, values):
    """A matrix of 2⁴⁰ weights whose packed tensors are one element, by strides."""
    shaped(2**20, 2**20)(tensors, values)


def other_dtype(tensors, values):
    for name in [name for name in tensors if name.startswith(first(values)[0])]:
        other = torch.int32 if tensors[name].is_floating_point() else torch.float32
        tensors[name] = tensors[name].to(other)


def largest_counts(tensors, values):
    """All bits of the metadata are set: more surviving weights than values."""
    for name in [name for name in tensors if name.startswith(first(values)[0])]:
        if not tensors[name].is_floating_point():
            tensors[name] = torch.full_like(tensors[name], torch.iinfo(tensors[name].dtype).max)


FORGED = [
    shaped(2**31, 2**31), shaped(2**62, 1), shaped(1, 2**62), shaped(2**32, 2**32), shaped(2**40, 16),
    shaped(16, 2**40), shaped(-1, -16), shaped(16, 16, stacked=True), shaped(*[1] * 10_000, 16, 16), empty, spread,
    other_dtype, largest_counts,
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(FORGED)))
def test_a_forged_description_exhausts_no_memory(folder, tmp_path, number, two_gib_more):
    forge(folder, FORGED[number])
    assert_refused(folder, tmp_path / "out")


class Touch:
    """Creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pytorch_model.bin", "moonshot.bin", "model.pkl"])
def test_no_pickle_is_read(folder, tmp_path, name):
    (folder / name).write_bytes(pickle.dumps(Touch(tmp_path / "touched")))
    assert load_pruned(folder) is not None  # beside the weights: ignored
    change_json(
        folder / "moonshot.safetensors.index.json", lambda index: index["weight_map"].update({"lm_head.x": name})
    )
    assert_refused(folder, tmp_path / "out")
    (folder / name).rename(folder / "pytorch_model.bin")
    for path in folder.glob("moonshot*"):
        path.unlink()
    assert_refused(folder, tmp_path / "out")
    assert not (tmp_path / "touched").exists()


@pytest.mark.slow
def test_the_repositorys_code_does_not_run(folder, tmp_path):
    code = (
        f"open({str(tmp_path / 'touched')!r}, 'w')\nfrom transformers import LlamaConfig as C, LlamaForCausalLM as M\n"
    )
    (folder / "code.py").write_text(code)
    change_config(folder, model_type="hostile", auto_map={"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"})
    with pytest.raises(MoonshotError, match="custom code"):
        load_pruned(folder)
    for read in (verify, lambda folder: convert(folder, tmp_path / "out", "dense")):  # they need no model
        with contextlib.suppress(MoonshotError):
            read(folder)
    assert not (tmp_path / "touched").exists()


@pytest.mark.slow
@pytest.mark.parametrize("target", ["pipe", "/dev/zero", "loop"])
def test_special_files_are_refused_without_a_hang(folder, tmp_path, target):
    path = sorted(folder.glob("*.safetensors"))[0]
    path.unlink()
    if target == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(path if target == "loop" else target)
    assert_refused(folder, tmp_path / "out")
    config = folder / "config.json"
    config.unlink()
    if target == "pipe":
        os.mkfifo(config)
    else:
        config.symlink_to(config if target == "loop" else target)
    with pytest.raises(MoonshotError):
        verify(folder)
    with pytest.raises(MoonshotError):
        load_pruned(folder)


@pytest.mark.slow
@pytest.mark.parametrize("field", ["moonshot", "tags", "license", "language", "base_model", "model-index", "other"])
def test_a_card_of_nested_aliases_exhausts_no_memory(intact, folder, tmp_path, field, two_gib_more):
    (folder / "README.md").write_text(f"---\n{BOMB}{field}: *a11\n---\n# Name\n")
    assert find_base(str(folder)).text.startswith("# Name")
    convert(folder, tmp_path / "out", "dense")
    assert (tmp_path / "out" / "README.md").stat().st_size < 100_000
    verify(folder)
    model = load_pruned(folder)
    model.name_or_path = str(folder)
    pruner = MoonshotPruner(model, MoonshotConfig(solver="magnitude", pattern="1:4"))
    pruner.prune(progress=False)
    pruner.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again" / "README.md").stat().st_size < 100_000


@pytest.mark.slow
@pytest.mark.parametrize("name", ["X\n\n# A heading\n\n<script>", "`x` [y](http://z)", "---\nlicense: evil\n---"])
def test_names_in_config_json_add_nothing_to_a_card(folder, tmp_path, name):
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# Name\n")
    change_config(folder, _name_or_path=name, architectures=[name])
    try:
        convert(folder, tmp_path / "out", "dense")
    except MoonshotError:
        return
    text = (tmp_path / "out" / "README.md").read_text() if (tmp_path / "out" / "README.md").exists() else ""
    assert "<script>" not in text and "evil" not in text and "http://z" not in text
