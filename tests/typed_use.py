"""Expected types for users of the package; `make lint` checks this file, and nothing imports it."""

from typing import Any, assert_type

from torch import Tensor, nn

from optimum_moonshot import (
    MoonshotConfig,
    MoonshotPruner,
    PruneReport,
    SweepReport,
    keep_sparsity,
    load_pruned,
    perplexity,
    prune_weight,
)


def prune(name: str) -> PruneReport:
    pruner = MoonshotPruner.from_pretrained(name, MoonshotConfig(pattern="2:4"))
    assert_type(pruner, MoonshotPruner)
    report = pruner.prune("c4")
    assert_type(report, PruneReport)
    assert_type(report.sparsity, float)
    assert_type(report.layers[0].loss, float | None)
    assert_type(perplexity(pruner.model, pruner.tokenizer).value, float)
    assert_type(pruner.sweep("c4", lambdas=[0.5, 1]), SweepReport)
    assert_type(pruner.push_to_hub("user/name"), str)
    assert_type(load_pruned(name), nn.Module)
    return report


def prune_matrix(weight: Tensor, gram: Tensor) -> Tensor:
    result = prune_weight(weight, gram, config=MoonshotConfig(sparsity=0.5, lam=1))
    assert_type(result.keep, Tensor)
    return result.weight


def train(model: nn.Module, optimizer: Any) -> float:
    with keep_sparsity(model, optimizer) as masks:
        return masks.sparsity()
