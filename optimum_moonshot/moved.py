"""Modules that public names were imported from before the package had folders: the old paths go on working."""

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_PACKAGE = __name__.rpartition(".")[0]
_MOVED = {
    "compact": "model.compaction",
    "loading": "checkpoint.loading",
    "report": "reports.prune_report",
    "saving": "checkpoint.saving",
    "sweep_report": "reports.sweep_report",
    "zeroshot": "evaluation.zeroshot",
}


class _Moved(MetaPathFinder, Loader):
    """Gives the module at its new place for the old name: one module, under two names."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        parent, _, child = name.rpartition(".")
        return ModuleSpec(name, self) if parent == _PACKAGE and child in _MOVED else None

    def exec_module(self, module: ModuleType) -> None:
        child = module.__name__.rpartition(".")[2]
        sys.modules[module.__name__] = importlib.import_module(f"{_PACKAGE}.{_MOVED[child]}")


def answer_old_names() -> None:
    """From here on the old names can be imported; again is harmless."""
    if not any(isinstance(finder, _Moved) for finder in sys.meta_path):
        sys.meta_path.append(_Moved())
