"""The program of `test_ranks.py`: the same prunings by 1, 2 and 4 processes, and failures in the middle of one.

One process imports everything and forks the others; each writes its results to a separate file.
"""

import contextlib
import copy
import io
import itertools
import os
import shutil
import socket
import sys
import time
import traceback
from functools import partial
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import transformers as hf
from models import GROUPED, image_batches, make, spread, token_batches

from optimum_moonshot import MoonshotConfig, MoonshotPruner
from optimum_moonshot.__main__ import main
from optimum_moonshot.calibration.accumulators import Gram
from optimum_moonshot.calibration.observer import GradientSums, Observer
from optimum_moonshot.commands import launch
from optimum_moonshot.distributed.sharing import on_main_process
from optimum_moonshot.model.layers import all_onloaded, visited
from optimum_moonshot.prune import layers as solving
from optimum_moonshot.recover import tuning

SIZES = (1, 2, 4)
IN_BFLOAT16 = " in bfloat16"
LOSSES = ("loss", "reconstruction", "fisher", "loss_masked", "reconstruction_masked", "fisher_masked")
DEMO = Path(__file__).parents[2] / "examples" / "demo_model"
FOLDER = Path()  # set by the program


def model(name="llama"):
    """A copy of the model, which is created once."""
    if name not in MODELS:
        made = two_experts() if name == "two experts" else make(name.removesuffix(IN_BFLOAT16))
        MODELS[name] = made.bfloat16() if name.endswith(IN_BFLOAT16) else made
    return copy.deepcopy(MODELS[name])


MODELS = {}


def two_experts():
    torch.manual_seed(0)
    config = hf.MixtralConfig(**{**GROUPED, "num_hidden_layers": 2}, num_local_experts=2, num_experts_per_tok=1)
    return spread(hf.MixtralForCausalLM(config)).to(torch.bfloat16)


def prune(name="llama", data=None, **settings):
    """Prune a model; returns its weights and the fields of its report."""
    experts = settings.get("pattern") == "experts"
    settings = {"sparsity": 0.5, "lam": 0.5, "num_samples": 7, "batch_size": 2, **settings}
    settings = {"fisher": None if experts else "rows", **settings}
    if ":" in settings.get("pattern", "unstructured"):
        del settings["sparsity"]
    data = token_batches(settings["num_samples"]) if data is None else data or None
    pruner = MoonshotPruner(model(name), MoonshotConfig(**settings))
    report = pruner.prune(data, progress=False)
    return result_of(pruner.model, report)


def from_disk(name="llama", **settings):
    """Like `prune`, for a model offloaded to its files."""
    config = MoonshotConfig(**{"pattern": "2:4", "lam": 0.5, "num_samples": 7, "batch_size": 2, **settings})
    pruner = MoonshotPruner.from_pretrained(stored(name), config, offload="disk")
    report = pruner.prune(token_batches(config.num_samples, size=1 if name == "mixtral" else 2), progress=False)
    with all_onloaded(visited(pruner.model)):
        return result_of(pruner.model, report)


def stored(name):
    """The folder of a saved model."""
    return FOLDER / "stored" / name


def result_of(pruned, report):
    layers = {
        layer.name: [getattr(layer, name) for name in ("sparsity", "damping", "lam", *LOSSES, "notes")]
        for layer in report.layers
    }
    rotation = None if report.rotation is None else report.rotation.objective_after
    recovery = [(block.loss_before, block.loss_after) for block in report.recovery]
    report_fields = {"layers": layers, "notes": report.notes, "skipped": report.skipped, "recovery": recovery}
    report_fields |= {"calibration": report.calibration, "rotation": rotation}
    return {"weights": {name: tensor.clone() for name, tensor in pruned.state_dict().items()}, "said": report_fields}


def sweep(**settings):
    config = MoonshotConfig(sparsity=0.5, num_samples=6)
    pruner = MoonshotPruner(model(), config)
    swept = {"lambdas": [0.5, 1.0], "patterns": ["unstructured", "2:4"], "progress": False}
    report = pruner.sweep(token_batches(), **swept, **settings)
    entries = [[entry.metric, entry.loss] for entry in report.entries] + [[report.dense, 0.0]]
    done = pruner.choose(report.best(pattern="2:4"))
    result = result_of(pruner.model, done)
    result["said"]["entries"] = entries
    return result


def processes():
    return dist.get_world_size() if dist.is_initialized() else 1


def rank():
    return dist.get_rank() if dist.is_initialized() else 0


def of_weights(model):
    return float(model.model.layers[0].mlp.up_proj.weight.abs().sum())


def path():
    pruner = MoonshotPruner(model(), MoonshotConfig(solver="cap", sparsity=0.5, lam=0.5, num_samples=6))
    return result_of(pruner.model, pruner.prune_path(token_batches(), [0.5, 0.75], progress=False).apply(0.75))


CASES = {
    "sparsegpt": lambda: prune(),
    "sparsegpt, at λ = 1, padded": lambda: prune(lam=1, pattern="2:4", data=token_batches(7, padded=True)),
    "wanda": lambda: prune(solver="wanda"),
    "alps": lambda: prune(solver="alps", num_samples=4),
    "osscar": lambda: prune("opt", solver="osscar", pattern="structured", sparsity=0.25),
    "obc, n:m, fewer samples than processes": lambda: prune(solver="obc", pattern="2:4", num_samples=3),
    "cap, more samples than inputs": lambda: prune(solver="cap", num_samples=31, batch_size=4),
    "magnitude, without data": lambda: prune(solver="magnitude", data=[], lam=None),
    "convolutions": lambda: prune("convnet", image_batches(7), solver="cap"),
    "a Fisher matrix for all rows": lambda: prune(fisher="shared"),
    "token weights of half of the samples": lambda: prune(fisher="shared", num_samples=35, batch_size=4),
    "a Fisher diagonal for all rows": lambda: prune(fisher="shared", solver="wanda"),
    "a Fisher matrix for each expert": lambda: prune("two experts", token_batches(7, size=1), fisher="shared"),
    "one layer": lambda: prune(targets=["layers.1.mlp.up_proj"], solver="cap"),
    "experts, some starved": lambda: prune("mixtral", token_batches(5, length=2, size=1), num_samples=5),
    "more processes than experts": lambda: prune("two experts", token_batches(7, size=1), solver="cap", lam=0.9),
    "experts in parts": lambda: prune(
        "mixtral",
        token_batches(7, size=1),
        pattern="2:4",
        under_calibrated_experts="magnitude",
        max_memory=80_000,
        offload_dir=str(FOLDER / "offload"),
    ),
    "experts, by what they lose": lambda: prune(
        "mixtral", token_batches(16, size=1), solver="wanda", allocation="fisher", num_samples=16
    ),
    "whole experts": lambda: prune("mixtral", token_batches(7, size=1), solver="osscar", pattern="experts"),
    "rounds": lambda: prune(max_memory=45_000, offload_dir=str(FOLDER / "offload")),
    "memories that differ": lambda: prune(max_memory=45_000 if rank() else None, offload_dir=str(FOLDER / "offload")),
    "chunks of rows": lambda: prune(
        solver="cap", max_memory=24_000, num_samples=6, offload_dir=str(FOLDER / "offload")
    ),
    "recompute": lambda: prune(recompute=True),
    "owl": lambda: prune(allocation="owl"),
    "fisher": lambda: prune(allocation="fisher", num_samples=16),
    "rotation": lambda: prune(rotation="learned", rotation_steps=3),
    "recovery": lambda: prune(recover="blockwise", recover_steps=4),
    "gradual": lambda: prune(recover="gradual", recover_steps=10),
    "recovery of whole blocks": lambda: prune(
        solver="osscar", pattern="structured", recover="blockwise", recover_steps=4, recover_lr=0.01, num_samples=16
    ),
    "recovery without some experts": lambda: prune(
        "mixtral",
        token_batches(16, size=1),
        solver="osscar",
        pattern="experts",
        recover="blockwise",
        recover_steps=4,
        recover_lr=0.01,
        num_samples=16,
    ),
    "distill": lambda: prune(recover="distill", recover_steps=4),
    "distill, a process without samples": lambda: prune(recover="distill", recover_steps=2, num_samples=2),
    "sweep": sweep,
    "sweep by a metric": lambda: sweep(metric=of_weights, work_dir=FOLDER / f"metric-{processes()}"),
    "path": path,
    "from disk": from_disk,
    "from disk, recomputed and recovered": lambda: from_disk(
        lam=1, recompute=True, recover="blockwise", recover_steps=4
    ),
    "from disk, owl": lambda: from_disk(pattern="unstructured", sparsity=0.5, allocation="owl"),
    "experts from disk": lambda: from_disk(
        "mixtral", pattern="unstructured", sparsity=0.5, solver="wanda", allocation="fisher", num_samples=16
    ),
    "self": lambda: prune(data="self", sequence_length=12),
    "bfloat16": lambda: prune("llama in bfloat16", data=token_batches(17), num_samples=17, lam=1),
    "bfloat16, gradients alone": lambda: prune("llama in bfloat16", lam=0, batch_size=4, data=token_batches(7, size=4)),
}


# The cases of four processes, which are slow on few cores.
FEW = (
    "sparsegpt", "sparsegpt, at λ = 1, padded", "wanda", "obc, n:m, fewer samples than processes",
    "magnitude, without data", "one layer", "experts, some starved", "more processes than experts",
    "chunks of rows", "sweep", "bfloat16", "bfloat16, gradients alone",
)  # fmt: skip


class Deadly(Exception):
    """The simulated failure."""


def stopping(at):
    """The function `solve`, and one that fails at a layer in the last process."""
    solve = solving.solve

    def failing(solver, layer, *rest):
        if dist.is_initialized() and dist.get_rank() == dist.get_world_size() - 1 and at in layer.name:
            raise Deadly(f"no more of {layer.name}")
        return solve(solver, layer, *rest)

    return solve, failing


@contextlib.contextmanager
def fails(at):
    before, solving.solve = stopping(at)
    try:
        yield
    finally:
        solving.solve = before


def full(place, at, where=1):
    """Make calls number `at` (None: all) of a function run out of memory in one process."""
    holder, name = place
    original, numbers = getattr(holder, name), itertools.count()

    def crowded(*args, **kwargs):
        number = next(numbers)
        if rank() == where and (at is None or number in at):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return original(*args, **kwargs)

    return mock.patch.object(holder, name, crowded)


def crowded():
    """Results of runs in which one process runs out of memory: in a pass, in the solver, …; or always."""
    done = {}
    for name, place, at in (
        ("pass", (Gram, "add"), {3, 11}),
        ("solver", (solving, "solve_layer"), {0, 1, 4}),
        ("moving on", (Observer, "end"), {1}),
    ):
        with full(place, at):
            done[name] = prune()
    with full((GradientSums, "add"), {9}):
        done["experts"] = CASES["more processes than experts"]()
    with full((tuning.BlockTask, "error"), {3}, where=0):
        done["recovery"] = CASES["recovery"]()
    with full((Gram, "add"), None):
        done["always"] = error_of(prune)
    return done


def resumable(folder, **settings):
    config = MoonshotConfig(sparsity=0.5, lam=0.5, num_samples=6, batch_size=2, **settings)
    pruner = MoonshotPruner(model(), config)
    report = pruner.prune(token_batches(), progress=False, resume_dir=folder)
    return result_of(pruner.model, report)


def failure(folder):
    """One process raises; returns the error of each."""
    with fails("layers.2."):  # the last block
        return error_of(lambda: resumable(folder))


def killed(folder):
    """One process dies; returns the error of the others."""
    if dist.get_rank() == 1:
        solving.solve = lambda *_: os._exit(9)
    return error_of(lambda: resumable(folder))


def differing():
    """Every process has a different configuration."""
    config = MoonshotConfig(sparsity=0.5 + 0.1 * dist.get_rank())
    return error_of(lambda: MoonshotPruner(model(), config).prune(token_batches()))


def differing_norm():
    """The final norm, which no layer has, differs: the Fisher gradients would be those of two models."""
    other = model()
    other.model.norm.weight.data += 0.1 * dist.get_rank()
    return error_of(lambda: MoonshotPruner(other, MoonshotConfig(sparsity=0.5)).prune(token_batches(), progress=False))


def differing_calls():
    """One process prunes, the other sweeps."""
    pruner = MoonshotPruner(model(), MoonshotConfig(sparsity=0.5))
    call = pruner.sweep if dist.get_rank() else pruner.prune
    return error_of(lambda: call(token_batches(), progress=False))


def differing_kinds():
    """One process prunes, the other saves."""
    pruner = MoonshotPruner(model(), MoonshotConfig(sparsity=0.5))
    save = partial(on_main_process, lambda: None)
    return error_of(save if dist.get_rank() else lambda: pruner.prune(token_batches(), progress=False))


def differing_loss():
    """The caller's loss differs: the Fisher gradients would be those of two losses."""

    def loss(output, batch):
        return output.logits.float().pow(1 + dist.get_rank()).mean((1, 2))

    pruner = MoonshotPruner(model(), MoonshotConfig(sparsity=0.5, lam=0.5, num_samples=6))
    return error_of(lambda: pruner.prune(token_batches(), loss=loss, progress=False))


def error_of(work):
    """The type and message of the error that `work` raises."""
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def work(folder, size):
    """The cases of one process out of `size`."""
    done = {name: CASES[name]() for name in (FEW if size == 4 else CASES)}
    done["again"] = CASES["sparsegpt"]()
    if size == 1:
        done["six samples"] = resumable(None)
    if size == 2:
        done["crowded"] = crowded()
        done["differing"] = differing()
        done["differing norm"] = differing_norm()
        done["differing calls"] = differing_calls()
        done["differing kinds"] = differing_kinds()
        done["differing loss"] = differing_loss()
        done["failure"] = failure(folder / "resumed")
        done["after the failure"] = CASES["sparsegpt"]()
        done["files"] = sorted(path.stem for path in (folder / "resumed" / "layers").iterdir())
    if size == 4:
        done["resumed"] = resumable(folder / "resumed")
    return done


def dying(folder, size):
    return {"killed": killed(folder / "killed")}


def absent(folder, size):
    """One process dies before its call."""
    if dist.get_rank() == 1:
        os._exit(9)
    return {"absent": error_of(lambda: resumable(None))}


def breaking(folder, size):
    """One process dies after initialisation, before it joins a collective."""
    if dist.get_rank() == 1:
        dist.all_reduce = lambda *_, **__: os._exit(9)
    return {"broken": error_of(lambda: resumable(None))}


DATA = ["--num-samples", "3", "--sequence-length", "32", "--batch-size", "2", "--device", "cpu"]
COMMANDS = {
    "sweep": ["sweep", "MODEL", "--patterns", "2:4", "--lambdas", "0.5", "1", "--save", "--calibration", "TEXT", *DATA],
    "fails": ["prune", "MODEL", "--sparsity", "0.5", "--targets", "nothing", "--calibration", "TEXT", *DATA],
    "convert": ["convert", "MODEL", "--format", "packed"],
}


def command(name, folder, size):
    """Output and exit status of a command in a process started by a launcher."""
    places = {"MODEL": str(folder / "model"), "TEXT": str(DEMO / "calibration.txt")}
    argv = [places.get(part, part) for part in COMMANDS[name]]
    out, err, status = io.StringIO(), io.StringIO(), 0
    launch.PATIENCE = 0.0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main([*argv, "--output", str(folder / name)])
        except SystemExit as ended:
            status = ended.code
    return {"status": status, "out": out.getvalue(), "err": err.getvalue()}


def save_model(folder):
    """Save a tiny model with a tokenizer."""
    config = hf.LlamaConfig(**{**GROUPED, "vocab_size": 2048})
    hf.LlamaForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, folder)


def launched(rank, size, port):
    """The environment of a process that torchrun starts."""
    return {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }  # fmt: skip


def start(work, folder, size, name, by_launcher=False):
    """Fork `size` processes, and wait for them; returns their exit codes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    children = []
    for rank in range(size):
        child = os.fork()
        if not child:
            code = 1
            try:
                if by_launcher:
                    os.environ.update(launched(rank, size, port))
                elif size > 1:
                    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
                torch.save(work(folder, size), folder / f"{name}-{size}-{rank}.pt")
                code = 0
            except BaseException:
                traceback.print_exc()
            sys.stderr.flush()
            os._exit(code)
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


if __name__ == "__main__":
    torch.set_num_threads(1)
    hf.utils.logging.disable_progress_bar()
    FOLDER = folder = Path(sys.argv[1])
    for name in ("llama", "mixtral"):
        make(name).save_pretrained(stored(name))
    for size in map(int, sys.argv[2:]) if len(sys.argv) > 2 else SIZES:
        started = time.perf_counter()
        codes = start(work, folder, size, "done")
        print(f"{size} processes: {time.perf_counter() - started:.1f} s {codes}", file=sys.stderr)
    for end in (dying, breaking, absent):
        print(start(end, folder, 2, end.__name__), file=sys.stderr)
    save_model(folder / "model")
    for name in COMMANDS:
        print(start(partial(command, name), folder, 2, name, by_launcher=True), file=sys.stderr)
