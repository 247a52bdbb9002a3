"""The solvers; importing this package registers them all."""

from . import alps, experts, osscar, ranked, sparsegpt, wanda  # noqa: F401
from .base import PrunedWeight, Solver, make_solver, register_solver, solver_class, solver_names

__all__ = ["PrunedWeight", "Solver", "make_solver", "register_solver", "solver_class", "solver_names"]
