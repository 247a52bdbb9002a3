"""Pruning of a single weight matrix from tensors, without a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .config import MoonshotConfig, check_ranked
from .devices import usual_settings
from .errors import MoonshotError, require
from .objective.fisher import SampleGradients
from .objective.linalg import all_finite, in_unit
from .objective.patterns import Experts, MixedNM, Pattern, nonzeros
from .objective.quadratic import DiagonalQuadratic, Objective, Quadratic
from .solvers import PrunedWeight, Solver
from .solvers.quantization import from_unit, on_grid


@usual_settings()
@torch.no_grad()
def prune_weight(
    weight: Tensor, gram: Tensor | None = None, gradients: Tensor | None = None, *, config: MoonshotConfig
) -> PrunedWeight:
    """Prune one weight matrix.

    Args:
        weight: dense weight, [d_out, d_in], floating point; not modified.
        gram: ``X Xᵀ`` summed over all tokens, [d_in, d_in]; optional for ``solver="magnitude"`` only. For a grouped
            convolution [groups, d_in, d_in], one for each d_out/groups rows.
        gradients: per-sample gradients of the loss, [N, d_out, d_in]; required for λ < 1, ignored at λ = 1. They may be
            on another device than the weight, and are then streamed by slices of rows.
        config: solver, pattern, sparsity, λ (default 0.9) and damping.

    Returns:
        The pruned weight in the dtype and on the device of the input, the mask, the damping and notes.

    Raises:
        MoonshotError: wrong shapes, NaN or infinity, λ < 1 without gradients, or groups that do not divide d_in.
        FactorizationError: the quadratic stays singular at the largest damping.
    """
    _check_config(config)
    solver, objective = _problem(weight, gram, gradients, config)
    pattern = _quantized(config, weight)
    return _finished(on_grid(solver, objective, solver.solve(objective, pattern), pattern), pattern, weight)


@usual_settings()
@torch.no_grad()
def prune_weight_path(
    weight: Tensor,
    gram: Tensor | None = None,
    gradients: Tensor | None = None,
    *,
    config: MoonshotConfig,
    sparsities: Sequence[float],
) -> dict[float, PrunedWeight]:
    """Prune one weight matrix to several sparsities by one elimination.

    Args:
        weight: dense weight, [d_out, d_in], floating point; not modified.
        gram: ``X Xᵀ`` summed over all tokens, [d_in, d_in].
        gradients: per-sample gradients of the loss, [N, d_out, d_in]; required for λ < 1.
        config: solver (OBC or CAP), λ and damping; pattern="unstructured". Its sparsity is ignored.
        sparsities: fractions of the weights to remove.

    Returns:
        Sparsity → the result of `prune_weight`.

    Raises:
        MoonshotError: wrong shapes, NaN or infinity, λ < 1 without gradients, or a solver or pattern that does not
            support several sparsities.
        FactorizationError: the quadratic stays singular at the largest damping.
    """
    _check_config(config)
    check_ranked(config, sparsities)
    patterns = [_quantized(dataclasses.replace(config, sparsity=sparsity), weight) for sparsity in sparsities]
    solver, objective = _problem(weight, gram, gradients, config)
    results = solver.solve_path(objective, patterns)
    results = [on_grid(solver, objective, *pair) for pair in zip(results, patterns, strict=True)]
    finished = [_finished(*pair, weight) for pair in zip(results, patterns, strict=True)]
    return dict(zip(sparsities, finished, strict=True))


def _quantized(config: MoonshotConfig, weight: Tensor) -> Pattern:
    """The pattern of a configuration, with the grid of a weight."""
    pattern, grid = config.parsed_pattern, config.grid
    assert pattern is not None and not isinstance(pattern, MixedNM)  # `_problem` has refused it
    return pattern if grid is None else dataclasses.replace(pattern, grid=grid.with_dtype(weight.dtype))


def _finished(result: PrunedWeight, pattern: Pattern, weight: Tensor) -> PrunedWeight:
    """In the unit and dtype of the given weight, with a note on its zeros."""
    zeros = weight.numel() - int(torch.count_nonzero(weight))
    notes = (*result.notes, *([f"{zeros:,} zeros of the weight remain"] if zeros else []))
    pruned = from_unit(result.weight, in_unit(weight)[1], pattern.grid).to(weight.dtype)
    return dataclasses.replace(result, weight=pruned, notes=notes)


def _problem(
    weight: Tensor, gram: Tensor | None, gradients: Tensor | None, config: MoonshotConfig
) -> tuple[Solver, Objective]:
    """The solver and its objective, after validation."""
    _check_tensor("weight", weight, (None, None))
    require(
        config.allocation == "uniform",
        "it allocates sparsity between layers, and this is a single one",
        field="allocation",
        value=config.allocation,
        hint="leave it out",
    )
    pattern = config.parsed_pattern
    experts = isinstance(pattern, Experts)
    message = "experts are removed from a model, not from a matrix"
    require(not experts, message, field="pattern", value=config.pattern, hint="use MoonshotPruner")
    assert pattern is not None and not isinstance(pattern, MixedNM | Experts)  # MixedNM requires an allocation
    d_out, d_in = weight.shape
    message = f"d_in={d_in} is not a multiple of {pattern.width}"
    require(pattern.fits((d_out, d_in)), message, field="pattern", value=config.pattern)
    solver = config.make_solver()
    message = "the gradients of the samples give every row a Fisher term of its own"
    require(config.fisher != "shared", message, field="fisher", value=config.fisher, hint="leave it out")
    lam = config.resolve_lam()
    if gram is None:
        if solver.calibrated:
            reason = f"solver={config.solver!r} needs the Gram matrix of the inputs"
            raise MoonshotError(reason, field="gram", value=None)
        gram, lam = torch.eye(d_in, device=weight.device), 1.0
    grouped = isinstance(gram, Tensor) and gram.ndim == 3
    _check_tensor("gram", gram, (None, d_in, d_in) if grouped else (d_in, d_in))
    divides = not grouped or d_out % len(gram) == 0
    require(divides, f"gram has shape {list(gram.shape)}: d_out={d_out} is not a multiple of {len(gram)} groups")
    message = "it does not support grouped convolutions, as its rows share columns"
    require(not grouped or solver.grouped, message, field="solver", value=config.solver)
    if lam < 1:
        if gradients is None:
            hint = "pass gradients, or set lam=1"
            raise MoonshotError(f"lam={lam!r} needs them", field="gradients", value=None, hint=hint)
        _check_tensor("gradients", gradients, (None, d_out, d_in))
    else:
        gradients = None
    weight, _ = in_unit(weight)
    return solver, build_objective(solver, pattern, weight, gram.float(), gradients, lam)


def build_objective(
    solver: Solver, pattern: Pattern, weight: Tensor, gram: Tensor, gradients: Tensor | None, lam: float
) -> Objective:
    """The objective that a solver requires, from full statistics.

    These are G, [d_in, d_in] or [groups, d_in, d_in] in float32, and A_n, [N, d_out, d_in] (None at λ = 1).

    Raises:
        FactorizationError: G is far from positive semidefinite.
    """
    if solver.objective.diagonal_only:
        squares = None if gradients is None else sum(part.float().square() for part in gradients).to(weight.device)
        diagonal, samples = gram.diagonal(dim1=-2, dim2=-1), 0 if gradients is None else len(gradients)
        return DiagonalQuadratic.build(weight, diagonal, squares, samples, lam, alive=nonzeros(weight))
    fisher = None if gradients is None else SampleGradients(gradients)
    column_block = solver.column_block(weight.shape[1], pattern)
    return Quadratic.build(weight, gram, fisher, lam, column_block=column_block, alive=nonzeros(weight))


def _check_config(config: Any) -> None:
    require(isinstance(config, MoonshotConfig), f"config is a {type(config).__name__}: give a MoonshotConfig")


def _check_tensor(name: str, tensor: Any, shape: tuple[int | None, ...]) -> None:
    require(isinstance(tensor, Tensor), f"{name} is a {type(tensor).__name__}: give a torch.Tensor")
    kinds = {"quantized": tensor.is_quantized, "nested": tensor.is_nested}
    kinds[f"of layout {tensor.layout}"] = tensor.layout is not torch.strided
    for kind, holds in kinds.items():
        require(not holds, f"{name} is {kind}: give a plain, dense tensor")
    require(not tensor.is_meta, f"{name} is on the meta device, which has no values: give a tensor with values")
    wide = tensor.is_floating_point() and tensor.dtype.itemsize > 1
    require(wide, f"{name} has dtype {tensor.dtype}: give a floating-point tensor of at least 16 bits")
    fits = tensor.ndim == len(shape) and all(
        want is None or want == have for want, have in zip(shape, tensor.shape, strict=True)
    )
    expected = ", ".join("any" if size is None else str(size) for size in shape)
    require(
        fits and tensor.numel() > 0, f"{name} has shape {list(tensor.shape)}: it must be [{expected}] and not empty"
    )
    require(all_finite(tensor), f"{name} holds NaN or infinite values")
