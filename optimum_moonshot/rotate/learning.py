"""Learns rotations: Adam on skew-symmetric matrices, which the Cayley transform makes orthogonal.

    R = (I - S)⁻¹ (I + S),   S = (A - Aᵀ) / 2

is orthogonal for every A, and the identity at A = 0. It costs one linear solve in each direction, while the matrix
exponential takes a dozen products of twice the width. If R must fix the vector of ones, a Householder reflection maps
that vector to the first unit vector, and the Cayley transform acts on the other coordinates.

`scale` scales rows that are compared with each other to units of the model's loss. A solver that compares the weights
of several rows gives all outputs the same weight. The effect of output k on the loss is ``D_k = Σ δ_k²`` of its
gradients (as in K-FAC, Martens and Grosse, arXiv 1503.05671). If a later column can compensate a factor on a row (up
and down, v and o), the row is multiplied by ``√D_k`` and the column divided by it. Their product does not change, and
neither do the scores ``w² / [H⁻¹]`` of the column; the scores of the row are then in units of the loss.
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..config import MoonshotConfig
from ..model.layers import PrunableLayer
from .objective import Objective
from .spaces import Space

# Learning stops if this many steps reduce the objective by less than this fraction. If the steps sample rows, the
# objective of all rows is evaluated once in so many steps; it takes a third of the time of a step with all rows.
PATIENCE, GAIN = 10, 1e-3
# A model with a matrix of more than WIDE rows or columns learns on a sample of rows, in fewer steps. SmolLM2-135M at
# 2:4, ALPS, λ = 1: KL divergence 0.650 in 750 CPU seconds; by all rows in 100 steps 0.634 in 1,106; without a rotation
# 0.703 in 276. With rotation_weights="equal", 0.639 in 563.
WIDE, STEPS = 1024, 100
SAMPLED_ROWS, FEWER_STEPS = 256, 50
# The largest factor, and the inverse of the smallest, so that the scaled weights fit 16 bits.
LARGEST = 16.0
BETAS, EPSILON = (0.9, 0.999), 1e-12
_PERMUTATION, _FACTORS = "permutation ", "factors "


@dataclass
class Learned:
    """The result of learning, and the state that is needed to resume it.

    `tensors` contains, for each width of spaces, the current and the best A, and Adam's two moments. Permutations
    (permutation_search.py) and factors (`scale`) are added afterwards.
    """

    tensors: dict[str, Tensor]
    # The objective of all rows: before every step, or before every tenth where the steps sample rows, and at the end.
    history: list[float] = field(default_factory=list)
    steps: int = 0
    seconds: float = 0.0
    done: bool = False  # the rotations are learned
    permutations: dict[str, Tensor] = field(default_factory=dict)  # space → int64 [count, width]
    permutation_gains: dict[str, float] = field(default_factory=dict)  # space → reduction of the objective
    factors: dict[str, Tensor] = field(default_factory=dict)  # space → [count, width]
    finished: bool = False  # with permutations and factors

    @property
    def before(self) -> float:
        return self.history[0]

    @property
    def learned(self) -> float:
        """The objective at the best evaluation, never more than before."""
        return min(self.history)

    @property
    def after(self) -> float:
        """The objective at the best evaluation, with the permutations."""
        return max(0.0, self.learned - sum(self.permutation_gains.values()))

    def saved(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The arguments of `load`: tensors in host memory, and JSON types."""
        by_prefix = {"": self.tensors, _PERMUTATION: self.permutations, _FACTORS: self.factors}
        tensors = {
            prefix + name: tensor.detach().cpu().contiguous()
            for prefix, by_name in by_prefix.items()
            for name, tensor in by_name.items()
        }
        names = ("history", "steps", "seconds", "done", "permutation_gains", "finished")
        return tensors, {name: getattr(self, name) for name in names}

    @classmethod
    def load(cls, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> "Learned":
        """The inverse of `saved`."""
        by_prefix: dict[str, dict[str, Tensor]] = {_PERMUTATION: {}, _FACTORS: {}, "": {}}
        for name, tensor in tensors.items():
            prefix = next(prefix for prefix in by_prefix if name.startswith(prefix))
            by_prefix[prefix][name.removeprefix(prefix)] = tensor
        return cls(by_prefix[""], permutations=by_prefix[_PERMUTATION], factors=by_prefix[_FACTORS], **values)


def learning_size(config: MoonshotConfig, layers: Iterable[PrunableLayer]) -> tuple[int, int | None]:
    """The most steps that learning takes, and the rows of every matrix that a step samples; None for all."""
    wide = any(max(layer.shape) > WIDE for layer in layers)
    steps, rows = (FEWER_STEPS, SAMPLED_ROWS) if wide else (STEPS, None)
    return config.rotation_steps or steps, config.rotation_rows or rows


def learn(
    objective: Objective,
    spaces: Sequence[Space],
    steps: int,
    rate: float,
    device: torch.device,
    state: Learned | None = None,
    rows: int | None = None,
    step_done: Callable[[Learned], None] = lambda state: None,
    attempt: Callable[[Callable[[], None]], None] = lambda step: step(),
) -> Learned:
    """Minimise the objective of a model whose norms' gains are folded, starting from the identity.

    Learning ends after `steps`, or when the objective no longer decreases. `rate`, Adam's learning rate of A in
    radians, follows a cosine. Spaces to permute or scale are skipped; spaces outside the objective keep their basis.
    The `state` of an earlier call with the same arguments resumes it; `step_done` receives the state after every step.
    `attempt` calls a step, and may repeat it: a step that fails does not change the state.

    Each step takes the gradient of a new sample of `rows` of every matrix, None for all. A rotation fitted to the same
    64 rows in all steps reduced the objective of these rows by 36%, but of all rows by 1% (SmolLM2-135M, 2:4).
    """
    families = _families(spaces)
    state = state or Learned(_start(families))
    state.tensors = {name: tensor.to(device) for name, tensor in state.tensors.items()}
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")  # TF32 on GPUs, which is precise enough for learning
    try:
        while not state.done:
            started = time.perf_counter()
            attempt(partial(_step, objective, families, state, steps, rate, rows))
            state.seconds += time.perf_counter() - started
            step_done(state)
    finally:
        torch.set_float32_matmul_precision(precision)
    return state


def rotations(spaces: Sequence[Space], state: Learned) -> dict[Space, Tensor]:
    """The best rotations, [count, width, width] in float64 in host memory, and all permutations and factors."""
    learned: dict[Space, Tensor] = {}
    for name, family in _families(spaces).items():
        skew = state.tensors[f"{name}.best"].cpu().double()
        learned |= dict(zip(family, _orthogonal(skew, family).split([space.count for space in family]), strict=True))
    others = state.permutations | state.factors
    return learned | {space: others[space.name] for space in spaces if space.name in others}


def _step(
    objective: Objective,
    families: Mapping[str, list[Space]],
    state: Learned,
    steps: int,
    rate: float,
    rows: int | None,
) -> None:
    """Evaluate the objective at A where it is due, then take one step of Adam on A, unless learning is done.

    The state changes only at the end, after everything that may run out of memory, so that a failed step can be
    repeated.
    """
    number, patience = state.steps, PATIENCE if rows is None else 1
    parameters = {name: state.tensors[f"{name}.at"].requires_grad_(number < steps) for name in families}
    whole: dict[str, Tensor] = {}
    leaves: dict[Space, Tensor] = {}
    for name, family in families.items():
        whole[name] = _orthogonal(parameters[name], family)
        by_space = whole[name].detach().split([space.count for space in family])
        leaves |= {space: leaf.requires_grad_(number < steps) for space, leaf in zip(family, by_space, strict=True)}
    history, done = state.history, False
    changed: dict[str, Tensor] = {}
    if rows is None or number % PATIENCE == 0 or number >= steps:
        at = leaves if rows is None else {space: leaf.detach() for space, leaf in leaves.items()}
        history = [*history, objective.value(at)]
        if history[-1] < min(state.history, default=math.inf):
            changed = {f"{name}.best": parameters[name].detach().clone() for name in families}
        stalled = len(history) > patience and min(history) > (1 - GAIN) * min(history[:-patience])
        done = number >= steps or not families or history[0] == 0 or stalled
    if not done:
        if rows is not None:
            objective.sampled(rows, seed=number).value(leaves)
        now = rate * (1 + math.cos(math.pi * number / steps)) / 2
        for name, family in families.items():
            of_family = [leaves[space] for space in family]
            gradients = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in of_family]
            (gradient,) = torch.autograd.grad(whole.pop(name), parameters[name], torch.cat(gradients))
            changed |= _adam(state.tensors, name, gradient, now, number + 1)
    state.tensors |= changed
    state.history, state.steps, state.done = history, number + (not done), done


@torch.no_grad()
def _adam(tensors: Mapping[str, Tensor], name: str, gradient: Tensor, rate: float, number: int) -> dict[str, Tensor]:
    """One step of Adam (Kingma and Ba, arXiv 1412.6980) on A: the new A and moments."""
    first = tensors[f"{name}.first"].lerp(gradient, 1 - BETAS[0])
    second = tensors[f"{name}.second"].lerp(gradient.square(), 1 - BETAS[1])
    size = (second / (1 - BETAS[1] ** number)).sqrt_().add_(EPSILON)
    at = tensors[f"{name}.at"].detach() - rate / (1 - BETAS[0] ** number) * first / size
    return {f"{name}.at": at, f"{name}.first": first, f"{name}.second": second}


def _families(spaces: Sequence[Space]) -> dict[str, list[Space]]:
    """The spaces to rotate by width: the rotations of one width are one batch."""
    families: dict[str, list[Space]] = {}
    for space in (space for space in spaces if space.rotated):
        families.setdefault(f"{space.width}{'-ones' if space.fixes_ones else ''}", []).append(space)
    return families


def _start(families: Mapping[str, list[Space]]) -> dict[str, Tensor]:
    tensors = {}
    for name, family in families.items():
        size = family[0].width - family[0].fixes_ones
        for kind in ("at", "best", "first", "second"):
            tensors[f"{name}.{kind}"] = torch.zeros(sum(space.count for space in family), size, size)
    return tensors


def _orthogonal(parameters: Tensor, family: list[Space]) -> Tensor:
    """Map A [count, size, size] to R [count, width, width]."""
    skew = (parameters - parameters.mT) / 2
    identity = torch.eye(skew.shape[-1], dtype=skew.dtype, device=skew.device)
    inner = torch.linalg.solve(identity - skew, identity + skew)
    if not family[0].fixes_ones:
        return inner
    width = family[0].width
    outer = torch.nn.functional.pad(inner, (1, 0, 1, 0))
    corner = torch.zeros(width, width, dtype=skew.dtype, device=skew.device)
    corner[0, 0] = 1
    mirror = torch.full((width,), -(width**-0.5), dtype=skew.dtype, device=skew.device)
    mirror[0] += 1  # reflects the first unit vector to the normalised vector of ones
    reflection = torch.eye(width, dtype=skew.dtype, device=skew.device)
    reflection = reflection - 2 * torch.outer(mirror, mirror) / mirror.square().sum()
    return reflection @ (outer + corner) @ reflection


def scale(spaces: Sequence[Space], state: Learned, moments: Mapping[str, Tensor]) -> None:
    """Add the factors of all scaled spaces to a learned state; `moments` has the `OutputMoments` by space name."""
    learned = rotations(spaces, state)
    for space in spaces:
        if not space.scaled or space.name not in moments:
            continue
        moment, change = moments[space.name], None if space.follows is None else learned.get(space.follows)
        if moment.ndim == 3:
            assert change is not None
            moment = (change * (moment @ change)).sum(-2)
        elif change is not None:
            moment = moment.gather(-1, change)
        state.factors[space.name] = factors(moment)


def factors(moment: Tensor) -> Tensor:
    """``√D`` [count, width] divided by its geometric mean, clamped by `LARGEST`; ones if all gradients are 0."""
    size = moment.clamp_min(0).sqrt()
    positive = size > 0
    if not positive.any():
        return torch.ones_like(size)
    return (size / size[positive].log().mean().exp()).clamp(1 / LARGEST, LARGEST)
