"""Merge a run of removed blocks into the layer before them: a linear map by least squares, without training.

Many blocks end with a layer whose output they add to the residual stream. The stream behind block a is

    h_a = y + s·(W z + b)

with the inputs z of that layer, and s = 1 for most architectures. Without the blocks a+1 … j of a run, the following
block has the input h_a in place of h_j. The change of the stream is added to the layer, as far as it is linear in z:

    Δ, c = argmin Σ_t ‖Δ z_t + c − (h_j − h_a)_t / s‖² + ρ ‖Δ‖²,    W ← W + Δ,    b ← b + c

over the calibration tokens, with c = 0 for a layer without a bias. ReplaceMe (Shopkhoev et al., arXiv 2505.02819) fits
a map T of the layer's output, W ← T W; the inputs are 2 to 4 times as many as the outputs, and Δ is any matrix. With
Δ = 0 the run is deleted, so the error of the stream never exceeds the error by deletion.

ρ = tr(Σ z zᵀ) / tokens: as if the data had another token for each input, of mean energy, without a change. So the fit
is close to deletion if tokens are few.

For every number of blocks, dynamic programming finds the set of runs with the least sum of losses. The losses of single
blocks are measured first, then the losses of the best quarter of the runs of each length, extended by a block at either
end, until several short runs lose less than a long one: about twice as many runs as the model has blocks.

The layers are found by a probe: a random change of the layer's output changes the block's by s times as much. The
probe fails for a norm behind the layer (Gemma 2), experts, and blocks that are not sequential: such runs are deleted.
"""

import copy
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ..data.batches import Batch
from ..errors import NOT_FINITE, require
from ..model.calls import (
    Arguments,
    close,
    evaluation_mode,
    first_tensor,
    model_device,
    recorded,
    run_model,
    split_hidden,
    to_device,
    without_caches,
)
from ..model.depth import skipping
from ..model.layer_kinds import LinearLayer, PrunableLayer
from ..model.layers import Block, find_structure
from ..model.losses import token_mask
from ..objective.linalg import all_finite
from ..pipeline.inputs import Prepared
from ..pipeline.walk import Stop

# The most bytes for the sums of a pass, if the model is smaller than this.
LEAST_BYTES = 2**30

Run = tuple[int, int]  # the block before a run of removed blocks, and the last of the run


@dataclass(frozen=True, eq=False)
class OutputLayer:
    """The layer whose output, times a scale, a block adds to the residual stream."""

    layer: LinearLayer
    scale: float


@torch.no_grad()
def find_output_layers(model: nn.Module, blocks: Sequence[Block], inputs: Batch) -> dict[int, OutputLayer]:
    """The output layers of blocks into which the following blocks can be merged.

    Args:
        model: in evaluation mode.
        blocks: all, in the model's order, with the layers that may change.
        inputs: a small batch on the model's device.

    Returns:
        The layers by the index of their block, for blocks whose output is the input of the next one.
    """
    layers = dict[int, OutputLayer]()
    with recorded({block.name: block.module for block in blocks}) as calls:
        run_model(model, inputs)
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    for index, (block, following) in enumerate(zip(blocks, blocks[1:], strict=False)):
        if block.name not in calls or following.name not in calls:
            continue
        received = split_hidden(*calls[following.name])[0]
        linear = [layer for layer in block.layers if isinstance(layer, LinearLayer) and uses[id(layer.parameter)] == 1]
        output = _output_layer(block, linear, calls[block.name], received)
        if output is not None:
            layers[index] = output
    return layers


def _output_layer(block: Block, layers: Sequence[LinearLayer], call: Arguments, received: Tensor) -> OutputLayer | None:
    """The output layer of a block, one of `layers`; None unless the next block `received` the block's output."""
    # In float32, since in bfloat16 a change of the MLP beside a change of the attention would pass for rounding.
    arguments = call[0], without_caches(call[1])
    args, kwargs = tree_map_only(
        Tensor, lambda x: x.float() if x.dtype.itemsize == 2 and x.is_floating_point() else x, arguments
    )
    wide = all(parameter.dtype.itemsize > 2 for parameter in block.module.parameters())
    module = block.module if wide else copy.deepcopy(block.module).float()
    output = first_tensor(module(*args, **kwargs))
    if output.shape != received.shape or not close(output.to(received.dtype), received):
        return None
    # The widest first: where attention and MLP are parallel, both pass, and the MLP's output has the larger rank.
    for layer in sorted(layers, key=lambda layer: -layer.shape[1]):
        inside = module.get_submodule(layer.name.removeprefix(f"{block.name}."))
        scale = _scale(replace(layer, modules=(inside,)), output, lambda: module(*args, **kwargs))
        if scale is not None:
            return OutputLayer(layer, scale)
    return None


def _scale(layer: LinearLayer, output: Tensor, call: Callable[[], Any]) -> float | None:
    """The factor s from a change of a layer's output to the change of its block's output; None if it is no constant."""
    changes = list[Tensor]()

    def change(_: PrunableLayer, inputs: Tensor, before: Tensor) -> Tensor:
        random = torch.randn(before.shape, generator=torch.Generator().manual_seed(0)).to(before)
        changes.append(random * output.square().mean().sqrt())
        return before + changes[-1]

    with ExitStack() as hooks:
        layer.watch(change, hooks)
        after = first_tensor(call())
    if len(changes) != 1 or changes[0].numel() != output.numel():
        return None
    given, difference = changes[0].reshape(output.shape), after - output
    scale = float((given * difference).sum() / given.square().sum().clamp(min=torch.finfo(torch.float32).tiny))
    return scale if scale > 0 and close(difference, scale * given) else None


def _bias(layer: PrunableLayer) -> nn.Parameter | None:
    return layer.module._parameters.get("bias")


@dataclass
class _Sums:
    """The sums over the calibration tokens for the updates of one layer, in host memory."""

    tokens: int = 0
    gram: Tensor | None = None  # Σ x xᵀ, [d_in, d_in]; with a last row and column for the bias, if the layer has one
    cross: dict[int, Tensor] = field(default_factory=dict)  # last block of the run → Σ x (h_j − h_a)ᵀ, [d_in, d_out]

    def add(self, inputs: Tensor) -> None:
        gram = (inputs.T @ inputs).cpu()
        self.tokens, self.gram = self.tokens + len(inputs), gram if self.gram is None else self.gram + gram

    def add_change(self, last: int, inputs: Tensor, change: Tensor) -> None:
        cross = (inputs.T @ change).cpu()
        self.cross[last] = self.cross[last] + cross if last in self.cross else cross

    def updates(self, output: OutputLayer) -> dict[int, Tensor]:
        """last block of the run → Δ, [d_out, d_in] in float64, with a last column for the bias."""
        assert self.gram is not None
        gram, width = self.gram.double(), output.layer.shape[1]
        finite = all(map(all_finite, (gram, *self.cross.values())))
        require(finite, f"the inputs of {output.layer.name} or the residual stream contain NaN", hint=NOT_FINITE)
        diagonal = gram.diagonal()
        # Inputs that are always 0 would make it singular; their columns of Δ are 0 with any ridge.
        ridge = float(diagonal[:width].sum()) / self.tokens
        diagonal[:width] += ridge or 1.0
        factor = torch.linalg.cholesky(gram)
        return {
            last: torch.cholesky_solve(cross.double(), factor).T / output.scale for last, cross in self.cross.items()
        }


class _Observer:
    """Hooks that add up the sums of some runs, removed when `hooks` closes."""

    def __init__(self, blocks: Sequence[Block], outputs: Mapping[int, OutputLayer], runs: Collection[Run]):
        self.outputs, self.last = outputs, max(last for _, last in runs)
        self.mask: Tensor | None = None
        self.sums = {before: _Sums() for before, _ in runs}
        self.lasts = {before: {last for first, last in runs if first == before} for before in self.sums}
        self.inputs, self.streams, self.hooks = dict[int, Tensor](), dict[int, Tensor](), ExitStack()
        for before in self.sums:
            outputs[before].layer.watch(partial(self._read, before), self.hooks)
        for index in {*self.sums, *(last for _, last in runs)}:
            hook = partial(self._observe, index)
            self.hooks.callback(blocks[index].module.register_forward_hook(hook).remove)

    def begin(self, mask: Tensor | None) -> None:
        """Prepare for the next batch; `mask`, bool [B, T], is True at its tokens."""
        self.mask, self.inputs, self.streams = mask, {}, {}

    def _rows(self, values: Tensor) -> Tensor:
        rows = values.detach().reshape(-1, values.shape[-1])
        rows = rows if self.mask is None else rows[self.mask.flatten()]
        return rows if rows.dtype == torch.float64 else rows.float()

    def _read(self, before: int, layer: PrunableLayer, inputs: Tensor, _: Tensor) -> None:
        self.mask = None if layer.token_mask(inputs, self.mask) is None else self.mask
        rows = self._rows(inputs)
        if _bias(layer) is not None:
            rows = torch.cat([rows, torch.ones_like(rows[:, :1])], 1)
        self.inputs[before] = rows
        self.sums[before].add(rows)

    def _observe(self, index: int, _: nn.Module, args: Any, output: Any) -> None:
        stream = self._rows(first_tensor(output))
        for before, rows in self.inputs.items():
            if index in self.lasts[before]:
                self.sums[before].add_change(index, rows, stream - self.streams[before])
        self.inputs = {before: rows for before, rows in self.inputs.items() if max(self.lasts[before]) > index}
        if index in self.sums:
            self.streams[index] = stream
        if index == self.last:
            raise Stop


class Merging:
    """The runs of blocks of a model that can be merged, with the updated layers of the fitted runs.

    Args:
        prepared: the dense model, and the data of the fit.
        outputs: of `find_output_layers`.
    """

    def __init__(self, prepared: Prepared, outputs: Mapping[int, OutputLayer]):
        self.prepared, self.outputs = prepared, outputs
        self.blocks = find_structure(prepared.model).blocks
        self.fitted: dict[Run, tuple[Tensor, Tensor | None]] = {}  # weight as a matrix, and bias
        self.most_bytes = max(LEAST_BYTES, sum(parameter.nbytes for parameter in prepared.model.parameters()))

    def runs(self, blocks: Collection[int]) -> list[Run]:
        """The runs among some removed blocks that can be merged, ascending."""
        runs = list[Run]()
        for first in sorted(blocks):
            before, last = first - 1, first
            while last + 1 in blocks and self._same_list(first, last + 1):
                last += 1
            if before not in blocks and before in self.outputs and self._same_list(before, last):
                runs.append((before, last))
        return runs

    def _same_list(self, first: int, last: int) -> bool:
        return len({self.blocks[index].name.rpartition(".")[0] for index in range(first, last + 1)}) == 1

    @torch.no_grad()
    def fit(self, runs: Collection[Run]) -> None:
        """Fit the layers before some runs, by one pass over the data, or several where the sums exceed `most_bytes`."""
        missing = [run for run in dict.fromkeys(runs) if run not in self.fitted]
        while missing:
            now = self._within_memory(missing)
            missing = [run for run in missing if run not in now]
            for before, sums in self._collect(now).items():
                output, bias = self.outputs[before], _bias(self.outputs[before].layer)
                for last, update in sums.updates(output).items():
                    weight = output.layer.matrix.double().cpu() + update[:, : output.layer.shape[1]]
                    shift = None if bias is None else (bias.double().cpu() + update[:, -1]).to(bias)
                    self.fitted[before, last] = weight.to(output.layer.matrix), shift

    def _within_memory(self, runs: Sequence[Run]) -> list[Run]:
        """The first of some runs whose sums need at most `most_bytes`; at least one."""
        limit, chosen, layers = self.most_bytes, list[Run](), set[int]()
        for before, last in sorted(runs):
            d_out, d_in = self.outputs[before].layer.shape
            limit -= 4 * d_in * (d_out + (0 if before in layers else d_in))
            if chosen and limit < 0:
                break
            chosen.append((before, last))
            layers.add(before)
        return chosen

    def _collect(self, runs: Collection[Run]) -> dict[int, _Sums]:
        model, device = self.prepared.model, model_device(self.prepared.model)
        observer = _Observer(self.blocks, self.outputs, runs)
        with evaluation_mode(model), observer.hooks:
            for batch in self.prepared.batches:
                batch = to_device(batch, device)
                observer.begin(token_mask(batch))
                with suppress(Stop):
                    run_model(model, batch)
        return observer.sums

    @contextmanager
    def applied(self, blocks: Collection[int]) -> Iterator[None]:
        """A context in which some blocks return their input, and the fitted layers replace their runs."""
        runs = self.runs(blocks)
        self.fit(runs)
        with ExitStack() as stack:
            for before, last in runs:
                layer, (weight, bias) = self.outputs[before].layer, self.fitted[before, last]
                for parameter, value in (layer.parameter, layer.as_parameter(weight)), (_bias(layer), bias):
                    if parameter is not None and value is not None:
                        stack.callback(setattr, parameter, "data", parameter.data)
                        parameter.data = value
            stack.enter_context(skipping(self.blocks[block].module for block in blocks))
            yield

    @torch.no_grad()
    def write(self, model: nn.Module, blocks: Collection[int]) -> list[Run]:
        """Write the fitted layers into a model without some blocks, and drop them; returns the runs they replace."""
        remaining = [index for index in range(len(self.blocks)) if index not in blocks]
        structure = find_structure(model).blocks
        runs = self.runs(blocks)
        self.fit(runs)
        for before, last in runs:
            weight, bias = self.fitted[before, last]
            block = structure[remaining.index(before)]
            name = self.outputs[before].layer.name.removeprefix(self.blocks[before].name)
            (layer,) = (layer for layer in block.layers if layer.name == block.name + name)
            layer.write(weight)
            shift = _bias(layer)
            if shift is not None and bias is not None:
                shift.copy_(bias)
        self.fitted.clear()
        return runs


def measure_runs(
    possible: Collection[Run], most: int, measure: Callable[[Run, Sequence[Run]], float]
) -> dict[Run, float]:
    """Measure the losses of all runs of one block, then of the best quarter of each length, extended by one block.

    Runs of a length are the last if none loses less than the best set of shorter ones.

    Args:
        possible: the runs that can be merged.
        most: the largest number of blocks to remove.
        measure: returns the increase of the model's loss without a run, which is one of the given runs of its length.

    Returns:
        The losses of the measured runs.
    """
    losses, runs = dict[Run, float](), sorted(run for run in possible if run[1] - run[0] == 1)
    for length in range(1, most + 1):
        shorter = _least_losses(losses, length).get(length)
        measured = {run: measure(run, runs) for run in runs}
        losses |= measured
        if not measured or shorter is not None and min(measured.values()) >= shorter[0]:
            break
        best = sorted(measured, key=lambda run: measured[run])[: math.ceil(len(measured) / 4)]
        longer = {grown for before, last in best for grown in ((before, last + 1), (before - 1, last))}
        runs = sorted(longer.intersection(possible))
    return losses


def best_sets(losses: dict[Run, float], most: int) -> dict[int, tuple[int, ...]]:
    """The set of blocks with the least sum of losses of its runs, by the number of its blocks.

    Args:
        losses: of runs.
        most: the largest number of blocks.

    Returns:
        Ascending indices of 1 to `most` blocks, for every number that can be removed.
    """
    return {count: blocks for count, (_, blocks) in _least_losses(losses, most).items() if count}


def _least_losses(losses: dict[Run, float], most: int) -> dict[int, tuple[float, tuple[int, ...]]]:
    """Like `best_sets`, with the losses, and an empty set of 0 blocks."""
    end = 1 + max((last for _, last in losses), default=-1)
    # For the blocks from `first` on: number of removed blocks → the least loss, and the removed blocks.
    tables: list[dict[int, tuple[float, tuple[int, ...]]]] = [{0: (0.0, ())} for _ in range(end + 2)]
    for first in range(end, -1, -1):
        table = dict(tables[first + 1])
        for (before, last), loss in losses.items():
            if before != first:
                continue
            blocks = tuple(range(before + 1, last + 1))
            # At least one block stays between two runs: the change of the second run is added to it.
            for count, (other, others) in tables[last + 1].items():
                total = len(blocks) + count
                if total <= most and (total not in table or loss + other < table[total][0]):
                    table[total] = loss + other, (*blocks, *others)
        tables[first] = table
    return tables[0]
