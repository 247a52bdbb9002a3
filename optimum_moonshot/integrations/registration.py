"""Make transformers know "moonshot" checkpoints and configurations as soon as this package is imported.

transformers takes seconds to import and has no entry points. So where it is not imported yet, nothing is imported
either: a finder waits for its quantizers and registers ours the moment they are there.
"""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

_QUANTIZERS = "transformers.quantizers.auto"


class _Waiting(MetaPathFinder):
    """Finds one module, once, as Python would, and registers after it has run."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _QUANTIZERS:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_register(module: ModuleType) -> None:
                run(module)
                register()

            spec.loader.exec_module = run_and_register
        return spec


def register_soon() -> None:
    """Register now if transformers is imported, else when it is."""
    if _QUANTIZERS in sys.modules:
        register()
    elif not any(isinstance(finder, _Waiting) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Waiting())


def register() -> None:
    """Tell transformers' automatic classes about ours; again is harmless."""
    from transformers.quantizers import auto

    from .transformers import METHOD, MoonshotPrunedCheckpoint, MoonshotQuantizer

    if METHOD not in auto.AUTO_QUANTIZER_MAPPING:
        auto.register_quantization_config(METHOD)(MoonshotPrunedCheckpoint)
        auto.register_quantizer(METHOD)(MoonshotQuantizer)
