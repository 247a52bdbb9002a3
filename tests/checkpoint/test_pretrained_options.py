"""Options of `from_pretrained`, and names of GGUF files, reach configuration, tokenizer and processor."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers as hf
from command_line import DEMO, failure
from foreign_checkpoints import gguf, llama, read
from hub_server import serve
from models import make

from optimum_moonshot import MoonshotConfig, MoonshotError, MoonshotPruner
from optimum_moonshot.__main__ import main

SETTINGS = MoonshotConfig(solver="magnitude", pattern="2:4")
IDS = torch.arange(5, 17)[None]


def in_cache(folder, name, source):
    """A repository in a cache of the Hub, from which a machine without a network loads it."""
    place = folder / f"models--{name.replace('/', '--')}"
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text("a" * 40)
    shutil.copytree(source, place / "snapshots" / ("a" * 40))


def test_places_of_files_reach_every_part(tmp_path):
    shutil.copytree(DEMO, tmp_path / "repository" / "inner")
    in_cache(tmp_path / "cache", "someone/tiny", DEMO)
    cached = {"cache_dir": tmp_path / "cache", "local_files_only": True, "revision": "main", "token": False}
    for name, options in (("someone/tiny", cached), (tmp_path / "repository", {"subfolder": "inner"})):
        pruner = MoonshotPruner.from_pretrained(name, SETTINGS, **options)
        assert pruner.tokenizer is not None
        assert MoonshotPruner.plan_for(name, SETTINGS, **options)
    with pytest.raises(OSError):
        MoonshotPruner.from_pretrained("someone/tiny", SETTINGS, cache_dir=tmp_path / "none", local_files_only=True)
    (tmp_path / "repository" / "inner" / "tokenizer.json").write_text("{}")
    with pytest.raises(MoonshotError, match="its tokenizer .*cannot be loaded"):
        MoonshotPruner.from_pretrained(tmp_path / "repository", SETTINGS, subfolder="inner")


def test_the_processor_is_found_too(tmp_path):
    make("vit").save_pretrained(tmp_path / "inner")
    hf.ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(tmp_path / "inner")
    assert MoonshotPruner.from_pretrained(tmp_path, SETTINGS, subfolder="inner").processor is not None


def test_the_tokenizer_of_a_model_that_is_pruned_while_it_is_loaded(tmp_path):
    shutil.copytree(DEMO, tmp_path / "inner")
    config = MoonshotConfig(
        solver="wanda",
        pattern="2:4",
        lam=1,
        num_samples=2,
        sequence_length=16,
        calibration=str(DEMO / "calibration.txt"),
    )
    model = hf.AutoModelForCausalLM.from_pretrained(tmp_path, subfolder="inner", quantization_config=config)
    assert model.moonshot_report.sparsity == pytest.approx(0.5, abs=0.01)


def test_a_configuration_of_the_user(tmp_path):
    shutil.copytree(DEMO, tmp_path / "model")
    config = hf.AutoConfig.from_pretrained(DEMO)
    config.rms_norm_eps = 0.25
    (tmp_path / "model" / "config.json").unlink()
    for given in (config, DEMO):
        pruner = MoonshotPruner.from_pretrained(tmp_path / "model", SETTINGS, config=given)
        assert pruner.tokenizer is not None
        assert (pruner.model.config.rms_norm_eps == 0.25) == (given is config)
    assert MoonshotPruner.from_pretrained(DEMO, config=SETTINGS).config == SETTINGS
    with pytest.raises(MoonshotError, match="config=5: give a configuration of transformers, or its folder"):
        MoonshotPruner.from_pretrained(DEMO, SETTINGS, config=5)
    without = MoonshotPruner.from_pretrained(DEMO)
    for call in (without.prune, without.plan, without.rotate):
        with pytest.raises(MoonshotError, match="no configuration says what to remove: give one; such as MoonshotCon"):
            call(["a text"])


def test_damaged_indices(tmp_path, capsys):
    folder, index = tmp_path / "model", tmp_path / "model" / "model.safetensors.index.json"
    make("llama").save_pretrained(folder, max_shard_size="5KB")
    gone = sorted(folder.glob("model-*"))[1]
    gone.unlink()
    words = f"{folder}: {gone.name} with model."
    for offload in (None, "disk"):
        with pytest.raises(MoonshotError, match=re.escape(words)):
            MoonshotPruner.from_pretrained(folder, SETTINGS, offload)
    argv = ("prune", folder, "--pattern", "2:4", "--solver", "magnitude", "--output", tmp_path / "o")
    status, lines = failure(capsys, *argv)
    assert status == 1 and words in lines[-1]
    for content in ("{}", '{"weight_map": {}}', '{"weight_map": {"a": 5}}'):
        index.write_text(content)
        with pytest.raises(MoonshotError, match="is damaged: it has no weight_map"):
            MoonshotPruner.from_pretrained(folder, SETTINGS)
    index.write_text('{"weight_map": {"a": "../a.safetensors"}}')
    with pytest.raises(MoonshotError, match="weights must be in the folder of their index"):
        MoonshotPruner.from_pretrained(folder, SETTINGS)


def test_a_home_folder_after_an_equals_sign(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    main(["prune", str(DEMO), "--solver", "magnitude", "--pattern", "2:4", "--output=~/out"])
    assert (tmp_path / "out" / "config.json").is_file() and not (tmp_path / "~").exists()


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """A GGUF file, alone in its folder."""
    pytest.importorskip("gguf")
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    gguf(path)
    return path


def assert_saved(pruner, folder):
    pruner.prune(progress=False)
    pruner.save_pretrained(folder)
    again = hf.AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        assert torch.equal(again(IDS).logits, pruner.model(IDS).logits)
    values, tensors = read(folder)
    assert "quantization_config" not in values and (folder / "tokenizer.json").is_file()
    return {tensor.dtype for tensor in tensors.values()}


def test_gguf_files(tmp_path, file, monkeypatch):
    dense = hf.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
    options = {"named": (file, {}), "folder": (file.parent, {"gguf_file": file.name, "dtype": "auto"})}
    options |= {"inner": (file.parent.parent, {"subfolder": file.parent.name, "gguf_file": file.name})}
    expected = dense.state_dict()
    for place, (name, given) in options.items():
        pruner = MoonshotPruner.from_pretrained(name, SETTINGS, **given)
        assert all(torch.equal(t, expected[n].to(t.dtype)) for n, t in pruner.model.state_dict().items())
        assert assert_saved(pruner, tmp_path / place) == {torch.bfloat16}
        assert MoonshotPruner.plan_for(name, SETTINGS, **given)
    monkeypatch.chdir(file.parent)
    assert MoonshotPruner.from_pretrained("tiny.gguf", SETTINGS, dtype=torch.float32).model.dtype == torch.float32
    taken = MoonshotPruner(dense, SETTINGS, hf.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name))
    assert assert_saved(taken, tmp_path / "taken") == {torch.float32}
    with pytest.raises(MoonshotError, match="offload='disk': not for a GGUF file; save its model"):
        MoonshotPruner.from_pretrained(file, SETTINGS, offload="disk")
    with pytest.raises(OSError, match="missing.gguf"):
        MoonshotPruner.from_pretrained(file.with_name("missing.gguf"), SETTINGS)


def test_gguf_files_on_the_command_line(tmp_path, file, capsys):
    text = tmp_path / "text.txt"
    text.write_text("a b c d e f " * 50)
    method = ["--solver", "magnitude", "--pattern", "2:4", "--output", str(tmp_path / "out")]
    main(["prune", str(file), *method, "--dry-run"])
    main(["prune", str(file), *method, "--eval", str(text)])
    changes = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("perplexity"))
    main(["eval", str(file), "--dataset", str(text)])
    before = changes.split()[1]
    assert f"perplexity  {before}" in capsys.readouterr().out


CLIENT = """
import sys
from optimum_moonshot import MoonshotConfig, MoonshotPruner
config = MoonshotConfig(solver="magnitude", pattern="2:4")
for name, options in (
    ("someone/tiny/tiny.gguf", {}), ("hf://someone/tiny@main/tiny.gguf", {}),
    ("someone/tiny", {"gguf_file": "tiny.gguf", "cache_dir": sys.argv[1]}), ("hf://someone/tiny/sub/tiny.gguf", {}),
):
    pruner = MoonshotPruner.from_pretrained(name, config, **options)
    assert pruner.tokenizer is not None and pruner.model.name_or_path == "someone/tiny", pruner.model.name_or_path
print("done")
"""


@pytest.mark.slow
def test_gguf_files_on_the_hub(tmp_path, file):
    with serve() as (address, hub):
        content = file.read_bytes()
        hub.files["someone/tiny"] = {"tiny.gguf": content, "sub/tiny.gguf": content}
        hub.commits["someone/tiny"], hub.private["someone/tiny"] = [], False
        unset = ("HF_TOKEN", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
        environment = {name: value for name, value in os.environ.items() if name not in unset}
        root = str(Path(__file__).parents[2])
        environment |= {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
        environment |= {"PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
        command = [sys.executable, "-c", CLIENT, str(tmp_path / "cache")]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.stdout.splitlines()[-1:] == ["done"], done.stderr[-2000:]
    assert (tmp_path / "cache" / "models--someone--tiny").is_dir()


def test_a_plain_folder_is_loaded_as_before(tmp_path):
    llama(tmp_path)
    assert MoonshotPruner.from_pretrained(tmp_path, SETTINGS).model.dtype == torch.bfloat16
