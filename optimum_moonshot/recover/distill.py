"""Recovery of a whole model: train all of its parameters end to end towards the dense model's logits, or embeddings.

    min   mean over tokens of KL(softmax(dense logits) ‖ softmax(logits))

on the calibration samples, by Adam with a cosine schedule (Hinton et al., arXiv 1503.02531, at temperature 1, without
labels). Zeros of pruned layers stay zeros, and survivors on a grid stay on it. A part of the samples is held out: the
result is the evaluated state with the least divergence on them, or the pruned weights if none has less.

The model stays dense: a copy trains (masters.py), where placement.py says, and the teacher's outputs are cached
(teacher.py). Several processes divide the samples of each step, and sum their gradients. Each evaluation saves the
state, so that a killed run continues bit for bit.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ..calibration.storage import DEFAULT_SHARE, free_memory
from ..data.batches import Batch, batch_size, cut_batches, sample_count, samples_between, take
from ..distributed.ranks import Ranks
from ..model.calls import called_by, forward_of, model_device, run_model, to_device
from ..model.layers import onloaded_in_turn
from ..pipeline.backoff import PassTooLarge
from ..pipeline.inputs import Prepared
from ..pipeline.store import ResultStore
from ..pipeline.variant import Variant
from ..progress import progress_bar
from ..reports.prune_report import MODEL, BlockReport
from .masters import Optimizer, StudentModel
from .student import Tensors
from .teacher import Teacher
from .tuning import EVALUATIONS, PATIENCE, divide_parts, step_parts

_PARTS = ("value", "first", "second", "best")  # prefixes of the names of its tensors


@dataclass
class DistillState:
    """Where the training is. Losses are held-out divergences from the teacher, in nats per row of logits."""

    first: float  # of the pruned weights
    best: float
    last: float  # of the latest evaluation
    samples: int  # of a pass, at most
    recomputes: bool = False  # whether blocks compute their activations again in the backward pass
    step: int = 0  # steps taken; the next samples and learning rate follow from it
    since: int = 0  # evaluations since the best
    kept: Tensors = field(default_factory=dict)  # masters of the best state, in host memory

    def evaluated(self, loss: float, student: StudentModel) -> None:
        """Note a loss of the student; a new best state is copied."""
        self.last, self.since = loss, self.since + 1
        if loss < self.best:
            self.best, self.since, self.kept = loss, 0, student.snapshot()

    @property
    def stopped(self) -> bool:
        """Whether the loss no longer falls, or is not finite."""
        return self.since >= PATIENCE or not math.isfinite(self.last)

    def save(self, store: ResultStore, student: StudentModel, optimizer: Optimizer) -> None:
        """Store the state in the run's folder, if there is one."""
        if store.folder is not None:
            parts = zip(_PARTS, (student.snapshot(), *optimizer.moments(), self.kept), strict=True)
            tensors = {f"{part} {name}": tensor for part, values in parts for name, tensor in values.items()}
            store.put_training(tensors, self._numbers())

    def _numbers(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name != "kept"}

    @classmethod
    def resumed(
        cls, store: ResultStore, ranks: Ranks, student: StudentModel, optimizer: Optimizer
    ) -> "DistillState | None":
        """The state of an interrupted run in all processes, of which the first has the folder; None without one."""
        saved = store.training() if ranks.is_main else None
        numbers = ranks.broadcast_object(None if saved is None else saved[1])
        if numbers is None:
            return None
        state, tensors = cls(**numbers), {} if saved is None else saved[0]

        def part(prefix: str) -> Tensors:
            return {
                name: ranks.broadcast(tensors.get(f"{prefix} {name}"), value.to("meta"), 0)
                for name, value in student.named()
            }

        student.restore(part("value"))
        optimizer.restore(part("first"), part("second"), state.step)
        state.kept = part("best")
        return state


WHERE = "distillation"


@dataclass
class Cached:
    """A batch of this process with the teacher's outputs on it."""

    batch: Batch
    cache: Tensor
    weights: Tensor  # of the rows of the logits, in host memory

    def pieces(self, samples: int) -> Iterator["Cached"]:
        for start in range(0, batch_size(self.batch), samples):
            part = slice(start, start + samples)
            yield Cached(take(self.batch, part.start, part.stop), self.cache[part], self.weights[part])


class Distillation:
    """Trains a copy of the dense, frozen model of a run; the store has the pruned weights, and receives the result."""

    def __init__(self, prepared: Prepared, variant: Variant, on_host: bool):
        self.prepared, self.variant, self.on_host = prepared, variant, on_host
        self.config, self.ranks, self.backoff = variant.selection.config, prepared.subject.ranks, prepared.backoff
        self.storage, self.total = prepared.storage, self.config.recovery_steps
        dense = prepared.subject.teacher
        self.teacher = Teacher(prepared.model if dense is None else dense.model, prepared.storage)
        self.device = model_device(prepared.model)
        parts = step_parts(prepared.calibration.num_samples)
        self.batches = cut_batches(prepared.calibration.batches, parts)
        self.groups, self.heldout = divide_parts(parts, [batch_size(batch) for batch in self.batches])

    def run(self) -> float:
        """Distill in all processes, unless the store has the result; returns the seconds."""
        started, store = time.perf_counter(), self.variant.store
        if MODEL in store.blocks:
            return 0.0
        with onloaded_in_turn(self.prepared.selection.structure.blocks), self.backoff.together():
            self.steps = [self._record(group) for group in self.groups]
            self.held = self._record(self.heldout)
        rows = [sum(float(each.weights.sum()) for each in shard) for shard in (*self.steps, self.held)]
        *self.rows, self.held_rows = (sum(counts) for counts in zip(*self.ranks.all_gather_object(rows), strict=True))
        with self.backoff.together():
            layers = [layer for layer in self.variant.layers if layer in store]
            patterns = {layer.name: self.variant.pattern_of(layer) for layer in layers}
            weights = [(layer, store.weight(layer)) for layer in layers]
            self.student = StudentModel(self.prepared.model, weights, patterns, self.on_host)
        with called_by(self.student.module, forward_of(self.prepared.model)):
            state = self._train()
        self._store(state, time.perf_counter() - started)
        return time.perf_counter() - started

    def _store(self, state: DistillState, seconds: float) -> None:
        """Store the best state; the other processes receive it from the first one."""
        notes = [] if state.step == self.total else [f"stopped after {state.step} of {self.total} steps"]
        gained = state.best < state.first
        notes += [] if gained else ["no gain: the pruned weights were kept"]
        self.student.restore(state.kept)
        matrices = self.student.matrices() if gained else ({}, {})
        if self.ranks.is_main:
            report = BlockReport(MODEL, state.first, state.best, state.step, seconds, tuple(notes))
            self.variant.store.put_block(report, *matrices)

    def _record(self, indices: list[int]) -> list[Cached]:
        """This process's samples of some batches, with the teacher's outputs."""
        batches = [self.batches[index] for index in indices]
        shard = self.ranks.shard(sample_count(batches))
        mine = samples_between(batches, shard.start, shard.stop)
        return [Cached(batch, *self.teacher.record(to_device(batch, self.device))) for batch in mine]

    def _train(self) -> DistillState:
        """Train until the end of the schedule, or of the gains on the held-out samples."""
        optimizer, store = Optimizer(self.student, self.config.recovery_lr), self.variant.store
        state = DistillState.resumed(store, self.ranks, self.student, optimizer)
        if state is None:
            state = self._started()
        else:
            self.variant.notes.append(f"{state.step} steps of the distillation were reused from an interrupted run")
        every, shown = max(1, self.total // EVALUATIONS), self.prepared.subject.progress
        with progress_bar(total=self.total, initial=state.step, desc="distilling", unit="step", shown=shown) as bar:
            for index in islice(self._order(), state.step, self.total):
                if state.stopped:
                    break
                self._passes(state, self.steps[index], self.rows[index])
                for master in self.student.masters.values():
                    self.ranks.all_reduce(master.gradient())
                optimizer.step((1 + math.cos(math.pi * state.step / self.total)) / 2)
                state.step += 1
                bar.update()
                if state.step % every == 0 or state.step == self.total:
                    state.evaluated(self._loss(state), self.student)
                    bar.set_postfix_str(f"held-out divergence {state.last:.4f}")
                    state.save(store, self.student, optimizer)
        return state

    def _started(self) -> DistillState:
        """The state before the first step, with passes as large as the memory allows."""
        most = max((batch_size(each.batch) for shard in self.steps for each in shard), default=1)
        state = DistillState(math.inf, math.inf, math.inf, most, kept=self.student.snapshot())
        self._fit(state)
        state.first = state.best = state.last = self._loss(state)
        return state

    def _fit(self, state: DistillState) -> None:
        """Let the passes be as large as their activations allow, by those of one sample; recompute them if none fits.

        The gradients and moments of the first step are not allocated yet.
        """
        pending = sum(12 * each.value.numel() for each in self.student.masters.values() if not self.on_host)
        free = int(DEFAULT_SHARE * free_memory(self.device)[self.device]) - pending
        shard = next((shard for shard in self.steps if shard), None)
        needed = 1 if shard is None else max(1, self._activations(next(shard[0].pieces(1))))
        samples = self.ranks.all_reduce_min(free // needed)
        if samples < 1:
            state.recomputes = True
            sizes = f"{needed / 2**30:.4g} GiB exceed the {max(0, free) / 2**30:.4g} GiB that are free"
            self.variant.notes.append(f"activations were computed again in backward passes: a sample's {sizes}")
        state.samples = max(1, min(state.samples, samples))

    def _activations(self, piece: Cached) -> int:
        """The bytes that the backward pass of a sample needs besides the weights, and three times its logits."""
        weights = {parameter.untyped_storage().data_ptr() for parameter in self.student.module.parameters()}
        saved: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            saved[storage.data_ptr()] = 0 if storage.data_ptr() in weights else storage.nbytes()
            return tensor.detach()  # an output that its own node holds would never be collected

        with self.backoff.together(), saved_tensors_hooks(keep, lambda tensor: tensor):
            logits = self._logits(piece)
        return sum(saved.values()) + 3 * logits.nbytes

    def _logits(self, piece: Cached) -> Tensor:
        module = self.student.module
        batch = to_device(piece.batch, self.device)
        return self.teacher.outputs(module, run_model(module, batch), batch)[0]

    def _loss(self, state: DistillState) -> float:
        """The mean held-out divergence of the weights in the dtype of the model."""
        return sum(self.ranks.all_gather_object(self._passes(state, self.held))) / self.held_rows

    def _passes(self, state: DistillState, shard: list[Cached], rows: float | None = None) -> float:
        """The divergence on samples of this process, summed; with `rows`, its gradient divided by them."""
        while True:
            total, training = 0.0, rows is not None
            try:
                with self.backoff.together(), self.student.checkpointed(state.recomputes and training):
                    for piece in (piece for cached in shard for piece in cached.pieces(state.samples)):
                        with torch.set_grad_enabled(training):
                            logits = self._logits(piece)
                        loss, gradient = self.teacher.divergence(logits, piece.cache, piece.weights)
                        total += loss
                        if rows is not None:
                            logits.backward(gradient / rows)
                return total
            except PassTooLarge as error:
                failure = error
            self.student.clear_gradients()
            self._shrink(state, failure, shard)

    def _shrink(self, state: DistillState, error: PassTooLarge, shard: list[Cached]) -> None:
        """After a pass that did not fit: smaller batches or caches, then recomputed activations.

        Raises:
            torch.OutOfMemoryError: nothing is left.
        """
        batches = [piece.batch for cached in shard for piece in cached.pieces(state.samples)]
        try:
            self.backoff.pass_failed(error, WHERE, batches)
        except torch.OutOfMemoryError:
            if state.recomputes:
                raise
            state.recomputes = True
            self.variant.notes.append("activations were computed again in backward passes: a sample's did not fit")
        state.samples = min(state.samples, self.backoff.samples or state.samples)
        for cached in (cached for each in (*self.steps, self.held) for cached in each):
            if self.storage.caches is not None and self.storage.cached > self.storage.caches:
                cached.cache = self.storage.away(cached.cache, "outputs of the teacher")
        self.backoff.release()

    def _order(self) -> Iterator[int]:
        """The index of the samples of each step: all of them in a new random order, endlessly."""
        generator = torch.Generator().manual_seed(self.config.seed % 2**63)
        while True:
            yield from torch.randperm(len(self.groups), generator=generator).tolist()
