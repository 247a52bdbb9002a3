"""`MoonshotCallback`: pruned models in `transformers.Trainer`, and its subclasses such as TRL's `SFTTrainer`.

With `Distillation`, a pruned model learns from the logits of the dense one and from the labels.
"""

import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils.hooks import RemovableHandle
from transformers import TrainerCallback, TrainerState, set_seed

from ..config import MoonshotConfig
from ..data.batches import IGNORED
from ..data.text import check_named_source
from ..devices import preserved_random_state
from ..errors import MoonshotError, check_expressions, check_number, check_whole, require
from ..masks import Masks, find_pruned, layer_follows
from ..model.calls import evaluation_mode, model_device, to_device
from ..model.layers import PrunableLayer, adapted_layers
from ..model.losses import labels_of
from ..model.model_info import takes_images
from ..objective.patterns import NM, Experts
from ..pruner import MoonshotPruner, selected_layers
from ..reports.record import PruningRecord

if TYPE_CHECKING:
    from ..reports.prune_report import PruneReport

SPARSITY, LOSS = "moonshot_sparsity", "moonshot_loss"  # names in the Trainer's log
# Further inputs of flash attention, for samples of a batch that are concatenated in one row.
_FLATTENED = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}
# Inputs of the student's loss, which are not passed to the teacher.
_LOSS_INPUTS = ("labels", "num_items_in_batch")
_log = logging.getLogger(__name__)


class MoonshotCallback(TrainerCallback):
    """Keeps a pruned model sparse while a `Trainer` trains it, or prunes it during training.

    ```python
    Trainer(model, args, train_dataset=data, callbacks=[MoonshotCallback()])        # an already pruned model
    MoonshotCallback(config, begin_step=100)                                        # prune before step 100
    MoonshotCallback(config, begin_step=100, end_step=500, every=50)                # nine prunings
    ```

    Removed weights are exactly zero after every optimizer step. The Trainer's log has `moonshot_sparsity` and, after a
    pruning, `moonshot_loss`, the relative loss L_λ of the pruned layers, a mean over their weights. (The Trainer calls
    TensorBoard and other loggers before this callback; `trainer.callback_handler.callbacks.insert(0, …)` changes that.)
    With `load_best_model_at_end`, the best model is selected among the models after the last pruning.
    A resumed run equals the uninterrupted one: the masks are the zeros of the checkpoint, and calibration samples are
    drawn by seed and step. At the end of training, the zeros and an n:m pattern are verified and printed.

    Args:
        config: the settings of pruning during training; None keeps the zeros of the model.
        begin_step: the optimizer step before which the model is pruned, counted from 0.
        end_step: the step of the last of several prunings; the j-th of n has the sparsity s·(1 - (1 - j/n)³), after Zhu
            & Gupta (arXiv 1710.01878). Every pruning selects among all weights. Requires a pattern other than n:m, and
            allocation="uniform".
        every: steps between prunings; required with `end_step`.
        calibration: see `MoonshotPruner.prune`. None is `config.calibration` or else the training data:
            `config.num_samples` random samples through the Trainer's collator. The run's random state is preserved.
        teacher: a dense model for logits distillation on the positions with labels; moved to the student's device.
        temperature: see `Distillation`.
        teacher_weight: see `weight` of `Distillation`.
        targets: expressions for the layers whose zeros are kept if config is None; see `find_pruned`.
        ignore: expressions for layers to leave out; see `find_pruned`.

    Raises:
        MoonshotError: (in training) a model without zeros, a pruning after the end of the run, or at the end a removed
            weight or a pattern that does not hold.
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
        valid = config is None or isinstance(config, MoonshotConfig)
        require(valid, f"config is a {type(config).__name__}: give a MoonshotConfig")
        if config is None:
            unused = (begin_step, end_step, every, calibration) == (0, None, None, None)
            names = "nothing is pruned; begin_step, end_step, every and calibration need a config"
            require(unused, names, field="config", value=None)
        else:
            names = "`targets` and `ignore`: with a config, give them to MoonshotConfig"
            require(targets is None and not ignore, names)
            message = "the optimizer's state is in the current basis of the model"
            hint = "rotate it before the training"
            require(config.rotation is None, message, field="rotation", value=config.rotation, hint=hint)
            message, hint = "the optimizer has the weights of all experts", "prune before the training"
            require(config.pattern != Experts.kind, message, field="pattern", value=config.pattern, hint=hint)
            calibration = config.calibration if calibration is None else calibration
            exhausted = end_step is not None and hasattr(calibration, "__next__")
            message, hint = "an iterator is enough for one pruning only", "give a list, or other data"
            require(not exhausted, message, field="calibration", hint=hint)
        self.config, self.calibration = config, calibration
        self.targets, self.ignore = check_expressions("targets", targets), check_expressions("ignore", ignore) or ()
        self.schedule = {} if config is None else cubic_schedule(config, begin_step, end_step, every)
        self.distillation = None if teacher is None else Distillation(teacher, temperature, teacher_weight)
        self.masks: Masks | None = None
        self.report: PruneReport | None = None
        self.relative_loss: float | None = None
        self._patterns: dict[str, NM] = {}  # the first n:m pattern that each layer follows, if any

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        model, optimizer = kwargs["model"], kwargs.get("optimizer")
        self.detach()
        self.masks = self.report = self.relative_loss = None
        with self._detached_on_failure():
            if self.distillation is not None:
                self.distillation.attach(model)
            if self.config is None:
                layers = find_pruned(model, self.targets, self.ignore)
                _warn_of_unmasked(model, layers)
                self._keep(layers, model, optimizer)
                self._check_restored(state)
                return
            self._check(self.config, model, max(state.max_steps, 1), kwargs.get("train_dataloader"))
            layers = selected_layers(model, self.config)  # raises now if the configuration does not fit
            if min(self.schedule) < state.global_step:
                losses = [entry[LOSS] for entry in state.log_history if LOSS in entry]
                self.relative_loss = losses[-1] if losses else None
                self._keep(layers, model, optimizer)
                self._check_restored(state)

    def _check_restored(self, state: TrainerState) -> None:
        """Raise `MoonshotError` if a resumed training lacks zeros of its checkpoint.

        A Trainer does not convert the names in a checkpoint, so it only warns that fused experts are not loaded.
        """
        logged = [entry[SPARSITY] for entry in state.log_history if SPARSITY in entry]
        sparsity = 0.0 if self.masks is None else self.masks.sparsity()
        message = f"pruned weights were not restored: their sparsity is {sparsity:.4f}"
        require(
            not logged or sparsity > logged[-1] - 1e-6,
            f"{message}, and was {logged[-1] if logged else 0:.4f}",
            field="resume_from_checkpoint",
            hint="create the model by from_pretrained(CHECKPOINT), and resume from it as well",
        )

    def _check(self, config: MoonshotConfig, model: nn.Module, steps: int, dataloader: Any) -> None:
        last, samples = max(self.schedule), config.num_samples
        require(last < steps, f"the pruning before step {last} is never reached: the training has {steps} steps")
        sharded = any(isinstance(parameter, DTensor) for parameter in model.parameters())
        require(not sharded, "a model sharded by fully_shard cannot be pruned", hint="prune it first, then train it")
        dataset: Any = getattr(dataloader, "dataset", None)
        if self.calibration is not None:
            if not takes_images(model):
                check_named_source(self.calibration)
        elif hasattr(dataset, "__len__"):
            message = f"the training data has {len(dataset)} samples"
            hint = "lower num_samples"
            require(len(dataset) >= samples, message, field="num_samples", value=samples, hint=hint)

    def _keep(self, layers: list[PrunableLayer], model: nn.Module, optimizer: Any) -> None:
        """Keep the current zeros of these layers, until `detach`."""
        if self.masks is not None:
            self.masks.detach()
        self.masks = Masks(layers)
        patterns = nm_patterns(self.config, model)
        matches = {layer.name: next((nm for nm in patterns if layer_follows(layer, nm)), None) for layer in layers}
        self._patterns = {name: pattern for name, pattern in matches.items() if pattern is not None}
        self.masks.attach(optimizer)

    def on_step_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if self.config is None or state.global_step not in self.schedule:
            return
        model = kwargs["model"]
        config = replace(self.config, sparsity=self.schedule[state.global_step])
        calibration = self.calibration
        seed = (config.seed + state.global_step) % 2**32
        with self._detached_on_failure(), seeded_random_state(seed):
            if calibration is None:
                calibration = training_inputs(kwargs["train_dataloader"], config.batch_size, seed)
            pruner = MoonshotPruner(model, config, kwargs.get("processing_class"))
            self.report = pruner.prune(calibration, progress=False)
            layers = selected_layers(model, config)
            if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
                for layer in layers:  # all data-parallel processes get the weights of the first
                    torch.distributed.broadcast(layer.parameter.data, 0)
            self._keep(layers, model, kwargs.get("optimizer"))
        self.relative_loss = self.report.loss
        # `load_best_model_at_end` must not load a model from before this pruning.
        state.best_metric = state.best_global_step = state.best_model_checkpoint = None
        state.log_history.append({**self._values(), "step": state.global_step, "epoch": state.epoch})

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if self.masks is not None and logs is not None:
            values = self._values()
            logs.update(values)
            state.log_history[-1].update(values)

    def on_save(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if self.masks is not None:
            self.masks.refresh()  # add new zeros to the mask, like a run that resumes from this checkpoint

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self.detach()
        if self.masks is None:
            missed = min(self.schedule)
            raise MoonshotError(f"the training ended at step {state.global_step}, before the pruning at step {missed}")
        self.masks.check(self._patterns)
        sparsity, layers = self.masks.sparsity(), len(self.masks.layers)
        if state.is_world_process_zero:
            counts = Counter(str(pattern) for pattern in self._patterns.values())
            patterns = "".join(f"; {count} of them are {pattern}" for pattern, count in sorted(counts.items()))
            if list(counts.values()) == [layers]:
                patterns = f"; every layer is {next(iter(counts))}"
            print(f"sparsity {sparsity:.4f} over {layers} layers: every removed weight is zero{patterns}")

    def _values(self) -> dict[str, float]:
        values = {} if self.masks is None else {SPARSITY: self.masks.sparsity()}
        return values if self.relative_loss is None else {**values, LOSS: self.relative_loss}

    @contextmanager
    def _detached_on_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.detach()
            raise

    def detach(self) -> None:
        """Remove every hook, as at the end of training. Call it after an interrupted training."""
        if self.masks is not None:
            self.masks.detach()
        if self.distillation is not None:
            self.distillation.detach()


def _warn_of_unmasked(model: nn.Module, layers: list[PrunableLayer]) -> None:
    """Log a warning if merging adapters would fill the zeros of pruned layers."""
    if not adapted_layers(model):
        return
    from .peft import unmasked_adapters

    unmasked = unmasked_adapters(model, [layer.parameter for layer in layers])
    if unmasked:
        _log.warning(
            "%d pruned layers have adapters without a mask (%s%s): merging them fills the zeros; call "
            "sparse_lora(trainer.model) of optimum_moonshot.integrations.peft before train(), or create them with its "
            "SparseLoraConfig",
            len(unmasked),
            ", ".join(unmasked[:3]),
            ", …" if len(unmasked) > 3 else "",
        )


def cubic_schedule(config: MoonshotConfig, begin: int, end: int | None, every: int | None) -> dict[int, float | None]:
    """Return step → sparsity of every pruning; None is the configuration's sparsity.

    The sparsity is s·(1 - (1 - j/n)³) at the j-th of n prunings (Zhu & Gupta, arXiv 1710.01878, equation 1, from 0).
    """
    check_whole("begin_step", begin, 0)
    quantized = config.grid is not None or config.has_budget
    require(not quantized, "training moves the weights off the grid", field="bits", hint="prune later")
    if end is None:
        message = "it needs end_step, the step of the last pruning"
        require(every is None, message, field="every", value=every)
        return {begin: config.sparsity}
    check_whole("end_step", end, begin)
    if every is None:
        raise MoonshotError("with end_step, give the steps between prunings", field="every", value=None)
    check_whole("every", every, 1)
    pattern, hint = config.parsed_pattern, "prune in one step, `begin_step`"
    if isinstance(pattern, NM):
        reason = "it has one sparsity, which a schedule cannot reach gradually"
        raise MoonshotError(reason, field="pattern", value=config.pattern, hint=hint)
    if config.allocation != "uniform" or pattern is None:
        reason = "a schedule needs sparsities that increase from pruning to pruning in every layer"
        raise MoonshotError(reason, field="allocation", value=config.allocation, hint=hint)
    steps = sorted({*range(begin, end, every), end})
    return {step: pattern.sparsity * (1 - (1 - j / len(steps)) ** 3) for j, step in enumerate(steps, start=1)}


def nm_patterns(config: MoonshotConfig | None, model: nn.Module) -> list[NM]:
    """Return the n:m patterns in the configuration, or else in the model's record, smallest m first."""
    record = PruningRecord.of(model) if config is None else config
    return [] if record is None else record.pattern_rules.nm()


@contextmanager
def seeded_random_state(seed: int) -> Iterator[None]:
    """Seed all random number generators, and restore their states at the end."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with preserved_random_state():
            set_seed(seed)
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def training_inputs(dataloader: Any, size: int, seed: int) -> Iterator[dict[str, Tensor]]:
    """Yield random samples of a data loader's data set through its collator, `size` per batch; the loader is unchanged.

    A stream is read from its start.
    """
    dataset, examples = dataloader.dataset, None
    if hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"):
        order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(seed)).tolist()
        examples = (dataset[index] for index in order)
    else:
        examples = iter(dataset)
    while chunk := list(islice(examples, size)):
        yield from _collated(dataloader.collate_fn, chunk)


def _collated(collate: Callable[[list[Any]], Any], samples: list[Any]) -> list[dict[str, Any]]:
    """Collate samples into one batch, or into one per sample if the collator concatenates them in one row."""
    batch = dict(collate(samples))
    if _FLATTENED.isdisjoint(batch):
        return [batch]
    batches = [batch] if len(samples) == 1 else [dict(collate([sample])) for sample in samples]
    return [{name: value for name, value in batch.items() if name not in _FLATTENED} for batch in batches]


class Distillation:
    """A forward hook on the student that mixes the teacher's loss into the model's own, in training mode only:

        (1 - weight) · loss + weight · T² · KL(softmax(teacher / T) ‖ softmax(student / T))

    (Hinton et al., arXiv 1503.02531). KL is summed over the positions with labels and, like the model's loss, divided
    by `num_items_in_batch` if the Trainer passes it, else by the number of these positions. The teacher, a model with
    the same vocabulary, runs in evaluation mode, without gradients; T > 0, and the weight is in [0, 1].
    """

    def __init__(self, teacher: nn.Module, temperature: float = 2.0, weight: float = 0.5):
        require(isinstance(teacher, nn.Module), f"teacher is a {type(teacher).__name__}: give the dense model")
        check_number("temperature", temperature)
        check_number("teacher_weight", weight)
        require(temperature > 0, "give a number above 0", field="temperature", value=temperature)
        require(0 <= weight <= 1, "give a number from 0 to 1", field="teacher_weight", value=weight)
        self.teacher, self.temperature, self.weight = teacher, temperature, weight
        self._handle: RemovableHandle | None = None

    def attach(self, student: nn.Module) -> None:
        """Add the hook to a student, which must not be the teacher, and move the teacher to the student's device."""
        require(self.teacher is not student, "it is the model that trains; give a dense copy", field="teacher")
        self.detach()
        self.teacher.to(model_device(student))
        self._handle = student.register_forward_hook(self._mix, with_kwargs=True)

    def detach(self) -> None:
        """Remove the hook, if any."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _mix(self, student: nn.Module, args: tuple[Any, ...], inputs: dict[str, Any], output: Any) -> Any:
        if not student.training:
            return output
        usable = all(getattr(output, name, None) is not None for name in ("loss", "logits")) and "labels" in inputs
        text = "distillation adds to a loss that the student computes from labels and logits, and this one returns none"
        fix = "use transformers.Trainer (TRL's SFTTrainer forms no logits) without compute_loss_func or label smoothing"
        require(usable, text, field="teacher", hint=fix)
        teacher_inputs = {name: value for name, value in inputs.items() if name not in _LOSS_INPUTS}
        with torch.no_grad(), evaluation_mode(self.teacher):
            targets = self.teacher(*to_device(args, model_device(self.teacher)), **teacher_inputs).logits
        labels = labels_of(student, {"labels": inputs["labels"]}).to(output.logits.device)
        divergence = self.divergence(output.logits, targets.to(output.logits.device), labels)
        items = inputs.get("num_items_in_batch")
        count = (labels != IGNORED).sum() if items is None else items
        output["loss"] = (1 - self.weight) * output.loss + self.weight * divergence / count
        return output

    def divergence(self, student: Tensor, teacher: Tensor, labels: Tensor) -> Tensor:
        """Return the scalar T² · Σ KL over the labelled positions; logits are [..., V], labels [...], -100 for none."""
        message = f"its logits have shape {list(teacher.shape)}, the student's {list(student.shape)}"
        hint = "give the model that the student was pruned from"
        require(student.shape == teacher.shape, message, field="teacher", hint=hint)
        rows = labels != IGNORED
        student, teacher = (
            functional.log_softmax(logits[rows].float() / self.temperature, -1) for logits in (student, teacher)
        )
        return self.temperature**2 * functional.kl_div(student, teacher, reduction="sum", log_target=True)
