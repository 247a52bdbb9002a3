"""Find the decoder layers of any model and the prunable weights in them, without a table of model names.

Decoder layers ("blocks") are the elements of the outermost `ModuleList`s whose elements contain weight matrices: every
transformers architecture holds its repeated layers so, and the stages of its convolutional networks. A model without
any (a plain `torch.nn.Module`) has all layers pruned but the first and the last. layer_adapters.py converts the weight
of each kind of layer to a matrix.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from torch import Tensor, nn

from ..errors import MoonshotError, Text, require
from .experts import ExpertsAdapter, expert_keys, stacks_experts
from .layer_adapters import LayerAdapter, find_adapter
from .offload import mark_written, rest_of, weights_of
from .onloading import RESIDENT, Weights, by_module

WEIGHT = "weight"  # what a module with one matrix calls it
ROUTER = "a router of experts stays dense unless targets names it"
Visit = Callable[[], AbstractContextManager[None]]  # returns a context in which some weights are onloaded
_ATTENTION = re.compile(r"attn|attention", re.IGNORECASE)


@dataclass(frozen=True)
class PrunableLayer:
    """One weight matrix [d_out, d_in], in the normal form of layer_adapters.py.

    Modules that share the parameter (tied weights) are one layer and stay tied.
    """

    name: str
    modules: tuple[nn.Module, ...]
    attention: bool
    key: str = WEIGHT  # the name of the parameter in the modules
    # As in `ExpertsAdapter`.
    span: tuple[int, int] | None = None
    everywhere: bool = False

    @cached_property
    def adapter(self) -> LayerAdapter:
        """The conversion of the parameter, the inputs and the output gradients to matrices."""
        return self.adapter_of(self.modules[0])

    def adapter_of(self, module: nn.Module) -> LayerAdapter:
        """The adapter of one of its modules."""
        adapter = adapter_at(module, self.key)
        assert adapter is not None
        if not isinstance(adapter, ExpertsAdapter):
            return adapter
        return replace(adapter, span=self.span, everywhere=self.everywhere)

    @property
    def weight_name(self) -> str:
        """The name of the parameter in the model."""
        return self.name if self.name.endswith(f".{self.key}") and self.key != WEIGHT else f"{self.name}.{WEIGHT}"

    @property
    def parameter(self) -> nn.Parameter:
        return self.adapter.parameter

    @property
    def matrix(self) -> Tensor:
        """The weight as [d_out, d_in], to read."""
        return self.as_matrix(self.parameter.detach())

    def assign(self, matrix: Tensor) -> None:
        """Copy a [d_out, d_in] matrix into the parameter; an offloaded block drops it on exit."""
        self.parameter.detach().copy_(self.as_parameter(matrix))

    def write(self, matrix: Tensor) -> None:
        """As `assign`, for good: an offloaded block stores the weight."""
        self.assign(matrix)
        mark_written(self.modules[0], self.key)

    def as_matrix(self, tensor: Tensor) -> Tensor:
        """[d_out, d_in] of a tensor in the parameter's layout."""
        return self.adapter.as_matrix(tensor)

    def as_parameter(self, matrix: Tensor) -> Tensor:
        """The inverse of `as_matrix`."""
        return self.adapter.as_parameter(matrix)

    @property
    def shape(self) -> tuple[int, int]:
        """[d_out, d_in]."""
        return self.adapter.shape

    def expert(self, index: int) -> "PrunableLayer":
        """A single expert of a layer of experts.

        Args:
            index: relative to the layer's first expert.
        """
        adapter = self.adapter
        assert isinstance(adapter, ExpertsAdapter)
        return replace(self, span=(adapter.experts[index], adapter.experts[index] + 1))

    @property
    def groups(self) -> int:
        """Number of equal slices of rows with separate inputs; 1 except for grouped convolutions and experts."""
        return self.adapter.groups


@dataclass(frozen=True)
class Block:
    """A decoder layer and its layers to prune."""

    name: str
    module: nn.Module
    layers: tuple[PrunableLayer, ...]
    weights: Weights = RESIDENT

    def onloaded(self) -> AbstractContextManager[None]:
        """A context in which the block's parameters hold its weights; see onloading.py."""
        return self.weights.onloaded()


@dataclass(frozen=True)
class Structure:
    """The layers to prune: blocks in the model's order, layers outside of them, and skipped modules with the reason."""

    blocks: tuple[Block, ...]
    outside: tuple[PrunableLayer, ...]
    skipped: dict[str, str] = field(default_factory=dict)

    def layers(self) -> Iterator[PrunableLayer]:
        for block in self.blocks:
            yield from block.layers
        yield from self.outside

    def layers_onloaded(self) -> Iterator[PrunableLayer]:
        """As `layers`, each with its block's weights onloaded until the next iteration."""
        for block in self.blocks:
            if block.layers:
                with block.onloaded():
                    yield from block.layers
        yield from self.outside


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


def visited(model: nn.Module) -> list[Block]:
    """The model's blocks without layers, to onload their weights one after the other."""
    return [Block(name, module, (), weights_of(model, module)) for name, module in find_blocks(model)]


def onloading_in(model: nn.Module) -> Callable[[nn.Module], AbstractContextManager[None]]:
    """A function from a module to a context in which its weights are onloaded; weights outside of blocks already are.

    Args:
        model: with these modules.
    """
    weights = by_module(visited(model))
    return lambda module: weights.get(module, RESIDENT).onloaded()


def by_visit(model: nn.Module, names: Iterable[str]) -> list[tuple[Visit, list[str]]]:
    """Weights grouped by the context that onloads them: the rest of the model, then block after block.

    Args:
        model: with these weights.
        names: of parameters and buffers.

    Returns:
        For each group a function that returns the context, and the names.
    """
    groups: dict[str, list[str]] = {"": []}
    visits: dict[str, Visit] = {"": partial(rest_onloaded, model)}
    for block in visited(model):
        groups[block.name], visits[block.name] = [], block.onloaded
    for name in names:
        parts = name.split(".")
        prefixes = (".".join(parts[:end]) for end in range(1, len(parts)))
        groups[next((prefix for prefix in prefixes if prefix in groups), "")].append(name)
    return [(visits[block_name], group) for block_name, group in groups.items()]


def rest_onloaded(model: nn.Module) -> AbstractContextManager[None]:
    """A context in which all weights outside of the blocks are onloaded."""
    return rest_of(model, [module for _, module in find_blocks(model)]).onloaded()


def _elements(name: str, module: nn.Module, nested: bool) -> Iterator[tuple[str, nn.Module]]:
    """The blocks of a list; a nested list is never called, so its elements are blocks."""
    for key, element in module.named_children():
        inner = f"{name}.{key}"
        if isinstance(element, nn.ModuleList | nn.ModuleDict):
            yield from _elements(inner, element, nested=True)
        elif _is_block(element) or (nested and find_adapter(element) is not None):
            yield inner, element


def _is_block(module: nn.Module) -> bool:
    """Whether a module contains layers; lists of bare matrices, such as heads and adapters, are no lists of blocks."""
    return any(find_adapter(child) is not None for child in module.modules() if child is not module)


def find_structure(model: nn.Module, targets: Sequence[str] | None = None, ignore: Sequence[str] = ()) -> Structure:
    """The layers that `targets` and `ignore` select.

    Args:
        model: any module.
        targets: expressions searched for in module names; None is everything prunable inside the blocks except routers
            of experts or, in a model without blocks, everything prunable but the first and the last layer in the order
            of their definition.
        ignore: expressions searched for in module names that stay dense.

    Raises:
        MoonshotError: PEFT adapters, an expression that matches no module, or nothing left to prune.
    """
    require(
        not adapted_layers(model),
        "it has PEFT adapters",
        field="model",
        hint="prune it before they are added, or merge them first (merge_and_unload)",
    )
    names = [name for name, _, _ in holders(model) if name] + [name for name, _ in model.named_modules() if name]
    for field_name, expressions in (("targets", targets or ()), ("ignore", ignore)):
        for expression in expressions:
            require(
                any(re.search(expression, name) for name in names),
                f"{expression!r} matches no module name, such as {', '.join(names[-3:])}",
                field=field_name,
            )
    blocks = find_blocks(model)
    selected, skipped = _candidates(model, blocks, targets, ignore)
    by_block: dict[str, list[PrunableLayer]] = {name: [] for name, _ in blocks}
    outside: list[PrunableLayer] = []
    for layer, block in selected:
        (by_block[block] if block else outside).append(layer)
    structure = Structure(
        tuple(Block(name, module, tuple(by_block[name]), weights_of(model, module)) for name, module in blocks),
        tuple(outside),
        skipped,
    )
    if next(structure.layers(), None) is None:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in list(skipped.items())[:3])
        if not reasons and (targets or ignore):
            raise MoonshotError(Text("nothing to prune: {} and {} leave nothing", "targets", "ignore"))
        raise MoonshotError(f"nothing to prune: {reasons or 'the model has no Linear or Conv2d'}")
    return structure


def adapted_layers(model: nn.Module) -> list[str]:
    """The names of the layers that PEFT has wrapped."""
    return [name for name, module in model.named_modules() if "base_layer" in module._modules]


def _candidates(
    model: nn.Module, blocks: list[tuple[str, nn.Module]], targets: Sequence[str] | None, ignore: Sequence[str]
) -> tuple[list[tuple[PrunableLayer, str | None]], dict[str, str]]:
    """Each selected layer with the name of its block, and the selected modules that cannot be pruned."""
    modules: dict[int, list[nn.Module]] = {}
    places: dict[int, tuple[str, str, str | None]] = {}
    skipped = {} if blocks or targets is not None else _ends(model)
    routers = _routers(model) if targets is None else set()
    for name, module, key in holders(model):
        block = next((block for block, _ in blocks if name == block or name.startswith(block + ".")), None)
        if targets is None:
            selected = name not in skipped and (block is not None or not blocks)
        else:
            selected = any(re.search(target, name) for target in targets)
        if not selected or any(re.search(expression, name) for expression in ignore):
            continue
        adapter = adapter_at(module, key)
        if not isinstance(adapter, ExpertsAdapter):
            parent = model.get_submodule(name.rpartition(".")[0])
            reason = ROUTER if module in routers else None
            reason = _unprunable(module, parent, targeted=targets is not None) or reason
        else:
            reason = adapter.unprunable()
        if reason:
            skipped[name] = reason
        elif adapter is not None:
            modules.setdefault(id(adapter.parameter), []).append(module)
            places.setdefault(id(adapter.parameter), (name, key, block))
    layers = []
    for parameter, (name, key, block) in places.items():
        attention = bool(_ATTENTION.search(name[len(block) :] if block else ""))
        layers.append((PrunableLayer(name, tuple(modules[parameter]), attention, key), block))
    return layers, skipped


def holders(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Every possible layer: its name, the module, and the name of the parameter in the module.

    A layer has the name of its module or, of fused experts, that of the parameter, without the suffix "weight".
    """
    for name, module in model.named_modules():
        keys = expert_keys(module)
        yield from ((name if key == WEIGHT else f"{name}.{key}", module, key) for key in keys)
        if not keys:
            yield name, module, WEIGHT


def adapter_at(module: nn.Module, key: str) -> LayerAdapter | None:
    """The adapter of a module's parameter; None if it is not the weight of a layer.

    Args:
        module: with the parameter.
        key: the name of the parameter in the module.
    """
    return ExpertsAdapter(module, key) if key in expert_keys(module) else find_adapter(module)


def _ends(model: nn.Module) -> dict[str, str]:
    """The first and the last layer in the order of their definition, with the reason why they stay dense."""
    weights = ((name, getattr(module, "weight", None)) for name, module in model.named_modules())
    names = [name for name, weight in weights if isinstance(weight, Tensor) and _is_matrix(weight)]
    ends = {"first": names[:1], "last": names[-1:]}
    return {
        name: f"the {place} layer of a model without repeated layers stays dense unless targets names it"
        for place, layers in ends.items()
        for name in layers
    }


def _matrices(module: nn.Module) -> list[list[int]]:
    """The shapes of the weight matrices and kernels that are direct parameters of a module."""
    return [list(parameter.shape) for parameter in module.parameters(recurse=False) if _is_matrix(parameter)]


def _is_matrix(weight: Tensor) -> bool:
    """Whether a weight is a matrix or kernel, not a vector with dimensions of size 1."""
    return weight.ndim >= 2 and sum(size > 1 for size in weight.shape) != 1


def _unprunable(module: nn.Module, parent: nn.Module, targeted: bool) -> str | None:
    """The reason why a module with weight matrices cannot be pruned; None if it can, or has none."""
    adapter = find_adapter(module)
    if adapter is not None:
        if isinstance(parent, nn.MultiheadAttention):
            return "torch's fused attention does not call its output projection"
        return adapter.unprunable()
    if isinstance(module, nn.Embedding):
        return (
            "an embedding has no input statistics; where the head is tied to it, target the head" if targeted else None
        )
    if "qweight" in dict(module.named_buffers(recurse=False)):
        return f"quantized: {type(module).__name__}"
    shapes = _matrices(module)
    if shapes and stacks_experts(module):
        return f"experts stacked along the rows of weights {shapes}: only parameters of three dimensions are supported"
    return f"no Linear or Conv2d: {type(module).__name__} with weights {shapes}" if shapes else None


def _routers(model: nn.Module) -> set[nn.Module]:
    """The layers that route tokens to experts: each is the only layer of a sibling of E experts, with E outputs."""
    routers = set()
    for module in model.modules():
        counts = {_experts(child) for child in module.children()} - {0}
        for child in module.children() if counts else ():
            adapters = [adapter for adapter in map(find_adapter, child.modules()) if adapter is not None]
            if len(adapters) == 1 and adapters[0].weight is not None and adapters[0].shape[0] in counts:
                routers.add(adapters[0].module)
    return routers


def _experts(module: nn.Module) -> int:
    """The number of experts in a module, a list or fused parameters [experts, …, …]; 0 if it has none."""
    if isinstance(module, nn.ModuleList):
        alike = len({type(element) for element in module}) == 1 and all(map(_is_block, module))
        return len(module) if alike and len(module) > 1 else 0
    if isinstance(module, nn.Conv1d | nn.ConvTranspose1d):
        return 0
    counts = {len(parameter) for parameter in module.parameters(recurse=False) if parameter.ndim == 3}
    return counts.pop() if len(counts) == 1 and counts != {1} else 0
