"""Changes of a checkpoint's files after the model was loaded, each in a process of its own: a wrong one is killed.

`python tests/support/changed_files.py FOLDER [disk]` prints, for every file and change, the exit status, whether the
model was refused, its logits and the loss of pruning it.
"""

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from models import make, token_batches
from offloaded_models import settings

from optimum_moonshot import MoonshotPruner
from optimum_moonshot.errors import MoonshotError

IDS = torch.arange(10)[None]


def replace(path):
    shutil.copy(path, path.with_suffix(".new"))
    os.replace(path.with_suffix(".new"), path)


def overwrite(path):
    """Zero the weights in place."""
    size = path.stat().st_size
    with path.open("r+b") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
        file.seek(start)
        file.write(b"\0" * (size - start))


def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


CHANGES = {"none": lambda _: None, "replace": replace, "overwrite": overwrite, "truncate": truncate}
CHANGES["unlink"] = Path.unlink


def logits(pruner):
    return pruner.model(IDS).logits.double().sum().item()


def loss(pruner):
    return sum(layer.loss for layer in pruner.prune(token_batches(), progress=False).layers)


def child(folder, file, change, offload, write):
    """Load the model, change a file, call the model and prune it; write the results, "refused" for the errors."""
    pruner = MoonshotPruner.from_pretrained(folder, settings(), offload=offload)
    CHANGES[change](folder / file)
    results = []
    for work in (logits, loss):
        try:
            results.append(work(pruner))
        except MoonshotError as error:
            assert "since the model was loaded" in str(error) and "load the model again" in str(error), error
            results.append("refused")
    os.write(write, json.dumps(results).encode())


def outcome(folder, file, change, offload):
    with tempfile.TemporaryDirectory() as place:
        copy = Path(shutil.copytree(folder, Path(place) / "model"))
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                child(copy, file, change, offload, write)
            finally:
                os._exit(0)
        os.close(write)
        with open(read) as pipe:
            content = pipe.read()
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return {"file": file, "change": change, "exit": status, "results": json.loads(content or "null")}


if __name__ == "__main__":
    torch.set_num_threads(1)
    make("llama")  # so that no process imports the model anew
    source, place = Path(sys.argv[1]), (sys.argv[2:] or [None])[0]
    files = sorted(path.name for path in source.glob("*.safetensors"))
    print(json.dumps([outcome(source, file, change, place) for file in files for change in CHANGES]))
