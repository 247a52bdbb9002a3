"""`MoonshotCallback`: pruned models under `transformers.Trainer`, and its descendants such as TRL's `SFTTrainer`."""

import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from os import PathLike
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments, set_seed

from ..config import MoonshotConfig
from ..data.sources import open_source
from ..devices import own_random_numbers
from ..errors import MoonshotError, check_expressions, check_whole, require
from ..masks import Masks, find_pruned, layer_follows
from ..model.layers import PrunableLayer, adapted_layers
from ..model.losses import IGNORED
from ..model.model_info import takes_images
from ..objective.patterns import NM, Experts
from ..pipeline.selection import select
from ..pruner import MoonshotPruner
from ..reports.prune_report import PruneReport
from ..reports.record import PruningRecord
from .distillation import Distillation

SPARSITY, LOSS = "moonshot_sparsity", "moonshot_loss"  # names in the Trainer's log
# What flash attention is told beside the positions, when the samples of a batch lie end to end in one row.
FLATTENED = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}
_log = logging.getLogger(__name__)


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
            (arXiv 1710.01878). Each chooses anew among all weights. Needs a pattern other than n:m, and
            allocation="uniform".
        every: steps between prunings; needed with `end_step`.
        calibration: what `MoonshotPruner.prune` takes. None is `config.calibration` or else the training data:
            `config.num_samples` random samples through the Trainer's collator. The run's random state does not move.
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
        targets: Sequence[str] | None = None,
        ignore: Sequence[str] = (),
    ):
        good = config is None or isinstance(config, MoonshotConfig)
        require(good, f"config is a {type(config).__name__}: give a MoonshotConfig")
        if config is None:
            alone = (begin_step, end_step, every, calibration) == (0, None, None, None)
            require(alone, "config=None: nothing is pruned; begin_step, end_step, every and calibration need a config")
        else:
            require(targets is None and not ignore, "targets and ignore: with a config, give them to MoonshotConfig")
            why = "its optimizer's state is in the basis that the model has: rotate it before the training"
            require(config.rotation is None, f"rotation={config.rotation!r}: {why}")
            smaller = "pattern='experts': the optimizer has the weights of all experts; prune before the training"
            require(config.pattern != Experts.kind, smaller)
            calibration = config.calibration if calibration is None else calibration
            once = end_step is not None and hasattr(calibration, "__next__")
            require(not once, "calibration: an iterator serves one pruning; a schedule needs a list, or other data")
        self.config, self.calibration = config, calibration
        self.targets, self.ignore = check_expressions("targets", targets), check_expressions("ignore", ignore)
        self.schedule = {} if config is None else cubic_schedule(config, begin_step, end_step, every)
        self.distillation = None if teacher is None else Distillation(teacher, temperature, teacher_weight)
        self.masks: Masks | None = None
        self.report: PruneReport | None = None
        self.relative_loss: float | None = None
        self._patterns: dict[str, NM] = {}  # of the layers that have one

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        optimizer: Any = None,
        train_dataloader: Any = None,
        **kwargs: Any,
    ) -> None:
        self.detach()
        self.masks = self.report = self.relative_loss = None
        with self._detached_on_failure():
            if self.distillation is not None:
                self.distillation.attach(model)
            if self.config is None:
                layers = find_pruned(model, self.targets, self.ignore)
                warn_of_unmasked(model, layers)
                self._keep(layers, model, optimizer)
                return
            self._check(model, max(state.max_steps, 1), train_dataloader)
            layers = prunable(model, self.config)  # tells now what the configuration does not fit
            if min(self.schedule) < state.global_step:
                losses = [entry[LOSS] for entry in state.log_history if LOSS in entry]
                self.relative_loss = losses[-1] if losses else None
                self._keep(layers, model, optimizer)

    def _check(self, model: nn.Module, steps: int, dataloader: Any) -> None:
        last, needed = max(self.schedule), self.config.num_samples
        require(last < steps, f"the pruning before step {last} never comes: the training has {steps} steps")
        sharded = any(isinstance(parameter, DTensor) for parameter in model.parameters())
        require(not sharded, "a model that fully_shard has sharded cannot be pruned: prune it first, then train it")
        dataset = getattr(dataloader, "dataset", None)
        if isinstance(self.calibration, str | PathLike) and not takes_images(model):
            open_source(self.calibration)  # such as a file that is not there
        elif self.calibration is None and hasattr(dataset, "__len__"):
            few = f"num_samples={needed}: the training data has {len(dataset)} samples to prune with; lower num_samples"
            require(len(dataset) >= needed, few)

    def _keep(self, layers: list[PrunableLayer], model: nn.Module, optimizer: Any) -> None:
        """Keep the zeros that these layers have now, until `detach`."""
        self._detach_masks()
        self.masks = Masks(layers)
        self._patterns = held_patterns(layers, nm_patterns(self.config, model))
        self.masks.attach(optimizer)

    def on_step_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        optimizer: Any = None,
        train_dataloader: Any = None,
        processing_class: Any = None,
        **kwargs: Any,
    ) -> None:
        if state.global_step not in self.schedule:
            return
        config = replace(self.config, sparsity=self.schedule[state.global_step])
        calibration = self.calibration
        seed = (config.seed + state.global_step) % 2**32
        with self._detached_on_failure(), own_random_state(seed), without_autocast(model):
            if calibration is None:
                calibration = training_inputs(train_dataloader, config.batch_size, seed)
            self.report = MoonshotPruner(model, config, processing_class).prune(calibration, progress=False)
            layers = prunable(model, config)
            share_from_first_process(layers)
            self._keep(layers, model, optimizer)
        self.relative_loss = self.report.loss
        state.log_history.append({**self._values(), "step": state.global_step, "epoch": state.epoch})

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any
    ) -> None:
        if self.masks is not None and logs is not None:
            values = self._values()
            logs.update(values)
            state.log_history[-1].update(values)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.masks is not None:
            self.masks.refresh()  # a weight that training brought to zero stays there, as for who resumes from here

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        self.detach()
        if self.masks is None:
            raise MoonshotError(
                f"the training ended at step {state.global_step}, before the pruning at step {min(self.schedule)}"
            )
        self.masks.check(self._patterns)
        sparsity = self.masks.sparsity()
        if state.is_world_process_zero:
            print(
                f"sparsity {sparsity:.4f} over {len(self.masks.layers)} layers: every removed weight is zero"
                + stated(self._patterns, len(self.masks.layers))
            )

    def _values(self) -> dict[str, float]:
        values = {SPARSITY: self.masks.sparsity()}
        return values if self.relative_loss is None else {**values, LOSS: self.relative_loss}

    @contextmanager
    def _detached_on_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.detach()
            raise

    def _detach_masks(self) -> None:
        if self.masks is not None:
            self.masks.detach()

    def detach(self) -> None:
        """Remove every hook, as the end of the training does. After one that was interrupted, call it."""
        self._detach_masks()
        if self.distillation is not None:
            self.distillation.detach()


def warn_of_unmasked(model: nn.Module, layers: list[PrunableLayer]) -> None:
    """Say, before a training, that adapters lie on pruned layers whose merge would fill the zeros."""
    if not adapted_layers(model):
        return
    from .peft import unmasked_adapters

    found = unmasked_adapters(model, [layer.parameter for layer in layers])
    if found:
        _log.warning(
            "adapters without a mask lie on %d pruned layers (%s%s): merging them fills the zeros; call "
            "sparse_lora(trainer.model) of optimum_moonshot.integrations.peft before train(), or make them with its "
            "SparseLoraConfig",
            len(found),
            ", ".join(found[:3]),
            ", …" if len(found) > 3 else "",
        )


def prunable(model: nn.Module, config: MoonshotConfig) -> list[PrunableLayer]:
    """The layers that a pruning by this configuration covers.

    Args:
        model: any module.
        config: which layers, and by which patterns.

    Raises:
        MoonshotError: nothing is chosen, or the pattern fits no layer.
    """
    return select(model, config).layers


def cubic_schedule(config: MoonshotConfig, begin: int, end: int | None, every: int | None) -> dict[int, float | None]:
    """Step → sparsity of every pruning; None is the configuration's own.

    Args:
        config: with the sparsity s of the last one.
        begin: the step before which the first one comes, from 0.
        end: that of the last one; None for one alone.
        every: steps between prunings; None for one alone.

    Returns:
        s·(1 - (1 - j/n)³) at the j-th of n (Zhu & Gupta, arXiv 1710.01878, equation 1, from 0 on).

    Raises:
        MoonshotError: steps that are no whole numbers or in no order, or a pattern or allocation that has no schedule.
    """
    check_whole("begin_step", begin, 0)
    if end is None:
        require(every is None, f"every={every}: it needs end_step, the step of the last pruning")
        return {begin: config.sparsity}
    check_whole("end_step", end, begin)
    require(every is not None, "every=None: with end_step, give the steps between prunings")
    check_whole("every", every, 1)
    require(
        not isinstance(config.parsed_pattern, NM),
        f"pattern={config.pattern!r} has one sparsity, which no schedule can lead up to: prune in one step, begin_step",
    )
    require(
        config.allocation == "uniform",
        f"allocation={config.allocation!r}: its sparsities of the layers do not grow from pruning to pruning, as a "
        "schedule needs it: prune in one step, begin_step",
    )
    sparsity = config.parsed_pattern.sparsity
    steps = sorted({*range(begin, end, every), end})
    return {step: sparsity * (1 - (1 - j / len(steps)) ** 3) for j, step in enumerate(steps, start=1)}


def nm_patterns(config: MoonshotConfig | None, model: nn.Module) -> list[NM]:
    """The n:m patterns that layers of a model were pruned to, the smallest m first; none where nothing says which.

    Args:
        config: by which they were, or are, pruned; None is the record of the model.
        model: any module.
    """
    told = PruningRecord.of(model) if config is None else config
    return [] if told is None else told.nm_patterns()


def held_patterns(layers: list[PrunableLayer], patterns: list[NM]) -> dict[str, NM]:
    """Layer → the first of the patterns that it has, as far as it has one."""
    held = {}
    for layer in layers:
        found = next((pattern for pattern in patterns if layer_follows(layer, pattern)), None)
        if found is not None:
            held[layer.name] = found
    return held


def stated(patterns: dict[str, NM], layers: int) -> str:
    """How many layers have which pattern, as the end of a sentence.

    Args:
        patterns: layer → its pattern, as far as it has one.
        layers: how many there are.
    """
    counts = Counter(str(pattern) for pattern in patterns.values())
    if list(counts.values()) == [layers]:
        return f"; every layer is {next(iter(counts))}"
    return "".join(f"; {count} of them are {pattern}" for pattern, count in sorted(counts.items()))


@contextmanager
def own_random_state(seed: int) -> Iterator[None]:
    """Random numbers of every kind start from `seed` inside, and go on outside as if nothing had happened."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with own_random_numbers():
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
    """Random samples of a data loader's data set through its collator; the loader itself is not touched.

    Args:
        dataloader: of torch; its data set may be a stream, which is then read from its start.
        size: samples of a batch.
        seed: of the order.
    """
    dataset, examples = dataloader.dataset, None
    if hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"):
        order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(seed)).tolist()
        examples = (dataset[index] for index in order)
    else:
        examples = iter(dataset)
    while chunk := list(islice(examples, size)):
        for batch in collated(dataloader.collate_fn, chunk):
            batch = labelled(batch)
            if batch is not None:
                yield batch


def collated(collate: Callable[[list[Any]], Any], samples: list[Any]) -> list[dict[str, Any]]:
    """Samples as batches: one, or one each where the collator lays them end to end in one row.

    Args:
        collate: from a list of samples to a batch.
        samples: of one batch.
    """
    batch = dict(collate(samples))
    if FLATTENED.isdisjoint(batch):
        return [batch]
    batches = [batch] if len(samples) == 1 else [dict(collate([sample])) for sample in samples]
    return [{name: value for name, value in batch.items() if name not in FLATTENED} for batch in batches]


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
def share_from_first_process(layers: list[PrunableLayer]) -> None:
    """Under data parallelism every process has pruned its copy; from here on all have the first one's, to the bit."""
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        for layer in layers:
            torch.distributed.broadcast(layer.parameter.data, 0)
