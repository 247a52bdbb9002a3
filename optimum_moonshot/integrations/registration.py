"""Make transformers and PEFT know what is "moonshot" in their files as soon as this package is imported.

transformers takes seconds to import and has no entry points, nor has PEFT. So where they are not imported yet, nothing
is imported either: a finder waits for each and registers ours the moment it is there.
"""

import contextlib
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


class _Waiting(MetaPathFinder):
    """Finds one module as Python would, and registers once it has run; many look for a module without importing it."""

    def __init__(self, name: str, register: Callable[[], None]):
        self.name, self.register = name, register

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self.name:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_register(module: ModuleType) -> None:
                run(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                self.register()

            spec.loader.exec_module = run_and_register
        return spec


def register_soon() -> None:
    """Register now with what is imported, else when it is."""
    waiting = {finder.name for finder in sys.meta_path if isinstance(finder, _Waiting)}
    for name, register_there in _REGISTERS.items():
        if name in sys.modules:
            register_there()
        elif name not in waiting:
            sys.meta_path.insert(0, _Waiting(name, register_there))


def register() -> None:
    """Tell transformers' automatic classes about ours; again is harmless."""
    from transformers.quantizers import auto

    from .transformers import METHOD, MoonshotPrunedCheckpoint, MoonshotQuantizer

    if METHOD not in auto.AUTO_QUANTIZER_MAPPING:
        auto.register_quantization_config(METHOD)(MoonshotPrunedCheckpoint)
        auto.register_quantizer(METHOD)(MoonshotQuantizer)
        # Those of which the caller's choices are taken over, where config.json has an entry of its own.
        auto.LOADING_ATTRIBUTES_CONFIG_TYPES += (MoonshotPrunedCheckpoint,)


def register_adapters() -> None:
    """Tell PEFT about masked adapters; a release of it that is too old for them stops at their mark all the same."""
    with contextlib.suppress(ImportError):
        import_module(f"{__package__}.peft")  # it may be what imports PEFT: then it is not through yet


_REGISTERS = {"transformers.quantizers.auto": register, "peft": register_adapters}
