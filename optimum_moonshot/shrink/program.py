"""The integer program of a decision: one option of every dimension, at the least loss within a budget.

A dimension is a property of the smaller model with several values, its options: the neurons that are removed from every
block, the heads, the blocks. With x_ia = 1 where dimension i has option a, loss and cost are

    Σ_i Σ_a l_ia x_ia  +  Σ_i<j Σ_ab l_ijab x_ia x_jb,    and Σ_a x_ia = 1,

where pairs express that a removed block has no neurons to lose. A product is replaced by a variable z_ijab in [0, 1]
with Σ_b z_ijab = x_ia and Σ_a z_ijab = x_jb, which for binary x is exact. scipy's `milp` (HiGHS) solves it.

A removed expert has no neurons to lose either, unless its block is removed: with the fractions f_i and f_j that two
dimensions have of their last numbers, the cost has a term c_s f_i f_j for option s of the first dimension. It needs a
variable for an option, not for each of their combinations: u_a = x_ia f_j, by u_a ≤ x_ia and Σ_a u_a = f_j, and
v_s = x_0s f_i f_j, by v_s ≤ x_0s and Σ_s v_s = Σ_a f_ia u_a. Both are exact for binary x, too.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from ..errors import MoonshotError

Pairs = Mapping[tuple[int, int], NDArray[np.float64]]  # dimensions i < j → [options of i, options of j]
# The least relative step by which the budget is lowered where rounding errors of the solver exceed it.
SLACK = 1e-9


@dataclass(frozen=True)
class Dimension:
    """A property of the smaller model."""

    name: str
    removed: tuple[int, ...]  # by each option, ascending from 0
    losses: tuple[float, ...]  # predicted, of each option alone
    costs: tuple[float, ...]  # change of the cost by each option alone, 0 or less

    def fractions(self) -> NDArray[np.float64]:
        """The number of each option, relative to the last."""
        return np.array(self.removed) / max(1, self.removed[-1])


@dataclass(frozen=True)
class Product:
    """A cost in proportion to the numbers that two dimensions remove."""

    first: int  # dimensions, not 0
    second: int
    costs: tuple[float, ...]  # by the option of dimension 0, at the last options of both


@dataclass(frozen=True)
class Choice:
    """One option of every dimension."""

    options: tuple[int, ...]
    loss: float
    cost: float


@dataclass(frozen=True)
class Program:
    """The losses and costs of all combinations of options."""

    dimensions: tuple[Dimension, ...]
    dense: float  # cost of the model without a change
    loss_pairs: Pairs
    cost_pairs: Pairs
    products: tuple[Product, ...] = ()  # further costs

    def choice(self, options: tuple[int, ...]) -> Choice:
        """The loss and cost of some options, one of each dimension."""
        loss, cost = 0.0, self.dense
        for dimension, option in zip(self.dimensions, options, strict=True):
            loss, cost = loss + dimension.losses[option], cost + dimension.costs[option]
        loss += sum(float(pairs[options[i], options[j]]) for (i, j), pairs in self.loss_pairs.items())
        cost += sum(float(pairs[options[i], options[j]]) for (i, j), pairs in self.cost_pairs.items())
        for product in self.products:
            one, other = (self.dimensions[i].fractions()[options[i]] for i in (product.first, product.second))
            cost += product.costs[options[0]] * float(one * other)
        return Choice(options, loss, cost)

    def best(self, budget: float, allowed: frozenset[str] | None = None) -> Choice | None:
        """The choice with the least loss that costs at most `budget`; None if there is none.

        Of choices with this loss, up to the tolerance of the solver, it is the one with the largest cost: nothing is
        removed that the budget does not demand.

        Args:
            budget: in units of the costs.
            allowed: names of the dimensions that may change; None is all.
        """
        choice = self._within(self._losses, budget, allowed)
        if choice is None:
            return None
        largest = self._within(-self._costs, budget, allowed, choice.loss)
        return choice if largest is None or largest.cost <= choice.cost else largest

    def _within(
        self, objective: NDArray[np.float64], budget: float, allowed: frozenset[str] | None, most: float | None = None
    ) -> Choice | None:
        """The choice at the minimum of an objective that costs at most `budget`, with a loss of at most `most`."""
        limit = budget
        while True:
            options = self._solve(objective, limit, allowed, most)
            if options is None or (choice := self.choice(options)).cost <= budget:
                return None if options is None else choice
            limit -= max(choice.cost - budget, SLACK * abs(budget))

    def least_cost(self) -> Choice:
        """The choice with the least cost."""
        options = self._solve(self._costs)
        assert options is not None
        return self.choice(options)

    @property
    def _losses(self) -> NDArray[np.float64]:
        losses = self._coefficients([dimension.losses for dimension in self.dimensions], self.loss_pairs)
        return np.append(losses, np.zeros(len(self._product_costs)))

    @property
    def _costs(self) -> NDArray[np.float64]:
        costs = self._coefficients([dimension.costs for dimension in self.dimensions], self.cost_pairs)
        return np.append(costs, self._product_costs)

    @property
    def _product_costs(self) -> NDArray[np.float64]:
        """The coefficients of the variables u and v of all products."""
        costs = [[0.0] * len(self.dimensions[product.first].removed) + [*product.costs] for product in self.products]
        return np.array(sum(costs, []))

    @cached_property
    def _keys(self) -> list[tuple[int, int]]:
        return sorted({*self.loss_pairs, *self.cost_pairs})

    def _coefficients(self, singles: list[tuple[float, ...]], pairs: Pairs) -> NDArray[np.float64]:
        """The coefficients of all variables: x of every dimension, then z of every pair."""
        shapes = {(i, j): (len(singles[i]), len(singles[j])) for i, j in self._keys}
        products = [np.broadcast_to(pairs.get(key, np.zeros(())), shapes[key]).ravel() for key in self._keys]
        return np.concatenate([*map(np.asarray, singles), *products])

    @cached_property
    def _structure(self) -> LinearConstraint:
        """The equations and inequalities of the variables."""
        rows = _Rows()
        counts = [len(dimension.removed) for dimension in self.dimensions]
        starts = np.cumsum([0, *counts])
        options = [start + np.arange(count) for start, count in zip(starts, counts, strict=False)]
        for indices in options:
            rows.add(indices, np.ones(len(indices)), 1.0, 1.0)
        offset = int(starts[-1])
        for i, j in self._keys:
            index = offset + np.arange(counts[i] * counts[j]).reshape(counts[i], counts[j])
            for variables, option in [*zip(index, options[i], strict=True), *zip(index.T, options[j], strict=True)]:
                rows.add([*variables, option], [1.0] * len(variables) + [-1.0], 0.0, 0.0)
            offset += index.size
        for product in self.products:
            first, second = (self.dimensions[i].fractions() for i in (product.first, product.second))
            u = offset + np.arange(counts[product.first])
            v = u[-1] + 1 + np.arange(counts[0])
            for variable, option in [*zip(u, options[product.first], strict=True), *zip(v, options[0], strict=True)]:
                rows.add([variable, option], [1.0, -1.0], -np.inf, 0.0)
            rows.add([*u, *options[product.second]], [*np.ones(len(u)), *-second], 0.0, 0.0)
            rows.add([*v, *u], [*np.ones(len(v)), *-first], 0.0, 0.0)
            offset = int(v[-1]) + 1
        return rows.constraint(offset)

    def _solve(
        self,
        objective: NDArray[np.float64],
        limit: float | None = None,
        allowed: frozenset[str] | None = None,
        most: float | None = None,
    ) -> tuple[int, ...] | None:
        """The options at the minimum of an objective; None if no choice is within the limits of cost and loss."""
        constraints = [self._structure]
        if limit is not None:  # relative to the dense cost, for the solver's absolute tolerance
            constraints.append(LinearConstraint(self._costs[None] / self.dense, ub=limit / self.dense - 1))
        if most is not None:
            scale = _scale(self._losses)
            constraints.append(LinearConstraint(self._losses[None] / scale, ub=most / scale))
        upper, integral, start = np.ones(len(objective)), np.zeros(len(objective)), 0
        for dimension in self.dimensions:
            count = len(dimension.removed)
            integral[start : start + count] = 1
            if allowed is not None and dimension.name not in allowed:
                upper[start + 1 : start + count] = 0
            start += count
        result = milp(
            objective / _scale(objective),
            integrality=integral,
            bounds=Bounds(0, upper),
            constraints=constraints,
            options={"mip_rel_gap": 0.0},
        )
        if result.status == 2:  # infeasible
            return None
        if result.x is None:
            raise MoonshotError(f"the integer program was not solved: {result.message}")
        ends = np.cumsum([len(dimension.removed) for dimension in self.dimensions])[:-1]
        return tuple(int(options.argmax()) for options in np.split(result.x[:start], ends))


class _Rows:
    """The rows of a constraint, low ≤ Σ value · variable ≤ high."""

    def __init__(self) -> None:
        self.variables, self.values, self.bounds = (
            list[NDArray[Any]](),
            list[NDArray[Any]](),
            list[tuple[float, float]](),
        )

    def add(self, variables: ArrayLike, values: ArrayLike, low: float, high: float) -> None:
        self.variables.append(np.asarray(variables, np.int32))  # `milp` of scipy 1.13 does not support int64
        self.values.append(np.asarray(values, float))
        self.bounds.append((low, high))

    def constraint(self, total: int) -> LinearConstraint:
        """The constraint of this number of variables."""
        ends = np.cumsum([0, *map(len, self.variables)]).astype(np.int32)
        places = np.concatenate(self.values), np.concatenate(self.variables), ends
        matrix = csr_array(places, shape=(len(self.bounds), total))
        return LinearConstraint(matrix, *np.array(self.bounds).T)


def _scale(coefficients: NDArray[np.float64]) -> float:
    """The largest magnitude of some coefficients, relative to which the solver's tolerances hold; 1 if all are 0."""
    return float(np.abs(coefficients).max()) or 1.0
