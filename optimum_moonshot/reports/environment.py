"""What a result was made with."""

import contextlib
import platform
from importlib.metadata import PackageNotFoundError, version


def versions() -> dict[str, str]:
    """Of the libraries that a result depends on."""
    found = {"python": platform.python_version()}
    for name in ("optimum-moonshot", "torch", "transformers", "datasets", "safetensors"):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
