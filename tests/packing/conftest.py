"""Fixtures of the packed products."""

import pytest

from optimum_moonshot.kernels.library import find_library
from optimum_moonshot.packing import bitmask, quantized


@pytest.fixture(params=["library", "torch"])
def route(request, monkeypatch):
    """With the compiled library, and without."""
    if request.param == "torch":
        for module in (bitmask, quantized):
            monkeypatch.setattr(module, "find_library", lambda: None)
    elif find_library() is None:
        pytest.skip("installed without a C compiler")
    return request.param
