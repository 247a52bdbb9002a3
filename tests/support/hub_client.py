"""A user's work with the Hub; test_hub.py runs it as a program, since the address is read on import.

Usage: python hub_client.py FOLDER; prints the results as JSON.
"""

import contextlib
import io
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import torch
import transformers as hf
from hub_server import TOKEN
from huggingface_hub import ModelCard
from models import make, token_batches

from optimum_moonshot import MoonshotConfig, MoonshotError, MoonshotPruner, load_pruned
from optimum_moonshot.__main__ import main as moonshot

BASE_CARD = """---
license: llama3.2
license_link: LICENSE.txt
language: [en, de]
tags: [facebook, llama]
pipeline_tag: text-generation
---
# The dense one

It has a {{ curly }} template in its text.
"""


def error(call):
    try:
        return f"no error: {call()}"
    except MoonshotError as refusal:
        return str(refusal)


def files(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def same(model, other):
    states = model.state_dict(), other.state_dict()
    return states[0].keys() == states[1].keys() and all(torch.equal(t, states[1][n]) for n, t in states[0].items())


def without_the_package(repo):
    """Exit status and last output of a process that loads a model without importing this package."""
    code = f"from transformers import AutoModelForCausalLM; AutoModelForCausalLM.from_pretrained({repo!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    return done.returncode, done.stderr[-1000:]


def command(*argv):
    """Exit status, standard output and standard error of a command."""
    out, err, status = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            moonshot([str(part) for part in argv])
        except SystemExit as ended:
            status = ended.code
    return status, out.getvalue(), err.getvalue()


def commands(folder, pruner):
    """`moonshot verify` and `moonshot convert` of Hub names, in a new folder."""
    folder.mkdir()
    os.chdir(folder)
    done = {
        "verified": command("verify", "me/shards", "--json"),
        "verified at": command("verify", "me/shards", "--revision", "main"),
        "no repository": command("verify", "me/nothing"),
        "not pruned": command("verify", "org/base"),
        "converted": command("convert", "me/shards", "--format", "dense"),
        "named": command("convert", "me/shards", "--format", "dense", "--output", "named"),
        "again": command("convert", "me/shards", "--format", "dense"),
        "is packed": command("convert", "me/shards", "--format", "packed"),
        "lost": command("convert", "me/nothing", "--format", "dense"),
    }
    done["folders"] = sorted(path.name for path in folder.iterdir())
    done["weights"] = [same(pruner.model, load_pruned(folder / name)) for name in ("shards-dense", "named")]
    return done


def publish_base(folder):
    """Upload a dense model with a card, as a user would."""
    from huggingface_hub import HfApi

    make("llama").to(torch.bfloat16).save_pretrained(folder)
    (folder / "README.md").write_text(BASE_CARD)
    for name in ("LICENSE", "modules.json", "1_Pooling/config.json", "onnx/model.onnx", "tf_model.h5"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(f"content of {name}")
    HfApi(token=TOKEN).create_repo("org/base")
    HfApi(token=TOKEN).upload_folder(repo_id="org/base", folder_path=folder)


def main(folder):
    publish_base(folder / "base")
    config = MoonshotConfig(pattern="2:4", num_samples=6, sequence_length=12)
    pruner = MoonshotPruner.from_pretrained("org/base", config, dtype="auto")
    report = pruner.prune(token_batches(), progress=False)
    report.record_evaluation("wikitext2", 9.5, 12.25)
    report.record_evaluation("arc_easy", 0.7, 0.65, "accuracy")
    pruner.save_pretrained(folder / "saved", format="packed")
    before = files(folder / "saved")

    def push(repo, **options):
        return pruner.push_to_hub(repo, **{"token": TOKEN, "format": "packed", **options})

    done = {
        "refused": error(lambda: push("me/refused", token="hf_wrong")),
        "url": push("me/small", private=True),
        "exists": error(lambda: push("me/small")),
        "public": error(lambda: push("me/small", private=False, exist_ok=True)),
        "cut": error(lambda: push("me/cut")),
        "cut again": error(lambda: push("me/cut")),
        "bad name": error(lambda: push("a//b")),
        "no name": error(lambda: push(None)),
        "bad format": error(lambda: push("me/none", format="zip")),
    }
    done["local files intact"] = files(folder / "saved") == before
    loaded = hf.AutoModelForCausalLM.from_pretrained("me/small", dtype="auto")
    done["same weights"] = same(pruner.model, loaded) and same(pruner.model, load_pruned("me/small"))
    push("me/shards", max_shard_size="10KB")
    shards = load_pruned("me/shards"), hf.AutoModelForCausalLM.from_pretrained("me/shards", dtype="auto")
    done["commands"] = commands(folder / "commands", pruner)
    done["same shards"] = all(same(pruner.model, loaded) for loaded in shards)
    done["without the package"] = {repo: without_the_package(repo) for repo in ("me/small", "me/shards")}
    done["card"] = ModelCard.load("me/small").data.to_dict()
    done["results"] = [vars(result) for result in ModelCard.load("me/small").data.eval_results]
    done["text"] = ModelCard.load("me/small").text
    weights = before["moonshot.safetensors"]
    done["tensor bytes"] = len(weights) - 8 - int.from_bytes(weights[:8], "little")
    # Push dense shards to the same repository: the packed file must be deleted.
    push("me/small", format="dense", exist_ok=True, max_shard_size="10KB", commit_message="dense")
    done["same weights again"] = same(pruner.model, hf.AutoModelForCausalLM.from_pretrained("me/small", dtype="auto"))
    # A model packed in memory, pushed by the pruner and by the model itself.
    pruner.to_runtime("packed")
    push("me/held", format=None)
    pruner.model.push_to_hub("own", token=TOKEN)
    pruner.to_runtime("dense")
    held = [hf.AutoModelForCausalLM.from_pretrained(repo, dtype="auto") for repo in ("me/held", "me/own")]
    done["same held"] = all(same(pruner.model, loaded) for loaded in held)
    examples = Path(__file__).parents[2] / "examples"
    demo, config = examples / "demo_model", MoonshotConfig(pattern="2:4", num_samples=4, sequence_length=256)
    texts = {"calibration": str(demo / "calibration.txt"), "test": str(demo / "heldout.txt"), "config": config}
    example = runpy.run_path(str(examples / "prune_and_push.py"))
    done["example"] = example["main"]("me/demo", demo, **texts, token=TOKEN)
    print(json.dumps(done, default=str))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
