"""The dependences between the tensors at a model's weights, from one run of the model that is cut at every weight.

Every product with a weight matrix, every embedding and every norm is a node, and returns a random leaf instead of its
output. Other parameters (positions, class tokens) are leaves themselves. Automatic differentiation then shows how the
inputs of a node depend on the outputs of others, without passing through another weight. If a dependence *only mixes
tokens*, its derivative commutes with every matrix on the channels. This is tested with one signed permutation, whose
products are exact in any dtype.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from ..data.batches import Batch
from ..errors import MoonshotError, reason
from ..model.calls import frozen, model_device, run_model, to_device
from ..model.experts import plain_implementation
from ..model.layer_kinds import find_layer
from ..model.layers import differentiated_in_turn, onloaded_in_turn, visited
from .norms import Norm, find_norm, may_be_norm

# Relative rounding error of a derivative that commutes with a permutation.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
COARSE = 5e-2
# Functions that return a parameter in another dtype.
_CASTS = (torch.Tensor.to, torch.Tensor.type, torch.Tensor.float, torch.Tensor.double)


@dataclass(frozen=True)
class Axis:
    """One axis of a parameter: the channels of the inputs or the outputs of a node."""

    holder: nn.Module
    name: str  # of the parameter in its module
    axis: int  # not negative

    @property
    def parameter(self) -> nn.Parameter:
        parameter = self.holder._parameters[self.name]
        assert parameter is not None
        return parameter


@dataclass(eq=False)
class Node:
    """A product with a weight, an embedding, a norm, or a parameter that the model uses directly."""

    name: str
    reads: tuple[Axis, ...] = ()
    writes: tuple[Axis, ...] = ()
    norm: Norm | None = None
    images: bool = False  # channels are on the third axis from the end, not on the last
    raw: bool = False  # a parameter itself
    hidden: bool = False  # some inputs are computed without gradients, so that their dependences are unknown
    functional: bool = False  # `functional.linear` with a parameter outside of layers, or slices of it (fused experts)
    inputs: list[Tensor] = field(default_factory=list)
    leaves: list[Tensor] = field(default_factory=list)
    onloaded: Tensor | None = None  # the value of a raw parameter, which may be offloaded later

    def value(self, leaf: Tensor) -> Tensor:
        """The value of one of the node's leaves in the run."""
        return leaf.detach() if self.onloaded is None else self.onloaded

    def channels_last(self, tensor: Tensor) -> Tensor:
        return tensor.movedim(-3, -1) if self.images and tensor.ndim >= 3 else tensor

    def cut(self, output: Tensor, generator: torch.Generator) -> Tensor:
        """A random leaf that replaces an output of the node."""
        leaf = random_like(output, generator).requires_grad_(True)
        self.leaves.append(leaf)
        return leaf.clone()  # autograd forbids in-place operations on leaves


@dataclass(frozen=True)
class Reading:
    """The dependence of one input of a node on the nodes' leaves; nodes are given by their index in the trace."""

    node: int | None  # None: the model's result
    alike: frozenset[int]  # the nodes whose tokens it only mixes
    other: frozenset[int]  # the nodes on which it depends in another way
    whole: bool  # whether it is the sum of the contributions of `alike`


class Trace:
    """The nodes of a model, and one run of it on a small random batch, with offloaded blocks onloaded in turn."""

    def __init__(self, model: nn.Module, batch: Batch):
        self.model = model
        self.results: list[Tensor] = []
        batch = to_device(batch, model_device(model))
        with frozen(model), plain_experts(model):
            self.nodes = _find_nodes(model, batch)
            self._run(batch)
        self.by_name = {node.name: node for node in self.nodes}

    def _run(self, batch: Batch) -> None:
        generator = torch.Generator().manual_seed(0)
        raw = [node for node in self.nodes if node.raw]
        functional = {id(node.writes[0].parameter): node for node in self.nodes if node.functional}
        modules = [node for node in self.nodes if node.writes and not node.raw and not node.functional]
        by_module = {node.writes[0].holder: node for node in modules}
        by_module |= {node.norm.module: node for node in self.nodes if node.norm is not None}

        def hook(node: Node, _: nn.Module, args: tuple[Any, ...], named: dict[str, Any], output: Tensor) -> Tensor:
            read = next((value for value in (*args, *named.values()) if _is_floating(value)), None)
            if read is not None and read.grad_fn is None and not torch.is_grad_enabled():
                node.hidden = True
            elif read is not None:
                node.inputs.append(read)
            return node.cut(output, generator)

        def product(parameter: int, inputs: Tensor, call: Callable[[], Tensor]) -> Tensor:
            if parameter not in functional:
                return call()
            functional[parameter].inputs.append(inputs)
            return functional[parameter].cut(call(), generator)

        with ExitStack() as stack:
            for module, node in by_module.items():
                stack.callback(module.register_forward_hook(partial(hook, node), with_kwargs=True).remove)
            for parameter in (node.writes[0].parameter for node in raw):
                parameter.requires_grad_(True)
                stack.callback(parameter.requires_grad_, False)
            _enter(raw, self.model)
            observed = stack.enter_context(_Products(self.model, product))

            def within(block: nn.Module) -> AbstractContextManager[None]:
                _enter(raw, block)
                return observed.of(block)

            stack.enter_context(differentiated_in_turn(visited(self.model), within))
            stack.enter_context(torch.enable_grad())
            self.results = [leaf for leaf in tree_leaves(_call(self.model, batch)) if _is_floating(leaf)]

    def readings(self) -> Iterator[Reading]:
        """Yield the dependences of all inputs on all leaves, node by node, then of the model's result."""
        flat = [(place, leaf) for place, node in enumerate(self.nodes) for leaf in node.leaves]
        for place, node in enumerate(self.nodes):
            for tensor in node.inputs:
                if tensor.requires_grad:
                    yield self._reading(place, tensor, flat)
        for tensor in self.results:
            if tensor.requires_grad:
                gradients = vjp(tensor, torch.randn_like(tensor), [leaf for _, leaf in flat])
                places = {place for (place, _), gradient in zip(flat, gradients, strict=True) if gradient is not None}
                yield Reading(None, frozenset(), frozenset(places), False)

    def _reading(self, reader: int, tensor: Tensor, flat: list[tuple[int, Tensor]]) -> Reading:
        node = self.nodes[reader]
        generator = torch.Generator().manual_seed(1)
        width = node.channels_last(tensor).shape[-1]
        order, signs = torch.randperm(width, generator=generator), torch.randn(width, generator=generator).sign()
        order, signs = order.to(tensor.device), signs.to(tensor.device, tensor.dtype)
        cotangent = random_like(tensor, generator)

        def permuted(value: Tensor, of: Node) -> Tensor:
            last = of.channels_last(value)[..., order] * signs
            return last.movedim(-1, -3) if of.images and value.ndim >= 3 else last

        plain = vjp(tensor, cotangent, [leaf for _, leaf in flat])
        reached = [
            (place, leaf, gradient)
            for (place, leaf), gradient in zip(flat, plain, strict=True)
            if gradient is not None and bool((gradient != 0).any())
        ]
        leaves = [leaf for _, leaf, _ in reached]
        after = vjp(tensor, permuted(cotangent, node), leaves) if leaves else ()
        tolerance = tolerance_of(tensor.dtype)
        alike, other, terms = set(), set(), list[tuple[Tensor, Tensor]]()
        for (place, leaf, before), gradient in zip(reached, after, strict=True):
            maker = self.nodes[place]
            if (
                maker.channels_last(leaf).shape[-1] == width
                and gradient is not None
                and float((gradient - permuted(before, maker)).norm()) <= tolerance * float(before.norm())
            ):
                alike.add(place)
                terms.append((leaf, maker.value(leaf)))
            else:
                other.add(place)
        whole = bool(alike) and _is_sum(tensor, terms, generator, trials=8 if other else 2)
        return Reading(reader, frozenset(alike - other), frozenset(other), whole)


def _is_sum(tensor: Tensor, terms: Sequence[tuple[Tensor, Tensor]], generator: torch.Generator, trials: int) -> bool:
    """Whether a tensor x is the sum of its linear dependences on some leaves, given with their values.

    Then ⟨c, x⟩ is the sum of ⟨gradient, leaf⟩ for every c. Each trial has a random c, because the coarse tolerance of
    16 bits permits coincidences.
    """
    value = tensor.detach().double()
    limit = 3 * tolerance_of(tensor.dtype) * float(value.norm())
    for _ in range(trials):
        cotangent = random_like(tensor, generator)
        gradients = vjp(tensor, cotangent, [leaf for leaf, _ in terms])
        error = float((cotangent.double() * value).sum())
        for (_, leaf), gradient in zip(terms, gradients, strict=True):
            error -= 0.0 if gradient is None else float((gradient.double() * leaf.double()).sum())
        if not abs(error) <= limit:
            return False
    return True


def vjp(output: Tensor, cotangent: Tensor, leaves: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """Vector–Jacobian products of an output of the run with respect to leaves; None if there is no dependence.

    A leaf may be a parameter that was frozen after the run. Raises `MoonshotError` if the model is not differentiable.
    """
    frozen_leaves = [leaf for leaf in leaves if not leaf.requires_grad]
    try:
        for leaf in frozen_leaves:
            leaf.requires_grad_(True)
        return torch.autograd.grad(output, leaves, cotangent, retain_graph=True, allow_unused=True)
    except (AssertionError, NotImplementedError) as error:  # from a backward pass that the model defines
        raise MoonshotError(f"the model cannot be differentiated: {reason(error)}", field="rotation") from error
    finally:
        for leaf in frozen_leaves:
            leaf.requires_grad_(False)


def tolerance_of(dtype: torch.dtype) -> float:
    """The relative difference that rounding in a dtype may cause between two computations of the same value."""
    return TOLERANCE.get(dtype, COARSE)


def random_like(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Normal values, drawn on the host, with the shape, device and dtype of a tensor."""
    return torch.randn(tensor.shape, generator=generator).to(tensor.device, tensor.dtype)


class _Products(TorchFunctionMode):
    """Intercepts `functional.linear` with a parameter of a model, a slice of it, or its cast to another dtype.

    Parameters are recognised by the address of their storage. `see` is called with the parameter's id (the id of the
    placeholder, if it is offloaded), the inputs and the product, and returns the result.
    """

    def __init__(self, model: nn.Module, see: Callable[[int, Tensor, Callable[[], Tensor]], Tensor]):
        super().__init__()
        self.see = see
        self.names = {(module, name): id(parameter) for module, name, parameter in parameter_slots(model)}
        self.ids = self._addresses(model)
        self.cast: list[Tensor] = []  # keeps casts alive, so that no other tensor gets their addresses

    def _addresses(self, module: nn.Module) -> dict[int, int]:
        return {
            parameter.untyped_storage().data_ptr(): self.names[holder, name]
            for holder, name, parameter in parameter_slots(module)
            if parameter.numel() and not parameter.is_meta
        }

    @contextmanager
    def of(self, block: nn.Module) -> Iterator[None]:
        """A context in which the onloaded weights of a block are recognised."""
        before, casts = self.ids, len(self.cast)
        self.ids = before | self._addresses(block)
        try:
            yield
        finally:  # these addresses will be reused
            self.ids = before
            del self.cast[casts:]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.linear and len(args) >= 2 and _is_floating(args[1]):
            parameter = self.ids.get(args[1].untyped_storage().data_ptr())
            if parameter is not None:
                return self.see(parameter, args[0], lambda: func(*args, **kwargs))
        result = func(*args, **kwargs)
        if func in _CASTS and isinstance(args[0], nn.Parameter) and _is_floating(result):
            parameter = self.ids.get(args[0].untyped_storage().data_ptr())
            if parameter is not None:
                self.ids[result.untyped_storage().data_ptr()] = parameter
                self.cast.append(result)
        return result


def parameter_slots(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Every parameter with its module and its name there, once per module that has it."""
    for holder in module.modules():
        for name, parameter in holder._parameters.items():
            if parameter is not None:
                yield holder, name, parameter


def _enter(nodes: Sequence[Node], module: nn.Module) -> None:
    """Make the raw parameters of a module leaves, if they are onloaded."""
    inside = set(module.modules())
    for node in nodes:
        parameter = node.writes[0].parameter
        if node.writes[0].holder in inside and not parameter.is_meta:
            node.leaves, node.onloaded = [parameter], parameter.detach()


def _find_nodes(model: nn.Module, batch: Batch) -> list[Node]:
    """All nodes, in the order of the modules; norms and embeddings are recognised by a call."""
    embeddings: set[nn.Module] = set()
    norms: dict[nn.Module, Norm | None] = {}
    used: set[int] = set()

    def hook(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        if module in embeddings or module in norms or not _is_floating(output) or find_layer(module) is not None:
            return
        read = next((value for value in (*args, *named.values()) if isinstance(value, Tensor)), None)
        if read is None or not read.is_floating_point():
            tables = list(module.parameters(recurse=False))
            if len(tables) == 1 and tables[0].ndim == 2 and tables[0].shape[1] == output.shape[-1]:
                embeddings.add(module)
        elif may_be_norm(module, read, output) and sum(map(_is_floating, (*args, *named.values()))) == 1:
            norms[module] = find_norm(module, read.shape[-1])

    def product(parameter: int, inputs: Tensor, call: Callable[[], Tensor]) -> Tensor:
        used.add(parameter)
        return call()

    with ExitStack() as stack, torch.no_grad():
        for module in model.modules():
            if next(module.children(), None) is None:
                stack.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
        products = stack.enter_context(_Products(model, product))
        stack.enter_context(onloaded_in_turn(visited(model), products.of))
        _call(model, batch)
    nodes: list[Node] = []
    covered: set[int] = set()
    for name, module in model.named_modules():
        node = _module_node(name, module, module in embeddings, norms.get(module))
        if node is not None:
            nodes.append(node)
            covered |= {id(parameter) for parameter in module.parameters(recurse=False)}
    for name, parameter in model.named_parameters():
        if id(parameter) not in covered and parameter.ndim:
            path, _, key = name.rpartition(".")
            holder, last = model.get_submodule(path), parameter.ndim - 1
            if id(parameter) in used and parameter.ndim >= 2:
                nodes.append(Node(name, (Axis(holder, key, last),), (Axis(holder, key, last - 1),), functional=True))
            else:
                nodes.append(Node(name, writes=(Axis(holder, key, last),), raw=True))
    return nodes


def _module_node(name: str, module: nn.Module, embeds: bool, norm: Norm | None) -> Node | None:
    layer = find_layer(module)
    if layer is not None and layer.unprunable() is None:  # even if the probe does not reach it
        out, into = layer.axes
        bias = (Axis(module, "bias", 0),) if module._parameters.get("bias") is not None else ()
        reads = (Axis(module, "weight", into),) if layer.groups == 1 else ()
        return Node(name, reads, (Axis(module, "weight", out), *bias), images=layer.images)
    if embeds:
        (table,) = module._parameters
        return Node(name, writes=(Axis(module, table, 1),))
    return None if norm is None else Node(name, norm=norm)


@contextmanager
def plain_experts(model: nn.Module) -> Iterator[None]:
    """A context in which fused experts are multiplied one by one, by `functional.linear`, if the model allows it."""
    with ExitStack() as stack:
        for module in model.modules():
            stack.enter_context(plain_implementation(module))
        yield


def _call(model: nn.Module, batch: Batch) -> Any:
    try:
        return run_model(model, batch)
    except MoonshotError:
        raise
    except (TypeError, ValueError, RuntimeError, KeyError, IndexError, AttributeError) as error:
        shapes = {key: list(tensor.shape) for key, tensor in batch.items()}
        raise MoonshotError(f"{type(model).__name__} does not run on a probe of {shapes}: {reason(error)}") from error


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
