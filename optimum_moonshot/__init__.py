"""One-shot pruning with two objectives at once (MOONSHOT, arXiv 2604.13287).

Names are imported when they are first used, so that `optimum-cli`, which imports this package on every call, starts
without torch. The import also makes `AutoModelForCausalLM.from_pretrained` read packed checkpoints and take a
`MoonshotConfig` as `quantization_config`; see registration.py for how without importing transformers.
"""

import importlib
from typing import TYPE_CHECKING

from .registration import register_soon
from .version import __version__

if TYPE_CHECKING:
    from .compact import Compaction, compact_model
    from .config import MoonshotConfig
    from .errors import MoonshotError
    from .evaluation import accuracy, perplexity
    from .functional import prune_weight, prune_weight_path
    from .integrations.trainer import MoonshotCallback
    from .loading import load_pruned
    from .masks import keep_sparsity
    from .pruner import MoonshotPruner
    from .report import LayerReport, PruneReport
    from .saving import convert
    from .solvers import register_solver
    from .sweep_report import SweepReport
    from .zeroshot import zero_shot

__all__ = [
    "Compaction",
    "LayerReport",
    "MoonshotCallback",
    "MoonshotConfig",
    "MoonshotError",
    "MoonshotPruner",
    "PruneReport",
    "SweepReport",
    "__version__",
    "accuracy",
    "compact_model",
    "convert",
    "keep_sparsity",
    "load_pruned",
    "perplexity",
    "prune_weight",
    "prune_weight_path",
    "register_solver",
    "zero_shot",
]

_MODULES = {
    "Compaction": "compact",
    "LayerReport": "report",
    "MoonshotCallback": "integrations.trainer",
    "MoonshotConfig": "config",
    "MoonshotError": "errors",
    "MoonshotPruner": "pruner",
    "PruneReport": "report",
    "SweepReport": "sweep_report",
    "accuracy": "evaluation",
    "compact_model": "compact",
    "convert": "saving",
    "keep_sparsity": "masks",
    "load_pruned": "loading",
    "perplexity": "evaluation",
    "prune_weight": "functional",
    "prune_weight_path": "functional",
    "register_solver": "solvers",
    "zero_shot": "zeroshot",
}


def __getattr__(name: str):
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__():
    return sorted({*globals(), *__all__})


register_soon()
