"""A run before it starts: its layers, sequences of blocks, calibration data and memory, and the sizes that follow."""

import dataclasses
from functools import cached_property
from typing import NamedTuple

import torch
from torch import nn

from ..calibration.storage import Storage
from ..devices import is_gpu
from ..errors import require
from ..model.layers import Block, PrunableLayer, Structure, is_on_disk
from ..model.weights import RESIDENT
from ..objective.patterns import MixedNM, Pattern
from ..objective.quadratic import ProblemSize, objective_bytes
from ..pipeline.block_sequences import BlockSequence
from ..pipeline.partition import StatisticsSpec
from ..pipeline.selection import Selection
from ..pipeline.under_calibrated_experts import is_under_calibrated
from ..solvers.quantization import quantization_bytes
from .footprint import ModelFootprint
from .report import DISK, HOST

# The freed memory that a C library retains within a phase, at most: glibc's trim threshold at the end of its heap,
# which is twice the largest tensor below 32 MiB, and as much in holes between tensors that live longer.
RETAINED_BYTES = 128 * 2**20


class OffloadedBlocks(NamedTuple):
    """Bytes of the offloaded blocks; one at a time is onloaded."""

    largest: int
    total: int
    place: str  # "cpu" or "disk"


def offloaded_blocks(structure: Structure, offload: str | None, on_cpu: bool) -> OffloadedBlocks | None:
    """The offloaded blocks of a model; None if all are resident.

    `offload` is "cpu" or "disk" for a model without weights; with `on_cpu` it cannot be "cpu".
    """
    blocks = [block for block in structure.blocks if offload is not None or block.weights is not RESIDENT]
    if not blocks:
        return None
    sizes = [module_bytes(block.module) for block in blocks]
    place = offload or (DISK if is_on_disk(blocks) else HOST)
    hint = "use offload='disk', or give device_memory"
    message = "the model is on the CPU anyway"
    require(place != HOST or not on_cpu, message, field="offload", value="cpu", hint=hint)
    return OffloadedBlocks(max(sizes), sum(sizes), place)


@dataclasses.dataclass(frozen=True)
class RunSpec:
    """A run before it starts: layers, sequences of blocks, calibration data and memory."""

    selection: Selection
    sequential: tuple[BlockSequence, ...]
    non_sequential: tuple[Block, ...]
    footprint: ModelFootprint
    sizes: tuple[int, ...]  # samples of each batch
    tokens: int  # of a sample; 0 if samples are not tokens
    vocabulary: int
    storage: Storage
    resumes: bool  # results are written to a folder
    gradients: bool  # whether its passes run backward
    kind: type[StatisticsSpec] = StatisticsSpec
    offloaded: OffloadedBlocks | None = None

    @property
    def device(self) -> torch.device:
        """The model's device."""
        return self.storage.device

    @property
    def samples(self) -> int:
        """N, in all batches."""
        return sum(self.sizes)

    @property
    def batch(self) -> int:
        """Samples of the largest batch."""
        return max(self.sizes)

    @property
    def itemsize(self) -> int:
        """Bytes of a number in the model's dtype."""
        return self.selection.layers[0].parameter.dtype.itemsize

    @property
    def recomputes(self) -> bool:
        """Whether the statistics are those of the pruned prefix, which takes one more pass at every block."""
        in_turn = len(self.sequential) == 1 and not (self.non_sequential or self.selection.structure.outside)
        in_turn &= not (self.gradients and any(layer.separate for layer in self.selection.layers))
        return in_turn if self.selection.recompute is None else self.selection.recompute

    @property
    def result_place(self) -> str:
        """Where results wait for the end of the run."""
        on_disk = self.resumes or (self.offloaded is not None and self.offloaded.place == DISK)
        return DISK if on_disk else HOST

    @cached_property
    def statistics(self) -> StatisticsSpec:
        patterns = {layer.name: [self.pattern(layer)] for layer in self.selection.layers}
        return self.kind.of(self.selection, patterns, self.samples)

    def pattern(self, layer: PrunableLayer) -> Pattern:
        return pattern_of(self.selection, layer)

    def all_token_experts(self, layer: PrunableLayer) -> int:
        """The number of experts that get all tokens, if the router sends the same number of tokens to each."""
        top_k = self.footprint.top_k.get(layer.name)
        if top_k is None or self.selection.config.under_calibrated_experts != "all":
            return 0
        tokens = self.samples * self.tokens * top_k // len(layer.parameter)
        return layer.groups if is_under_calibrated(tokens, layer.shape[1]) else 0

    def logits_bytes(self) -> int:
        """Bytes of a batch's logits with their gradient, and of three float32 copies of one sample's logits."""
        sample = self.tokens * self.vocabulary
        return 2 * self.batch * sample * self.itemsize + (12 if self.itemsize == 4 else 16) * sample

    @cached_property
    def retained(self) -> int:
        """Host memory that the C library retains of the tensors that every batch allocates and frees."""
        passes = [block.observed for block in self.footprint.blocks.values()] or [self.footprint.whole]
        logits = self.logits_bytes() if self.gradients else 0
        return min(RETAINED_BYTES, max(*passes, logits)) if self.device.type == "cpu" else 0

    def problem_size(self, layer: PrunableLayer, rows: int = 0) -> ProblemSize:
        """The size of a layer's problem, or of one expert's; `rows` is the size of a slice of rows, 0 for all."""
        pattern = self.pattern(layer)
        return ProblemSize(
            rows=rows or layer.shape[0] // (layer.groups if layer.separate else 1),
            inputs=layer.shape[1],
            samples=self.samples if self.statistics.needs_rows(layer) else 0,
            groups=1 if layer.separate else layer.groups,
            column_block=self.selection.solver.column_block(layer.shape[1], pattern),
            compressed=self.statistics.plan(layer).column_block is not None,
            lam=self.selection.lam_of(layer),
            sparsity=pattern.sparsity,
            device=self.device,
            threads=1 if is_gpu(self.device) else torch.get_num_threads(),
        )

    @property
    def hidden_bytes(self) -> int:
        """Bytes of the hidden states of all samples between two blocks."""
        return self.footprint.hidden * self.samples // self.batch

    def result_bytes(self, layer: PrunableLayer) -> int:
        """Bytes of a layer's pruned weight; in a file only its survivors and a bit mask."""
        size = weight_bytes(layer)
        survivors = round((1 - self.pattern(layer).sparsity) * size)
        return min(size, survivors + layer.shape[0] * layer.shape[1] // 8) if self.result_place == DISK else size

    def solver_bytes(self, layer: PrunableLayer, rows: int) -> int:
        """Bytes to solve a layer and to measure its losses, besides its statistics; with the weights of all experts."""
        size, solver, pattern = self.problem_size(layer, rows), self.selection.solver, self.pattern(layer)
        quantizing = 0 if pattern.grid is None else quantization_bytes(size)
        losses = objective_bytes(size, solver.objective.diagonal_only)
        weights = weight_bytes(layer) if layer.separate else 0
        return max(solver.workspace(size, pattern), quantizing, losses) + weights


def module_bytes(module: nn.Module) -> int:
    """Bytes of all parameters and buffers, shared ones once."""
    return sum({id(tensor): tensor.nbytes for tensor in (*module.parameters(), *module.buffers())}.values())


def weight_bytes(layer: PrunableLayer) -> int:
    """Bytes of a layer's matrix in the model's dtype."""
    return layer.shape[0] * layer.shape[1] * layer.parameter.dtype.itemsize


def pattern_of(selection: Selection, layer: PrunableLayer) -> Pattern:
    """The pattern of a layer, before an allocation changes it."""
    pattern = selection.patterns[layer.name]
    return selection.on_grid(pattern.nearest if isinstance(pattern, MixedNM) else pattern, layer)
