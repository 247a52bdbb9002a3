"""Recovery of a whole model: train it end to end towards the dense model's logits, or embeddings.

    min   mean over tokens of KL(softmax(dense logits) ‖ softmax(logits))

on the calibration samples, by Adam with a cosine schedule (Hinton et al., arXiv 1503.02531, at temperature 1, without
labels). All parameters train, or the routers of a mixture of experts alone: where experts or their neurons are gone,
other experts suit a token. Zeros of pruned layers stay zeros, and survivors on a grid stay on it. The result is the
evaluated state with the least divergence on held-out samples, or the pruned weights if none has less.

The model stays dense: a copy (student.py) trains on cached outputs of the teacher, on the device that run.py chooses.
Several processes divide the samples of each step, and sum their gradients. The state is saved after each evaluation, so
that a killed run continues bit for bit.
"""

import dataclasses
import itertools
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
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
from .blockwise import SmallerModel
from .student import HOST, StudentModel, Tensors
from .teacher import Teacher
from .tuning import LOWERED, Optimizer, Progress, Trainer, step_parts, trained_names

_PARTS = ("best", "value", "first", "second")  # prefixes of saved masters, and of Adam's first and second moments


@dataclass
class DistillState(Progress):
    """The progress of a distillation; losses are divergences from the teacher, in nats per row of logits."""

    samples: int = 1  # the most samples of a pass
    recomputes: bool = False  # whether blocks recompute their activations in the backward pass

    def save(self, store: ResultStore, optimizer: Optimizer) -> None:
        """Store the state in the run's folder, if there is one, after a step."""
        if store.folder is None:
            return
        tensors = Tensors()
        for name, value in optimizer.student.named_parameters():
            adam = optimizer.adam.state[value]
            values = (self.best_values[name], value.detach(), adam["exp_avg"], adam["exp_avg_sq"])
            for part, tensor in zip(_PARTS, values, strict=True):
                tensors[f"{part} {name}"] = tensor.to(HOST).contiguous()  # a transposed weight is not contiguous
        numbers = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        del numbers["best_values"]
        store.put_training(tensors, numbers)

    @classmethod
    def resumed(cls, store: ResultStore, ranks: Ranks, optimizer: Optimizer) -> "DistillState | None":
        """Load the state of an interrupted run in all processes, from the folder of the first; None without one."""
        saved = store.training() if ranks.is_main else None
        numbers: dict[str, Any] | None = ranks.broadcast_object(None if saved is None else saved[1])
        if numbers is None:
            return None
        state, tensors, values = cls(**numbers), {} if saved is None else saved[0], Tensors()
        for name, value in optimizer.student.named_parameters():
            like = value.to("meta")
            state.best_values[name], values[name], *moments = (
                ranks.broadcast(tensors.get(f"{part} {name}"), like, 0) for part in _PARTS
            )
            first, second = (moment.to(value.device, copy=True) for moment in moments)
            step = torch.tensor(float(state.step - state.begun))
            optimizer.adam.state[value] = {"step": step, "exp_avg": first, "exp_avg_sq": second}
        optimizer.student.restore(values)
        return state


@dataclass
class Cached:
    """A batch of this process with the teacher's outputs on it."""

    batch: Batch
    cache: Tensor
    weights: Tensor  # float32, one for each row of the logits, in host memory

    def pieces(self, samples: int) -> Iterator["Cached"]:
        for start in range(0, batch_size(self.batch), samples):
            rows = slice(start, start + samples)
            yield Cached(take(self.batch, rows.start, rows.stop), self.cache[rows], self.weights[rows])


class Distillation(Trainer):
    """Trains a copy of a run's dense, frozen model; the store has the pruned weights and, later, the result.

    With `smaller`, the copy has fewer experts.
    """

    student: StudentModel
    state: DistillState

    def __init__(self, prepared: Prepared, variant: Variant, on_host: bool, smaller: SmallerModel | None = None):
        self.prepared, self.variant, self.on_host = prepared, variant, on_host
        self.removed = nullcontext if smaller is None else smaller.removed
        self.ranks, self.backoff, self.storage = prepared.subject.ranks, prepared.backoff, prepared.storage
        dense = prepared.subject.teacher
        self.teacher = Teacher(prepared.model if dense is None else dense.model, prepared.storage)
        self.device = model_device(prepared.model)
        sizes, config = step_parts(prepared.calibration.num_samples), variant.selection.config
        self.batches = cut_batches(prepared.calibration.batches, sizes)
        super().__init__(config, sizes, [*map(batch_size, self.batches)], config.seed)

    def run(self) -> float:
        """Distill in all processes, unless the store has the result; return the seconds."""
        started, store = time.perf_counter(), self.variant.store
        if MODEL in store.blocks:
            return 0.0
        with onloaded_in_turn(self.prepared.selection.structure.blocks), self.backoff.together():
            self.group_shards = [self._record(group) for group in self.groups]
            self.heldout_shard = self._record(self.heldout)
        shards = (*self.group_shards, self.heldout_shard)
        rows = [sum(float(cached.weights.sum()) for cached in shard) for shard in shards]
        *self.group_rows, self.heldout_rows = map(sum, zip(*self.ranks.all_gather_object(rows), strict=True))
        with self.backoff.together(), self.removed():
            layers = [layer for layer in self.variant.layers if layer.name in store.reports]
            patterns = {layer.name: self.variant.pattern_of(layer) for layer in layers}
            weights = [(layer, store.weight(layer)) for layer in layers]
            names = trained_names(self.prepared.model, self.variant.selection.config)
            self.student = StudentModel(self.prepared.model, weights, patterns, self.on_host, names)
        with called_by(self.student.module, forward_of(self.prepared.model)):
            self._train()
        state, notes = self.state, self.early_stop()
        if state.lowered:
            rate = self.lr * LOWERED**state.lowered
            notes.append(f"the learning rate was lowered to {rate:.2g}: recover_lr={self.lr:g} raised the divergence")
        gained = state.best < state.first
        notes += [] if gained else ["no gain: the pruned weights were kept"]
        self.student.restore(state.best_values)
        results = self.student.results() if gained else ({}, {})
        if self.ranks.is_main:  # the other processes receive the result from this one
            seconds = time.perf_counter() - started
            store.put_block(BlockReport(MODEL, state.first, state.best, state.step, seconds, tuple(notes)), *results)
        return time.perf_counter() - started

    def _record(self, indices: list[int]) -> list[Cached]:
        """Return this process's samples of some batches, with the teacher's outputs."""
        batches = [self.batches[index] for index in indices]
        samples = self.ranks.shard(sample_count(batches))
        batches = samples_between(batches, samples.start, samples.stop)
        return [Cached(batch, *self.teacher.record(to_device(batch, self.device))) for batch in batches]

    def _train(self) -> None:
        """Train until the schedule ends, or the held-out divergence no longer falls."""
        optimizer, store = Optimizer(self.student, self.lr), self.variant.store
        resumed = DistillState.resumed(store, self.ranks, optimizer)
        if resumed is None:
            self._start()
        else:
            self.state, self.taken = resumed, resumed.step
            next(itertools.islice(self.order, self.taken, self.taken), None)  # skip the samples of these steps
            note = f"{self.taken} steps of the distillation were reused from an interrupted run"
            self.variant.notes.append(note)
        state, shown = self.state, self.prepared.subject.progress
        with progress_bar(total=self.total, initial=state.step, desc="distilling", unit="step", shown=shown) as bar:
            for evaluated in self.train(optimizer, state):
                bar.update()
                if evaluated:
                    bar.set_postfix_str(f"held-out divergence {state.last:.4f}")
                    state.save(store, optimizer)

    def _start(self) -> None:
        """Set the state before the first step.

        The activations of one sample determine the samples of a pass; if not even one sample fits, activations are
        recomputed. The free bytes exclude gradients and moments, which are allocated only in the first step.
        """
        training = [cached for shard in self.group_shards for cached in shard]
        state = self.state = DistillState(best_values=self.student.snapshot())
        masters = self.student.masters.values()
        pending = 0 if self.on_host else sum(12 * master.value.numel() for master in masters)
        free = int(DEFAULT_SHARE * free_memory(self.device)[self.device]) - pending
        with self.backoff.together():  # also in a process without training samples
            needed = max(1, self._activations(next(training[0].pieces(1)))) if training else 1
        samples = min(self.ranks.all_gather_object(free // needed))
        if samples < 1:
            self._recompute(f"{needed / 2**30:.4g} GiB exceed the {max(0, free) / 2**30:.4g} GiB that are free")
        largest = max((batch_size(cached.batch) for cached in training), default=1)
        state.samples = max(1, min(largest, samples))
        state.first = state.best = state.last = self.loss()

    def _recompute(self, reason: str) -> None:
        """Recompute activations in backward passes from now on; `reason` is the end of the note in the report."""
        self.state.recomputes = True
        self.variant.notes.append(f"activations were computed again in backward passes: a sample's {reason}")

    def _activations(self, piece: Cached) -> int:
        """The bytes that are saved for the backward pass of a sample, without weights, plus three times its logits."""
        weights = {parameter.untyped_storage().data_ptr() for parameter in self.student.module.parameters()}
        saved: dict[int, int] = {}

        def count(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            saved[storage.data_ptr()] = 0 if storage.data_ptr() in weights else storage.nbytes()
            return tensor.detach()  # a node that refers to its own output would never be freed

        with saved_tensors_hooks(count, lambda tensor: tensor):
            logits = self._logits(piece)
        return sum(saved.values()) + 3 * logits.nbytes

    def _logits(self, piece: Cached) -> Tensor:
        module = self.student.module
        batch = to_device(piece.batch, self.device)
        return self.teacher.outputs(module, run_model(module, batch), batch)[0]

    def add_gradients(self, group: int) -> None:
        self._passes(self.group_shards[group], self.group_rows[group])
        for master in self.student.masters.values():
            self.ranks.all_reduce(master.gradient())

    def loss(self) -> float:
        """The mean held-out divergence of the weights in the dtype of the model."""
        return sum(self.ranks.all_gather_object(self._passes(self.heldout_shard))) / self.heldout_rows

    def _passes(self, shard: list[Cached], rows: float | None = None) -> float:
        """Return the divergence, summed over this process's samples; with `rows`, add its gradient / `rows`."""
        state, training = self.state, rows is not None
        while True:
            total = 0.0
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
            except PassTooLarge:
                pass  # shrink after the handler: the traceback refers to tensors of the pass
            self.student.clear_gradients()
            self._shrink(shard)

    def _shrink(self, shard: list[Cached]) -> None:
        """Reduce the memory of a pass that did not fit: smaller batches or caches, then recomputed activations.

        Raises:
            torch.OutOfMemoryError: nothing is left to be halved or recomputed.
        """
        state = self.state
        batches = [piece.batch for cached in shard for piece in cached.pieces(state.samples)]
        try:
            self.backoff.shrink("distillation", batches)
        except torch.OutOfMemoryError:
            if state.recomputes:
                raise
            self._recompute("did not fit")
        state.samples = min(state.samples, self.backoff.samples.size or state.samples)
        for cached in itertools.chain(*self.group_shards, self.heldout_shard):
            if self.storage.caches is not None and self.storage.cached > self.storage.caches:
                cached.cache = self.storage.away(cached.cache, "outputs of the teacher")
        self.backoff.release()
