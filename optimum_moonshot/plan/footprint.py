"""Bytes that a model and its blocks hold during a pass, measured on fake tensors, which have shapes and no memory.

A block runs forward and backward at its real size in milliseconds, on any machine, with or without weights. The routing
of tokens is unknown without data, so every expert of a mixture gets the same number of tokens.
"""

import dataclasses
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from ..data.batches import Batch, batch_size
from ..model.calls import (
    BlockCall,
    Forward,
    called_by,
    first_tensor,
    frozen,
    hook_gradient,
    join_hidden,
    run_model,
    split_hidden,
)
from ..model.experts import ExpertsLayer, routing
from ..model.layer_kinds import expert_parameters
from ..model.layers import Block, PrunableLayer, Structure
from ..model.weights import bare_copy
from ..pipeline.block_sequences import BlockSequence


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the storages that are allocated in its context by this thread: alive `now`, and the peak."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._live: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        inputs = {id(leaf.untyped_storage()) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        output = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if id(storage) not in self._live and id(storage) not in inputs:
                    self._add(storage)
        return output

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = id(storage), storage.nbytes()

        def release(_: Any) -> None:
            self.now -= size
            self._live.pop(key, None)

        self._live[key] = weakref.ref(storage, release)
        self.now += size
        self.peak = max(self.peak, self.now)


def shape_of(module: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """A copy of a module on fake CPU tensors; its weights may be on any device."""
    memo: dict[int, Any] = {}
    with mode:
        for tensor in [*module.parameters(), *module.buffers()]:
            fake: Tensor = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
            memo[id(tensor)] = nn.Parameter(fake, requires_grad=False) if isinstance(tensor, nn.Parameter) else fake
        return bare_copy(module, memo)


@dataclasses.dataclass(frozen=True)
class BlockFootprint:
    """Bytes on the model's device during a batch's pass through a block."""

    observed: int  # under the hooks: forward and, with gradients, backward
    trained: int  # forward and backward, with all that a layer's gradient needs; 0 unless asked for
    shared: tuple[tuple[int, ...], ...]  # indices of layers with one input tensor, and one Gram matrix


@dataclasses.dataclass(frozen=True)
class ModelFootprint:
    """The footprints of the blocks with layers to prune, by name, and the bytes that they share."""

    blocks: dict[str, BlockFootprint]
    # All blocks in the order of their calls: the input of each is the output of the one before, of the same shape.
    sequences: tuple[tuple[str, ...], ...]
    hidden: int  # bytes of a batch's hidden state
    whole: int  # bytes of a pass of the whole model, with gradients also backward
    top_k: dict[str, int] = dataclasses.field(default_factory=dict)  # layer of experts → experts per token


def model_footprint(
    model: nn.Module,
    structure: Structure,
    batch: Batch,
    gradients: bool,
    trains: bool = False,
    forward: Forward | None = None,
) -> ModelFootprint:
    """Run a copy of a model and its blocks on fake tensors, with a batch of the size of the largest one.

    With `gradients`, passes run backward, as in calibration; with `trains`, blocks are trained as well. A model that
    depends on the values of a tensor may raise any exception.
    """
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, frozen(model):
        fake = _FakeModel(model, mode, batch_size(batch), gradients)
        shapes = {name: tensor for name, tensor in batch.items() if name != "attention_mask"}
        inputs = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in shapes.items()}
        whole = fake.run(structure, inputs, forward)
        footprints: dict[Any, BlockFootprint] = {}
        blocks = {}
        for block in structure.blocks:
            if block.layers and block.name in fake.calls:
                hidden = fake.calls[block.name].hidden
                kind = kind_of(block), hidden.shape, hidden.dtype
                if kind not in footprints:
                    footprints[kind] = fake.run_block(block, trains)
                blocks[block.name] = footprints[kind]
        size = next((call.hidden.nbytes for call in fake.calls.values()), 0)
        experts = {layer.name: fake.layer(layer).module for layer in structure.layers() if layer.separate}
        top_k = {name: fake.top_k[module] for name, module in experts.items() if module in fake.top_k}
    return ModelFootprint(blocks, tuple(map(tuple, fake.sequences)), size, whole, top_k)


def kind_of(block: Block) -> Any:
    """A key that is equal for blocks with the same memory and time."""
    layers = tuple((layer.name.removeprefix(block.name), layer.shape) for layer in block.layers)
    shapes = tuple((name, parameter.shape) for name, parameter in block.module.named_parameters())
    return type(block.module), shapes, layers


class _FakeModel:
    """A copy of a model on fake tensors, with the calls of its blocks and the tensors that its hooks hold."""

    def __init__(self, model: nn.Module, mode: FakeTensorMode, samples: int, gradients: bool):
        self.model, self.samples, self.gradients = shape_of(model, mode), samples, gradients
        self.copies = {module: self.model.get_submodule(name) for name, module in model.named_modules()}
        self.calls: dict[str, BlockCall] = {}
        self.sequences: list[list[str]] = []
        self.held: list[Tensor] = []
        self.top_k: dict[nn.Module, int] = {}  # by module of experts
        self.observed = False  # experts are under hooks
        for module in self.model.modules():
            if expert_parameters(module):
                module.forward = self._balanced(module)

    def layer(self, layer: PrunableLayer) -> PrunableLayer:
        """The copy of a layer."""
        return dataclasses.replace(layer, modules=tuple(self.copies[module] for module in layer.modules))

    def run(self, structure: Structure, inputs: Batch, forward: Forward | None) -> int:
        """Run the model once, record the calls of the blocks, and return the bytes at the peak."""
        last: list[Tensor] = []

        def enter(name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            with suppress(KeyError):  # without a hidden state
                hidden, others, named = split_hidden(args, kwargs)
                if not (last and hidden is last[0]):
                    self.sequences.append([])
                self.sequences[-1].append(name)
                # Detached: the graph's hooks hold this model, which holds the calls.
                self.calls.setdefault(name, BlockCall(*tree_map_only(Tensor, Tensor.detach, (others, named, hidden))))

        def leave(name: str, _: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            hidden = first_tensor(output)
            last[:] = [hidden] if name in self.calls and hidden.shape == self.calls[name].hidden.shape else []

        with ExitStack() as stack, LiveBytes() as live, called_by(self.model, forward):
            for block in structure.blocks:
                module = self.copies[block.module]
                stack.callback(module.register_forward_pre_hook(partial(enter, block.name), with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(partial(leave, block.name)).remove)
            for layer in structure.layers() if self.gradients else ():
                self._watch(layer, stack, {}, 0)
            with torch.set_grad_enabled(self.gradients):
                output = run_model(self.model, inputs)
                logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
                if logits is not None and logits.requires_grad:
                    torch.autograd.backward(logits, torch.empty_like(logits))
            self.held.clear()
        return live.peak

    def run_block(self, block: Block, trains: bool) -> BlockFootprint:
        """Run a single block under hooks, which hold the inputs of all layers, as in training."""
        reads: dict[Any, list[int]] = {}
        with ExitStack() as stack:
            for index, layer in enumerate(block.layers):
                self._watch(layer, stack, reads, index)
            self.observed = True
            observed = self._pass(block, self.gradients)
            trained = self._pass(block, True) if trains else 0
            self.observed = False
        watched = {index for readers in reads.values() for index in readers}
        alone = [(index,) for index in range(len(block.layers)) if index not in watched]
        return BlockFootprint(observed, trained, (*map(tuple, reads.values()), *alone))

    def _pass(self, block: Block, gradients: bool) -> int:
        """Run a block forward and, with gradients, backward; return the bytes at the peak."""
        call = self.calls[block.name]
        with LiveBytes() as live, torch.set_grad_enabled(gradients):
            hidden = torch.empty(call.hidden.shape, dtype=call.hidden.dtype).requires_grad_(gradients)
            args, kwargs = join_hidden(hidden, call)
            output = first_tensor(self.copies[block.module](*args, **kwargs))
            if gradients:
                torch.autograd.backward(output, torch.empty_like(output))
            self.held.clear()
        return live.peak

    def _watch(self, layer: PrunableLayer, stack: ExitStack, reads: dict[Any, list[int]], index: int) -> None:
        """Hold and convert the tensors of a layer's calls like `Observer`; add `index` to `reads`, by input tensor."""
        if layer.separate:  # see `_balanced`
            return

        def see(called: PrunableLayer, inputs: Tensor, output: Tensor) -> Tensor | None:
            inputs = inputs.detach()
            self.held.append(inputs)
            key = id(inputs.untyped_storage()), inputs.shape, inputs.stride(), called.input_key
            if index not in reads.setdefault(key, []):
                reads[key].append(index)
            deque(called.tokens(inputs, None), maxlen=0)  # as an observer, one at a time
            if not torch.is_grad_enabled():
                return None

            def add(delta: Tensor) -> None:
                deque(called.pairs(inputs, delta, None, self.samples), maxlen=0)

            return hook_gradient(output, add)

        self.layer(layer).watch(see, stack)

    def _balanced(self, module: nn.Module) -> Callable[..., Tensor]:
        """A forward of a module of experts that holds tensors of the size of all inputs and outputs of experts.

        Hooks hold the inputs of all experts until the batch ends; without a graph, the outputs of one expert at a time
        are too small to count.
        """
        layers = [ExpertsLayer("", (module,), key=key) for key in expert_parameters(module)]

        def forward(hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            routed = routing(args, kwargs)
            if routed is not None:
                self.top_k[module] = routed[0].shape[1]
            rows = hidden.numel() // hidden.shape[-1] * self.top_k.get(module, 1)
            for layer in layers:
                d_out, d_in = layer.shape[0] // layer.groups, layer.shape[1]
                width = d_in * self.observed + (d_in + d_out) * torch.is_grad_enabled()
                self.held.append(hidden.new_empty(rows, width))
            return hidden * 1.0

        return forward


def sequences_by_shape(
    footprint: ModelFootprint, blocks: Sequence[Block]
) -> tuple[tuple[BlockSequence, ...], tuple[Block, ...]]:
    """The sequential blocks, and the others with layers to prune, as far as shapes can show."""
    calls = Counter(name for names in footprint.sequences for name in names)
    once = {block.name: block for block in blocks if calls[block.name] == 1}
    sequences = [tuple(once[name] for name in names if name in once) for names in footprint.sequences]
    pruned = tuple(BlockSequence(sequence, None) for sequence in sequences if any(block.layers for block in sequence))
    return pruned, tuple(block for block in blocks if calls[block.name] > 1 and block.layers)
