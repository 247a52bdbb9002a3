"""Seconds of the passes over the data, measured on one batch.

The batch passes the model, and then, under the hooks of the run, the first block of every kind.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ..calibration.accumulators import STAGED, GradientPlan
from ..calibration.observer import Observer
from ..calibration.storage import Storage
from ..data.batches import Batch, batch_size
from ..model.calls import BlockCall, first_tensor, join_hidden, run_model, split_hidden, without_caches
from ..model.layers import Block, PrunableLayer
from ..model.losses import token_mask
from ..pipeline.selection import Subject
from ..pipeline.walk import FullModelPipeline, PassObserver
from .footprint import kind_of
from .memory import WHOLE, Phase, Visit, passes_of
from .solver import clock
from .spec import RunSpec

PassRunner = Callable[[PassObserver], None]  # passes the trial batch, under an observer's hooks


@dataclass
class Trial:
    """A batch that has passed the model once."""

    subject: Subject
    batch: Batch
    calls: dict[Any, tuple[str, PassRunner]]  # kind of sequential block → name and call of the first one
    outside: float  # seconds of a forward pass outside of sequential blocks
    forward: float  # seconds of a forward pass of all sequential blocks

    @classmethod
    def of(cls, subject: Subject, run: RunSpec, batch: Batch) -> "Trial":
        calls: dict[Any, tuple[str, PassRunner]] = {}
        blocks = [block for sequence in run.sequential for block in sequence.blocks]
        inside, started = 0.0, list[float]()

        def enter(block: Block, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden, others, named = split_hidden(args, kwargs)
            call = BlockCall(others, without_caches(named), hidden)
            calls.setdefault(kind_of(block), (block.name, partial(_run_block, block.module, call, batch)))
            started.append(clock(run.device))

        def leave(*_: Any) -> None:
            nonlocal inside
            inside += clock(run.device) - started.pop()

        with ExitStack() as stack, torch.no_grad():
            for block in blocks:
                stack.callback(block.module.register_forward_pre_hook(partial(enter, block), with_kwargs=True).remove)
                stack.callback(block.module.register_forward_hook(leave).remove)
            start = clock(run.device)
            run_model(subject.model, batch)
            outside = clock(run.device) - start - inside
        trial = cls(subject, batch, calls, outside, 0.0)
        alone = {kind: trial.observed(run, call, ()) for kind, (_, call) in calls.items()}
        trial.forward = sum(alone[kind_of(block)] for block in blocks)
        return trial

    def seconds(self, phase: Phase) -> float:
        """Seconds per sample in all passes of a phase."""
        run, visits = phase.run, {visit.block.name: visit for visit in phase.visits}
        total = self.forward + 3 * self.outside if run.gradients else 0.0  # capture: with the head's backward pass
        passes: dict[Any, float] = {}  # kind → seconds of a pass
        for kind, (name, call) in self.calls.items():
            if name in visits:
                passes[kind] = self._pass_seconds(run, visits[name], call)
        for visit in phase.visits:
            if visit.block.name == WHOLE:
                model = FullModelPipeline(self.subject.model, (), [self.batch], run.gradients, self.subject.loss)
                total += visit.passes * self._pass_seconds(run, visit, model.run)
            else:
                total += visit.passes * passes[kind_of(visit.block)]
        return total / batch_size(self.batch)

    def _pass_seconds(self, run: RunSpec, visit: Visit, call: PassRunner) -> float:
        """Mean seconds of a pass of the trial batch at a block; of slices the first is measured."""
        forward, seconds, spec = self.observed(run, call, ()), 0.0, run.statistics
        for part in visit.parts:
            layers, plans = part.layers, {layer.name: spec.plan(layer) for layer in part.layers}
            if part.slices and layers[0].separate:
                layers = (replace(layers[0], span=(part.slices[0].start, part.slices[0].stop)),)
            elif part.slices:
                plans = {name: replace(plan, rows=part.slices[0]) for name, plan in plans.items()}
            passes, observed = passes_of(run, part), self.observed(run, call, layers, plans)
            # Half of the passes send all tokens to every under-calibrated expert, not to `top_k` of them.
            more = [layer.groups / run.footprint.top_k[layer.name] for layer in layers if run.all_token_experts(layer)]
            seconds += passes * observed + (passes // 2 * (max(more) - 1) * (observed - forward) if more else 0.0)
        advancing = visit.passes - sum(passes_of(run, part) for part in visit.parts)
        return (seconds + advancing * forward * (3 if run.gradients else 1)) / visit.passes

    def observed(
        self,
        run: RunSpec,
        call: PassRunner,
        layers: Sequence[PrunableLayer],
        plans: Mapping[str, GradientPlan] | None = None,
    ) -> float:
        """Seconds of a pass of the trial batch under the hooks of some layers.

        The second of two passes is timed: the first one allocates the memory of the statistics.
        """
        plans, spec, device = plans or {}, run.statistics, run.device
        with_gradients = {layer.name for layer in layers if layer.name in plans and spec.needs_gradients(layer)}
        compressed = any(plans[name].column_block is not None for name in with_gradients)
        count = batch_size(self.batch)
        samples = STAGED if compressed else count
        with Observer(layers, spec.diagonal, with_gradients, samples, Storage(device), plans) as observer:
            call(observer)
            passing = clock(device)
            call(observer)
        passed = clock(device)
        for layer in layers:
            if observer.reached(layer):
                observer.take(layer)
        adding = clock(device) - passed  # of `STAGED` samples, where they are compressed
        return passed - passing + (adding * count / STAGED if compressed else 0.0)


def _run_block(module: nn.Module, call: BlockCall, batch: Batch, observer: PassObserver) -> None:
    """Run a block on its arguments under an observer, and backward if it needs gradients."""
    gradients, mask = bool(observer.gradients), token_mask(batch)
    observer.begin(0, batch_size(batch), mask)
    with torch.set_grad_enabled(gradients):
        args, kwargs = join_hidden(call.hidden.detach().requires_grad_(gradients), call)
        output = first_tensor(module(*args, **kwargs))
        if gradients:
            torch.autograd.backward(output, output.detach())
    observer.end()
