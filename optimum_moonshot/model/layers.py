"""Find the decoder layers of any model and the weights in them that can be pruned, without a table of model names.

Decoder layers ("blocks") are the elements of the outermost `ModuleList`s whose elements have weight matrices of their
own: that is how every transformers architecture holds its repeated layers, and the stages of its convolutional
networks. A model without any (a plain `torch.nn.Module`) has all its layers pruned but the first and the last. What a
kind of layer multiplies and how its weight becomes a matrix is in forms.py.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from torch import Tensor, nn

from ..errors import require
from .experts import ExpertsAdapter, expert_keys, stacks_experts
from .layer_adapters import LayerAdapter, find_adapter
from .offload import mark_written, rest_of, weights_of
from .onloading import RESIDENT, Weights, by_module

WEIGHT = "weight"  # what a module with one matrix calls it
ROUTER = "it sends tokens to experts: it stays dense unless targets names it"
Visit = Callable[[], AbstractContextManager[None]]  # makes a context in which some weights are in the model
_ATTENTION = re.compile(r"attn|attention", re.IGNORECASE)


@dataclass(frozen=True)
class PrunableLayer:
    """One weight matrix [d_out, d_in], in the normal form of forms.py.

    Modules that share the parameter (tied weights) are one layer and stay tied.
    """

    name: str
    modules: tuple[nn.Module, ...]
    attention: bool
    key: str = WEIGHT  # what the modules call the parameter
    # Of fused experts: some alone, the first and the one behind the last; and whether their inputs are all tokens.
    span: tuple[int, int] | None = None
    everywhere: bool = False

    @cached_property
    def adapter(self) -> LayerAdapter:
        """How the parameter, the inputs and the output gradients become matrices."""
        return self.adapter_of(self.modules[0])

    def adapter_of(self, module: nn.Module) -> LayerAdapter:
        """That of one of its modules."""
        form = adapter_at(module, self.key)
        if not isinstance(form, ExpertsAdapter):
            return form
        return replace(form, span=self.span, everywhere=self.everywhere)

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
        """[d_out, d_in] of a tensor that is laid out as the parameter."""
        return self.adapter.as_matrix(tensor)

    def as_parameter(self, matrix: Tensor) -> Tensor:
        """The inverse of `as_matrix`."""
        return self.adapter.as_parameter(matrix)

    @property
    def shape(self) -> tuple[int, int]:
        """[d_out, d_in]."""
        return self.adapter.shape

    def expert(self, index: int) -> "PrunableLayer":
        """One of a layer of experts alone.

        Args:
            index: counted from the layer's first.
        """
        form = self.adapter
        assert isinstance(form, ExpertsAdapter)
        return replace(self, span=(form.experts[index], form.experts[index] + 1))

    @property
    def groups(self) -> int:
        """How many equal slices of rows read inputs of their own; 1 for all but grouped convolutions and experts."""
        return self.adapter.groups


@dataclass(frozen=True)
class Block:
    """A decoder layer and what is pruned in it."""

    name: str
    module: nn.Module
    layers: tuple[PrunableLayer, ...]
    weights: Weights = RESIDENT

    def onloaded(self) -> AbstractContextManager[None]:
        """A context in which the block's weights are in its parameters; see presence.py."""
        return self.weights.onloaded()


@dataclass(frozen=True)
class Structure:
    """What a run prunes: blocks in the model's order, layers outside of them, and what stays dense with the reason."""

    blocks: tuple[Block, ...]
    outside: tuple[PrunableLayer, ...]
    skipped: dict[str, str] = field(default_factory=dict)

    def layers(self) -> Iterator[PrunableLayer]:
        for block in self.blocks:
            yield from block.layers
        yield from self.outside

    def layers_onloaded(self) -> Iterator[PrunableLayer]:
        """As `layers`, each with its block's weights present until the next one is asked for."""
        for block in self.blocks:
            if block.layers:
                with block.onloaded():
                    yield from block.layers
        yield from self.outside


def find_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The elements of the outermost module lists that hold weight matrices inside, in the model's order."""
    found: list[tuple[str, nn.Module]] = []
    outer: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not any(name.startswith(f"{above}.") for above in outer):
            elements = list(_elements(name, module, nested=False))
            found += elements
            outer += [name] if elements else []
    return found


def visited(model: nn.Module) -> list[Block]:
    """The model's blocks, to bring their weights one after the other."""
    return [Block(name, module, (), weights_of(model, module)) for name, module in find_blocks(model)]


def onloading_in(model: nn.Module) -> Callable[[nn.Module], AbstractContextManager[None]]:
    """What makes a context in which a module's weights are in the model, where those outside of the blocks are.

    Args:
        model: whose modules will be asked for.
    """
    inside = by_module(visited(model))
    return lambda module: inside.get(module, RESIDENT).onloaded()


def by_visit(model: nn.Module, names: Iterable[str]) -> list[tuple[Visit, list[str]]]:
    """Weights by what has to be brought for them: the rest of the model, then block after block.

    Args:
        model: that has them.
        names: of parameters and buffers.

    Returns:
        What makes a context in which they are in the model, and which they are.
    """
    found: dict[str, list[str]] = {"": []}
    visits: dict[str, Visit] = {"": partial(rest_onloaded, model)}
    for block in visited(model):
        found[block.name], visits[block.name] = [], block.onloaded
    for name in names:
        parts = name.split(".")
        inside = next((own for own in (".".join(parts[:end]) for end in range(1, len(parts))) if own in found), "")
        found[inside].append(name)
    return [(visits[own], some) for own, some in found.items()]


def rest_onloaded(model: nn.Module) -> AbstractContextManager[None]:
    """A context in which all weights outside of the blocks are in the model."""
    return rest_of(model, [module for _, module in find_blocks(model)]).onloaded()


def _elements(name: str, module: nn.Module, nested: bool) -> Iterator[tuple[str, nn.Module]]:
    """The blocks of a list. Nobody calls a list: one in it holds blocks, and each of its elements is one."""
    for key, element in module.named_children():
        inner = f"{name}.{key}"
        if isinstance(element, nn.ModuleList | nn.ModuleDict):
            yield from _elements(inner, element, nested=True)
        elif _is_block(element) or (nested and find_adapter(element) is not None):
            yield inner, element


def _is_block(module: nn.Module) -> bool:
    """A list of bare matrices is no list of layers: heads and adapters look like that."""
    inner = [child for child in module.modules() if child is not module]
    return any(find_adapter(child) is not None for child in inner)


def find_structure(model: nn.Module, targets: tuple[str, ...] | None = None, ignore: tuple[str, ...] = ()) -> Structure:
    """What `targets` and `ignore` choose.

    Args:
        model: any module.
        targets: expressions searched for in module names; None is everything prunable inside the blocks or, in a model
            without any, everything prunable but the first and the last layer in the order of their definition. Routers
            of experts are not among them.
        ignore: expressions searched for in module names that stay dense.

    Raises:
        MoonshotError: adapters of PEFT's, an expression that names no module, or nothing left to prune.
    """
    require(
        not adapted_layers(model),
        "model: it has PEFT adapters; prune it before they are added, or merge them first (merge_and_unload)",
    )
    names = [name for name, _, _ in holders(model) if name] + [name for name, _ in model.named_modules() if name]
    for field_name, expressions in (("targets", targets or ()), ("ignore", ignore)):
        for expression in expressions:
            require(
                any(re.search(expression, name) for name in names),
                f"{field_name}: {expression!r} is found in no module name, such as {', '.join(names[-3:])}",
            )
    blocks = find_blocks(model)
    wanted, skipped = _candidates(model, blocks, targets, ignore)
    by_block: dict[str, list[PrunableLayer]] = {name: [] for name, _ in blocks}
    outside: list[PrunableLayer] = []
    for layer, block in wanted:
        (by_block[block] if block else outside).append(layer)
    structure = Structure(
        tuple(Block(name, module, tuple(by_block[name]), weights_of(model, module)) for name, module in blocks),
        tuple(outside),
        skipped,
    )
    if next(structure.layers(), None) is None:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in list(skipped.items())[:3])
        chosen = "targets and ignore leave nothing" if targets or ignore else "the model has no Linear or Conv2d"
        require(False, f"nothing to prune: {reasons or chosen}")
    return structure


def adapted_layers(model: nn.Module) -> list[str]:
    """The names of the layers that PEFT has put adapters around."""
    return [name for name, module in model.named_modules() if "base_layer" in module._modules]


def _candidates(
    model: nn.Module, blocks: list[tuple[str, nn.Module]], targets: tuple[str, ...] | None, ignore: tuple[str, ...]
) -> tuple[list[tuple[PrunableLayer, str | None]], dict[str, str]]:
    """Each chosen layer with the name of its block, and the modules that were chosen but cannot be pruned."""
    modules: dict[int, list[nn.Module]] = {}
    places: dict[int, tuple[str, str, str | None]] = {}
    skipped = {} if blocks or targets is not None else _ends(model)
    routers = _routers(model) if targets is None else set()
    for name, module, key in holders(model):
        block = next((block for block, _ in blocks if name == block or name.startswith(block + ".")), None)
        if targets is None:
            chosen = name not in skipped and (block is not None or not blocks)
        else:
            chosen = any(re.search(target, name) for target in targets)
        if not chosen or any(re.search(expression, name) for expression in ignore):
            continue
        form = adapter_at(module, key)
        if not isinstance(form, ExpertsAdapter):
            parent = model.get_submodule(name.rpartition(".")[0])
            reason = ROUTER if module in routers else None
            reason = _unprunable(module, parent, asked=targets is not None) or reason
        else:
            reason = form.unprunable()
        if reason:
            skipped[name] = reason
        elif form is not None:
            modules.setdefault(id(form.parameter), []).append(module)
            places.setdefault(id(form.parameter), (name, key, block))
    wanted = []
    for parameter, (name, key, block) in places.items():
        attention = bool(_ATTENTION.search(name[len(block) :] if block else ""))
        wanted.append((PrunableLayer(name, tuple(modules[parameter]), attention, key), block))
    return wanted, skipped


def holders(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Every place where a layer could be: its name, the module, and what that calls the parameter.

    A layer has the name of its module or, of fused experts, that of the parameter, but for the word "weight".
    """
    for name, module in model.named_modules():
        keys = expert_keys(module)
        yield from ((name if key == WEIGHT else f"{name}.{key}", module, key) for key in keys)
        if not keys:
            yield name, module, WEIGHT


def adapter_at(module: nn.Module, key: str) -> LayerAdapter | None:
    """The form of a module's parameter; None where it is no layer's.

    Args:
        module: that has it.
        key: what the module calls it.
    """
    return ExpertsAdapter(module, key) if key in expert_keys(module) else find_adapter(module)


def _ends(model: nn.Module) -> dict[str, str]:
    """The first and the last layer in the order of their definition, with the reason why they stay dense."""
    weights = ((name, getattr(module, "weight", None)) for name, module in model.named_modules())
    names = [name for name, weight in weights if isinstance(weight, Tensor) and _is_matrix(weight)]
    ends = {"first": names[:1], "last": names[-1:]}
    return {
        name: f"the {place} layer of a model without repeated layers stays dense unless targets names it"
        for place, found in ends.items()
        for name in found
    }


def _matrices(module: nn.Module) -> list[list[int]]:
    """The shapes of a module's own weight matrices and kernels."""
    return [list(parameter.shape) for parameter in module.parameters(recurse=False) if _is_matrix(parameter)]


def _is_matrix(weight: Tensor) -> bool:
    """Also a kernel; not a vector with dimensions of 1 around it."""
    return weight.ndim >= 2 and sum(size > 1 for size in weight.shape) != 1


def _unprunable(module: nn.Module, parent: nn.Module, asked: bool) -> str | None:
    """Why a module that holds weight matrices cannot be pruned; None where it can, or holds none."""
    form = find_adapter(module)
    if form is not None:
        if isinstance(parent, nn.MultiheadAttention):
            return "torch's fused attention does not call its output projection"
        return form.unprunable()
    if isinstance(module, nn.Embedding):
        return "an embedding has no input statistics; where the head is tied to it, target the head" if asked else None
    if "qweight" in dict(module.named_buffers(recurse=False)):
        return f"quantized: {type(module).__name__}"
    shapes = _matrices(module)
    if shapes and stacks_experts(module):
        return f"experts one below the other in weights {shapes}: only those of three dimensions are told apart"
    return f"no Linear or Conv2d: {type(module).__name__} with weights {shapes}" if shapes else None


def _routers(model: nn.Module) -> set[nn.Module]:
    """The layers that send tokens to experts: each the only layer of a part beside E experts, with E outputs."""
    found = set()
    for module in model.modules():
        counts = {_experts(child) for child in module.children()} - {0}
        for child in module.children() if counts else ():
            forms = [form for form in map(find_adapter, child.modules()) if form is not None]
            if len(forms) == 1 and forms[0].parameter is not None and forms[0].shape[0] in counts:
                found.add(forms[0].module)
    return found


def _experts(module: nn.Module) -> int:
    """How many experts a module is, in a list or fused to parameters [experts, …, …]; 0 where it is none."""
    if isinstance(module, nn.ModuleList):
        alike = len({type(element) for element in module}) == 1 and all(map(_is_block, module))
        return len(module) if alike and len(module) > 1 else 0
    if isinstance(module, nn.Conv1d | nn.ConvTranspose1d):
        return 0
    counts = {len(parameter) for parameter in module.parameters(recurse=False) if parameter.ndim == 3}
    return counts.pop() if len(counts) == 1 and counts != {1} else 0
