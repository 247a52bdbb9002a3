"""Structured groups: input columns that can be removed with the rows that produce them, as neurons or attention heads.

They are probed, without a table of model names. The output of every linear layer of a decoder layer is replaced by
random values, and automatic differentiation shows which of these reach which input column of which layer without
passing through another linear layer. The columns of ``down_proj`` depend on one row of ``gate_proj`` and ``up_proj``
each, the columns of ``o_proj`` on the rows of their head in ``q_proj``, ``k_proj`` and ``v_proj``. Fused projections,
interleaved or not, need no special case. A group is the smallest set of consecutive columns that can be removed: under
grouped-query attention a key-value head with all of its query heads; if one key-value head serves every query head, it
stays and query heads are removed.

The experts of a mixture have equal shapes, so one expert that receives tokens is probed for all of them.
"""

import dataclasses
from collections.abc import Callable
from contextlib import ExitStack
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..data.batches import Batch
from ..errors import MoonshotError, require
from ..objective.patterns import Structured
from .calls import frozen, model_device, run_model, to_device
from .isolation import use_differentiable_attention
from .layers import PrunableLayer, Structure, differentiated_in_turn, find_structure
from .model_info import max_positions, vocabulary_size

PROBE_SAMPLES, PROBE_TOKENS = 2, 16
UNEXPLAINED = "its columns are no neurons or heads that can be removed, and it produces none"
UNREACHED = "the probe for neurons and heads did not reach it"
OUTSIDE = "it is in no repeated layer, where neurons and heads are searched"
CONVOLUTION = "a convolution: structured pruning finds the neurons and heads of linear layers"


@dataclasses.dataclass(frozen=True)
class StructuredGroups:
    """The input columns of one layer as ``count`` groups of ``size`` consecutive ones, neurons or heads.

    Fused experts have these groups each.
    """

    name: str  # of the layer that reads the columns
    size: int
    count: int
    rows: dict[str, Tensor]  # producing layer → int64 [rows of a matrix]: the group that a row serves, -1 for all

    @property
    def columns(self) -> Tensor:
        """The group of every column, int64 [d_in]."""
        return torch.arange(self.count).repeat_interleave(self.size)


@dataclasses.dataclass
class _Trace:
    """One forward pass of the model on random layer outputs; a layer that is called twice has two of each.

    Of fused experts it has the products of the first that a token is routed to.
    """

    inputs: dict[str, list[Tensor]] = dataclasses.field(default_factory=dict)  # of every layer
    outputs: dict[str, list[Tensor]] = dataclasses.field(default_factory=dict)  # the leaves of the graph
    results: list[Tensor] = dataclasses.field(default_factory=list)  # of the model
    experts: dict[str, slice] = dataclasses.field(default_factory=dict)  # layer → the expert that is probed

    @cached_property
    def cotangents(self) -> dict[str, list[tuple[Tensor, Tensor]]]:
        """The inputs of every layer, and the results of the model at "", each with a random tensor."""
        generator = torch.Generator().manual_seed(1)
        tensors = {**self.inputs, "": self.results}
        return {name: list(zip(of, _random_like(of, generator), strict=True)) for name, of in tensors.items()}


def find_structured_groups(
    model: nn.Module, inputs: Batch | None = None
) -> tuple[dict[str, StructuredGroups], dict[str, str]]:
    """The structured groups of every layer that has some, by its name; the reason for each that is in none.

    The model runs once on random data, or on `inputs`, whose values do not matter. Raises `MoonshotError` if it does
    not run, or ``torch.inference_mode()`` forbids it.
    """
    require(not torch.is_inference_mode_enabled(), "torch.inference_mode() forbids gradients", hint="leave its context")
    blocks = find_structure(model).blocks
    linear = {b.name: [layer for layer in b.layers if not layer.images] for b in blocks}
    layers = [layer for group in linear.values() for layer in group]
    if not layers:
        return {}, {}
    with frozen(model):
        with differentiated_in_turn(blocks):
            trace = _run_probe(model, layers, inputs or probe_inputs(model))
        groups: dict[str, StructuredGroups] = {}
        sizes: dict[str, int] = {}  # of an earlier decoder layer, tried first
        for block in blocks:
            leaves = {
                layer.name: trace.outputs[layer.name] for layer in linear[block.name] if layer.name in trace.outputs
            }
            for name in leaves:
                relative = name.removeprefix(block.name)
                group = _groups(trace, name, leaves, sizes.get(relative))
                if group is not None:
                    groups[name], sizes[relative] = group, group.size
    used = {*groups, *(producer for group in groups.values() for producer in group.rows)}
    names = [layer.name for layer in layers if layer.name not in used]
    return groups, {name: UNEXPLAINED if name in trace.outputs else UNREACHED for name in names}


def structured_patterns(
    model: nn.Module, structure: Structure, pattern: Structured, chosen: bool
) -> tuple[Structure, dict[str, Structured], list[str]]:
    """The layers to prune in a structured run, a pattern for each, and notes for the user.

    Neurons are removed ``pattern.group`` at a time, heads always one by one. If the user has `chosen` the layers,
    columns of layers without neurons or heads are set to zero as well; otherwise these layers stay dense.
    """
    groups, unused = find_structured_groups(model)
    skipped, patterns, notes = dict(structure.skipped), {}, []
    for layer in structure.layers():
        if layer.name in groups and groups[layer.name].size > 1:
            patterns[layer.name] = dataclasses.replace(pattern, group=groups[layer.name].size)
        elif layer.name in groups or chosen:
            patterns[layer.name] = pattern
        elif all(layer.name not in group.rows for group in groups.values()):
            skipped[layer.name] = unused.get(layer.name, CONVOLUTION if layer.images else OUTSIDE)
        if chosen and layer.name not in groups and layer.name in patterns:
            notes.append(f"{layer.name}: its columns are no neurons or heads; zero columns make no model smaller")

    def with_pattern(layers: tuple[PrunableLayer, ...]) -> tuple[PrunableLayer, ...]:
        return tuple(layer for layer in layers if layer.name in patterns)

    blocks = tuple(dataclasses.replace(block, layers=with_pattern(block.layers)) for block in structure.blocks)
    structure = Structure(blocks, with_pattern(structure.outside), skipped)
    counts = {layer.name: layer.shape[1] // patterns[layer.name].group for layer in structure.layers()}  # of groups
    whole = [name for name, count in counts.items() if pattern.sparsity and not round(pattern.sparsity * count)]
    if whole:
        notes.append(
            f"{len(whole)} layers, such as {whole[0]}, keep all columns: {pattern.sparsity:g} of their "
            f"{counts[whole[0]]} groups rounds to none"
        )
    return structure, patterns, notes


def probe_inputs(model: nn.Module) -> Batch:
    """A small random batch for a text or image model; `MoonshotError` for other models."""
    generator = torch.Generator().manual_seed(0)
    config = getattr(model, "config", None)
    name = getattr(model, "main_input_name", "input_ids")
    if name == "pixel_values":
        size = getattr(config, "image_size", None) or 224
        height, width = (size, size) if isinstance(size, int) else size
        channels = getattr(config, "num_channels", 3)
        return {name: torch.randn(PROBE_SAMPLES, channels, height, width, generator=generator)}
    require(name == "input_ids", f"{type(model).__name__} reads {name}: structured pruning supports text and images")
    length = min(PROBE_TOKENS, max_positions(model) or PROBE_TOKENS)
    ids = torch.randint(vocabulary_size(model), (PROBE_SAMPLES, length), generator=generator)
    return {name: ids, "decoder_input_ids": ids} if getattr(config, "is_encoder_decoder", False) else {name: ids}


def _run_probe(model: nn.Module, layers: list[PrunableLayer], inputs: Batch) -> _Trace:
    """Run the model with every layer's output replaced by a random leaf."""
    trace = _Trace()
    generator = torch.Generator().manual_seed(0)

    def replace(layer: PrunableLayer, inputs: Tensor, output: Tensor) -> Tensor | None:
        if trace.experts.setdefault(layer.name, layer.called_groups) != layer.called_groups:
            return None
        (random,) = _random_like([output], generator)
        trace.inputs.setdefault(layer.name, []).append(inputs)
        trace.outputs.setdefault(layer.name, []).append(random.requires_grad_(True))
        return random.clone()  # the model may write to it in place, which a leaf forbids

    with ExitStack() as undo:
        use_differentiable_attention(model, undo)
        for layer in layers:
            layer.watch(replace, undo)
        try:
            output = run_model(model, to_device(inputs, model_device(model)))
        except (TypeError, ValueError, RuntimeError, KeyError, IndexError, AttributeError) as error:
            name, shapes = type(model).__name__, {key: list(tensor.shape) for key, tensor in inputs.items()}
            raise MoonshotError(f"{name} does not run on a probe of {shapes}: {error}") from error
    trace.results = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    return trace


def _groups(trace: _Trace, name: str, leaves: dict[str, list[Tensor]], expected: int | None) -> StructuredGroups | None:
    """The smallest groups of a layer's columns that separate; None if none do, or other layers read them too."""
    inputs = [tensor for tensor in trace.inputs[name] if tensor.requires_grad]
    if not inputs:
        return None
    width = inputs[0].shape[-1]
    cotangents = _random_like(inputs, torch.Generator().manual_seed(0))

    def reached(columns: Tensor) -> Tensor:
        return _reached(inputs, [cotangent * columns.to(cotangent.device) for cotangent in cotangents], leaves)

    sizes = [size for size in range(1, width // 2 + 1) if width % size == 0]  # two groups or more
    if expected and width % expected == 0:
        sizes.insert(0, expected)
    for size in sizes:
        group_of = torch.arange(width) // size
        served = _served(group_of, width // size, reached)
        if served is None:
            continue
        rows = _per_layer(served, leaves, width // size)
        if rows is None or _reach_others(trace, name, {producer: leaves[producer] for producer in rows}, rows):
            return None
        return StructuredGroups(name, size, width // size, rows)
    return None


def _reached(outputs: list[Tensor], cotangents: list[Tensor], leaves: dict[str, list[Tensor]]) -> Tensor:
    """Whether each output channel of all leaves, one layer after another, reaches the outputs: a bool vector."""
    masks = {name: torch.zeros(calls[0].shape[-1], dtype=torch.bool) for name, calls in leaves.items()}
    names, flat = zip(*((name, leaf) for name, calls in leaves.items() for leaf in calls), strict=True)
    gradients = torch.autograd.grad(outputs, flat, cotangents, retain_graph=True, allow_unused=True)
    for name, gradient in zip(names, gradients, strict=True):
        if gradient is not None:
            masks[name] |= (gradient != 0).flatten(0, -2).any(0).cpu()
    return torch.cat([*masks.values()])


def _served(group_of: Tensor, count: int, reached: Callable[[Tensor], Tensor]) -> Tensor | None:
    """The one group that each channel reaches, -1 if it reaches all, -2 if none; None if any reaches some.

    Two probes per binary digit of the group's index, the columns of the groups with and without that digit, decide for
    all channels at once: a channel that reaches two groups is in both probes of a digit in which they differ.
    `reached` maps a bool mask of columns [d_in] to a mask of the channels of all layers that reach them.
    """
    digits = range((count - 1).bit_length())
    single = every = silent = torch.tensor(True)
    number = torch.tensor(0)
    for digit in sorted(digits, key=lambda digit: (digit > 0, -digit)):  # most failures show in the outer digits
        has = group_of >> digit & 1 == 1
        one, zero = reached(has), reached(~has)
        single, every, silent = single & (one ^ zero), every & (one & zero), silent & ~(one | zero)
        number = number + (one.long() << digit)
        if not single.any() or not (single | every | silent).all():
            return None
    if every.any() and not all(reached(group_of == group)[every].all() for group in range(count)):
        return None
    return torch.where(single, number, torch.where(every, -1, -2))


def _per_layer(served: Tensor, leaves: dict[str, list[Tensor]], count: int) -> dict[str, Tensor] | None:
    """`served` by layer, for layers that reach any group; None unless each layer has equally many rows per group."""
    rows = {}
    widths = [calls[0].shape[-1] for calls in leaves.values()]
    for name, groups in zip(leaves, served.split(widths), strict=True):
        sizes = torch.bincount(groups[groups >= 0], minlength=count)
        if not (sizes == sizes[0]).all():
            return None
        if (groups >= -1).any():
            rows[name] = groups
    return rows


def _reach_others(trace: _Trace, name: str, producers: dict[str, list[Tensor]], rows: dict[str, Tensor]) -> bool:
    """Whether a row that serves a group of the layer `name` reaches any other layer or the model's result too."""
    read = [tensor for other in trace.inputs if other != name for tensor in trace.cotangents[other]]
    pairs = [(tensor, random) for tensor, random in [*read, *trace.cotangents[""]] if tensor.requires_grad]
    if not pairs:
        return False
    outputs, cotangents = map(list, zip(*pairs, strict=True))
    reached = _reached(outputs, cotangents, producers)
    return bool(reached[torch.cat([*rows.values()]) >= 0].any())


def _random_like(tensors: list[Tensor], generator: torch.Generator) -> list[Tensor]:
    """Random tensors of the same shapes, types and devices, without the global random state."""
    return [torch.randn(tensor.shape, generator=generator).to(tensor.device, tensor.dtype) for tensor in tensors]
