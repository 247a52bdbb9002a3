"""What a user does with the Hub, run by test_hub.py in a process of its own, since the address is read on import.

Usage: python hub_client.py FOLDER; prints what happened as JSON.
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
    except MoonshotError as found:
        return str(found)


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def same(model, other):
    states = model.state_dict(), other.state_dict()
    return states[0].keys() == states[1].keys() and all(torch.equal(t, states[1][n]) for n, t in states[0].items())


def without_the_package(repo):
    """What a process sees that knows nothing of this package: its status, and what it says last."""
    code = f"from transformers import AutoModelForCausalLM; AutoModelForCausalLM.from_pretrained({repo!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    return done.returncode, done.stderr[-1000:]


def command(*argv):
    """The status that a command ended with, what it printed, and what it complained of."""
    printed, complained, status = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(complained):
        try:
            moonshot([str(part) for part in argv])
        except SystemExit as ended:
            status = ended.code
    return status, printed.getvalue(), complained.getvalue()


def commands(folder, pruner):
    """`moonshot verify` and `moonshot convert` of names on the Hub, in a folder of their own."""
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
    """A dense model with a card, on the Hub as a user would have put it there."""
    from huggingface_hub import HfApi

    make("llama").to(torch.bfloat16).save_pretrained(folder)
    (folder / "README.md").write_text(BASE_CARD)
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
    # The same repository again, dense and in shards: the packed file must go.
    push("me/small", format="dense", exist_ok=True, max_shard_size="10KB", commit_message="dense")
    done["same weights again"] = same(pruner.model, hf.AutoModelForCausalLM.from_pretrained("me/small", dtype="auto"))
    # Packed in memory: by the pruner, and by the model alone, as transformers does it.
    pruner.to_runtime("packed")
    push("me/held", format=None)
    pruner.model.push_to_hub("own", token=TOKEN)
    pruner.to_runtime("dense")
    held = [hf.AutoModelForCausalLM.from_pretrained(repo, dtype="auto") for repo in ("me/held", "me/own")]
    done["same held"] = all(same(pruner.model, loaded) for loaded in held)
    example = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "push_to_hub.py"))
    done["example"] = example["main"]("me/demo", num_samples=4, token=TOKEN)
    print(json.dumps(done, default=str))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
