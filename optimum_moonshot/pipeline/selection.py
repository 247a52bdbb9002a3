"""The model of a run, and the layers, patterns and λ that a configuration selects in it, without calibration data."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ..config import MoonshotConfig
from ..distributed.ranks import SINGLE_PROCESS, Ranks
from ..errors import MoonshotError, error_context, require
from ..model.layers import NamedParameter, PrunableLayer, Structure, find_structure
from ..model.losses import Loss
from ..model.model_info import takes_images
from ..model.structured_groups import structured_patterns
from ..model.word_embeddings import rounded_to, word_embeddings
from ..objective.grid import BITS, Grid
from ..objective.linalg import all_finite
from ..objective.patterns import Experts, MixedNM, Pattern, Structured
from ..reports.record import PruningRecord
from ..solvers import Solver

# The note on a structured pattern, which cannot have a different sparsity for every layer.
ONE_WIDTH = 'allocation="fisher": uniform with pattern="structured", since the blocks of a compact model have one width'


@dataclasses.dataclass(frozen=True)
class DenseTeacher:
    """The dense model that a recovery reproduces, where parts of it were removed before the run."""

    model: nn.Module
    removed: tuple[int, ...] = ()  # the blocks that were removed, by their indices in it
    merged: tuple[int, ...] = ()  # those of them that the blocks before them replace, by a linear map
    basis: Tensor | None = None  # [d, d']: a hidden state h of it is h @ basis in the run's model; None: h itself


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model with its tokenizer and processor, as a caller of the pruner gives them.

    `loss` (model output, inputs) → [B] replaces the cross-entropy from which the Fisher loss starts.
    """

    model: nn.Module
    tokenizer: Any = None
    processor: Any = None
    loss: Loss | None = None
    progress: bool = True  # show bars
    ranks: Ranks = SINGLE_PROCESS  # the processes of the run
    teacher: DenseTeacher | None = None  # of a recovery; None: the model before the run
    notes: tuple[str, ...] = ()  # on the conditions of the run, for its report

    @property
    def narrowed(self) -> bool:
        """Whether directions of the residual stream were removed before the run, so that every block differs."""
        return self.teacher is not None and self.teacher.basis is not None

    def require_one_process(self, call: str) -> None:
        """Raise `MoonshotError` if several processes make a call that they cannot share."""
        require(self.ranks.size == 1, f"{call} runs in one process", hint="start it without a launcher")


@dataclasses.dataclass(frozen=True)
class Selection:
    """The layers that a configuration chooses in a model, with the pattern and λ of each."""

    config: MoonshotConfig
    solver: Solver
    structure: Structure
    patterns: Mapping[str, Pattern | MixedNM]  # of every layer, by its name; before an allocation
    lam: float  # the configuration's, or the default for this kind of model
    fisher: str  # likewise: "rows" or "shared"
    kind: str  # of the model's inputs, on which defaults depend: "vision" or "language"
    notes: tuple[str, ...] = ()

    @property
    def settings(self) -> dict[str, str]:
        """All settings that change the result, by the field of the configuration."""
        values = {**json.loads(self.config.fingerprint()), "lam": self.lam, "fisher": self.fisher}
        return {name: json.dumps(value) for name, value in values.items()}

    @property
    def layers(self) -> list[PrunableLayer]:
        """In the order of pruning: the layers of the blocks, then the layers outside of them."""
        return list(self.structure.layers())

    def lam_of(self, layer: PrunableLayer) -> float:
        """λ of a layer: 1 where the Fisher loss is restricted to attention and the layer does not belong to it."""
        return self.lam if self.config.fisher_layers == "all" or layer.attention else 1.0

    def pattern_of(self, layer: PrunableLayer, allocated: Pattern | MixedNM | None = None) -> Pattern:
        """The pattern of a layer, from an allocation if it has one, with the grid of its survivors."""
        pattern = self.patterns[layer.name] if allocated is None else allocated
        pattern = pattern.nearest if isinstance(pattern, MixedNM) else pattern
        grid = pattern.grid if self.config.has_budget else self.config.grid
        return pattern if grid is None else dataclasses.replace(pattern, grid=grid.with_dtype(layer.parameter.dtype))

    def embeddings(self, model: nn.Module) -> list[NamedParameter]:
        """The word embeddings of the model that are rounded."""
        return [] if self.config.embedding_grid is None else word_embeddings(model, self.layers)

    def rounded(self, embedding: Tensor) -> Tensor:
        """A word embedding [rows, d_in] on the grid of the configuration, which has one."""
        assert self.config.embedding_grid is not None
        return rounded_to(self.config.embedding_grid, embedding)

    @property
    def needs_gradients(self) -> bool:
        """Whether some layer has a Fisher loss."""
        return any(self.lam_of(layer) < 1 for layer in self.structure.layers())

    @property
    def needs_losses(self) -> bool:
        """Whether a backward pass starts from the samples' losses: for the layers, an allocation, or a rotation."""
        config = self.config
        rotates_by_gradients = config.rotation is not None and config.rotation_weights == "fisher"
        return rotates_by_gradients or config.allocation == "fisher" or self.needs_gradients

    @property
    def shares_fisher(self) -> bool:
        """Whether the rows of a layer share a Fisher matrix; a diagonal objective has a diagonal for every row."""
        return self.fisher == "shared" and not self.solver.objective.diagonal_only

    @property
    def recompute(self) -> bool | None:
        """Whether the statistics are those of the pruned prefix; None where that depends on the model's blocks.

        By default where it takes one more forward pass: by λ = 1, or by token weights of a Fisher term that rows share.
        """
        if self.config.recompute is not None:
            return self.config.recompute
        structured = isinstance(self.config.parsed_pattern, Structured | Experts)
        cheap = self.shares_fisher or not self.needs_gradients
        return None if cheap and self.kind == "language" and self.solver.calibrated and not structured else False

    def with_lam(self, config: MoonshotConfig) -> "Selection":
        """The same layers and patterns by a configuration that differs in λ alone."""
        return dataclasses.replace(self, config=config, lam=config.resolve_lam(self.kind))

    def of_the_dense_model(self, lam: float) -> "Selection":
        """The same layers, all at one λ, by statistics of the dense model: for passes before the run."""
        return dataclasses.replace(
            self, config=dataclasses.replace(self.config, fisher_layers="all", recompute=False), lam=lam
        )


def select(model: nn.Module, config: MoonshotConfig) -> Selection:
    """Select the layers of a model, which stays as it is (structured patterns run a probe through it).

    Raises:
        MoonshotError: nothing is chosen, the pattern fits no layer, or a layer's dtype cannot be quantized.
    """
    if config.rotation is not None:
        check_dense(model, "a rotation", "rotate", "rotation")
    structure, solver = find_structure(model, config.targets, config.ignore), config.make_solver()
    pattern = config.parsed_pattern
    patterns: Mapping[str, Pattern | MixedNM]
    notes: list[str] = []
    if isinstance(pattern, Structured):
        structure, groups, notes = structured_patterns(model, structure, pattern, config.targets is not None)
        rules = config.pattern_rules.of(groups)
        patterns = {
            name: dataclasses.replace(pattern, sparsity=rules[name].sparsity) for name, pattern in groups.items()
        }
        if config.allocation == "fisher":
            config, notes = dataclasses.replace(config, allocation="uniform"), [*notes, ONE_WIDTH]
    else:
        patterns = config.pattern_rules.of(layer.name for layer in structure.layers())
    structure = _fitting(structure, patterns, solver, config)
    if config.bits is not None or config.has_budget:
        for layer in structure.layers():
            with error_context(layer.name):
                Grid(BITS[0], config.quant_group).with_dtype(layer.parameter.dtype)
    kind = "vision" if takes_images(model) else "language"
    lam, fisher = config.resolve_lam(kind), config.resolve_fisher(kind)
    return Selection(config, solver, structure, patterns, lam, fisher, kind, tuple(notes))


def select_experts(model: nn.Module, config: MoonshotConfig) -> Selection:
    """The parameters of all experts, as layers: they have to be finite, and the data are observed at them."""
    structure = find_structure(model)

    def experts(layers: tuple[PrunableLayer, ...]) -> tuple[PrunableLayer, ...]:
        return tuple(layer for layer in layers if layer.separate and layer.groups > 1)

    blocks = tuple(dataclasses.replace(block, layers=experts(block.layers)) for block in structure.blocks)
    structure = Structure(blocks, experts(structure.outside))
    require(
        any(structure.layers()),
        f"{type(model).__name__} has no experts in fused parameters; give a mixture of experts",
        field="pattern",
        value=Experts.kind,
    )
    pattern = config.parsed_pattern
    assert isinstance(pattern, Experts)
    patterns = dict.fromkeys((layer.name for layer in structure.layers()), pattern)
    kind = "vision" if takes_images(model) else "language"
    return Selection(config, config.make_solver(), structure, patterns, config.resolve_lam(kind), "rows", kind)


def check_dense(model: nn.Module, change: str, verb: str, field: str | None = None) -> None:
    """Check that a model was not pruned, unless it became smaller and has no zeros to keep.

    Args:
        model: to be changed.
        change: of all its weights, such as "a rotation".
        verb: of the change, such as "rotate".
        field: that demands it.

    Raises:
        MoonshotError: the change would fill the zeros of a pruned model, or move quantized weights off their grids.
    """
    record = PruningRecord.of(model)
    if record is None:
        return
    smaller = record.compaction is not None and not record.compaction.get("zeros") and not record.grids
    lost = "zeros and quantized weights" if record.grids else "zeros"
    message = f"the model is pruned already ({record.config['pattern']}), and {change} would not keep its {lost}"
    require(smaller, message, field=field, hint=f"{verb} the dense model, then prune it")


def _fitting(
    structure: Structure, patterns: Mapping[str, Pattern | MixedNM], solver: Solver, config: MoonshotConfig
) -> Structure:
    """Without the layers that their pattern does not fit or that the solver cannot take, each with the reason."""
    skipped = dict(structure.skipped)
    for layer in structure.layers():
        pattern = patterns[layer.name]
        if not pattern.fits(layer.shape):
            skipped[layer.name] = f"its {layer.shape[1]} inputs do not divide into groups for {pattern}"
        elif layer.groups > 1 and not (solver.grouped or layer.separate):
            skipped[layer.name] = f"a grouped convolution, which solver={config.solver!r} does not take"

    lists = [*(block.layers for block in structure.blocks), structure.outside]
    *inside, outside = (tuple(layer for layer in layers if layer.name not in skipped) for layers in lists)
    if not outside and not any(inside):
        raise MoonshotError(f"it fits no layer: {skipped}", field="pattern", value=config.pattern)
    blocks = zip(structure.blocks, inside, strict=True)
    return Structure(tuple(dataclasses.replace(block, layers=layers) for block, layers in blocks), outside, skipped)


def check_weight(layer: PrunableLayer) -> None:
    """Check that a layer's weight, which is onloaded, can be pruned.

    Raises:
        MoonshotError: the weight is on no device, or has NaN or infinite values.
    """
    weight = layer.matrix
    message, hint = f"{layer.name}: its weight is on the meta device", "load the model's weights"
    require(weight.device.type != "meta", message, hint=hint)
    require(all_finite(weight), f"{layer.name}: its weight holds NaN or infinite values")
