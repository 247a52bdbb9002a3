"""Packed formats of sparse matrices, one file each; importing this package registers them all."""

from ..objective.grid import BITS
from .bitmask import Bitmask
from .codec import INPUTS, Codec, Verdict, find_codec, register_codec, suffixes, weight_of
from .layer import PackedLayer
from .quantized import Quantized

register_codec(Bitmask())
for _bits in BITS:
    register_codec(Quantized(_bits))

__all__ = [
    "INPUTS", "Bitmask", "Codec", "PackedLayer", "Quantized", "Verdict", "find_codec", "register_codec", "suffixes",
    "weight_of",
]  # fmt: skip
