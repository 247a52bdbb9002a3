"""A real client against a real HTTP server: create, push, load, read the card; failures leave nothing behind."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hub_server import serve

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parents[1] / "support"


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    """The client's observations and the final state of the server."""
    folder = tmp_path_factory.mktemp("hub")
    with serve() as (address, hub):
        settings = {
            "HF_ENDPOINT": address,
            "HF_HOME": str(folder / "home"),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parents[1]), os.environ.get("PYTHONPATH", "")]),
        }
        unset = ("HF_TOKEN", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
        environment = {name: value for name, value in os.environ.items() if name not in unset}
        command = [sys.executable, str(TESTS / "hub_client.py"), str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, env={**environment, **settings}, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1]), hub


def test_everything_is_published_in_one_commit(session):
    done, hub = session
    first, second = hub.commits["me/small"]
    weights = {"moonshot.safetensors", "moonshot.safetensors.index.json"}
    assert {"config.json", *weights, "README.md", "moonshot_report.json", "moonshot_report.png"} <= set(first)
    assert hub.private["me/small"] and "/me/small/commit/" in done["url"]
    assert done["same weights"] and done["same weights again"]
    # The second push replaced the packed file by dense shards, in the same commit.
    assert weights <= set(second) and not weights & hub.files["me/small"].keys()
    assert sum(name.endswith(".safetensors") for name in hub.files["me/small"]) > 1


def test_files_beside_the_weights_are_published_too(session):
    _, hub = session
    published = hub.files["me/small"]
    for name in ("LICENSE", "modules.json", "1_Pooling/config.json"):
        assert published[name] == f"content of {name}".encode()
    assert not {"onnx/model.onnx", "tf_model.h5"} & published.keys()


def test_packed_shards_are_loaded_from_the_hub_and_only_with_this_package(session):
    done, hub = session
    assert sum(name.startswith("moonshot-") for name in hub.files["me/shards"]) > 1
    assert done["same shards"]
    for repo in ("me/small", "me/shards"):
        status, printed = done["without the package"][repo]
        assert status == 1 and "import optimum_moonshot" in printed.splitlines()[-1]


def test_a_model_that_is_packed_in_memory_is_published_packed(session):
    done, hub = session
    assert done["same held"]
    by_pruner, by_model = hub.files["me/held"], hub.files["me/own"]
    assert by_pruner["moonshot.safetensors"] == by_model["moonshot.safetensors"]
    assert "model.safetensors" not in by_model
    assert "README.md" in by_pruner and "moonshot.safetensors" in hub.commits["me/held"][0]


def test_commands_take_names_on_the_hub(session):
    done = session[0]["commands"]
    status, printed, _ = done["verified"]
    result = json.loads(printed)
    assert status == 0 and result["matches"] and result["checksums"] and result["path"] == "me/shards"
    assert result["sparsity"] == 0.5 and all(layer["follows"] for layer in result["layers"])
    status, printed, _ = done["verified at"]
    assert status == 0 and "packed; every checksum is right" in printed
    for name in ("converted", "named"):
        assert done[name][0] == 0 and "weights" in done[name][1], done[name]
    assert done["folders"] == ["named", "shards-dense"] and done["weights"] == [True, True]


@pytest.mark.parametrize(
    ("name", "status", "words"),
    [
        ("no repository", 1, "me/nothing"),
        ("lost", 1, "me/nothing"),
        ("again", 2, "--output shards-dense: it is not empty; --overwrite writes there anyway"),
        ("is packed", 1, "is a packed checkpoint already"),
    ],
)
def test_commands_report_errors_of_the_hub(session, name, status, words):
    actual, _, errors = session[0]["commands"][name]
    assert actual == status and "Traceback" not in errors
    assert errors.splitlines()[-1].startswith("error: ") and words in errors.splitlines()[-1]


def test_a_dense_model_on_the_hub_declares_nothing(session):
    status, printed, _ = session[0]["commands"]["not pruned"]
    assert status == 0 and "no metadata declares that it is pruned" in printed


def test_failures_give_a_hint_and_change_nothing(session):
    done, hub = session
    assert "refused the token for me/refused (401" in done["refused"] and "hf auth login" in done["refused"]
    assert "me/small exists and contains" in done["exists"] and "exist_ok=True" in done["exists"]
    assert "private=False: me/small exists and is private" in done["public"]
    for attempt in ("cut", "cut again"):  # the repository that the first one made is empty: no obstacle
        assert "the connection to" in done[attempt] and "nothing was published in me/cut; try again" in done[attempt]
    assert hub.commits["me/cut"] == [] and hub.files["me/cut"].keys() == {".gitattributes"}
    assert "me/refused" not in hub.files
    assert "is not the name of a repository" in done["bad name"] and "repo_id=None" in done["no name"]
    assert "format='zip'" in done["bad format"] and "me/none" not in hub.files
    assert done["local files intact"]


def test_the_card_describes_the_run(session):
    done, hub = session
    card = done["card"]
    assert card["base_model"] == "org/base" and card["library_name"] == "transformers"
    assert card["license"] == "llama3.2" and card["license_link"] == "LICENSE.txt" and card["language"] == ["en", "de"]
    assert {"moonshot", "pruning", "2:4", "sparsegpt", "facebook", "llama"} <= set(card["tags"])
    facts = card["moonshot"]
    assert facts["lambda"] == 0.9 and facts["solver"] == "sparsegpt" and facts["pattern"] == "2:4"
    assert facts["target_sparsity"] == facts["sparsity"] == 0.5
    assert len(facts["sparsity_by_kind"]) == 7 and set(facts["sparsity_by_kind"].values()) == {0.5}
    data = facts["calibration"]
    assert (data["num_samples"], data["sequence_length"], data["seed"]) == (6, 12, 0) and len(data["digest"]) == 64
    assert facts["seconds"]["total"] > 0 and facts["peak_memory_bytes"] > 0 and "torch" in facts["versions"]
    assert facts["weight_bytes"]["packed"] == done["tensor bytes"] < facts["weight_bytes"]["dense"]
    results = {(r["dataset_name"], r["metric_type"], r["metric_name"]): r["metric_value"] for r in done["results"]}
    assert results == {
        ("wikitext2", "perplexity", "perplexity, before pruning"): 9.5,
        ("wikitext2", "perplexity", "perplexity, after pruning"): 12.25,
        ("arc_easy", "accuracy", "accuracy, before pruning"): 0.7,
        ("arc_easy", "accuracy", "accuracy, after pruning"): 0.65,
    }


def test_the_text_explains_loading_and_keeps_the_dense_models_card(session):
    done, hub = session
    text = done["text"]
    assert "import optimum_moonshot" in text and 'from_pretrained("me/small", dtype="auto")' in text
    assert "moonshot_report.png" in text and "| perplexity on wikitext2 | 9.50 | 12.25 |" in text
    assert "| accuracy on arc_easy | 0.7 | 0.65 |" in text
    ours, theirs = text.split("# Card of the dense model")
    assert theirs.strip() == "# The dense one\n\nIt has a {{ curly }} template in its text."
    _, block, _ = hub.files["me/small"]["README.md"].decode().split("---\n", 2)
    assert yaml.safe_load(block)["moonshot"]["format"] == "dense"
    assert "{%" not in ours and "{{" not in ours


def test_the_example_publishes_its_measurements(session):
    done, hub = session
    assert "/me/demo/commit/" in done["example"] and hub.private["me/demo"]
    _, block, text = hub.files["me/demo"]["README.md"].decode().split("---\n", 2)
    card = yaml.safe_load(block)
    assert "base_model" not in card and card["license"] == "apache-2.0"  # the demo model is a folder, with a card
    before, after = (metric["value"] for metric in card["model-index"][0]["results"][0]["metrics"])
    assert 30 < before < after < 80 and "A small Llama to try pruning on" in text
    assert card["moonshot"]["calibration"]["source"] == "calibration.txt"
    config = json.loads(hub.files["me/demo"]["config.json"])
    assert config["quantization_config"] == {"quant_method": "moonshot", "format": "packed", "version": 1}
