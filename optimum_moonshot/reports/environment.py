"""The versions behind a result."""

import contextlib
import platform
from importlib.metadata import PackageNotFoundError, version


def versions() -> dict[str, str]:
    """The versions of the libraries that a result depends on."""
    installed = {"python": platform.python_version()}
    for name in ("optimum-moonshot", "torch", "transformers", "datasets", "safetensors"):
        with contextlib.suppress(PackageNotFoundError):
            installed[name] = version(name)
    return installed
