"""One file per solver; importing this package registers them all."""

from . import alps, cap, magnitude, obc, osscar, sparsegpt, wanda
from .base import (
    PrunedWeight,
    Solver,
    finish,
    hyperparameter,
    make_solver,
    parse_option,
    register_solver,
    solver_class,
    solver_names,
    solver_options,
)

__all__ = [
    "PrunedWeight",
    "Solver",
    "alps",
    "cap",
    "finish",
    "hyperparameter",
    "magnitude",
    "make_solver",
    "obc",
    "osscar",
    "parse_option",
    "register_solver",
    "solver_class",
    "solver_names",
    "solver_options",
    "sparsegpt",
    "wanda",
]
