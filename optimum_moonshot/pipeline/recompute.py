"""Statistics on the already pruned prefix: the paper's "++" (MOONSHOT, arXiv 2604.13287, "Hessian Recomputation").

The blocks are pruned first to last. The inputs of a block's layers, and the gradients of their outputs, come from a
model whose blocks before it are pruned and whose blocks from it on are dense; all layers of a block are observed before
one is pruned, as in SparseGPT. Pruned weights are in the model only during a pass, while the device holds them beside
the dense ones (of one block, or of the whole prefix where the blocks are not sequential).

Cost, over the calibration data, for L blocks: at λ = 1 every block runs twice, dense to be observed and pruned to
compute the next one's inputs. At λ < 1 every block needs the passes of itself and all blocks behind it, L(L+1)/2 block
passes backwards and twice as many forwards (a block is run again for its backward pass, so that one block's graph is
alive at a time), and L passes of the head; one-shot statistics take L backwards and 2L forwards. Cached inputs replace
the blocks before. `FullModelPipeline` with the prefix pruned serves blocks that are not sequential, and layers outside
of blocks: each of these comes after all blocks, in the model's order, as a separate stage.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..calibration.storage import Storage
from ..data.batches import Batch, batch_size
from ..model.calls import (
    BlockCall,
    close,
    first_tensor,
    join_hidden,
    model_device,
    run_model,
    split_hidden,
    to_device,
)
from ..model.layers import Block, PrunableLayer, Structure, all_onloaded, onloaded_in_turn
from ..model.losses import Loss, token_mask
from ..progress import progress_bar
from .block_probe import Extras, passing_on
from .block_sequences import is_sequential
from .stages import FullModelPipeline, OpenStage, PassObserver, Stage, Stop
from .streamed import StreamedPipeline

Layers = tuple[PrunableLayer, ...]


@contextmanager
def lent(layers: Layers, weight: Callable[[PrunableLayer], Tensor]) -> Iterator[None]:
    """Meanwhile the layers have other weights, `weight(layer)` [d_out, d_in]; their tensors are restored on exit."""
    original = []
    try:
        for layer in layers:
            parameter, matrix = layer.parameter, weight(layer)
            original.append((parameter, parameter.data))
            parameter.data = torch.empty_like(parameter.data)
            layer.assign(matrix)
        yield
    finally:
        for parameter, data in original:
            parameter.data = data


class Entrance:
    """Starts the model at one of its sequential blocks: those before it pass their input on and compute nothing."""

    def __init__(self, blocks: tuple[Block, ...], extras: Extras):
        self.blocks, self.extras = blocks, extras

    @contextmanager
    def at(self, i: int, hidden: Tensor) -> Iterator[None]:
        """Meanwhile a pass of the model starts at block i, with `hidden` [B, T, d] (on its device) as its input."""

        def give(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            rest, named = split_hidden(args, kwargs)[1:]
            return join_hidden(hidden, BlockCall(rest, named, hidden))

        with ExitStack() as stack:
            stack.enter_context(passing_on(self.blocks[:i], self.extras[:i]))
            handle = self.blocks[i].module.register_forward_pre_hook(give, with_kwargs=True)
            stack.callback(handle.remove)
            yield


def find_entrance(model: nn.Module, blocks: tuple[Block, ...], batch: Batch) -> Entrance | None:
    """Start the model, in evaluation mode and onloaded, at any of its sequential blocks, as tried on a small batch.

    None where the last block's output is not the same then.
    """
    inputs: list[Tensor] = []
    outputs: list[Any] = []
    with ExitStack() as stack, torch.no_grad():
        for block in blocks:
            before = lambda _, args, kwargs: inputs.append(split_hidden(args, kwargs)[0])  # noqa: E731
            stack.callback(block.module.register_forward_pre_hook(before, with_kwargs=True).remove)
            after = lambda _, args, output: outputs.append(output)  # noqa: E731
            stack.callback(block.module.register_forward_hook(after).remove)
        run_model(model, batch)
    entrance = Entrance(blocks, [None if isinstance(output, Tensor) else len(output) - 1 for output in outputs])
    expected = first_tensor(outputs[-1])
    for i in range(1, len(blocks)):
        try:
            with entrance.at(i, inputs[i]):
                output = output_of(blocks[-1].module, lambda: run_model(model, batch))
        except (KeyError, IndexError, TypeError, AttributeError, ValueError):
            return None  # something reads other results of a skipped block than its hidden state
        if not close(output, expected):
            return None
    return entrance


def input_of(module: nn.Module, run: Callable[[], Any]) -> Tensor:
    """The hidden state that a module reads, by a forward pass of the model without a graph, which ends there."""
    return _until(
        run,
        lambda keep: module.register_forward_pre_hook(
            lambda _, args, kwargs: keep(split_hidden(args, kwargs)[0]), with_kwargs=True
        ),
    )


def output_of(module: nn.Module, run: Callable[[], Any]) -> Tensor:
    """The hidden state that a module returns, by a forward pass of the model without a graph, which ends there."""
    return _until(run, lambda keep: module.register_forward_hook(lambda _, args, output: keep(first_tensor(output))))


def _until(run: Callable[[], Any], register: Callable[[Callable[[Tensor], None]], RemovableHandle]) -> Tensor:
    states: list[Tensor] = []

    def keep(hidden: Tensor) -> None:
        states.append(hidden)
        raise Stop

    handle = register(keep)
    try:
        with torch.no_grad(), suppress(Stop):
            run()
    finally:
        handle.remove()
    return states[0]


class _RecomputeStage:
    """A block that is observed dense behind pruned ones, and advances with its pruned weights to the next, if any."""

    advanced = False

    def __init__(self, pipeline: "RecomputePipeline", entrance: Entrance, index: int, leads_on: bool):
        self.pipeline, self.entrance, self.index, self.leads_on = pipeline, entrance, index, leads_on
        block = pipeline.blocks[index]
        self.layers, self.onloaded = block.layers, block.onloaded

    def observe(self, observer: PassObserver, advance: bool = False) -> None:
        self.pipeline.run(self.entrance, self.index, observer)

    def advance(self) -> None:
        if self.leads_on:
            self.pipeline.advance(self.entrance, self.index)
            self.advanced = True


@dataclass(eq=False)
class RecomputePipeline:
    """Stages in the order of pruning; see the module's docstring."""

    model: nn.Module  # frozen
    structure: Structure
    batches: Sequence[Batch]
    loss: Loss | None  # (output, batch) → [B] losses; None for the model's own
    storage: Storage  # of the caches
    weight: Callable[[PrunableLayer], Tensor]  # a layer's pruned weight [d_out, d_in], once its stage is solved
    probe: Batch  # a small sample on the model's device, to test whether the blocks are sequential
    gradients: bool  # whether any layer needs them
    extras: Extras | None = None  # of `probe_blocks`, where the blocks are offloaded
    progress: bool = False  # show a bar for every stage

    def __post_init__(self) -> None:
        self.blocks = self.structure.blocks
        self.behind: StreamedPipeline | None = None  # from a block on
        self.hidden: list[Tensor] = []  # inputs of the current block, batch by batch
        self.forward, self.backward, self.whole = 0, 0, 0  # passes over all data: of blocks, and of the whole model

    @property
    def cost(self) -> str:
        """The passes that the stages took, for the report."""
        parts = [f"{self.forward} block passes forwards", f"{self.backward} backwards"] if self.forward else []
        parts += [f"{self.whole} passes of the whole model"] if self.whole or not parts else []
        return f"statistics recomputed on the pruned prefix: {', '.join(parts)}"

    def __iter__(self) -> Iterator[Stage]:
        """One stage per block with layers to observe (and those between), then one per layer outside of blocks."""
        inside = [block.layers for block in self.blocks if block.layers]
        entrance, done = self._entrance(inside), Layers()
        if entrance is not None:
            yield from self._blocks(entrance)
            done = sum(inside, ())
            inside = []
        for layers in (*inside, *((layer,) for layer in self.structure.outside)):
            yield OpenStage(layers, partial(self._run_whole, done))
            done += layers

    def _entrance(self, inside: list[Layers]) -> Entrance | None:
        """How to start the model at any block; None where the blocks are not sequential."""
        if self.extras is not None:
            return Entrance(self.blocks, self.extras)
        shared = any(len(layer.modules) > 1 for layers in inside for layer in layers)
        with all_onloaded(self.blocks):
            sequential = bool(inside) and not shared
            sequential = sequential and is_sequential(self.model, self.blocks, self.probe, self.gradients, self.loss)
            return find_entrance(self.model, self.blocks, self.probe) if sequential else None

    def _blocks(self, entrance: Entrance) -> Iterator[Stage]:
        observed = [i for i, block in enumerate(self.blocks) if block.layers]
        first = self.blocks[observed[0]]
        for _, batch in self._batches(first.name):
            with onloaded_in_turn(self.blocks):
                hidden = input_of(first.module, partial(run_model, self.model, batch))
            self.hidden.append(self.storage.put(hidden, f"{first.name}: inputs"))
        self.forward += observed[0]
        for i in range(observed[0], observed[-1] + 1):
            yield _RecomputeStage(self, entrance, i, i < observed[-1])
        self.hidden = []

    def _batches(self, name: str) -> Iterator[tuple[int, Batch]]:
        """Every batch on the model's device, with its index, under a bar."""
        device = model_device(self.model)
        bar = progress_bar(self.batches, desc=f"calibrating {name}", unit="batch", leave=False, shown=self.progress)
        for index, batch in enumerate(bar):
            yield index, to_device(batch, device)

    def run(self, entrance: Entrance, i: int, observer: PassObserver) -> None:
        """Observe block i on its inputs, with the gradients of the dense blocks behind it if the observer needs any."""
        block, first = self.blocks[i].module, 0
        if observer.gradients:
            self._run_backward(entrance, i, observer)
            return
        device = next(block.parameters()).device
        for index, batch in self._batches(self.blocks[i].name):
            count, mask = batch_size(batch), token_mask(batch)
            observer.begin(first, count, None if mask is None else mask.to(device))
            with entrance.at(i, self.hidden[index].to(device)):
                output_of(block, partial(run_model, self.model, batch))
            observer.end()
            first += count
        self.forward += 1

    def _run_backward(self, entrance: Entrance, i: int, observer: PassObserver) -> None:
        """As `run`, by a forward and a backward pass of the blocks behind, each for all data before the next."""
        if self.behind is None:
            arguments = self.model, self.blocks, self.batches, True, self.loss, self.storage
            behind = StreamedPipeline(*arguments, extras=entrance.extras)
            behind.capture_arguments()
            self.behind = behind
        self.behind.run_from(i, self.hidden, observer)
        behind_count = len(self.blocks) - i - 1
        self.forward += 2 * (1 + behind_count)
        self.backward += 1 + behind_count

    def advance(self, entrance: Entrance, i: int) -> None:
        """Replace the inputs of block i, which is onloaded, by its outputs with the pruned weights."""
        with lent(self.blocks[i].layers, self.weight):
            for index, batch in self._batches(self.blocks[i].name):
                with entrance.at(i, self.hidden[index].to(next(self.blocks[i].module.parameters()).device)):
                    output = output_of(self.blocks[i].module, partial(run_model, self.model, batch))
                self.hidden[index].copy_(output)
        self.forward += 1

    def _run_whole(self, done: Layers, observer: PassObserver) -> None:
        with lent(done, self.weight):
            full = FullModelPipeline(self.model, self.blocks, self.batches, bool(observer.gradients), self.loss)
            full.run(observer)
        self.whole += 1
