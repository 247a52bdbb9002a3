"""Bytes that a model and its blocks hold during a pass, measured on fake tensors, which have shapes and no memory.

A block runs forward and backward at its real size in milliseconds, on any machine, whether its weights are loaded or
not. The hooks here hold and convert the same tensors as `calibration.Observer`. The routing of tokens is unknown
without data, so every expert of a mixture gets the same number of tokens.
"""

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..data.batches import Batch, batch_size
from ..model.calls import BlockCall, Forward, called_by, first_tensor, frozen, join_hidden, run_model, split_hidden
from ..model.experts import ExpertsLayer, expert_parameters, routing
from ..model.layers import Block, PrunableLayer, Structure
from ..model.offload import bare_copy


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the storages that are allocated in its context by this thread: alive `now`, and the peak."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._live: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        inputs = {id(each.untyped_storage()) for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
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

    forward: int  # without graph and hooks
    observed: int  # under the hooks: forward and, with gradients, backward
    trained: int  # forward and backward, with gradients of all its weights, which are not included; 0 unless asked for
    shared: tuple[tuple[int, ...], ...]  # indices of its layers that read the same tensor and share one Gram matrix


@dataclasses.dataclass(frozen=True)
class ModelFootprint:
    """The footprints of the blocks with layers to prune, by name, and the bytes that they share."""

    blocks: dict[str, BlockFootprint]
    order: tuple[str, ...]  # all blocks in the order of their calls
    follows: frozenset[str]  # blocks that read the output of the preceding block, of the same shape as their own
    hidden: int  # bytes of a batch's hidden state
    arguments: int  # bytes of the blocks' other arguments, which all batches share
    whole: int  # bytes of a pass of the whole model, with gradients also backward
    top_k: dict[str, int] = dataclasses.field(default_factory=dict)  # layer of experts → experts per token, if known

    def sequences(self, blocks: Sequence[Block]) -> tuple[list[tuple[Block, ...]], list[Block]]:
        """Of all blocks the sequential ones, and the others with layers to prune, as far as shapes can show."""
        by_name = {block.name: block for block in blocks}
        sequences: list[list[Block]] = []
        once = [name for name in self.order if self.order.count(name) == 1]
        for name in once:
            if name in self.follows and sequences:
                sequences[-1].append(by_name[name])
            else:
                sequences.append([by_name[name]])
        others = [block for name in set(self.order) - set(once) if (block := by_name[name]).layers]
        return [tuple(each) for each in sequences if any(block.layers for block in each)], others


def model_footprint(
    model: nn.Module,
    structure: Structure,
    batch: Batch,
    gradients: bool,
    trains: bool = False,
    forward: Forward | None = None,
) -> ModelFootprint:
    """Run a copy of a model and its blocks on fake tensors, with a batch of the size of the largest one.

    `gradients` are those of calibration; if `trains`, blocks are trained as well. A model that reads the value of a
    tensor raises any exception.
    """
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, frozen(model):
        fake = _FakeModel(model, mode, batch_size(batch), gradients)
        inputs = {
            name: torch.empty(each.shape, dtype=each.dtype) for name, each in batch.items() if name != "attention_mask"
        }
        whole = fake.run(structure, inputs, forward)
        footprints: dict[Any, BlockFootprint] = {}
        blocks = {}
        for block in structure.blocks:
            if block.layers and block.name in fake.calls:
                kind = _kind(block, fake.calls[block.name])
                if kind not in footprints:
                    footprints[kind] = fake.run_block(block, trains)
                blocks[block.name] = footprints[kind]
        hidden = arguments = 0
        if fake.order:
            call = fake.calls[fake.order[0]]
            tensors = [each for each in tree_leaves((call.args, call.kwargs)) if isinstance(each, Tensor)]
            hidden, arguments = call.hidden.nbytes, sum({id(each): each.nbytes for each in tensors}.values())
        experts = {layer.name: fake.layer(layer).modules[0] for layer in structure.layers() if layer.separate}
        top_k = {name: fake.top_k[module] for name, module in experts.items() if module in fake.top_k}
    return ModelFootprint(blocks, tuple(fake.order), frozenset(fake.follows), hidden, arguments, whole, top_k)


def _kind(block: Block, call: BlockCall) -> tuple[Any, ...]:
    """Equal for blocks with the same footprint."""
    layers = tuple((layer.name.removeprefix(block.name), layer.shape) for layer in block.layers)
    parameters = tuple((name, each.shape) for name, each in block.module.named_parameters())
    return type(block.module), parameters, layers, call.hidden.shape, call.hidden.dtype


def _widen(gradient: Tensor) -> None:
    """The float32 copy that the statistics read."""
    gradient.float()


class _FakeModel:
    """A copy of a model on fake tensors, with the calls of its blocks and the tensors that its hooks hold."""

    def __init__(self, model: nn.Module, mode: FakeTensorMode, samples: int, gradients: bool):
        self.model, self.samples, self.gradients = shape_of(model, mode), samples, gradients
        self.copies = {module: self.model.get_submodule(name) for name, module in model.named_modules()}
        self.calls: dict[str, BlockCall] = {}
        self.order: list[str] = []
        self.follows: set[str] = set()
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
        """One pass of the model, which records the calls of the blocks; the bytes at its peak."""
        last: list[Tensor] = []

        def enter(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            try:
                hidden, others, named = split_hidden(args, kwargs)
            except KeyError:
                return
            if last and hidden is last[0]:
                self.follows.add(name)
            self.order.append(name)
            self.calls.setdefault(name, BlockCall(others, named, hidden))

        def leave(name: str, output: Any) -> None:
            hidden = first_tensor(output)
            last[:] = [hidden] if name in self.calls and hidden.shape == self.calls[name].hidden.shape else []

        with ExitStack() as stack, LiveBytes() as live, called_by(self.model, forward):
            for block in structure.blocks:
                module = self.copies[block.module]
                before = lambda _, args, kwargs, name=block.name: enter(name, args, kwargs)  # noqa: E731
                after = lambda _, args, output, name=block.name: leave(name, output)  # noqa: E731
                stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(after).remove)
            for layer in structure.layers() if self.gradients else ():
                self._watch(self.layer(layer), stack, {}, 0)
            with torch.set_grad_enabled(self.gradients):
                output = run_model(self.model, inputs)
                logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
                if self.gradients and logits is not None and logits.requires_grad:
                    torch.autograd.backward(logits, torch.empty_like(logits))
            self.held.clear()
        return live.peak

    def run_block(self, block: Block, trains: bool) -> BlockFootprint:
        """Passes of a single block, without hooks and with them, and in training."""
        with LiveBytes() as forward:
            self._call(block, False)
        reads: dict[Any, list[int]] = {}
        with ExitStack() as stack:
            for index, layer in enumerate(block.layers):
                self._watch(self.layer(layer), stack, reads, index)
            self.observed = True
            with LiveBytes() as observed, torch.set_grad_enabled(self.gradients):
                output = self._call(block, self.gradients)
                if self.gradients:
                    torch.autograd.backward(output, torch.empty_like(output))
                self.held.clear()
            self.observed = False
        alone = [(index,) for index in range(len(block.layers)) if not any(index in each for each in reads.values())]
        trained = self._train(block) if trains else 0
        return BlockFootprint(forward.peak, observed.peak, trained, (*map(tuple, reads.values()), *alone))

    def _train(self, block: Block) -> int:
        """Bytes of a pass in which all weights get gradients, without these."""
        weights = [each for each in self.copies[block.module].parameters() if each.is_floating_point()]
        for weight in weights:
            weight.requires_grad_(True)
        with LiveBytes() as live:
            output = self._call(block, True)
            torch.autograd.backward(output, torch.empty_like(output))
        written = sum(each.nbytes for each in weights if each.grad is not None)
        for weight in weights:
            weight.grad = None
            weight.requires_grad_(False)
        return max(0, live.peak - written)

    def _call(self, block: Block, gradients: bool) -> Tensor:
        call = self.calls[block.name]
        hidden = torch.empty(call.hidden.shape, dtype=call.hidden.dtype).requires_grad_(gradients)
        args, kwargs = join_hidden(hidden, call)
        with torch.set_grad_enabled(gradients):
            return first_tensor(self.copies[block.module](*args, **kwargs))

    def _watch(self, layer: PrunableLayer, stack: ExitStack, reads: dict[Any, list[int]], index: int) -> None:
        """Hold and convert the same tensors of a layer's calls as `Observer`; adds its index to its input tensors'."""
        if layer.separate:  # see `_balanced`
            return

        def hook(_: nn.Module, args: tuple[Any, ...], named: dict[str, Tensor], output: Tensor) -> Tensor | None:
            inputs = (args[0] if args else next(iter(named.values()))).detach()
            self.held.append(inputs)
            key = id(inputs.untyped_storage()), inputs.shape, inputs.stride(), layer.input_key
            if index not in reads.setdefault(key, []):
                reads[key].append(index)
            for _piece in layer.tokens(inputs, None):
                pass
            if not torch.is_grad_enabled():
                return None
            leaf = not output.requires_grad
            if leaf:
                output = output.detach().requires_grad_(True).clone()

            def gradient(delta: Tensor) -> None:
                for _pair in layer.pairs(inputs, delta, None, self.samples):
                    pass

            # A hook that stays would hold this model, whose calls hold the graph with the hook.
            stack.callback(output.register_hook(gradient).remove)
            return output if leaf else None

        for module in layer.modules:
            stack.callback(module.register_forward_hook(hook, with_kwargs=True).remove)

    def _balanced(self, module: nn.Module) -> Callable[..., Tensor]:
        """A forward of a module of experts that gives all experts the same number of tokens.

        Without a graph, the tensors of one expert at a time are alive and, under hooks, the inputs of all.
        """
        layers = [ExpertsLayer("", (module,), key=key) for key in expert_parameters(module)]

        def forward(hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            routed, tokens = routing(args, kwargs), hidden.reshape(-1, hidden.shape[-1])
            top_k = 1
            if routed is not None:
                top_k = self.top_k[module] = routed[0].shape[1]
            experts = layers[0].groups
            count = -(-len(tokens) * top_k // experts)  # tokens of an expert
            if not torch.is_grad_enabled():
                for layer in layers:
                    if self.observed:
                        self.held.append(tokens.new_empty(experts * count, layer.shape[1]))
                    inputs = tokens.new_empty(count, layer.shape[1])
                    inputs.float()
                    inputs.new_empty(count, layer.shape[0] // experts)
                return torch.zeros_like(tokens).view_as(hidden)
            index = torch.zeros(experts * count, dtype=torch.int64)
            x = read = tokens[index].view(experts, count, -1)
            for layer in layers:
                width = layer.shape[1]
                if x.shape[-1] == 2 * width:  # a gate and its values in one matrix
                    gate, x = x.chunk(2, -1)
                    x = functional.silu(gate) * x
                elif x.shape[-1] != width:
                    x = read
                if self.observed:
                    self.held.append(x.detach())
                x.detach().float()
                weight = layer.parameter
                assert weight is not None
                x = torch.bmm(x, weight if layer.transposed else weight.mT)
                if x.requires_grad:
                    x.register_hook(_widen)
            scale = torch.empty(experts * count, 1, dtype=x.dtype)
            flat = x.reshape(experts * count, -1) * scale
            return torch.zeros_like(tokens).index_add(0, index, flat.to(tokens.dtype)).view_as(hidden)

        return forward
