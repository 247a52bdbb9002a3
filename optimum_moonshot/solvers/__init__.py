"""One file per solver; importing this package registers them all."""

from . import alps, cap, frequency, magnitude, obc, osscar, reap, sparsegpt, wanda
from .base import (
    PrunedWeight,
    Solver,
    damped,
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
    "damped",
    "finish",
    "frequency",
    "hyperparameter",
    "magnitude",
    "make_solver",
    "obc",
    "osscar",
    "parse_option",
    "reap",
    "register_solver",
    "solver_class",
    "solver_names",
    "solver_options",
    "sparsegpt",
    "wanda",
]
