"""The latency of a model and its parts on this machine: medians of timed calls of single blocks.

A block of another width is made from the smaller configuration, with random weights. One token per sample is decoded
after a context in the cache; several tokens are a prefill without a cache.
"""

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel

from ..devices import device_name, preserved_random_state, wait_for
from ..errors import require
from ..model.calls import Arguments, evaluation_mode, model_device, recorded
from ..model.layers import find_blocks
from ..model.model_info import embedded_tokens, max_positions, vocabulary_size
from .costs import Costs, belongs
from .widths import Width

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
