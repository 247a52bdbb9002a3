"""Kills of one of two processes at random moments: the other ends with a clear error, and a rerun gives the same bits.

A process that has imported everything forks two for each run, which prune one model together. A random one of them is
killed at a random moment; the other has to end within `LONGEST` seconds by `RankFailed`, or with the result if it no
longer needed the first. Both then run again in the same folder.

As a program it runs more trials than the test:  python tests/support/rank_kills.py --kills 30
"""

import argparse
import collections
import json
import logging
import os
import random
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import transformers as hf
from models import make, token_batches

from optimum_moonshot import MoonshotConfig, MoonshotPruner
from optimum_moonshot.distributed.ranks import RankFailed

RUNS = {
    "prune": {},
    "rotation": {"rotation": "learned", "rotation_steps": 12},
    "recovery": {"recover": "blockwise", "recover_steps": 4},
    "quantized": {"bits": 4, "quant_group": 64, "pattern": "2:4", "sparsity": None},
    "distillation": {"recover": "distill", "recover_steps": 6},
}
LONGEST = 60  # seconds from a kill to the end of the other process
FINISHED = "finished"


def prune(kind, folder, rank, address):
    """One of two processes: the run, and its result or error in a file."""
    try:
        dist.init_process_group("gloo", address, rank=rank, world_size=2)
        (folder / f"begun-{rank}").touch()
        settings = {"sparsity": 0.5, "lam": 0.5, "num_samples": 6, "batch_size": 2, **RUNS[kind]}
        pruner = MoonshotPruner(make("llama"), MoonshotConfig(**settings))
        pruner.prune(token_batches(6), progress=False, resume_dir=folder / "run")
        torch.save(pruner.model.state_dict(), folder / f"weights-{rank}.pt")
        outcome = FINISHED
    except RankFailed:
        outcome = "RankFailed"
    except BaseException as error:  # at the start torch alone notices, with an error of its own
        outcome = f"{type(error).__name__}: {error}".partition("\n")[0]
        if not (folder / "begun-0").exists() or not (folder / "begun-1").exists():
            outcome = "error of torch before the run"
    (folder / f"outcome-{rank}").write_text(outcome)


def start(kind, folder):
    """Fork both processes; returns their ids."""
    for path in [*folder.glob("begun-*"), *folder.glob("outcome-*"), *folder.glob("weights-*")]:
        path.unlink()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    children = []
    for rank in range(2):
        child = os.fork()
        if not child:
            quiet = os.open(folder / f"errors-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(quiet, 2)
            prune(kind, folder, rank, address)
            os._exit(0)
        children.append(child)
    return children


def wait(child, seconds):
    """Whether the process ends in this time; if not, it is killed."""
    deadline = time.monotonic() + seconds
    while os.waitpid(child, os.WNOHANG)[0] == 0:
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return False
        time.sleep(0.005)
    return True


def outcome(folder, rank):
    path = folder / f"outcome-{rank}"
    return path.read_text() if path.exists() else "none"


def complete(kind, folder):
    """Run both processes to the end; returns the weights, equal in both, and the seconds."""
    started = time.monotonic()
    ended = [wait(child, 5 * LONGEST) for child in start(kind, folder)]
    outcomes = [outcome(folder, rank) for rank in range(2)]
    if not all(ended) or outcomes != [FINISHED] * 2:
        return outcomes, 0.0
    weights = [torch.load(folder / f"weights-{rank}.pt") for rank in range(2)]
    assert same(*weights)
    return weights[0], time.monotonic() - started


def same(state, other):
    return state.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in state.items())


def trial(kind, folder, expected, seconds, rng):
    """Kill one of two processes once; returns the killed rank, the other's outcome and seconds, and an error."""
    folder.mkdir()
    victim, children = rng.randrange(2), start(kind, folder)
    time.sleep(rng.uniform(0, seconds))
    os.kill(children[victim], signal.SIGKILL)
    killed = time.monotonic()
    os.waitpid(children[victim], 0)
    ended = wait(children[1 - victim], LONGEST)
    taken, how = time.monotonic() - killed, outcome(folder, 1 - victim)
    if not ended:
        return victim, "hangs", taken, f"no end within {LONGEST} s"
    wrong = None if how in (FINISHED, "RankFailed", "error of torch before the run") else f"the other ended by: {how}"
    weights, _ = complete(kind, folder)
    if isinstance(weights, list):
        wrong = f"the rerun ended by {weights}"
    elif not same(weights, expected):
        wrong = "the rerun gives other weights"
    elif any(path.suffix == ".partial" or path.name[0] == "." for path in (folder / "run").rglob("*")):
        wrong = "temporary files are left"
    return victim, how, taken, wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", nargs="*", choices=RUNS, default=list(RUNS))
    parser.add_argument("--json", type=Path, help="file of the results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    hf.utils.logging.disable_progress_bar()
    rng, counts, longest, wrong = random.Random(options.seed), collections.Counter(), 0.0, []
    with tempfile.TemporaryDirectory() as root:
        undisturbed = {}
        for kind in options.runs:
            folder = Path(root) / kind
            folder.mkdir()
            undisturbed[kind] = complete(kind, folder)
            assert undisturbed[kind][1], undisturbed[kind][0]
        for number in range(options.kills):
            kind = options.runs[number % len(options.runs)]
            victim, how, taken, error = trial(kind, Path(root) / str(number), *undisturbed[kind], rng)
            counts[f"rank {victim} killed: {how}"] += 1
            longest = max(longest, taken)
            wrong += [f"{kind}, {number}, rank {victim}: {error}"] if error else []
            print(kind, victim, how, f"{taken:.2f} s", error or "", file=sys.stderr, flush=True)
    results = {"kills": options.kills, **dict(sorted(counts.items())), "longest_seconds": round(longest, 1)}
    results["wrong"] = wrong
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(results, indent=2))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
