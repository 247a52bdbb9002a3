"""`from_pretrained` after `import optimum_moonshot`: registration, and pruning while loading."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers as hf
from checkpoint_edits import change_json
from models import make, token_batches
from transformers.quantizers import auto

from optimum_moonshot import MoonshotConfig, MoonshotError, MoonshotPruner, PruneReport, convert, load_pruned
from optimum_moonshot.integrations.registration import register_quantizer, register_soon
from optimum_moonshot.integrations.transformers import MoonshotQuantizer

ROOT = Path(__file__).parents[2]
SETTINGS = dict(pattern="2:4", lam=0.9, num_samples=6, sequence_length=12, batch_size=2)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    make("llama").save_pretrained(folder)
    return folder


def load(folder, calibration=None, settings=None, **options):
    config = MoonshotConfig(**{**SETTINGS, **(settings or {})}, calibration=calibration)
    return hf.AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    "imports",
    [
        "import optimum_moonshot, transformers",
        "import transformers, optimum_moonshot",
        "import transformers.quantizers.auto, optimum_moonshot",
        "import optimum_moonshot, importlib; import transformers.quantizers.auto; importlib.reload(optimum_moonshot)",
        "from optimum_moonshot import MoonshotPruner",
    ],
)
def test_registered_in_any_order_of_imports(imports):
    code = (
        f"{imports}\nfrom transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING as quantizers\n"
        "import sys\nassert quantizers['moonshot'].__name__ == 'MoonshotQuantizer'\n"
        "waiting = [each for each in sys.meta_path if type(each).__module__.endswith('.registration')]\n"
        "assert not [finder for finder in waiting if finder.name in sys.modules]\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_registering_again_is_harmless():
    register_quantizer()
    register_soon()
    assert auto.AUTO_QUANTIZER_MAPPING["moonshot"] is MoonshotQuantizer


def test_pruning_while_loading_is_pruning_after_loading(base, tmp_path):
    model = hf.AutoModelForCausalLM.from_pretrained(base)
    pruner = MoonshotPruner(model, MoonshotConfig(**SETTINGS))
    pruner.prune(token_batches(), progress=False)
    for options in ({}, {"device_map": "cpu"}, {"device_map": "auto", "dtype": "auto"}):
        loaded = load(base, token_batches(), **options)
        for name, tensor in model.state_dict().items():
            assert torch.equal(loaded.state_dict()[name], tensor), name
        assert loaded.moonshot_report.sparsity == 0.5 == loaded.config.moonshot["sparsity"]
        assert not loaded.is_quantized and not hasattr(loaded, "hf_quantizer")
        assert not hasattr(loaded.config, "quantization_config") and not loaded.training
    loaded.save_pretrained(tmp_path)
    json.dumps(loaded.config.to_dict())
    convert(tmp_path, tmp_path / "packed", "packed")
    again = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in model.state_dict().items())


def test_a_model_pruned_while_loading_is_saved_with_its_report_and_card(base, tmp_path):
    model = load(base, token_batches())
    pruner = MoonshotPruner(model, MoonshotConfig(**SETTINGS))
    pruner.save_pretrained(tmp_path, format="packed")
    assert PruneReport.load(tmp_path) == model.moonshot_report
    assert "import optimum_moonshot" in (tmp_path / "README.md").read_text()
    again = load_pruned(tmp_path).state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in model.state_dict().items())


def test_pruning_while_loading_works_in_half_precision_and_without_gradients(base):
    with torch.no_grad():
        model = load(base, token_batches(), dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16 and model.moonshot_report.sparsity == 0.5
    assert all(layer.fisher is not None for layer in model.moonshot_report.layers)


def test_calibration_is_used_once_and_never_copied(base):
    model = load(base, iter(token_batches()))  # an iterator cannot be copied, or read twice
    assert model.config.moonshot["calibration"]["num_samples"] == 6
    assert "calibration" not in model.config.moonshot["config"]
    data = object()
    config = MoonshotConfig(**SETTINGS, calibration=data)
    assert config == MoonshotConfig(**SETTINGS) and hash(config) == hash(MoonshotConfig(**SETTINGS))
    assert "calibration" not in config.to_dict() and "object" not in repr(config)


def test_text_is_read_with_the_tokenizer_beside_the_model(base, tmp_path, tokenizer):
    make("llama").save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    model = load(tmp_path, ["some words that are long enough " * 3] * 6)
    assert model.moonshot_report.calibration["source"] == "list of 6 strings"
    with pytest.raises(MoonshotError, match="tokenizer=None"):
        load(base, ["some words"] * 6)


def test_magnitude_needs_no_calibration(base):
    assert load(base, settings=dict(solver="magnitude", lam=None)).moonshot_report.sparsity == 0.5
    with pytest.raises(MoonshotError, match="calibration=None: solver='sparsegpt' needs data"):
        load(base)


def test_a_checkpoint_is_not_pruned_twice(base, tmp_path):
    load(base, token_batches()).save_pretrained(tmp_path / "dense")
    with pytest.raises(MoonshotError, match="dense is pruned already"):
        load(tmp_path / "dense", token_batches())
    convert(tmp_path / "dense", tmp_path / "packed", "packed")
    with pytest.raises(ValueError, match="MoonshotPrunedCheckpoint but you are passing a MoonshotConfig"):
        load(tmp_path / "packed", token_batches())


def test_inference_mode_and_disk_offload_are_refused_while_loading(base, tmp_path):
    with torch.inference_mode(), pytest.raises(MoonshotError, match="inference_mode"):
        load(base, token_batches())
    with pytest.raises(MoonshotError, match="offloaded to disk"):
        load(base, token_batches(), device_map={"": "disk"}, offload_folder=tmp_path)


def test_a_newer_packed_format_is_refused(base, tmp_path):
    load(base, token_batches()).save_pretrained(tmp_path / "dense")
    convert(tmp_path / "dense", tmp_path / "packed", "packed")
    newer = {"version": 3, "codec": "of a later release"}
    change_json(tmp_path / "packed" / "config.json", lambda config: config["quantization_config"].update(newer))
    with pytest.raises(MoonshotError, match="'version': 3.*this release reads"):
        hf.AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
