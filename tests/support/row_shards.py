"""The program of `test_row_shards.py`: prunings in which 1, 2, 3 and 4 processes shard matrices by rows.

Every matrix of a shardable kind is sharded, however small; `ranks.py` explains the processes.
"""

import contextlib
import os
import sys
from pathlib import Path
from unittest import mock

import ranks
import torch
import transformers as hf
from models import image_batches, make, token_batches
from ranks import error_of, fails, full, path, prune, rank, resumable, start, stored, sweep

from optimum_moonshot.distributed.sharing import assign
from optimum_moonshot.errors import FactorizationError
from optimum_moonshot.model.layers import find_structure
from optimum_moonshot.pipeline import partition
from optimum_moonshot.pipeline.slices import ShardedRows
from optimum_moonshot.solvers.ranked import Ranked
from optimum_moonshot.solvers.sparsegpt import LowRankFactors, SparseGPT

SIZES = (1, 2, 3, 4)


def narrow():
    """A model in which some matrices have fewer than four rows."""
    torch.manual_seed(0)
    sizes = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, head_dim=2)
    return hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, num_key_value_heads=1, vocab_size=96))


def partly_pruned():
    """A model whose matrices have zeros in their first rows, so that some processes have none."""
    model = make("llama")
    with torch.no_grad():
        for layer in find_structure(model).layers():
            rows = layer.matrix[: layer.shape[0] // 3]
            rows[torch.rand(rows.shape, generator=torch.Generator().manual_seed(0)) < 0.6] = 0
    return model


def failing(work, late):
    """Make factorisations fail in the last process below a damping of 0.1."""

    def failing(solver, objective, pattern, damping):
        result = work(solver, objective, pattern, damping) if late or damping >= 0.1 else None
        if rank() == ranks.processes() - 1 and damping < 0.1:
            raise FactorizationError("a matrix of the last rows is not positive definite")
        return result

    return failing


@contextlib.contextmanager
def escalating(late):
    with (
        mock.patch.object(Ranked, "rank_removals", failing(Ranked.rank_removals, late)),
        mock.patch.object(SparseGPT, "attempt", failing(SparseGPT.attempt, late)),
    ):
        yield


def escalated(late, **settings):
    with escalating(late):
        return prune(**settings)


CASES = {
    "sparsegpt": lambda: prune(),
    "sparsegpt, n:m": lambda: prune(pattern="2:4", batch_size=3),
    "sparsegpt, λ = 1": lambda: prune(lam=1),
    "sparsegpt, λ = 0": lambda: prune(lam=0),
    "sparsegpt, matrices": lambda: prune(num_samples=31, batch_size=4),
    "sparsegpt, columns that compare, exactly": lambda: prune(
        allocation="owl", solver_options={"block_size": 4}, sparsity=0.513
    ),
    "a Fisher matrix for all rows": lambda: prune(fisher="shared"),
    "a Fisher matrix for all rows, cap": lambda: prune(fisher="shared", solver="cap"),
    "cap": lambda: prune(solver="cap"),
    "cap, compressed": lambda: prune(solver="cap", num_samples=31, batch_size=4, solver_options={"block_size": 8}),
    "cap, λ = 1, padded": lambda: prune(solver="cap", lam=1, data=token_batches(7, padded=True)),
    "obc, n:m": lambda: prune(solver="obc", pattern="2:4"),
    "obc, n:m, λ = 1": lambda: prune(solver="obc", pattern="2:4", lam=1),
    "damping that rises early, fewer samples than processes": lambda: escalated(False, num_samples=3),
    "damping that rises late": lambda: escalated(True, solver="obc", num_samples=4),
    "fewer rows than processes": lambda: prune("narrow", solver="cap"),
    "convolutions": lambda: prune("convnet", image_batches(7), solver="cap"),
    "experts beside it": lambda: prune("mixtral", token_batches(7, size=1), solver="cap", lam=0.9),
    "recompute": lambda: prune(recompute=True, solver="cap"),
    "fisher": lambda: prune(allocation="fisher", num_samples=16),
    "bits": lambda: prune(bits=8, quant_group=64),
    "bits, cap": lambda: prune(solver="cap", bits=8, quant_group=64),
    "zeros": lambda: prune("partly pruned", pattern="2:4", bits=8, quant_group=64),
    "zeros that compete": lambda: prune("partly pruned"),
    "zeros, obc": lambda: prune("partly pruned", solver="obc", pattern="2:4", lam=1),
    "sweep": sweep,
    "path": path,
    "too large for one": lambda: prune(
        solver="cap", max_memory=24_000, num_samples=6, offload_dir=str(ranks.FOLDER / "offload")
    ),
    "from disk": lambda: ranks.from_disk(pattern="unstructured", sparsity=0.5, solver="cap"),
}
# The cases of three and four processes, which are slow on few cores.
FEW = (
    "sparsegpt", "sparsegpt, columns that compare, exactly", "cap, compressed", "obc, n:m, λ = 1",
    "damping that rises early, fewer samples than processes", "fewer rows than processes", "too large for one",
)  # fmt: skip
SOLVED = set()  # the layers that were sharded


def dividing():
    """Shard every shardable layer, and record its name in `SOLVED`."""
    solve = ShardedRows.solve

    def noted(share, *rest):
        SOLVED.add(share.layer.name)
        return solve(share, *rest)

    def division(costs, parts, processes):
        owners = assign(costs, processes)
        return [owner if part is None else None for owner, part in zip(owners, parts, strict=True)]

    partition.LEAST_SHARDED, ShardedRows.solve, partition.divide = 0, noted, division


def case(name):
    """The result of a pruning, with the names of the sharded layers."""
    SOLVED.clear()
    result = CASES[name]()
    return {**result, "divided": sorted(SOLVED)}


def of_two(folder):
    """Failures while two processes share a matrix."""
    done = {}
    for name, place, at in (("rank", (Ranked, "rank_removals"), {0, 5}), ("minimise", (Ranked, "minimise"), {1})):
        with full(place, at):
            done[name] = CASES["cap"]()
    with full((LowRankFactors, "end_group"), {1}):
        done["in the middle"] = error_of(CASES["sparsegpt"])
    with mock.patch.object(Ranked, "rank_removals", singular):
        done["singular"] = error_of(CASES["cap"])
    with fails("layers.1."):
        done["failure"] = error_of(lambda: resumable(folder / "resumed", solver="cap"))
    return done


def singular(solver, objective, pattern, damping, original=Ranked.rank_removals):
    if rank() == 1:
        raise FactorizationError("a matrix of the last rows is not positive definite")
    return original(solver, objective, pattern, damping)


def work(folder, size):
    dividing()
    done = {name: case(name) for name in (CASES if size < 3 else FEW)}
    if size == 1:
        done["six samples"] = resumable(None, solver="cap")
    if size == 2:
        done["again"] = case("sparsegpt")
        done |= of_two(folder)
    if size == 3:
        done["resumed"] = resumable(folder / "resumed", solver="cap")
    return done


def dying(folder, size):
    """One process dies while the others wait for its rows."""
    dividing()
    if rank() == 1:
        Ranked.minimise = lambda *_: os._exit(9)
    return {"killed": error_of(CASES["cap"])}


if __name__ == "__main__":
    torch.set_num_threads(1)
    hf.utils.logging.disable_progress_bar()
    ranks.FOLDER = folder = Path(sys.argv[1])
    ranks.MODELS |= {"narrow": narrow(), "partly pruned": partly_pruned()}
    make("llama").save_pretrained(stored("llama"))
    for size in SIZES:
        print(size, start(work, folder, size, "done"), file=sys.stderr)
    print(start(dying, folder, 3, "dying"), file=sys.stderr)
