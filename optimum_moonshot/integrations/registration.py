"""Register "moonshot" with transformers and PEFT when this package is imported.

Both libraries are slow to import and have no entry points. If a library is not imported yet, an import hook registers
"moonshot" right after the import.
"""

import contextlib
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


class _Waiting(MetaPathFinder):
    """Finds one module like Python, and registers after its execution: many found specs are never imported."""

    def __init__(self, name: str, register: Callable[[], None]):
        self.name, self.register = name, register

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self.name:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader  # to replace a method
            run = loader.exec_module

            def run_and_register(module: ModuleType) -> None:
                run(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                self.register()

            loader.exec_module = run_and_register
        return spec


def register_soon() -> None:
    """Register now with the imported libraries, and with the others after their import."""
    waiting = {finder.name for finder in sys.meta_path if isinstance(finder, _Waiting)}
    for name, register_there in _REGISTERS.items():
        if name in sys.modules:
            register_there()
        elif name not in waiting:
            sys.meta_path.insert(0, _Waiting(name, register_there))


def register_quantizer() -> None:
    """Register the quantizer with transformers' automatic classes; idempotent."""
    from transformers.quantizers import auto

    from ..checkpoint.weight_files import METHOD, MoonshotPrunedCheckpoint
    from .transformers import MoonshotQuantizer

    if METHOD not in auto.AUTO_QUANTIZER_MAPPING:
        auto.register_quantization_config(METHOD)(MoonshotPrunedCheckpoint)
        auto.register_quantizer(METHOD)(MoonshotQuantizer)
        # The caller's `get_loading_attributes` override an entry in config.json for these types.
        types: tuple[Any, ...] = auto.LOADING_ATTRIBUTES_CONFIG_TYPES
        vars(auto)["LOADING_ATTRIBUTES_CONFIG_TYPES"] = (*types, MoonshotPrunedCheckpoint)


def register_adapters() -> None:
    """Register masked adapters with PEFT; releases of PEFT that are too old raise an error at the mark anyway."""
    with contextlib.suppress(ImportError):
        import_module(f"{__package__}.peft")  # no `from`: this module may be importing PEFT, and be incomplete


_REGISTERS = {"transformers.quantizers.auto": register_quantizer, "peft": register_adapters}
