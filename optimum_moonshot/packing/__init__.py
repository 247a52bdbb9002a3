"""Packed formats of sparse matrices, one file each; importing this package registers them all."""

from .bitmask_codec import Bitmask
from .codec import Codec, Verdict, find_codec, register_codec, suffixes, weight_of
from .layer import PackedLayer

register_codec(Bitmask())

__all__ = ["Bitmask", "Codec", "PackedLayer", "Verdict", "find_codec", "register_codec", "suffixes", "weight_of"]
