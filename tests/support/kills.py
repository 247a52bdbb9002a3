"""Commands that a signal ends at any moment: a rerun must give the files of an undisturbed command.

A process that has imported everything forks a child for each trial, so that kills hit the work, not the imports.
Children are killed at random moments, by SIGKILL or SIGTERM, or just before one of the file operations below their
folder, where their temporary files are, too: one trial for each.
Reruns are killed too, up to four times in a row. After each kill, any model that loads must be complete; after the last
rerun, every file must equal the undisturbed one bit for bit, except for the notes about the kills. Clocks are constant
in the children, because the seconds and peak memory in reports and cards differ from run to run.

As a program it runs more trials than the test:  python tests/support/kills.py --kills 100 --operations
"""

import argparse
import collections
import contextlib
import faulthandler
import functools
import json
import logging
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
import types
from pathlib import Path

import filelock._api
import torch
import transformers as hf
from tqdm import tqdm

from optimum_moonshot import MoonshotConfig, MoonshotError, MoonshotPruner
from optimum_moonshot.__main__ import main as moonshot

DEMO = Path(__file__).parents[2] / "examples" / "demo_model"
DATA = ["--num-samples", "4", "--sequence-length", "32", "--batch-size", "2", "--device", "cpu"]
PRUNE = ["prune", "MODEL", "--pattern", "2:4", "--calibration", "TEXT", *DATA]
COMMANDS = {
    "prune": PRUNE,
    "prune, packed": [*PRUNE, "--solver", "wanda", "--format", "packed", "--eval", "TEXT"],
    "recover": [*PRUNE, "--recover", "blockwise", "--recover-steps", "6"],
    "distill": [*PRUNE, "--recover", "distill", "--recover-steps", "6"],
    "sweep": ["sweep", *PRUNE[1:2], "--patterns", "2:4", *PRUNE[4:], "--lambdas", "0.5", "1", "--seeds", "0", "1",
              "--save"],
    "rotate": ["rotate", "MODEL", "--pattern", "2:4", "--calibration", "TEXT", *DATA, "--rotation-steps", "24"],
    "prune, rotated": [*PRUNE, "--rotation", "learned", "--rotation-steps", "24"],
    "prune, quantized": [*PRUNE, "--bits", "4", "--quant-group", "64", "--format", "packed"],
    "distill, quantized": [*PRUNE, "--bits", "4", "--recover", "distill", "--recover-steps", "6", "--format", "packed"],
    "shrink": ["shrink", "MODEL", "--parameters", "0.8", "--calibration", "TEXT", *DATA],
    "convert to packed": ["convert", "DENSE", "--format", "packed"],
    "convert to dense": ["convert", "PACKED", "--format", "dense"],
}  # fmt: skip
WIDTH = "reduce width"  # in Python, without a folder to resume from
SAVES = ("save, dense", "save, packed")  # over a model of the other format: the result is either one, or nothing
KINDS = (*COMMANDS, WIDTH, *SAVES)
SIGNALS = (signal.SIGKILL, signal.SIGTERM)
IN_A_ROW = 4
LONGEST = 120  # seconds; no command takes as long
# Notes about reused results, and about passes, which a rerun does not need if it has the results of all layers.
PASSES = "statistics recomputed on the pruned prefix|token weights of the Fisher term"
ABOUT_KILLS = re.compile(rf"reused from an interrupted run|were discarded and recomputed|{PASSES}")
REFUSED = re.compile("another command writes there|it is not empty")
MEETINGS = [
    ("prune", "prune"), ("prune", "recover"), ("prune", "distill"), ("sweep", "sweep"), ("prune", "convert to packed"),
    ("convert to dense", "prune, packed"), SAVES,
]  # fmt: skip
DONE = "it is not empty; --overwrite writes there anyway"  # after a kill at the very end
CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate", "fcntl.flock"}


class Stage:
    """A folder with a tiny model, text, and a pruned model in both formats; trials do not change it."""

    def __init__(self, root):
        self.root = root
        torch.manual_seed(0)
        config = hf.LlamaConfig(
            vocab_size=2048, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2,
            num_key_value_heads=2, max_position_embeddings=64, bos_token_id=0, eos_token_id=1, pad_token_id=2,
        )  # fmt: skip
        hf.LlamaForCausalLM(config).save_pretrained(root / "model")
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(DEMO / name, root / "model")
        (root / "text.txt").write_text((DEMO / "calibration.txt").read_text(encoding="utf-8")[:12_000])
        self.pruner = MoonshotPruner.from_pretrained(
            root / "model", MoonshotConfig(solver="magnitude", pattern="2:4", targets=(r"layers\.[02]\.",))
        )
        self.pruner.prune(progress=False)
        for format in ("dense", "packed"):
            self.pruner.save_pretrained(root / format, format=format, max_shard_size="200KB")

    def prepare(self, kind, folder):
        """Create the folder as it is before the command."""
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "temporary").mkdir(parents=True)
        if kind in SAVES:
            shutil.copytree(self.root / ("packed" if kind == SAVES[0] else "dense"), folder / "out")

    def work(self, kind, folder):
        """Run the command, which may be killed."""
        if kind in SAVES:
            format = kind.rpartition(" ")[2]
            self.pruner.save_pretrained(folder / "out", format=format, max_shard_size="100KB")
            return
        if kind == WIDTH:
            config = MoonshotConfig(pattern="2:4", num_samples=4, sequence_length=32, batch_size=2)
            pruner = MoonshotPruner.from_pretrained(self.root / "model", config)
            pruner.reduce_width(24, self.root / "text.txt")
            pruner.prune(self.root / "text.txt", progress=False)
            pruner.save_pretrained(folder / "out", format="packed")
            return
        places = {"MODEL": "model", "TEXT": "text.txt", "DENSE": "dense", "PACKED": "packed"}
        argv = [str(self.root / places[part]) if part in places else part for part in COMMANDS[kind]]
        moonshot([*argv, "--output", str(folder / "out")])


def freeze_clocks():
    """Make clocks and memory counters constant in every process, except for the time-outs of locks."""
    filelock._api.time = types.SimpleNamespace(**vars(time))
    time.perf_counter = lambda: 0.0
    resource.getrusage = lambda who: types.SimpleNamespace(ru_maxrss=0)


def share_nothing():
    """Prevent locks shared between forked children, or held by a thread of this process at the fork.

    Call it before the first progress bar: tqdm's default lock is shared by all processes, and a killed process never
    releases it. The threads in which transformers reads tensors may outlive the call.
    """
    tqdm.set_lock(threading.RLock())
    tqdm.monitor_interval = 0  # no monitor thread
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"


def watch(folder, deadly, counted):
    """Count the file operations below a folder; kill this process just before number `deadly`.

    `shutil.rmtree` names files relative to an open folder; relative paths therefore count, too.
    """

    def happens(event, arguments):
        if event == "open":
            path, _, flags = arguments
            if not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                return
        elif event in CHANGES:
            path = arguments[0]
        else:
            return
        absolute = isinstance(path, str | os.PathLike) and os.path.isabs(path)
        if absolute and not str(path).startswith(str(folder)):
            return
        counted.append(event)
        if len(counted) == deadly:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(happens)


class Child:
    """A forked process that calls `work`, and is killed just before this file operation below `folder`."""

    def __init__(self, work, folder, operation=None):
        self.folder = folder
        self._count, writing = os.pipe()
        self.id = os.fork()
        if not self.id:
            with contextlib.suppress(BaseException):
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
                os.dup2(os.open(self._errors(os.getpid()), os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
                faulthandler.dump_traceback_later(LONGEST - 5)
                os.environ.pop("HF_DEACTIVATE_ASYNC_LOAD", None)
                freeze_clocks()
                tempfile.tempdir = str(folder / "temporary")
                counted = []
                watch(folder, operation, counted)
                work()
                os.write(writing, str(len(counted)).encode())
            os._exit(0)
        os.close(writing)

    def _errors(self, child):
        return self.folder.with_name(f"errors-{child}.txt")

    def end(self, moment=None, deadly=signal.SIGKILL):
        """Wait for the process, and end it by a signal after `moment` seconds.

        Returns:
            "killed", the number of file operations, or the last line of its error.
        """
        started, hangs = time.monotonic(), False
        while (ended := os.waitpid(self.id, os.WNOHANG))[0] == 0:
            hangs = time.monotonic() - started > LONGEST
            if hangs or (moment is not None and time.monotonic() - started >= moment):
                os.kill(self.id, signal.SIGKILL if hangs else deadly)
            time.sleep(0.0005)
        count, errors = os.read(self._count, 100), self._errors(self.id)
        os.close(self._count)
        message = errors.read_text().strip() if errors.exists() else ""
        errors.unlink(missing_ok=True)
        if hangs:
            return f"no end after {LONGEST} s: {message}"
        if os.WIFSIGNALED(ended[1]):
            assert os.WTERMSIG(ended[1]) in SIGNALS, f"signal {os.WTERMSIG(ended[1])}"
            return "killed"
        return int(count) if count else message.rpartition("\n")[2]


def files(folder):
    """The bytes of every file, without the lines about kills."""
    contents = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        content = path.read_bytes()
        if path.suffix in (".json", ".md"):
            lines = content.decode().splitlines()
            # Without commas: one of these lines may be the last of several notes.
            lines = [line.rstrip(",") for line in lines if not ABOUT_KILLS.search(line)]
            content = "\n".join(lines).replace('"notes": [\n  ]', '"notes": []').encode()
        contents[path.relative_to(folder).as_posix()] = content
    return contents


def weights(folder):
    """The weights that transformers loads from a folder; None without a model."""
    if not (folder / "config.json").exists():
        return None
    return hf.AutoModelForCausalLM.from_pretrained(folder).state_dict()


def left(folder):
    """Describe the folder after a kill."""
    output = folder / "out"
    if any(output.rglob(".saving-*")):
        half = any(path.is_file() for path in output.glob("*")) and not (output / "config.json").exists()
        return "half moved" if half else "while saving"
    if (output / "config.json").exists() or (output / "model" / "config.json").exists():
        return "when all was there"
    return "with results" if any((folder / "out.partial").rglob("*.safetensors")) else "before the first result"


class Tries:
    """All trials of one command."""

    def __init__(self, stage, kind):
        self.stage, self.kind, self.folder = stage, kind, stage.root / "try"
        self.start_counting()
        self.fresh = True  # the folder is as prepared
        stage.prepare(kind, self.folder)
        self.before = weights(self.folder / "out")
        self.seconds = float("inf")
        self.operations = self.run()
        assert isinstance(self.operations, int), f"{kind}: {self.operations}"
        self.expected = files(self.folder)
        self.after = weights(self.model())

    def start_counting(self):
        self.left, self.wrong = collections.Counter(), []
        self.kills = self.identical = self.tries = 0

    def run(self, moment=None, operation=None, deadly=signal.SIGKILL):
        """One run; the shortest complete one sets the range of random moments."""
        started = time.monotonic()
        child = Child(functools.partial(self.stage.work, self.kind, self.folder), self.folder, operation)
        ended = child.end(moment, deadly)
        if self.fresh and ended != "killed":
            self.seconds = min(self.seconds, time.monotonic() - started)
        self.fresh = False
        return ended

    def model(self):
        return self.folder / "out" / ("model" if self.kind == "sweep" else "")

    def once(self, name, *kills):
        """Kill the command and its reruns in these ways, until one completes; then let it complete, and compare."""
        self.stage.prepare(self.kind, self.folder)
        self.fresh = True
        self.tries += 1
        for how in (*kills, {}):
            ended = self.run(**how)
            if ended != "killed":
                break
            self.kills += 1
            self.left[left(self.folder)] += 1
            self.check_model(name)
        actual = files(self.folder)
        different = sorted(path for path in {*actual, *self.expected} if actual.get(path) != self.expected.get(path))
        self.identical += not different
        if not isinstance(ended, int) and (different or not ended.endswith(DONE)):
            self.wrong.append(f"{self.kind}, {name}: {ended}")
        self.wrong += [f"{self.kind}, {name}: {path} differs" for path in different]

    def check_model(self, name):
        """A model that loads is the previous or the new one, never a part or a mixture."""
        try:
            state = weights(self.model())
        except (MoonshotError, OSError, ValueError):
            self.wrong.append(f"{self.kind}, {name}: config.json is there, and the model cannot be loaded")
            return
        if state is not None and not any(_same(state, saved) for saved in (self.before, self.after) if saved):
            self.wrong.append(f"{self.kind}, {name}: another model is there")

    def at_random(self, count, seed):
        """Run trials until `count` kills have hit."""
        rng = random.Random(f"{self.kind} {seed}")
        while self.kills < count:
            ways = [{"moment": rng.uniform(0, self.seconds), "deadly": rng.choice(SIGNALS)} for _ in range(IN_A_ROW)]
            self.once(f"try {self.tries}", *ways)

    def at_operations(self, operations, seed):
        """Kill before these operations, and the rerun before a random one; the next rerun completes."""
        rng = random.Random(f"{self.kind} {seed}")
        for operation in operations:
            again = rng.randint(1, self.operations)
            self.once(f"operations {operation} and {again}", {"operation": operation}, {"operation": again})

    def counts(self):
        return {
            "seconds_undisturbed": round(self.seconds, 2), "file_operations": self.operations, "tries": self.tries,
            "kills": self.kills, "identical": self.identical, "killed": dict(self.left), "wrong": self.wrong,
        }  # fmt: skip


def meet(stage, alone, first, second, count, seed):
    """Run two commands that write to one folder, the second from a random moment of the first.

    One of them may be refused; the folder must equal the undisturbed result (in `alone`) of one that was not.
    """
    folder, rng = stage.root / "meeting", random.Random(f"{first} {second} {seed}")
    results, wrong = collections.Counter(), []
    for number in range(count):
        stage.prepare(first, folder)
        children = [Child(functools.partial(stage.work, first, folder), folder)]
        time.sleep(rng.uniform(0, alone[first].seconds))
        children.append(Child(functools.partial(stage.work, second, folder), folder))
        ended = [child.end() for child in children]
        done = [kind for kind, how in zip((first, second), ended, strict=True) if isinstance(how, int)]
        refused = [how for how in ended if not isinstance(how, int)]
        results[" and ".join(REFUSED.search(how)[0] if REFUSED.search(how) else "?" for how in refused) or "both"] += 1
        actual = files(folder)
        if not done or not any(actual == alone[kind].expected for kind in done):
            wrong.append(f"{first} and {second}, {number}: the result is of neither ({ended})")
        wrong += [f"{first} and {second}, {number}: {how}" for how in refused if not REFUSED.search(how)]
    return {"meetings": count, "refused": dict(results), "wrong": wrong}


def _same(state, other):
    return state.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in state.items())


def run_all(kinds, kills, operations, meetings, seed):
    """Results by command and type of kill, and by pair of concurrent commands."""
    results = {}
    with tempfile.TemporaryDirectory() as root:
        stage = Stage(Path(root))
        pairs = MEETINGS if meetings else ()
        alone = {kind: Tries(stage, kind) for kind in dict.fromkeys(kind for pair in pairs for kind in pair)}
        for first, second in pairs:
            name = f"{first}, and {second}"
            results[name] = {"two writers": meet(stage, alone, first, second, meetings, seed)}
            print(name, json.dumps(results[name]), file=sys.stderr, flush=True)
        for kind in kinds:
            tries = Tries(stage, kind)
            tries.at_random(kills, seed)
            results[kind] = {"random moments": tries.counts()}
            tries.start_counting()
            count = tries.operations if operations is None else operations
            tries.at_operations([1 + int((n + 0.5) * tries.operations / count) for n in range(count)], seed)
            results[kind]["file operations"] = tries.counts()
            print(kind, json.dumps(results[kind]), file=sys.stderr, flush=True)
    return results


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=100, help="at random moments, of each command")
    parser.add_argument("--operations", type=int, help="file operations to die at, of each command; default: all")
    parser.add_argument("--meetings", type=int, default=20, help="of each pair of commands that write to one folder")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commands", nargs="*", choices=KINDS, default=KINDS)
    parser.add_argument("--json", type=Path, help="file of the results; those of other commands are kept")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    hf.utils.logging.disable_progress_bar()
    share_nothing()
    results = run_all(options.commands, options.kills, options.operations, options.meetings, options.seed)
    if options.json:
        kept = json.loads(options.json.read_text(encoding="utf-8")) if options.json.exists() else {}
        options.json.write_text(json.dumps(kept | results, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    wrong = [line for kind in results.values() for how in kind.values() for line in how["wrong"]]
    print(*wrong, sep="\n")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
