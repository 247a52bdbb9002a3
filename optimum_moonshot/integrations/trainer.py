"""`MoonshotCallback`: pruned models under `transformers.Trainer`, and its descendants such as TRL's `SFTTrainer`."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback, set_seed

from ..config import MoonshotConfig
from ..errors import MoonshotError, check_whole, require
from ..losses import IGNORED
from ..masks import Masks, find_pruned
from ..patterns import NM
from ..pruner import MoonshotPruner
from ..report import PruneReport
from ..run import Run
from .distillation import Distillation

SPARSITY, LOSS = "moonshot_sparsity", "moonshot_loss"  # names in the Trainer's log


class MoonshotCallback(TrainerCallback):
    """Keeps a pruned model sparse while a `Trainer` trains it, or prunes it in the course of the training.

    ```python
    Trainer(model, args, train_dataset=data, callbacks=[MoonshotCallback()])        # a model that is pruned already
    MoonshotCallback(config, begin_step=100)                                        # prune before step 100
    MoonshotCallback(config, begin_step=100, end_step=500, every=50)                # in nine steps, to config.sparsity
    ```

    Removed weights are exactly zero after every optimizer step. The Trainer's log gets `moonshot_sparsity` and, after a
    pruning, `moonshot_loss`, the relative loss L_λ of the pruned layers, a mean over their weights. (The Trainer calls
    TensorBoard and its like before this callback: `trainer.callback_handler.callbacks.insert(0, …)` shows it to them.)
    A resumed run equals the uninterrupted one: masks are what is zero in a checkpoint, and the choice of calibration
    samples follows from seed and step. At the end the zeros and an n:m pattern are verified and stated.

    Args:
        config: how to prune, in the course of the training; None keeps the zeros that the model has.
        begin_step: the optimizer step before which the model is pruned, counted from 0.
        end_step: the last of several prunings; the j-th of n goes to the sparsity s·(1 - (1 - j/n)³), after Zhu & Gupta
            (arXiv 1710.01878). Each chooses anew among all weights. Needs a pattern other than n:m.
        every: steps between prunings; needed with `end_step`.
        calibration: what `MoonshotPruner.prune` takes. None is the training data: `config.num_samples` random samples
            through the Trainer's collator. Neither moves the random state of the run.
        teacher: a dense model whose logits the student learns from too, on the positions that have labels; moved to the
            student's device.
        temperature, teacher_weight: see `Distillation`.
        targets, ignore: which layers' zeros are kept where config is None, as in `find_pruned`.

    Raises:
        MoonshotError: (in training) a model without zeros, a pruning that the run never reaches, or at the end zeros or
            a pattern that do not hold.
    """

    def __init__(
        self,
        config: MoonshotConfig | None = None,
        *,
        begin_step: int = 0,
        end_step: int | None = None,
        every: int | None = None,
        calibration: Any = None,
        teacher: nn.Module | None = None,
        temperature: float = 2.0,
        teacher_weight: float = 0.5,
        targets: tuple[str, ...] | None = None,
        ignore: tuple[str, ...] = (),
    ):
        good = config is None or isinstance(config, MoonshotConfig)
        require(good, f"config is a {type(config).__name__}: give a MoonshotConfig")
        self.config, self.calibration, self.targets, self.ignore = config, calibration, targets, ignore
        self.schedule = {} if config is None else cubic_schedule(config, begin_step, end_step, every)
        self.distillation = None if teacher is None else Distillation(teacher, temperature, teacher_weight)
        self.masks: Masks | None = None
        self.report: PruneReport | None = None
        self.relative_loss: float | None = None

    def on_train_begin(self, args, state, control, model=None, optimizer=None, **kwargs):
        self._detach()
        self.masks = self.report = self.relative_loss = None
        if self.distillation is not None:
            self.distillation.attach(model)
        if self.config is None:
            self.masks = Masks(find_pruned(model, self.targets, self.ignore))
        else:
            self._check(model, max(state.max_steps, 1))
            if min(self.schedule) < state.global_step:
                self.masks = Masks(Run(model, self.config, None, None, False).layers)
                losses = [entry[LOSS] for entry in state.log_history if LOSS in entry]
                self.relative_loss = losses[-1] if losses else None
        if self.masks is not None:
            self.masks.attach(optimizer)

    def _check(self, model: nn.Module, steps: int) -> None:
        last = max(self.schedule)
        require(last < steps, f"the pruning before step {last} never comes: the training has {steps} steps")
        sharded = any(isinstance(parameter, DTensor) for parameter in model.parameters())
        require(not sharded, "a model that fully_shard has sharded cannot be pruned: prune it first, then train it")

    def on_step_begin(
        self,
        args,
        state,
        control,
        model=None,
        optimizer=None,
        train_dataloader=None,
        processing_class=None,
        **kwargs,
    ):
        sparsity = self.schedule.get(state.global_step)
        if sparsity is None:
            return
        config = self.config if sparsity == self.config.sparsity else replace(self.config, sparsity=sparsity)
        calibration = self.calibration
        seed = (config.seed + state.global_step) % 2**32
        with own_random_state(seed), without_autocast(model):
            if calibration is None:
                calibration = training_inputs(train_dataloader, config.batch_size, seed)
            pruner = MoonshotPruner(model, config, processing_class)
            self.report = pruner.prune(calibration, progress=False)
        self._detach_masks()
        modules = {layer.name: layer for layer in Run(model, config, None, None, False).layers}
        self.masks = Masks([modules[layer.name] for layer in self.report.layers])
        share_from_first_process(self.masks)
        self.masks.attach(optimizer)
        self.relative_loss = mean_loss(self.report)
        state.log_history.append({**self._values(), "step": state.global_step, "epoch": state.epoch})

    def on_log(self, args, state, control, logs=None, **kwargs):
        if self.masks is not None and logs is not None:
            values = self._values()
            logs.update(values)
            state.log_history[-1].update(values)

    def on_save(self, args, state, control, **kwargs):
        if self.masks is not None:
            self.masks.refresh()  # a weight that training brought to zero stays there, as for who resumes from here

    def on_train_end(self, args, state, control, model=None, **kwargs):
        self._detach()
        if self.masks is None:
            raise MoonshotError(
                f"the training ended at step {state.global_step}, before the pruning at step {min(self.schedule)}"
            )
        pattern = pattern_of(self.config, model)
        self.masks.check(pattern)
        if state.is_world_process_zero:
            held = f"; every layer is {pattern!s}" if pattern is not None else ""
            print(
                f"sparsity {self.masks.sparsity():.4f} over {len(self.masks.layers)} layers: "
                f"every removed weight is zero{held}"
            )

    def _values(self) -> dict[str, float]:
        values = {SPARSITY: self.masks.sparsity()}
        return values if self.relative_loss is None else {**values, LOSS: self.relative_loss}

    def _detach_masks(self) -> None:
        if self.masks is not None:
            self.masks.detach()

    def _detach(self) -> None:
        self._detach_masks()
        if self.distillation is not None:
            self.distillation.detach()


def cubic_schedule(config: MoonshotConfig, begin: int, end: int | None, every: int | None) -> dict[int, float]:
    """Step → sparsity of every pruning."""
    check_whole("begin_step", begin, 0)
    sparsity = config.parsed_pattern.sparsity
    if end is None:
        require(every is None, f"every={every}: it needs end_step, the step of the last pruning")
        return {begin: sparsity}
    check_whole("end_step", end, begin)
    require(every is not None, "every=None: with end_step, give the steps between prunings")
    check_whole("every", every, 1)
    require(
        not isinstance(config.parsed_pattern, NM),
        f"pattern={config.pattern!r} has one sparsity, which no schedule can lead up to: prune in one step, begin_step",
    )
    steps = sorted({*range(begin, end, every), end})
    return {step: sparsity * (1 - (1 - j / len(steps)) ** 3) for j, step in enumerate(steps, start=1)}


def pattern_of(config: MoonshotConfig | None, model: nn.Module) -> NM | None:
    """The n:m pattern that a model was pruned to; None where it was none, or nothing says which."""
    if config is None:
        record = getattr(getattr(model, "config", None), "moonshot", None)
        if not isinstance(record, dict) or "config" not in record:
            return None
        config = MoonshotConfig.from_dict(record["config"])
    pattern = config.parsed_pattern
    return pattern if isinstance(pattern, NM) else None


def mean_loss(report: PruneReport) -> float | None:
    """L_λ of the pruned layers, a mean over their weights."""
    layers = [layer for layer in report.layers if layer.loss is not None]
    total = sum(layer.shape[0] * layer.shape[1] for layer in layers)
    return sum(layer.loss * layer.shape[0] * layer.shape[1] for layer in layers) / total if layers else None


@contextmanager
def own_random_state(seed: int) -> Iterator[None]:
    """Random numbers of every kind start from `seed` inside, and go on outside as if nothing had happened."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            set_seed(seed)
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


@contextmanager
def without_autocast(model: nn.Module) -> Iterator[None]:
    """The model's own forward in place of accelerate's mixed-precision one: a block that runs alone has none either."""
    wrapped, original = (model.__dict__.get(name) for name in ("forward", "_original_forward"))
    swapped = wrapped is not None and original is not None
    try:
        if swapped:
            model.forward = original
        yield
    finally:
        if swapped:
            model.forward = wrapped


def training_inputs(dataloader: Any, size: int, seed: int) -> Iterator[dict[str, Tensor]]:
    """Random samples of a data loader's data set through its collator; the loader itself is not touched."""
    dataset, examples = dataloader.dataset, None
    if hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"):
        order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(seed)).tolist()
        examples = (dataset[index] for index in order)
    else:
        examples = iter(dataset)
    while chunk := list(islice(examples, size)):
        batch = labelled(dict(dataloader.collate_fn(chunk)))
        if batch is not None:
            yield batch


def labelled(batch: dict[str, Any]) -> dict[str, Any] | None:
    """The samples of a batch in which some token has a label to predict; None where there is no such sample."""
    labels = batch.get("labels")
    if not isinstance(labels, Tensor) or labels.ndim != 2:
        return batch
    rows = (labels[:, 1:] != IGNORED).any(1)
    if bool(rows.all()):
        return batch
    return {name: value[rows] for name, value in batch.items()} if bool(rows.any()) else None


@torch.no_grad()
def share_from_first_process(masks: Masks) -> None:
    """Under data parallelism every process has pruned its copy; from here on all have the first one's, to the bit."""
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        for layer in masks.layers:
            torch.distributed.broadcast(layer.parameter.data, 0)
        masks.refresh()
