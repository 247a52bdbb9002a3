"""Benchmarks of many cells (seed, setting, step, λ), with a results file written after every cell, to resume."""

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from common import machine

Cell = tuple[int, str, str, float]  # seed, setting, step, λ


def add_options(arguments: argparse.ArgumentParser, steps: Iterable[str], lambdas: Iterable[float]) -> None:
    """Command-line options that select cells of a table.

    Args:
        arguments: of the command line.
        steps: all steps.
        lambdas: all values of λ.
    """
    arguments.add_argument("--steps", nargs="+", default=list(steps), choices=list(steps))
    arguments.add_argument("--lambdas", nargs="+", type=float, default=list(lambdas))
    arguments.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    arguments.add_argument("--minutes", type=float, help="begin no cell after so long")
    arguments.add_argument("--show", action="store_true", help="show the table and the picture of the measured cells")


def run_cells(
    path: Path,
    cells: Iterable[Cell],
    measure: Callable[[Cell], dict],
    dense: Callable[[], object],
    options: argparse.Namespace,
) -> dict:
    """Measure the cells missing from a results file.

    Args:
        path: of the file.
        cells: in the order to run.
        measure: returns the values of a cell: perplexity, seconds, and more.
        dense: returns the values of the dense model.
        options: from `add_options`.

    Returns:
        The content of the file.
    """
    results = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    if results is None:
        results = {"machine": machine(), "dense": dense(), "cells": []}
    measured = {(row["seed"], row["setting"], row["step"], row["lam"]) for row in results["cells"]}
    started = time.perf_counter()
    for cell in [] if options.show else cells:
        if cell in measured:
            continue
        if options.minutes and time.perf_counter() - started > 60 * options.minutes:
            break
        row = measure(cell)
        results["cells"].append(dict(zip(("seed", "setting", "step", "lam"), cell, strict=True)) | row)
        path.write_text(json.dumps(results, indent=1), encoding="utf-8")
        print(*cell, f"{row['perplexity']:.2f}, {row['seconds']:.0f} s", flush=True)
    return results


def gather(results: dict, setting: str, step: str, lam: float, key: str = "perplexity") -> list[float]:
    """A cell's values over the measured seeds; rows of another machine have no speeds."""
    wanted = (setting, step, lam)
    cells = [row for row in results["cells"] if (row["setting"], row["step"], row["lam"]) == wanted]
    return [row[key] for row in cells if key in row]


def mean_error(values: list[float], digits: int = 1) -> str:
    """Mean ± standard error; the plain value for one seed, empty for none."""
    if len(values) < 2:
        return f"{values[0]:.{digits}f}" if values else ""
    error = statistics.stdev(values) / math.sqrt(len(values))
    return f"{statistics.fmean(values):.{digits}f} ± {error:.{digits}f}"


def least(results: dict, setting: str, step: str, lambdas: Iterable[float]) -> float | None:
    """The mean perplexity of the best λ; None without results."""
    values = [gather(results, setting, step, lam) for lam in lambdas]
    return min((statistics.fmean(each) for each in values if each), default=None)
