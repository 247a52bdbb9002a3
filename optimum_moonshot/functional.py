"""The functional entry: one matrix in, one pruned matrix out. Tests and scripts come through here."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from .config import MoonshotConfig
from .errors import check_number, require
from .objective.fisher import SampleGradients
from .objective.linalg import all_finite
from .objective.patterns import Experts, MixedNM, Pattern, Unstructured
from .objective.quadratic import DiagonalQuadratic, Objective, Quadratic
from .solvers import PrunedWeight, Solver, solver_class, solver_names


@torch.no_grad()
def prune_weight(
    weight: Tensor, gram: Tensor | None = None, gradients: Tensor | None = None, *, config: MoonshotConfig
) -> PrunedWeight:
    """Prune one weight matrix by `config`.

    Args:
        weight: dense weight, [d_out, d_in], floating point.
        gram: ``X Xᵀ`` summed over every token, [d_in, d_in]; only ``solver="magnitude"`` does without. A grouped
            convolution has [groups, d_in, d_in], one for each d_out/groups rows.
        gradients: per-sample gradients of the loss, [N, d_out, d_in]; needed where λ < 1, unused at λ = 1. They may
            lie on another device than the weight: rows are then streamed.
        config: solver, pattern, sparsity, λ (default 0.9) and damping.

    Returns:
        weight, keep, damping and notes; the weight in the dtype and on the device of the input, which is not changed.

    Raises:
        MoonshotError: wrong shapes, NaN or infinity, λ < 1 without gradients, or groups that do not divide d_in.
        FactorizationError: the quadratic stays singular at the largest damping.
    """
    _check_config(config)
    solver, objective = _problem(weight, gram, gradients, config)
    return _in_dtype(solver.solve(objective, config.parsed_pattern), weight)


@torch.no_grad()
def prune_weight_path(
    weight: Tensor,
    gram: Tensor | None = None,
    gradients: Tensor | None = None,
    *,
    config: MoonshotConfig,
    sparsities: Sequence[float],
) -> dict[float, PrunedWeight]:
    """Prune one weight matrix to several sparsities, by one elimination.

    Args:
        weight, gram, gradients: as for `prune_weight`.
        config: solver (OBC or CAP), λ and damping; pattern="unstructured", whose own sparsity is not used.
        sparsities: shares of the weights to remove.

    Returns:
        By sparsity, what `prune_weight` returns.

    Raises:
        MoonshotError: as `prune_weight`, and a solver or pattern without such a path.
        FactorizationError: the quadratic stays singular at the largest damping.
    """
    _check_config(config)
    check_ranked(config, sparsities)
    patterns = [dataclasses.replace(config, sparsity=sparsity).parsed_pattern for sparsity in sparsities]
    solver, objective = _problem(weight, gram, gradients, config)
    results = cast(Any, solver).solve_path(objective, patterns)
    return {sparsity: _in_dtype(result, weight) for sparsity, result in zip(sparsities, results, strict=True)}


def check_ranked(config: MoonshotConfig, sparsities: Sequence[float]) -> None:
    """Raise `MoonshotError` unless one elimination serves several sparsities, and a list of them is given.

    Args:
        config: its solver ranks removals, and its pattern is unstructured.
        sparsities: numbers, each once.
    """
    able = [name for name in solver_names() if solver_class(name).ranks]
    require(
        config.solver in able,
        f"solver={config.solver!r} has no path of sparsities: use one of {', '.join(able)}, or prune for each sparsity",
    )
    require(
        config.pattern == Unstructured.kind,
        f'pattern={config.pattern!r} has its own sparsity: a path needs pattern="unstructured"',
    )
    listed = isinstance(sparsities, Sequence) and not isinstance(sparsities, str) and len(sparsities) > 0
    require(listed, f"sparsities={sparsities!r}: give a list of numbers")
    for sparsity in sparsities:
        check_number("sparsities", sparsity)
    require(len(set(sparsities)) == len(sparsities), f"sparsities={list(sparsities)}: a value is given twice")


def _in_dtype(result: PrunedWeight, weight: Tensor) -> PrunedWeight:
    """The result in the dtype of the dense weight."""
    return PrunedWeight(result.weight.to(weight.dtype), result.keep, result.damping, result.notes)


def _problem(
    weight: Tensor, gram: Tensor | None, gradients: Tensor | None, config: MoonshotConfig
) -> tuple[Solver, Objective]:
    """The solver and its objective, all checked."""
    _check_tensor("weight", weight, (None, None))
    require(
        config.allocation == "uniform",
        f"allocation={config.allocation!r}: it divides the sparsity between layers, and this is one; leave it out",
    )
    pattern = config.parsed_pattern
    require(
        not isinstance(pattern, Experts),
        "pattern='experts': whole experts leave a model, not a matrix; use MoonshotPruner",
    )
    assert pattern is not None and not isinstance(pattern, MixedNM)  # only allocations have such
    d_out, d_in = weight.shape
    require(
        pattern.fits((d_out, d_in)), f"pattern={config.pattern!r}: d_in={d_in} is not a multiple of {pattern.width}"
    )
    solver = config.make_solver()
    lam = config.resolve_lam()
    if gram is None:
        require(not solver.calibrated, f"gram=None: solver={config.solver!r} needs the inputs' Gram matrix")
        gram, lam = torch.eye(d_in, device=weight.device), 1.0
    grouped = isinstance(gram, Tensor) and gram.ndim == 3
    _check_tensor("gram", gram, (None, d_in, d_in) if grouped else (d_in, d_in))
    divides = not grouped or d_out % len(gram) == 0
    require(divides, f"gram has shape {list(gram.shape)}: d_out={d_out} does not divide into {len(gram)} groups")
    require(
        not grouped or solver.grouped, f"solver={config.solver!r} takes no grouped convolution: its rows share columns"
    )
    if lam < 1:
        require(gradients is not None, f"gradients=None: lam={lam:g} needs them; give gradients or set lam=1")
        _check_tensor("gradients", gradients, (None, d_out, d_in))
    else:
        gradients = None
    return solver, build_objective(solver, pattern, weight, gram.float(), gradients, lam)


def build_objective(
    solver: Solver, pattern: Pattern, weight: Tensor, gram: Tensor, gradients: Tensor | None, lam: float
) -> Objective:
    """The objective that a solver asks for, from full statistics.

    Args:
        solver: which declares what it works on.
        pattern: that it will prune by.
        weight: dense weight, [d_out, d_in].
        gram: G, [d_in, d_in] or [groups, d_in, d_in] in float32.
        gradients: A_n, [N, d_out, d_in]; None at λ = 1.
        lam: λ in [0, 1].

    Raises:
        FactorizationError: G is far from positive semidefinite.
    """
    if solver.objective.diagonal_only:
        squares = None if gradients is None else sum(part.float().square() for part in gradients).to(weight.device)
        return DiagonalQuadratic.build(
            weight, gram.diagonal(dim1=-2, dim2=-1), squares, 0 if gradients is None else len(gradients), lam
        )
    fisher = None if gradients is None else SampleGradients(gradients)
    return Quadratic.build(weight, gram, fisher, lam, column_block=solver.column_block(weight.shape[1], pattern))


def _check_config(config: Any) -> None:
    require(isinstance(config, MoonshotConfig), f"config is a {type(config).__name__}: give a MoonshotConfig")


def _kind(tensor: Tensor) -> str:
    """What a tensor is that is not plain."""
    if tensor.is_quantized:
        return "quantized"
    return "nested" if tensor.is_nested else f"of layout {tensor.layout}"


def _check_tensor(name: str, tensor: Any, shape: tuple[int | None, ...]) -> None:
    require(isinstance(tensor, Tensor), f"{name} is a {type(tensor).__name__}: give a torch.Tensor")
    plain = tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized
    require(plain, f"{name} is {_kind(tensor)}: give a plain, dense tensor")
    require(not tensor.is_meta, f"{name} lies on the meta device, which holds no values: give a tensor with values")
    wide = tensor.is_floating_point() and tensor.dtype.itemsize > 1
    require(wide, f"{name} has dtype {tensor.dtype}: give a floating-point tensor of at least 16 bits")
    fits = tensor.ndim == len(shape) and all(
        want is None or want == have for want, have in zip(shape, tensor.shape, strict=True)
    )
    wanted = ", ".join("any" if size is None else str(size) for size in shape)
    require(fits and tensor.numel() > 0, f"{name} has shape {list(tensor.shape)}: it must be [{wanted}] and not empty")
    require(all_finite(tensor), f"{name} holds NaN or infinite values")
