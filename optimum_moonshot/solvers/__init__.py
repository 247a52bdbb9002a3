"""One file per solver; importing this package registers them all."""

from . import cap, magnitude, obc, osscar, sparsegpt, wanda
from .base import PrunedWeight, Solver, register_solver, solver_class, solver_names

__all__ = [
    "PrunedWeight",
    "Solver",
    "cap",
    "magnitude",
    "obc",
    "osscar",
    "register_solver",
    "solver_class",
    "solver_names",
    "sparsegpt",
    "wanda",
]
