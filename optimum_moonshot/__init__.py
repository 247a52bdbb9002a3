"""One-shot pruning with two objectives at once (MOONSHOT, arXiv 2604.13287).

Names are imported when they are first used, so that `optimum-cli`, which imports this package on every call, starts
without torch. The import also makes `AutoModelForCausalLM.from_pretrained` read packed checkpoints and take a
`MoonshotConfig` as `quantization_config`; see integrations/registration.py for how without importing transformers.
"""

import importlib
from typing import TYPE_CHECKING, Any

from .integrations.registration import register_soon
from .version import __version__ as __version__

if TYPE_CHECKING:
    from .checkpoint.converting import convert as convert
    from .checkpoint.converting import export_gguf as export_gguf
    from .checkpoint.loading import load_pruned as load_pruned
    from .checkpoint.verification import Verification as Verification
    from .checkpoint.verification import verify as verify
    from .checkpoint.weight_files import MoonshotPrunedCheckpoint as MoonshotPrunedCheckpoint
    from .config import MoonshotConfig as MoonshotConfig
    from .data.text import SelfCalibration as SelfCalibration
    from .errors import MoonshotError as MoonshotError
    from .evaluation.metrics import accuracy as accuracy
    from .evaluation.metrics import agreement as agreement
    from .evaluation.metrics import perplexity as perplexity
    from .evaluation.zeroshot import zero_shot as zero_shot
    from .functional import prune_weight as prune_weight
    from .functional import prune_weight_path as prune_weight_path
    from .integrations.trainer import MoonshotCallback as MoonshotCallback
    from .masks import keep_sparsity as keep_sparsity
    from .model.compaction import Compaction as Compaction
    from .model.compaction import compact_model as compact_model
    from .pruner import MoonshotPruner as MoonshotPruner
    from .reports.prune_report import LayerReport as LayerReport
    from .reports.prune_report import PruneReport as PruneReport
    from .solvers import register_solver as register_solver
    from .sweep.report import SweepReport as SweepReport

_MODULES = {
    "Compaction": "model.compaction",
    "LayerReport": "reports.prune_report",
    "MoonshotCallback": "integrations.trainer",
    "MoonshotConfig": "config",
    "MoonshotError": "errors",
    "MoonshotPrunedCheckpoint": "checkpoint.weight_files",
    "MoonshotPruner": "pruner",
    "PruneReport": "reports.prune_report",
    "SelfCalibration": "data.text",
    "SweepReport": "sweep.report",
    "Verification": "checkpoint.verification",
    "accuracy": "evaluation.metrics",
    "agreement": "evaluation.metrics",
    "compact_model": "model.compaction",
    "convert": "checkpoint.converting",
    "export_gguf": "checkpoint.converting",
    "keep_sparsity": "masks",
    "load_pruned": "checkpoint.loading",
    "perplexity": "evaluation.metrics",
    "prune_weight": "functional",
    "prune_weight_path": "functional",
    "register_solver": "solvers",
    "verify": "checkpoint.verification",
    "zero_shot": "evaluation.zeroshot",
}
__all__ = ["__version__", *_MODULES]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


register_soon()
