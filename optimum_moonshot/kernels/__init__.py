"""Products with packed matrices on a CPU, in C: the library that the installation compiled, if it had a compiler."""

from .library import Library, find_library

__all__ = ["Library", "find_library"]
