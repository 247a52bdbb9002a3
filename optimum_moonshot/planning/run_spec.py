"""A run as far as it is known before it: what a plan asks of layers, batches and the run's own decisions."""

import dataclasses

import torch

from ..calibration.storage import Storage
from ..devices import is_gpu
from ..model.layers import Block, PrunableLayer
from ..objective.patterns import MixedNM, Pattern
from ..objective.problem_size import ProblemSize, ruler_bytes
from ..pipeline.selection import Selection
from ..pipeline.spec import StatisticsSpec
from ..pipeline.under_calibrated_experts import is_under_calibrated
from .block_footprint import ModelFootprint
from .offloaded import Away

CPU = torch.device("cpu")
# What a C library keeps of freed tensors within a phase, at most: those of up to 32 MiB, twice.
KEPT_BYTES = 64 * 2**20


@dataclasses.dataclass(frozen=True)
class RunSpec:
    """A run as far as it is known before it."""

    selection: Selection
    sequential: tuple[tuple[Block, ...], ...]
    non_sequential: tuple[Block, ...]
    footprint: ModelFootprint
    samples: int  # N
    sizes: tuple[int, ...]  # samples of each batch
    tokens: int | None  # of a sample
    vocabulary: int
    itemsize: int  # of the model's numbers
    storage: Storage
    resumes: bool  # results lie in a folder
    kind: type[StatisticsSpec] = StatisticsSpec
    away: Away | None = None  # blocks that are elsewhere

    @property
    def kept(self) -> int:
        """What the C library keeps in host memory of what every batch allocates and frees."""
        passing = [each.observed for each in self.footprint.blocks.values()] or [self.footprint.whole]
        logits = self.logits_bytes() if self.selection.needs_gradients else 0
        return min(KEPT_BYTES, max(*passing, logits)) if self.storage.device.type == "cpu" else 0

    @property
    def batch(self) -> int:
        """Samples of the largest."""
        return max(self.sizes)

    @property
    def statistics(self) -> StatisticsSpec:
        """Of the run."""
        patterns = {layer.name: [pattern_of(self.selection, layer)] for layer in self.selection.layers}
        return self.kind.of(self.selection, patterns, self.samples)

    @property
    def keeps_routing(self) -> bool:
        """Whether every expert keeps the statistics of its own tokens."""
        config = self.selection.config
        return config.expert_tokens != "all" and config.under_calibrated_experts == "routed"

    def under_calibrated(self, layer: PrunableLayer) -> int:
        """How many experts of a layer are shown all tokens, if its router sends each as many as any other."""
        config, choices = self.selection.config, self.footprint.choices.get(layer.name)
        everyone = config.expert_tokens == "all"
        replaced = everyone or config.under_calibrated_experts == "all"
        if choices is None or not replaced:
            return 0
        tokens = self.samples * (self.tokens or 0) * choices // len(layer.parameter)
        return layer.groups if everyone or is_under_calibrated(tokens, layer.shape[1]) else 0

    def logits_bytes(self) -> int:
        """A batch's logits with their gradient, and one sample's in float32, three times."""
        if not self.tokens:
            return 0
        sample = self.tokens * self.vocabulary
        return 2 * self.batch * sample * self.itemsize + (12 if self.itemsize == 4 else 16) * sample


def pattern_of(selection: Selection, layer: PrunableLayer) -> Pattern:
    """What a layer is pruned by, as far as it is known before an allocation divides."""
    pattern = selection.patterns[layer.name]
    return pattern.nearest if isinstance(pattern, MixedNM) else pattern


def problem_size(outline: RunSpec, layer: PrunableLayer, rows: int | None = None) -> ProblemSize:
    """What the solver is given of a layer: of one expert, where it is many.

    Args:
        outline: of the run.
        layer: any of it.
        rows: of a chunk; None is all.
    """
    selection, lam = outline.selection, outline.selection.lam_of(layer)
    d_out, d_in = layer.shape
    pattern, separate = pattern_of(selection, layer), layer.separate
    plan = outline.statistics.plan(layer)
    device = outline.storage.device
    return ProblemSize(
        rows=rows or (d_out // layer.groups if separate else d_out),
        inputs=d_in,
        samples=outline.samples if lam < 1 else 0,
        groups=1 if separate else layer.groups,
        column_block=selection.solver.column_block(d_in, pattern),
        compressed=plan.column_block is not None,
        lam=lam,
        sparsity=pattern.sparsity,
        device=device,
        threads=1 if is_gpu(device) else torch.get_num_threads(),
    )


def solver_bytes(outline: RunSpec, layer: PrunableLayer, rows: int | None = None) -> int:
    """What solving takes beside the statistics, with what measuring its losses takes, and the weights of all experts.

    Args:
        outline: as for `problem_size`.
        layer: as for `problem_size`.
        rows: as for `problem_size`.
    """
    size = problem_size(outline, layer, rows)
    solver = outline.selection.solver
    work = solver.work(size, pattern_of(outline.selection, layer))
    return max(work.bytes, ruler_bytes(size, solver.objective.diagonal_only)) + (
        weight_bytes(layer) if layer.separate else 0
    )


def weight_bytes(layer: PrunableLayer) -> int:
    """Of a layer's matrix in the model's dtype."""
    d_out, d_in = layer.shape
    return d_out * d_in * layer.parameter.dtype.itemsize
