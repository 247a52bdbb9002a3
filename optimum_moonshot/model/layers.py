"""Find the decoder layers of any model and the prunable weights in them, without a table of model names.

Decoder layers ("blocks") are the elements of the outermost `ModuleList`s whose elements contain weight matrices: every
transformers architecture holds its repeated layers so, and the stages of its convolutional networks. A model without
any (a plain `torch.nn.Module`) has all layers pruned but the first and the last.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ..errors import MoonshotError, require
from .experts import ExpertsLayer
from .layer_kinds import WEIGHT, expert_parameters, find_layer, stacks_experts
from .layer_kinds import PrunableLayer as PrunableLayer  # for the users of blocks and their layers
from .weights import RESIDENT, Weights, mark_written, offload_hooks

ROUTER = "a router of experts stays dense unless targets names it"
Within = Callable[[nn.Module], AbstractContextManager[Any]]  # a context around each call of a module
Visit = Callable[[], AbstractContextManager[None]]  # returns a context in which some weights are onloaded
_ATTENTION = re.compile(r"attn|attention", re.IGNORECASE)


@dataclass(frozen=True)
class Block:
    """A decoder layer and its layers to prune."""

    name: str
    module: nn.Module
    layers: tuple[PrunableLayer, ...]
    weights: Weights = RESIDENT

    def onloaded(self) -> AbstractContextManager[None]:
        """A context in which the block's parameters hold its weights."""
        return self.weights.onloaded()


@dataclass(frozen=True)
class Structure:
    """The layers to prune: blocks in the model's order, layers outside of them, and skipped modules with the reason."""

    blocks: tuple[Block, ...]
    outside: tuple[PrunableLayer, ...]
    skipped: dict[str, str] = field(default_factory=dict)

    @property
    def resident(self) -> bool:
        """Whether the weights of all blocks are in the model all the time."""
        return all(block.weights is RESIDENT for block in self.blocks)

    @property
    def on_disk(self) -> bool:
        """Whether some weights of the blocks are loaded from disk."""
        return any(block.weights.on_disk for block in self.blocks)

    def layers(self) -> Iterator[PrunableLayer]:
        for block in self.blocks:
            yield from block.layers
        yield from self.outside


@dataclass(frozen=True)
class NamedParameter:
    """A parameter that is not the matrix of a pruned layer, with the interface to read and write one."""

    name: str  # in the model
    module: nn.Module  # its owner
    key: str

    @classmethod
    def of(cls, model: nn.Module, name: str) -> "NamedParameter":
        """The parameter of a model with this name."""
        owner, _, key = name.rpartition(".")
        return cls(name, model.get_submodule(owner), key)

    @property
    def parameter(self) -> nn.Parameter:
        """The module's parameter, or the placeholder of an offloaded one."""
        parameter = self.module._parameters[self.key]
        assert parameter is not None
        return parameter

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.parameter.shape)

    @property
    def matrix(self) -> Tensor:
        """The tensor, of any shape, to read."""
        return self.parameter.detach()

    def as_parameter(self, tensor: Tensor) -> Tensor:
        return tensor

    def write(self, tensor: Tensor) -> None:
        """Copy a tensor into the parameter; an offloaded block stores it on exit."""
        self.matrix.copy_(tensor)
        mark_written(self.module, self.key)


def other_parameters(model: nn.Module, layers: Iterable[PrunableLayer]) -> list[nn.Parameter]:
    """The parameters of a model that belong to none of the layers; tied ones once."""
    pruned = {id(layer.parameter) for layer in layers}
    return [parameter for parameter in model.parameters() if id(parameter) not in pruned]


def find_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The elements of the outermost module lists that hold weight matrices inside, in the model's order."""
    blocks: list[tuple[str, nn.Module]] = []
    outer: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not any(name.startswith(f"{parent}.") for parent in outer):
            elements = list(_elements(name, module, nested=False))
            blocks += elements
            outer += [name] if elements else []
    return blocks


def weights_of(model: nn.Module, block: nn.Module, without: Sequence[nn.Module] = ()) -> Weights:
    """The weights of a block of a model; with the model as `block`, the weights outside of its blocks `without`."""
    others = {module for other in without for module in other.modules()}
    modules = [module for module in block.modules() if module not in others]
    if not any(map(offload_hooks, modules)):
        return RESIDENT
    from .offload import offloaded_weights  # late: few models need it

    return offloaded_weights(model, block, modules)


def visited(model: nn.Module) -> list[Block]:
    """The model's blocks without layers, to onload their weights one after the other."""
    return [Block(name, module, (), weights_of(model, module)) for name, module in find_blocks(model)]


def require_resident(model: nn.Module) -> None:
    """Raise `MoonshotError` if blocks of a model are offloaded."""
    resident = all(block.weights is RESIDENT for block in visited(model))
    require(resident, "its blocks are offloaded", field="model", hint="load it without `offload`")


def onloading_in(model: nn.Module) -> Callable[[nn.Module], AbstractContextManager[None]]:
    """A function from a module to a context that onloads its weights; weights outside of blocks always are."""
    weights = by_module(visited(model))
    return lambda module: weights.get(module, RESIDENT).onloaded()


def by_visit(model: nn.Module, names: Iterable[str]) -> list[tuple[Visit, list[str]]]:
    """Names of parameters and buffers grouped by the context that onloads them; names outside of the blocks first."""
    groups: dict[str, tuple[Visit, list[str]]] = {"": (partial(rest_onloaded, model), [])}
    groups |= {block.name: (block.onloaded, []) for block in visited(model)}
    for name in names:
        fields = name.split(".")
        prefixes = (".".join(fields[:end]) for end in range(1, len(fields)))
        _, group = groups[next((prefix for prefix in prefixes if prefix in groups), "")]
        group.append(name)
    return list(groups.values())


def rest_onloaded(model: nn.Module) -> AbstractContextManager[None]:
    """A context in which all weights outside of the blocks are onloaded."""
    return weights_of(model, model, without=[module for _, module in find_blocks(model)]).onloaded()


def _elements(name: str, module: nn.Module, nested: bool) -> Iterator[tuple[str, nn.Module]]:
    """The blocks of a list; a nested list is never called, so its elements are blocks."""
    for key, element in module.named_children():
        inner = f"{name}.{key}"
        if isinstance(element, nn.ModuleList | nn.ModuleDict):
            yield from _elements(inner, element, nested=True)
        elif _is_block(element) or (nested and find_layer(element) is not None):
            yield inner, element


def _is_block(module: nn.Module) -> bool:
    """Whether a module contains layers; a list of bare matrices, such as heads or adapters, has no blocks."""
    return any(find_layer(child) is not None for child in module.modules() if child is not module)


def by_module(blocks: Sequence[Block]) -> dict[nn.Module, Weights]:
    """The weights of the block that a module is in, by module."""
    return {module: block.weights for block in blocks for module in block.module.modules()}


@contextmanager
def onloaded_in_turn(blocks: Sequence[Block], within: Within | None = None) -> Iterator[None]:
    """While the whole model runs forward, each offloaded block's weights are onloaded for its call, inside `within`."""
    with ExitStack() as stack:
        for block in blocks:
            if block.weights is not RESIDENT:
                _onload_for_calls(block, stack, within)
        yield


@contextmanager
def differentiated_in_turn(blocks: Sequence[Block], within: Within | None = None) -> Iterator[None]:
    """Like `onloaded_in_turn`, but keeps what a later backward pass needs.

    The graph saves detached tensors, whose data stay: a parameter is empty after the call.
    """
    resident = all(block.weights is RESIDENT for block in blocks)
    # A saved tensor that is the output of its own node would be a cycle that nothing collects.
    saved = nullcontext() if resident else saved_tensors_hooks(Tensor.detach, lambda tensor: tensor)
    with saved, onloaded_in_turn(blocks, within):
        yield


def _onload_for_calls(block: Block, stack: ExitStack, within: Within | None) -> None:
    calls: list[ExitStack] = []  # of the calls in progress

    def enter(*_: Any) -> None:
        with ExitStack() as inside:
            inside.enter_context(block.weights.onloaded())
            if within is not None:
                inside.enter_context(within(block.module))
            calls.append(inside.pop_all())

    def leave(*_: Any) -> None:
        calls.pop().close()

    def end() -> None:  # after a call that failed
        for inside in reversed(calls):
            inside.close()

    stack.callback(end)
    stack.callback(block.module.register_forward_pre_hook(enter, prepend=True).remove)
    stack.callback(block.module.register_forward_hook(leave).remove)


@contextmanager
def all_onloaded(blocks: Sequence[Block]) -> Iterator[None]:
    """All blocks' weights at once, for backward passes of the whole model."""
    with ExitStack() as stack:
        for block in blocks:
            stack.enter_context(block.weights.onloaded())
        yield


def find_structure(model: nn.Module, targets: Sequence[str] | None = None, ignore: Sequence[str] = ()) -> Structure:
    """The layers that `targets` and `ignore`, expressions searched for in module names, select.

    Without targets, everything prunable inside the blocks except routers of experts or, in a model without blocks,
    everything but the first and the last layer in the order of their definition. Raises `MoonshotError` for PEFT
    adapters, an expression that matches no module, or nothing left to prune.
    """
    hint = "prune it before they are added, or merge them first (merge_and_unload)"
    require(not adapted_layers(model), "it has PEFT adapters", field="model", hint=hint)
    names = [name for name, _, _ in named_layers(model) if name] + [name for name, _ in model.named_modules() if name]
    for field_name, expressions in (("targets", targets or ()), ("ignore", ignore)):
        for expression in expressions:
            message = f"{expression!r} matches no module name, such as {', '.join(names[-3:])}"
            require(any(re.search(expression, name) for name in names), message, field=field_name)
    blocks = find_blocks(model)
    layers, skipped = _candidates(model, [name for name, _ in blocks], targets, ignore)
    structure = Structure(
        tuple(Block(name, block, tuple(layers.get(name, ())), weights_of(model, block)) for name, block in blocks),
        tuple(layers.get(None, ())),
        skipped,
    )
    if next(structure.layers(), None) is None:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in list(skipped.items())[:3])
        if not reasons and (targets or ignore):
            raise MoonshotError("nothing to prune: `targets` and `ignore` leave nothing")
        raise MoonshotError(f"nothing to prune: {reasons or 'the model has no Linear or Conv2d'}")
    return structure


def adapted_layers(model: nn.Module) -> list[str]:
    """The names of the layers that PEFT has wrapped."""
    return [name for name, module in model.named_modules() if "base_layer" in module._modules]


def _candidates(
    model: nn.Module, blocks: list[str], targets: Sequence[str] | None, ignore: Sequence[str]
) -> tuple[dict[str | None, list[PrunableLayer]], dict[str, str]]:
    """The selected layers by the names of their blocks, and the reason for each that cannot be pruned."""
    tied: dict[int, tuple[str | None, PrunableLayer]] = {}  # by their parameter
    skipped = {} if blocks or targets is not None else _ends(model)
    routers = _routers(model) if targets is None else set()
    for name, module, layer in named_layers(model):
        block = next((block for block in blocks if name == block or name.startswith(block + ".")), None)
        if targets is None:
            selected = name not in skipped and (block is not None or not blocks)
        else:
            selected = any(re.search(target, name) for target in targets)
        if not selected or any(re.search(expression, name) for expression in ignore):
            continue
        parent = model.get_submodule(name.rpartition(".")[0])
        reason = _unprunable(module, layer, parent, targeted=targets is not None)
        reason = reason or (ROUTER if module in routers else None)
        if reason:
            skipped[name] = reason
        elif layer is not None:
            attention = bool(_ATTENTION.search(name[len(block) :] if block else ""))
            first = (block, replace(layer, modules=(), attention=attention))
            block, shared = tied.get(id(layer.parameter), first)
            tied[id(layer.parameter)] = block, replace(shared, modules=(*shared.modules, module))
    layers: dict[str | None, list[PrunableLayer]] = {}
    for block, layer in tied.values():
        layers.setdefault(block, []).append(layer)
    return layers, skipped


def named_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module, PrunableLayer | None]]:
    """Every possible layer: its name, the module, and the layer, None if the module has none.

    A layer has the name of its module or, for fused experts, of the parameter, without the suffix "weight".
    """
    for name, module in model.named_modules():
        keys = expert_parameters(module)
        for key in keys:
            layer_name = name if key == WEIGHT else f"{name}.{key}"
            yield layer_name, module, ExpertsLayer(layer_name, (module,), key=key)
        if not keys:
            yield name, module, find_layer(module, name)


def _ends(model: nn.Module) -> dict[str, str]:
    """The first and the last layer in the order of their definition, with the reason why they stay dense."""
    weights = ((name, getattr(module, "weight", None)) for name, module in model.named_modules())
    names = [name for name, weight in weights if isinstance(weight, Tensor) and _is_matrix(weight)]
    ends = {names[0]: "first", names[-1]: "last"} if names else {}
    reason = "the {} layer of a model without repeated layers stays dense unless targets names it"
    return {name: reason.format(place) for name, place in ends.items()}


def _is_matrix(weight: Tensor) -> bool:
    """Whether a weight is a matrix or kernel, not a vector with dimensions of size 1."""
    return weight.ndim >= 2 and sum(size > 1 for size in weight.shape) != 1


def _unprunable(module: nn.Module, layer: PrunableLayer | None, parent: nn.Module, targeted: bool) -> str | None:
    """The reason why a module with weight matrices cannot be pruned; None if it can, or has none."""
    if layer is not None:
        if isinstance(parent, nn.MultiheadAttention):
            return "torch's fused attention does not call its output projection"
        return layer.unprunable()
    if isinstance(module, nn.Embedding):
        reason = "an embedding has no input statistics; where the head is tied to it, target the head"
        return reason if targeted else None
    if "qweight" in dict(module.named_buffers(recurse=False)):
        return f"quantized: {type(module).__name__}"
    shapes = [list(parameter.shape) for parameter in module.parameters(recurse=False) if _is_matrix(parameter)]
    if shapes and stacks_experts(module):
        return f"experts stacked along the rows of weights {shapes}: only parameters of three dimensions are supported"
    return f"no Linear or Conv2d: {type(module).__name__} with weights {shapes}" if shapes else None


def _routers(model: nn.Module) -> set[nn.Module]:
    """The layers that route tokens to experts: each is the only layer of a sibling of E experts, with E outputs."""
    routers = set()
    for module in model.modules():
        counts = set[int]()  # of experts: alike blocks of a list, or slices of fused parameters [experts, …, …]
        for child in module.children():
            if isinstance(child, nn.ModuleList):
                if len({type(element) for element in child}) == 1 and all(map(_is_block, child)):
                    counts.add(len(child))
            elif not isinstance(child, nn.Conv1d | nn.ConvTranspose1d):
                fused = {len(parameter) for parameter in child.parameters(recurse=False) if parameter.ndim == 3}
                counts |= fused if len(fused) == 1 else set()
        counts -= {0, 1}
        for child in module.children() if counts else ():
            layers = [layer for layer in map(find_layer, child.modules()) if layer is not None]
            computed = any(layer.module._parameters.get(WEIGHT) is None for layer in layers)
            if len(layers) == 1 and not computed and layers[0].shape[0] in counts:
                routers.add(layers[0].module)
    return routers
