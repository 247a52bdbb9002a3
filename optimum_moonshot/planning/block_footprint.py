"""What a model's blocks hold while the data pass them, by running them on tensors without memory (footprint.py).

The hooks here hold and convert what those of observer.py do. An expert's tokens are not known without data: a mixture's
go to its experts in equal shares.
"""

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from ..data.batches import Batch, batch_size
from ..model.calls import BlockCall, Forward, called_by, first_tensor, frozen, join_hidden, run_model, split_hidden
from ..model.experts import ExpertsLayer, expert_parameters, routing
from ..model.layers import Block, PrunableLayer, Structure
from .footprint import LiveBytes, shape_of, without_memory


@dataclasses.dataclass(frozen=True)
class BlockFootprint:
    """Bytes on the model's device while a batch passes a block."""

    forward: int  # forwards, no graph, no hooks
    observed: int  # under the hooks: forwards and, where gradients are wanted, backwards
    shared: tuple[tuple[str, ...], ...]  # names of the layers that read the same tensor, and have one Gram matrix


@dataclasses.dataclass(frozen=True)
class ModelFootprint:
    """Of the blocks in which something is pruned, by their names, and of what they share."""

    blocks: dict[str, BlockFootprint]
    order: tuple[str, ...]  # of the calls of all blocks
    follows: frozenset[str]  # blocks that read what the one called before gives, of the same shape
    hidden: int  # bytes of a batch's hidden state
    arguments: int  # of what the blocks read beside it, which all batches share
    whole: int  # of a pass of the whole model, backwards too where gradients are wanted
    choices: dict[str, int] = dataclasses.field(default_factory=dict)  # layer of experts → k, where a call says it


@dataclasses.dataclass
class _Twin:
    """A copy of a model without memory, and what its blocks were called with."""

    model: nn.Module
    mode: FakeTensorMode
    names: dict[nn.Module, str]  # of the original's modules
    calls: dict[str, BlockCall] = dataclasses.field(default_factory=dict)
    order: list[str] = dataclasses.field(default_factory=list)
    follows: set[str] = dataclasses.field(default_factory=set)
    held: list[Tensor] = dataclasses.field(default_factory=list)  # by the hooks
    choices: dict[nn.Module, int] = dataclasses.field(default_factory=dict)  # of a module of experts: k
    samples: int = 1
    watched: bool = False  # by hooks

    def layer(self, layer: PrunableLayer) -> PrunableLayer:
        return dataclasses.replace(
            layer, modules=tuple(self.model.get_submodule(self.names[module]) for module in layer.modules)
        )


def model_footprint(
    model: nn.Module, structure: Structure, batch: Batch, gradients: bool, forward: Forward | None = None
) -> ModelFootprint:
    """Run a model and its blocks without memory.

    Args:
        model: which stays as it is; its weights may be anywhere, or on the meta device.
        structure: what is pruned in it.
        batch: of the size that passes at a time.
        gradients: whether the passes go backwards.
        forward: (model, inputs) → output, or None for a plain call.

    Raises:
        Exception: whatever the model raises where it asks for a value, which there is none of.
    """
    names = {module: name for name, module in model.named_modules()}
    with without_memory() as mode, frozen(model):
        twin = _Twin(shape_of(model, mode), mode, names, samples=batch_size(batch))
        for module in twin.model.modules():
            if expert_parameters(module):
                module.forward = _balanced(module, twin)
        inputs = {name: torch.empty(each.shape, dtype=each.dtype) for name, each in batch.items()}
        inputs = {name: each for name, each in inputs.items() if name != "attention_mask"}
        whole = _run_whole(twin, structure, inputs, gradients, forward)
        found: dict[Any, BlockFootprint] = {}
        blocks = {}
        for block in structure.blocks:
            if block.layers and block.name in twin.calls:
                key = _signature(block, twin.calls[block.name])
                if key not in found:
                    found[key] = _of_block(twin, block, gradients)
                blocks[block.name] = _renamed(found[key], key, block)
        first = next((twin.calls[name] for name in twin.order), None)
        arguments = 0 if first is None else _bytes_of((first.args, first.kwargs))
        hidden = 0 if first is None else first.hidden.nbytes
        fused = {layer.name: twin.layer(layer).modules[0] for layer in structure.layers() if layer.separate}
        choices = {name: twin.choices[module] for name, module in fused.items() if module in twin.choices}
    return ModelFootprint(blocks, tuple(twin.order), frozenset(twin.follows), hidden, arguments, whole, choices)


def _run_whole(twin: _Twin, structure: Structure, inputs: Batch, gradients: bool, forward: Forward | None) -> int:
    """One pass of the model; notes the blocks' calls. The bytes at its peak."""
    last: list[Tensor] = []

    def enter(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            hidden, rest, named = split_hidden(args, kwargs)
        except KeyError:
            return
        if last and hidden is last[0]:
            twin.follows.add(name)
        twin.order.append(name)
        twin.calls.setdefault(name, BlockCall(rest, named, hidden))

    def leave(name: str, output: Any) -> None:
        found = first_tensor(output)
        alike = name in twin.calls and found.shape == twin.calls[name].hidden.shape
        last[:] = [found] if alike else []

    with ExitStack() as stack, LiveBytes() as live, called_by(twin.model, forward):
        for block in structure.blocks:
            module = twin.model.get_submodule(block.name)
            before = lambda _, args, kwargs, name=block.name: enter(name, args, kwargs)  # noqa: E731
            after = lambda _, args, output, name=block.name: leave(name, output)  # noqa: E731
            stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(after).remove)
        for layer in structure.layers() if gradients else ():
            _watch(twin, twin.layer(layer), stack, {})
        with torch.set_grad_enabled(gradients):
            output = run_model(twin.model, inputs)
            logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
            if gradients and logits is not None and logits.requires_grad:
                torch.autograd.backward(logits, torch.empty_like(logits))
        twin.held.clear()
    return live.peak


def _of_block(twin: _Twin, block: Block, gradients: bool) -> BlockFootprint:
    call, module = twin.calls[block.name], twin.model.get_submodule(block.name)
    reads: dict[Any, list[str]] = {}
    forward = _peak(lambda: first_tensor(_call(module, call, False)))
    with ExitStack() as stack:
        for layer in block.layers:
            _watch(twin, twin.layer(layer), stack, reads)

        def run() -> None:
            twin.watched = True
            with torch.set_grad_enabled(gradients):
                output = first_tensor(_call(module, call, gradients))
                if gradients:
                    torch.autograd.backward(output, torch.empty_like(output))
            twin.held.clear()
            twin.watched = False

        observed = _peak(run)
    for layer in block.layers:
        if not any(layer.name in some for some in reads.values()):
            reads[layer.name] = [layer.name]
    return BlockFootprint(forward, observed, tuple(map(tuple, reads.values())))


def _peak(run: Callable[[], Any]) -> int:
    with LiveBytes() as live:
        run()
    return live.peak


def _call(module: nn.Module, call: BlockCall, gradients: bool) -> Any:
    hidden = torch.empty(call.hidden.shape, dtype=call.hidden.dtype).requires_grad_(gradients)
    args, kwargs = join_hidden(hidden, call)
    with torch.set_grad_enabled(gradients):
        return module(*args, **kwargs)


def _watch(twin: _Twin, layer: PrunableLayer, stack: ExitStack, reads: dict[Any, list[str]]) -> None:
    """Hold and convert what `Observer` does of a layer's calls."""
    form = layer
    if form.separate:  # its module's stand-in does
        return

    def see(_: nn.Module, args: tuple[Any, ...], named: dict[str, Tensor], output: Tensor) -> Tensor | None:
        inputs = (args[0] if args else next(iter(named.values()))).detach()
        twin.held.append(inputs)
        key = id(inputs.untyped_storage()), inputs.shape, inputs.stride(), form.reads
        if layer.name not in reads.setdefault(key, []):
            reads[key].append(layer.name)
        for _piece in form.tokens(inputs, None):
            pass
        if not torch.is_grad_enabled():
            return None
        begins = not output.requires_grad
        if begins:
            output = output.detach().requires_grad_(True).clone()

        def gradient(delta: Tensor) -> None:
            for _pair in form.pairs(inputs, delta, None, twin.samples):
                pass

        output.register_hook(gradient)
        return output if begins else None

    for module in layer.modules:
        stack.callback(module.register_forward_hook(see, with_kwargs=True).remove)


def _balanced(module: nn.Module, twin: _Twin) -> Callable[..., Tensor]:
    """A forward of a module of experts in which every expert gets as many tokens as any other.

    Without a graph one expert's tensors are alive at a time and, under hooks, the inputs of all.
    """
    forms = [ExpertsLayer("", (module,), key=key) for key in expert_parameters(module)]

    def forward(hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        found, tokens = routing(args, kwargs), hidden.reshape(-1, hidden.shape[-1])
        if found is not None:
            twin.choices[module] = found[0].shape[1]
        experts = forms[0].groups
        share = -(-len(tokens) * (1 if found is None else found[0].shape[1]) // experts)
        if not torch.is_grad_enabled():
            for form in forms:
                if twin.watched:
                    twin.held.append(tokens.new_empty(experts * share, form.shape[1]))
                one = tokens.new_empty(share, form.shape[1])
                one.float()
                one.new_empty(share, form.shape[0] // experts)
            return torch.zeros_like(tokens).view_as(hidden)
        index = torch.zeros(experts * share, dtype=torch.int64)
        x = read = tokens[index].view(experts, share, -1)
        for form in forms:
            wanted = form.shape[1]
            if x.shape[-1] == 2 * wanted:  # a gate beside what it lets through
                gate, x = x.chunk(2, -1)
                x = functional.silu(gate) * x
            elif x.shape[-1] != wanted:
                x = read
            if twin.watched:
                twin.held.append(x.detach())
            x.detach().float()
            weight = form.parameter
            assert weight is not None
            x = torch.bmm(x, weight if form.transposed else weight.mT)
            if x.requires_grad:
                x.register_hook(_widen)
        scale = torch.empty(experts * share, 1, dtype=x.dtype)
        flat = x.reshape(experts * share, -1) * scale
        return torch.zeros_like(tokens).index_add(0, index, flat.to(tokens.dtype)).view_as(hidden)

    return forward


def _widen(delta: Tensor) -> None:
    """What the statistics read of a gradient lives for a time."""
    delta.float()


def _signature(block: Block, call: BlockCall) -> tuple[Any, ...]:
    """Equal for blocks that hold the same."""
    layers = tuple((layer.name.removeprefix(block.name), layer.shape) for layer in block.layers)
    kind = tuple((name, each.shape) for name, each in block.module.named_parameters())
    return type(block.module), kind, layers, call.hidden.shape, call.hidden.dtype


def _renamed(found: BlockFootprint, key: tuple[Any, ...], block: Block) -> BlockFootprint:
    """A footprint of an equal block, with this one's layers."""
    own = {name: block.name + name for name, _ in key[2]}
    shared = [tuple(own[next(end for end in own if name.endswith(end))] for name in some) for some in found.shared]
    return dataclasses.replace(found, shared=tuple(shared))


def _bytes_of(tree: Any) -> int:
    leaves = torch.utils._pytree.tree_leaves(tree)
    return sum({id(each): each.nbytes for each in leaves if isinstance(each, Tensor)}.values())


def chain_names(found: ModelFootprint, blocks: Sequence[Block]) -> tuple[list[tuple[Block, ...]], list[Block]]:
    """The chains of blocks, and those in none, as far as shapes tell.

    Args:
        found: of the model.
        blocks: all of the model's.
    """
    by_name = {block.name: block for block in blocks}
    chains: list[list[Block]] = []
    called = [name for name in found.order if found.order.count(name) == 1]
    for name in called:
        if name in found.follows and chains:
            chains[-1].append(by_name[name])
        else:
            chains.append([by_name[name]])
    loose = [block for name in set(found.order) - set(called) if (block := by_name[name]).layers]
    good = [tuple(chain) for chain in chains if any(block.layers for block in chain)]
    return good, loose
