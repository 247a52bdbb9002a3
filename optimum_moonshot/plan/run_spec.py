"""A run before it starts: its layers, data and memory, and the sizes that follow from them."""

import dataclasses
from functools import cached_property

import torch
from torch import nn

from ..calibration.storage import Storage
from ..devices import is_gpu
from ..errors import Option, Text, require
from ..model.layers import Block, PrunableLayer, Structure, is_on_disk
from ..model.offload import RESIDENT
from ..objective.patterns import MixedNM, Pattern
from ..objective.problem_size import ProblemSize, ruler_bytes
from ..pipeline.selection import Selection
from ..pipeline.spec import StatisticsSpec
from ..pipeline.under_calibrated_experts import is_under_calibrated
from ..solvers.quantization import quantization_bytes
from .footprint import ModelFootprint
from .report import DISK, HOST

# The freed memory that a C library retains within a phase, at most: glibc's trim threshold at the end of its heap,
# which is twice the largest tensor below 32 MiB, and as much in holes between tensors that live longer.
RETAINED_BYTES = 128 * 2**20


@dataclasses.dataclass(frozen=True)
class OffloadedBlocks:
    """Bytes of the offloaded blocks, of which one at a time is onloaded."""

    largest: int
    total: int
    place: str  # "cpu" or "disk"


def offloaded_blocks(structure: Structure, offload: str | None, on_cpu: bool) -> OffloadedBlocks | None:
    """The offloaded blocks of a model; None if all are resident.

    `offload` is "cpu" or "disk" for a model without weights, which `on_cpu` must not be offloaded to the CPU.
    """
    blocks = [block for block in structure.blocks if offload is not None or block.weights is not RESIDENT]
    if not blocks:
        return None
    sizes = [module_bytes(block.module) for block in blocks]
    place = offload or (DISK if is_on_disk(blocks) else HOST)
    hint = Text("use {}, or give {}", Option("offload", "disk"), "device_memory")
    message = "the model is on the CPU anyway"
    require(place != HOST or not on_cpu, message, field="offload", value="cpu", hint=hint)
    return OffloadedBlocks(max(sizes), sum(sizes), place)


def module_bytes(module: nn.Module) -> int:
    """Bytes of all parameters and buffers, shared ones once."""
    return sum({id(each): each.nbytes for each in (*module.parameters(), *module.buffers())}.values())


@dataclasses.dataclass(frozen=True)
class RunSpec:
    """A run: layers, sequences of blocks, calibration data and memory."""

    selection: Selection
    sequential: tuple[tuple[Block, ...], ...]
    non_sequential: tuple[Block, ...]
    footprint: ModelFootprint
    sizes: tuple[int, ...]  # samples of each batch
    samples: int  # N, in all
    tokens: int | None  # of a sample
    vocabulary: int
    itemsize: int  # bytes of a number in the model's dtype
    storage: Storage
    resumes: bool  # results are written to a folder
    kind: type[StatisticsSpec] = StatisticsSpec
    offloaded: OffloadedBlocks | None = None

    @property
    def device(self) -> torch.device:
        """The model's device."""
        return self.storage.device

    @property
    def batch(self) -> int:
        """Samples of the largest batch."""
        return max(self.sizes)

    @cached_property
    def statistics(self) -> StatisticsSpec:
        patterns = {layer.name: [pattern_of(self.selection, layer)] for layer in self.selection.layers}
        return self.kind.of(self.selection, patterns, self.samples)

    def all_token_experts(self, layer: PrunableLayer) -> int:
        """The number of experts that get all tokens, if the router sends the same number of tokens to each."""
        config, top_k = self.selection.config, self.footprint.top_k.get(layer.name)
        if top_k is None or config.under_calibrated_experts != "all":
            return 0
        tokens = self.samples * (self.tokens or 0) * top_k // len(layer.parameter)
        return layer.groups if is_under_calibrated(tokens, layer.shape[1]) else 0

    def logits_bytes(self) -> int:
        """A batch's logits with their gradient, and three float32 copies of one sample's."""
        if not self.tokens:
            return 0
        sample = self.tokens * self.vocabulary
        return 2 * self.batch * sample * self.itemsize + (12 if self.itemsize == 4 else 16) * sample

    @cached_property
    def retained(self) -> int:
        """Host memory that the C library retains of the tensors that every batch allocates and frees."""
        passes = [each.observed for each in self.footprint.blocks.values()] or [self.footprint.whole]
        logits = self.logits_bytes() if self.selection.needs_gradients else 0
        return min(RETAINED_BYTES, max(*passes, logits)) if self.device.type == "cpu" else 0


def pattern_of(selection: Selection, layer: PrunableLayer) -> Pattern:
    """The pattern of a layer, before an allocation changes it."""
    pattern = selection.patterns[layer.name]
    return selection.on_grid(pattern.nearest if isinstance(pattern, MixedNM) else pattern, layer)


def problem_size(run: RunSpec, layer: PrunableLayer, rows: int = 0) -> ProblemSize:
    """The size of a layer's problem, or of one expert's; `rows` are those of a slice, 0 is all."""
    selection, lam, device = run.selection, run.selection.lam_of(layer), run.device
    d_out, d_in = layer.shape
    pattern, separate = pattern_of(selection, layer), layer.separate
    return ProblemSize(
        rows=rows or (d_out // layer.groups if separate else d_out),
        inputs=d_in,
        samples=run.samples if lam < 1 else 0,
        groups=1 if separate else layer.groups,
        column_block=selection.solver.column_block(d_in, pattern),
        compressed=run.statistics.plan(layer).column_block is not None,
        lam=lam,
        sparsity=pattern.sparsity,
        device=device,
        threads=1 if is_gpu(device) else torch.get_num_threads(),
    )


def solver_bytes(run: RunSpec, layer: PrunableLayer, rows: int) -> int:
    """Bytes to solve a layer and to measure its losses, besides its statistics; with the weights of all experts."""
    size, solver = problem_size(run, layer, rows), run.selection.solver
    pattern = pattern_of(run.selection, layer)
    work = solver.work(size, pattern)
    weights = weight_bytes(layer) if layer.separate else 0
    quantizing = 0 if pattern.grid is None else quantization_bytes(size)
    return max(work.bytes, quantizing, ruler_bytes(size, solver.objective.diagonal_only)) + weights


def weight_bytes(layer: PrunableLayer) -> int:
    """Bytes of a layer's matrix in the model's dtype."""
    d_out, d_in = layer.shape
    return d_out * d_in * layer.parameter.dtype.itemsize
