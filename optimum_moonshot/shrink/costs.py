"""The cost of a smaller model, exactly in parameters or bytes, and measured in seconds.

Parameters and bytes follow from the shapes of its configuration. Seconds are medians of timed calls of single blocks on
this machine. A block of another width is made from the smaller configuration, with random weights. One token per sample
is decoded after a context in the cache; several tokens are a prefill without a cache.
"""

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel

from ..devices import device_name, preserved_random_state, wait_for
from ..errors import require
from ..model.calls import Arguments, evaluation_mode, model_device, recorded
from ..model.layers import PrunableLayer, find_blocks, find_structure
from ..model.model_info import embedded_tokens, max_positions, vocabulary_size
from ..model.structured_groups import StructuredGroups
from .experts import ExpertCount
from .widths import Width

Size = Callable[[nn.Parameter, int], float]  # (parameter, number of its entries) → cost


@dataclass(frozen=True)
class Costs:
    """The costs of a model and of each part that can be removed, in one unit."""

    unit: str  # "parameters", "bytes" or "seconds"
    dense: float  # of the whole model
    blocks: tuple[float, ...]  # of each block
    # Width → the saving in each block by every level, [blocks][levels].
    savings: Mapping[str, tuple[tuple[float, ...], ...]]
    # Pair of widths → in each block, what the last levels of both save together and `savings` counts twice: the neurons
    # of removed experts. It is proportional to both levels.
    overlaps: Mapping[tuple[str, str], tuple[float, ...]] = field(default_factory=dict)

    def scaled(self, factor: float) -> "Costs":
        """The same costs, each multiplied by a factor."""
        blocks = tuple(factor * block for block in self.blocks)
        savings = {
            name: tuple(tuple(factor * saving for saving in levels) for levels in by_block)
            for name, by_block in self.savings.items()
        }
        overlaps = {names: tuple(factor * cost for cost in by_block) for names, by_block in self.overlaps.items()}
        return Costs(self.unit, factor * self.dense, blocks, savings, overlaps)

    def least(self, most_blocks: int) -> float:
        """The cost without the `most_blocks` most expensive blocks, at the last level of every width."""
        saved = [
            sum(by_block[index][-1] for by_block in self.savings.values())
            - sum(by_block[index] for by_block in self.overlaps.values())
            for index in range(len(self.blocks))
        ]
        remaining = [block - saving for block, saving in zip(self.blocks, saved, strict=True)]
        return self.dense - sum(saved) - sum(sorted(remaining, reverse=True)[:most_blocks])


@dataclass(frozen=True)
class Narrowing:
    """A smaller hidden size, and the number of axes of each parameter that become shorter."""

    width: int  # the hidden size of the model
    size: int
    axes: Mapping[int, int]  # id of a parameter → number

    def entries(self, parameter: nn.Parameter, entries: int) -> int:
        """The number that remains of `entries` of a parameter, which span all axes that become shorter."""
        axes = self.axes.get(id(parameter), 0)
        return entries * self.size**axes // self.width**axes


def count_entries(parameter: nn.Parameter, entries: int) -> float:
    """The cost of some entries of a parameter, in parameters."""
    return entries


def count_bytes(parameter: nn.Parameter, entries: int) -> float:
    """The cost of some entries of a parameter, in bytes, without the headers of a file."""
    return entries * parameter.element_size()


def dense_cost(model: nn.Module, unit: str) -> float:
    """The parameters or the bytes of a model; shared parameters count once."""
    size = count_entries if unit == "parameters" else count_bytes
    return sum(size(parameter, parameter.numel()) for parameter in model.parameters())


def shape_costs(
    model: PreTrainedModel,
    widths: Sequence[Width],
    unit: str,
    narrowing: Narrowing | None = None,
) -> Costs:
    """The parameters or the bytes of a model and its parts; shared parameters count once.

    Args:
        model: dense.
        widths: the reducible widths.
        unit: "parameters" or "bytes".
        narrowing: a smaller hidden size to compute the costs for; None is the model's own.
    """
    count = count_entries if unit == "parameters" else count_bytes
    layers: dict[str, PrunableLayer] = {layer.name: layer for layer in find_structure(model).layers()}

    def size(parameter: nn.Parameter, entries: int) -> float:
        return count(parameter, entries if narrowing is None else narrowing.entries(parameter, entries))

    blocks = [module for _, module in find_blocks(model)]

    def total(module: nn.Module) -> float:
        return sum(size(parameter, parameter.numel()) for parameter in module.parameters())

    def one(width: Width, block: nn.Module, of_experts: int | None = None) -> float:
        """The cost of one group of a width in a block, or in each mixture of this number of experts there."""
        if isinstance(width, ExpertCount):
            return width.expert_cost(block, size)
        return sum(
            group_cost(layer, groups, layers, size) * (groups.count // width.count)
            for layer, groups in width.members
            if belongs(layer, block) and of_experts in (None, layer.matrices)
        )

    savings, overlaps = {}, {}
    for width in widths:
        by_block = [one(width, block) for block in blocks]
        savings[width.name] = tuple(tuple(cost * level for level in width.levels) for cost in by_block)
    for experts in (width for width in widths if isinstance(width, ExpertCount)):
        share = experts.sparsity(experts.levels[-1])
        for width in (width for width in widths if any(layer.separate for layer, _ in width.members)):
            by_block = [share * width.levels[-1] * one(width, block, experts.count) for block in blocks]
            overlaps[experts.name, width.name] = tuple(by_block)
    return Costs(unit, total(model), tuple(map(total, blocks)), savings, overlaps)


def belongs(layer: PrunableLayer, block: nn.Module) -> bool:
    """Whether a layer is inside a block."""
    return any(module is inner for module in layer.modules for inner in block.modules())


def group_cost(
    layer: PrunableLayer, groups: StructuredGroups, layers: Mapping[str, PrunableLayer], size: Size = count_entries
) -> float:
    """The cost of one neuron or head, of every expert: its columns, and the rows and biases that produce them."""
    cost = size(layer.parameter, layer.shape[0] * groups.size)
    for name, served in groups.rows.items():
        producer = layers[name]
        rows = producer.matrices * int((served == 0).sum())
        cost += size(producer.parameter, rows * producer.shape[1])
        cost += 0 if producer.bias is None else size(producer.bias, rows)
    return cost


# Tokens in the cache before the decoded one; warm-up calls; the least number and the least seconds of timed calls.
CONTEXT, WARM_UP, CALLS, SECONDS = 256, 3, 11, 0.2

Keep = Callable[[str, Callable[[], float]], float]  # (name, measurement) → its value, stored for a repeated run


class _Calls:
    """Timed calls of a model and its blocks on random tokens of a batch shape."""

    def __init__(self, model: PreTrainedModel, batch_shape: tuple[int, int]):
        check_timed(model, batch_shape)
        self.model, (samples, tokens) = model, batch_shape
        self.decodes, limit = tokens == 1, max_positions(model)
        self.context = CONTEXT if limit is None else max(1, min(CONTEXT, limit - 2))
        self.device = model_device(model)
        generator = torch.Generator().manual_seed(0)
        length = self.context + 1 if self.decodes else tokens
        self.ids = torch.randint(vocabulary_size(model), (samples, length), generator=generator).to(self.device)

    def seconds(self) -> float:
        """The median seconds of a call of the whole model."""
        if not self.decodes:
            return timed(lambda _: self.model(input_ids=self.ids, use_cache=False), self.device)
        filled = DynamicCache(config=self.model.config)
        self.model(input_ids=self.ids[:, :-1], past_key_values=filled, use_cache=True)

        def decode(cache: DynamicCache | None) -> None:
            self.model(input_ids=self.ids[:, -1:], past_key_values=cache, use_cache=True)

        return timed(decode, self.device, filled)

    def of_blocks(self) -> tuple[dict[str, Arguments], dict[str, Arguments]]:
        """The arguments of every block's call, and of the preceding one that fills its cache."""
        blocks, cache = dict(find_blocks(self.model)), DynamicCache(config=self.model.config)
        if not self.decodes:
            with recorded(blocks) as calls:
                self.model(input_ids=self.ids, use_cache=False)
            return calls, {}
        with recorded(blocks) as before:
            self.model(input_ids=self.ids[:, :-1], past_key_values=cache, use_cache=True)
        with recorded(blocks) as calls:
            self.model(input_ids=self.ids[:, -1:], past_key_values=cache, use_cache=True)
        return calls, before

    def of_block(self, block: nn.Module, call: Arguments, before: Arguments | None) -> float:
        """The median seconds of a call of a block, or of a narrower one in its place, with recorded arguments."""
        if before is None:
            return timed(lambda _: block(*call[0], **call[1]), self.device)
        filled = DynamicCache(config=self.model.config)
        args, kwargs = _with_cache(before, filled)
        block(*args, **kwargs)

        def decode(cache: DynamicCache | None) -> None:
            args, kwargs = _with_cache(call, cache)
            block(*args, **kwargs)

        return timed(decode, self.device, filled)


def check_timed(model: PreTrainedModel, batch_shape: tuple[int, int]) -> None:
    """Check that the latency of a model can be measured.

    Args:
        model: to be timed.
        batch_shape: see `model_latency`.

    Raises:
        MoonshotError: the model needs other inputs than token ids, or has too few positions.
    """
    alone = embedded_tokens(model) is not None and not model.config.is_encoder_decoder
    message = f"it is measured on token ids, and {type(model).__name__} needs other inputs"
    hint = "give `parameters` or `bytes`"
    require(alone, message, field="latency", hint=hint)
    limit = max_positions(model)
    fits = limit is None or batch_shape[1] <= limit
    require(fits, f"the model has {limit} positions", field="batch_shape", value=batch_shape)


def as_measured(keep: Keep, model: PreTrainedModel, batch_shape: tuple[int, int]) -> Keep:
    """`keep` with the batch shape and the device in every name, so that other conditions are measured anew."""
    samples, tokens = batch_shape
    conditions = f"{samples}x{tokens} tokens on {device_name(model_device(model))}"
    return lambda name, measure: keep(f"{name}, {conditions}", measure)


def _with_cache(call: Arguments, cache: DynamicCache | None) -> Arguments:
    args, kwargs = call
    return args, {name: cache if isinstance(value, DynamicCache) else value for name, value in kwargs.items()}


def timed(call: Callable[[DynamicCache | None], Any], device: torch.device, cache: DynamicCache | None = None) -> float:
    """The median seconds of a repeated call, each time with a new copy of the cache."""
    times: list[float] = []
    while len(times) < WARM_UP + CALLS or sum(times[WARM_UP:]) < SECONDS:
        copied = copy.deepcopy(cache)
        wait_for(device)
        started = time.perf_counter()
        call(copied)
        wait_for(device)
        times.append(time.perf_counter() - started)
    return median(times[WARM_UP:])


@torch.no_grad()
def model_latency(model: PreTrainedModel, batch_shape: tuple[int, int]) -> float:
    """Seconds of a forward pass.

    Args:
        model: a causal language model.
        batch_shape: samples, and tokens of each; 1 token is decoded after a context.

    Raises:
        MoonshotError: like `check_timed`.
    """
    with evaluation_mode(model):
        return _Calls(model, batch_shape).seconds()


@torch.no_grad()
def latency_costs(
    model: PreTrainedModel,
    widths: Sequence[Width],
    batch_shape: tuple[int, int],
    keep: Keep,
) -> Costs:
    """Measure the seconds of a model's blocks at some levels of every width, and interpolate the other levels.

    Args:
        model: a dense causal language model.
        widths: the reducible widths.
        batch_shape: see `model_latency`.
        keep: returns the stored measurement of a name, or calls the function and stores its result.

    Raises:
        MoonshotError: like `model_latency`.
    """
    keep = as_measured(keep, model, batch_shape)
    with evaluation_mode(model):
        calls = _Calls(model, batch_shape)
        by_block, before = calls.of_blocks()
        blocks = [(name, module) for name, module in find_blocks(model) if name in by_block]
        dense = keep("seconds", calls.seconds)
        kinds: dict[Any, int] = {}  # shapes of a block's tensors → the first such block

        def of_level(index: int, config: PreTrainedConfig | None) -> Callable[[], float]:
            name, module = blocks[index]

            def measure() -> float:
                block = module if config is None else random_block(model, config, name)
                return calls.of_block(block, by_block[name], before.get(name))

            return measure

        alike = [kinds.setdefault(_shapes(module), index) for index, (_, module) in enumerate(blocks)]
        times = {index: keep(f"seconds of block {index}", of_level(index, None)) for index in kinds.values()}
        savings = {}
        for width in widths:
            curves = {}
            for index in kinds.values():
                inside = any(belongs(layer, blocks[index][1]) for layer, _ in width.members)
                points = {0: 0.0}
                for level, config in sorted(width.configs.items()) if inside else ():
                    key = f"seconds of block {index} with {width.name} without {level}"
                    points[level] = times[index] - keep(key, of_level(index, config))
                curves[index] = tuple(map(float, np.interp(width.levels, list(points), _ascending(points))))
            savings[width.name] = tuple(curves[index] for index in alike)
    return Costs(
        "seconds", max(dense, sum(times[index] for index in alike)), tuple(times[index] for index in alike), savings
    )


def _ascending(points: Mapping[int, float]) -> list[float]:
    """The running maximum of the savings: apart from noise, a narrower block is never slower."""
    return list(map(float, np.maximum.accumulate(np.maximum(list(points.values()), 0.0))))


def _shapes(module: nn.Module) -> tuple[Any, ...]:
    return type(module), tuple((name, tuple(parameter.shape)) for name, parameter in module.named_parameters())


def random_block(model: PreTrainedModel, config: PreTrainedConfig, name: str) -> nn.Module:
    """A block of a model with this configuration, alone, with random weights in the model's dtype and on its device."""
    with torch.device("meta"):
        block = type(model)(config).get_submodule(name)
    first = next(model.parameters())
    block = block.to(first.dtype).to_empty(device=first.device).eval()
    with preserved_random_state(first.device):
        for tensor in (*block.parameters(), *block.buffers()):
            if tensor.is_floating_point():
                tensor.data.copy_(0.02 * torch.randn(tensor.shape, device=first.device))
            else:
                tensor.data.zero_()
    return block
