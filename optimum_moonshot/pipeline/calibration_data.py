"""The calibration data of a run, from a source of any kind, in batches that suit the model.

Samples that the dense model generates have exactly T tokens, none padded. All samples of a batch grow in step, by
`generate` with its cache. The beginning of a sample is forced token by token, and so is the next beginning where the
model ends a text early. The samples are stored in the run's folder: a resumed run reads the same tokens.

Gradients are collected sample by sample, and statistics exclude padding, so the samples must be on the first axis of a
layer's inputs. Most inputs are [samples, tokens, features]. Others have tokens first, are shared by all samples (tables
of relative positions), or are the tokens of one expert, or the patches of all images in one row. Shapes alone do not
distinguish these, so the calls with two samples are compared with the calls with the second sample alone; batches have
one sample where they differ.
"""

import dataclasses
import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from ..config import NEEDING_DATA
from ..data.batches import PROBE_TOKENS, Batch, batch_size, digest, shorten, split_batches, take, without_padding
from ..data.images import load_image_text, load_images, open_image_text, open_images, reads_both
from ..data.text import LONGEST_SAMPLE, CalibrationData, SelfCalibration, Usable, load_calibration, window_length
from ..devices import is_out_of_memory, preserved_random_state, release_unused
from ..errors import MoonshotError, one_line, reason, require
from ..model.calls import close, frozen, model_device, run_model
from ..model.layers import PrunableLayer, onloaded_in_turn, visited
from ..model.losses import add_labels, labelled, token_mask
from ..model.model_info import check_tokens, max_positions, reads_images_and_text, takes_images, vocabulary_size
from ..model.weight_sums import function_values, model_parts, model_sums
from ..progress import progress_bar
from .run_folder import SAMPLES, Parts, RunFolder
from .selection import Selection, Subject

# A batch's logits, with their gradient, stay below this: with a large vocabulary fewer samples pass at a time.
LOGITS_BYTES = 2 * 2**30

# By layer, for each call: one number per element of the first axis of its inputs; None if it does not show the samples.
Calls = dict[str, list[Tensor | None]]


def read_data(
    subject: Subject, selection: Selection, calibration: Any, samples_folder: RunFolder | None
) -> CalibrationData:
    """Exactly `num_samples` samples, with labels where the loss needs them, in batches whose logits have room."""
    model, config = subject.model, selection.config
    written = SelfCalibration.of(calibration)
    if written is not None:
        data = load_self(model, subject.tokenizer, selection, written, samples_folder, subject.progress)
        return with_room(data, selection, model)
    gradients = selection.needs_losses
    options = {name: getattr(config, name) for name in ("num_samples", "batch_size", "seed")}
    if reads_images_and_text(model) and (pairs := open_image_text(calibration)) is not None:
        require(
            reads_both(subject.processor),
            f"{pairs.name} has images and text, which need the model's processor",
            field="processor",
            hint="give AutoProcessor.from_pretrained(...), or batches of model inputs",
        )
        lengths = {name: getattr(config, name) for name in ("num_samples", "sequence_length", "seed")}
        data = load_image_text(pairs, subject.processor, max_positions=max_positions(model), **lengths)
        for batch in data.batches:
            check_tokens(model, batch["input_ids"], "processor")
        return data  # whose loss is that of the text
    if takes_images(model) and (source := open_images(calibration)) is not None:
        labels = gradients and (subject.loss is None or source.label is not None)
        return load_images(source, model, subject.processor, labels=labels, **options)
    options["sequence_length"] = config.sequence_length
    options["usable"] = usable(subject, selection)
    data = load_calibration(calibration, subject.tokenizer, max_positions=max_positions(model), **options)
    for ids in (batch["input_ids"] for batch in data.batches if "input_ids" in batch):
        check_tokens(model, ids, "input_ids" if data.model_inputs else "tokenizer")
    masked = gradients and subject.loss is None
    batches, note = add_labels(model, data.batches, subject.tokenizer, config.seed, masked)
    if note is not None:
        data = dataclasses.replace(data, batches=batches, notes=(*data.notes, note))
    return with_room(data, selection, model)


def usable(subject: Subject, selection: Selection) -> Usable | None:
    """Which samples of model inputs have a label; None where the loss is the caller's, and labels may mean anything."""
    return None if subject.loss is not None else partial(labelled, subject.model, required=selection.needs_losses)


def with_room(data: CalibrationData, selection: Selection, model: nn.Module) -> CalibrationData:
    """The data in batches whose logits, with their gradient, stay below `LOGITS_BYTES`, where any are needed."""
    if (selection.needs_losses or selection.config.allocation == "owl") and data.sequence_length:
        itemsize = selection.layers[0].parameter.dtype.itemsize
        per_sample = 2 * data.sequence_length * vocabulary_size(model) * itemsize
        data = dataclasses.replace(data, batches=split_batches(data.batches, max(1, LOGITS_BYTES // per_sample)))
    return data


def two_samples(selection: Selection, data: CalibrationData) -> Batch | None:
    """Two samples, padded if any are, to test whether the layers show them; None where it does not matter."""
    several = [batch for batch in data.batches if batch_size(batch) > 1]
    masks = ((batch, token_mask(batch)) for batch in several)
    padded = next((batch for batch, mask in masks if mask is not None and not bool(mask.all())), None)
    if not several or (padded is None and not selection.needs_losses):
        return None
    return shorten(several[0] if padded is None else padded, samples=2)


def one_by_one(data: CalibrationData, unshown: list[str]) -> CalibrationData:
    """The data in batches of one sample, where some layers do not show them, with a note."""
    if not unshown:
        return data
    more = f" and {len(unshown) - 1} more" if len(unshown) > 1 else ""
    note = f"one sample at a time: the inputs of {unshown[0]}{more} do not show which sample they belong to"
    batches = [without_padding(batch) for batch in split_batches(data.batches, 1)]
    return dataclasses.replace(data, batches=batches, notes=(*data.notes, note))


def unshown_samples(model: nn.Module, layers: Sequence[PrunableLayer], batch: Batch) -> list[str]:
    """The names of the layers whose inputs do not show the samples of a batch of two, on the model's device.

    The model is in evaluation mode, with its weights onloaded while it is called.
    """
    both, second = (
        calls_seen(layers, token_mask(samples), batch_size(samples), partial(run_model, model, samples))
        for samples in (batch, take(batch, 1, 2))
    )
    return unlike(layers, both, second)


def unlike(layers: Sequence[PrunableLayer], both: Calls, second: Calls) -> list[str]:
    """The names of the layers where the second half of some call with both samples is not the second sample's call."""
    names = []
    for layer in layers:
        calls, alone = both[layer.name], second[layer.name]
        pairs = [(two, one) for two, one in zip(calls, alone, strict=False) if two is not None and one is not None]
        complete = len(pairs) == len(calls) == len(alone)
        if not complete or not all(len(two) == 2 * len(one) and close(two[len(one) :], one) for two, one in pairs):
            names.append(layer.name)
    return names


@torch.no_grad()
def calls_seen(layers: Sequence[PrunableLayer], mask: Tensor | None, samples: int, run: Callable[[], Any]) -> Calls:
    """The calls of the layers while `run` is called with B `samples`.

    `mask` is bool [B, T], True where a token counts; None where all do.
    """
    calls: Calls = {layer.name: [] for layer in layers}

    def see(name: str, called: PrunableLayer, inputs: Tensor, output: Tensor) -> None:
        try:
            next(called.pairs(inputs, output, called.token_mask(inputs, mask), samples))
        except MoonshotError:
            calls[name].append(None)
            return
        rows = inputs.detach().float().flatten(1) if inputs.ndim > 1 else inputs.detach().float()[:, None]
        calls[name].append(rows @ torch.arange(rows.shape[1], device=rows.device).cos())

    with ExitStack() as stack:
        for layer in layers:
            layer.watch(partial(see, layer.name), stack)
        run()
    return calls


def check_without_data(selection: Selection) -> None:
    """Check that a run needs no data.

    Raises:
        MoonshotError: it needs some.
    """
    config = selection.config
    message = "without calibration data there is nothing to recompute; give some, or leave it out"
    require(not config.recompute, message, field="recompute", value=True)
    require(
        config.allocation not in NEEDING_DATA,
        f"allocation={config.allocation!r} needs data to see what a layer does",
        field="calibration",
        value=None,
        hint="give some, or use allocation='alpha'",
    )
    such = 'such as "c4", a text file, or a folder of images for an image model'
    needed = f"solver={config.solver!r} needs data, {such}"
    require(not selection.solver.calibrated, needed, field="calibration", value=None)


def load_self(
    model: nn.Module,
    tokenizer: Any,
    selection: Selection,
    source: SelfCalibration,
    folder: RunFolder | None,
    progress: bool,
) -> CalibrationData:
    """Exactly `num_samples` samples that the dense model writes, or that it wrote before the run was interrupted.

    The tokenizer is for prompts, and may be None without. `folder` is for the samples alone.

    Raises:
        MoonshotError: a model that is not a causal language model, prompts that cannot be used, or no BOS token.
    """
    config, name = selection.config, type(model).__name__
    message = f"{name} is not a causal language model: give data instead"
    require(writes(model), message, field="calibration", value="self")
    length = window_length(config.sequence_length, max_positions(model), LONGEST_SAMPLE)
    beginnings = source.beginnings(tokenizer, _bos(model, tokenizer), length)
    ends = _ends(model, tokenizer)
    notes: list[str] = []

    def write() -> Tensor:
        with frozen(model):
            sizes = config.num_samples, length
            return write_samples(model, beginnings, ends, source, *sizes, config.seed, progress, notes)

    if folder is None:
        ids = write()
    else:
        values = {**asdict(source), "prompts": None, "ends": sorted(ends), "beginnings": beginnings}
        settings = json.dumps([values, config.num_samples, length, config.seed])
        weights = model_parts(model, model_sums(model, selection.structure.blocks))
        parts = {"the samples": {"settings": settings}, **weights, "the model's function": _function(model)}
        ids = _stored(folder, parts, write, notes)
    batches = [{"input_ids": part} for part in ids.split(config.batch_size)]
    return CalibrationData(batches, config.num_samples, length, source.describe(), digest(batches), tuple(notes))


def writes(model: nn.Module) -> bool:
    """Whether a model is a causal language model."""
    able = getattr(model, "can_generate", None)
    encoder_decoder = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    return able is not None and bool(able()) and not encoder_decoder and not takes_images(model)


@torch.no_grad()
def _function(model: nn.Module) -> dict[str, str]:
    """The `function_values` of a model for a few tokens; a caller's `forward` does not matter, since it writes none."""
    tokens = torch.arange(PROBE_TOKENS, device=model_device(model))[None] % vocabulary_size(model)
    with frozen(model), onloaded_in_turn(visited(model)), preserved_random_state(tokens.device):
        torch.manual_seed(0)
        return function_values(model, model(input_ids=tokens, use_cache=False), {"input_ids": tokens})


def _stored(folder: RunFolder, parts: Parts, write: Callable[[], Tensor], notes: list[str]) -> Tensor:
    """The samples of an interrupted run, or new ones, which are stored."""
    same = folder.open(parts)
    try:
        for _, report, tensors in folder.saved(SAMPLES) if same else ():
            if report is not None:
                notes.append("the generated samples were reused from an interrupted run")
                return tensors["input_ids"]
            notes.append("damaged samples of an interrupted run were discarded and generated again")
        ids = write()
        folder.save(SAMPLES, "self", {"input_ids": ids}, {})
        return ids
    finally:
        folder.release()


def _bos(model: nn.Module, tokenizer: Any) -> int | None:
    """The token that begins the model's texts, by the first of the tokenizer and the configurations that has one."""
    tokens = (getattr(owner, "bos_token_id", None) for owner in (tokenizer, model.generation_config, model.config))
    return next((token for token in tokens if token is not None), None)


def _ends(model: nn.Module, tokenizer: Any) -> set[int]:
    """The tokens that end a text."""
    tokens = (getattr(owner, "eos_token_id", None) for owner in (tokenizer, model.generation_config))
    lists = (ids if isinstance(ids, list | tuple) else [ids] for ids in tokens)
    return {token for ids in lists for token in ids if token is not None}


def write_samples(
    model: nn.Module,
    beginnings: list[list[int]],
    ends: set[int],
    source: SelfCalibration,
    count: int,
    length: int,
    seed: int,
    progress: bool,
    notes: list[str],
) -> Tensor:
    """Samples [count, length], int64 on the CPU; the global random state stays as it is.

    Each of the beginnings (token ids) is used as often as the others, in random order, also behind tokens that end a
    text. Where the device is out of memory, half as many are written at a time from there on, with a note.

    Raises:
        MoonshotError: the model gives no probabilities.
        torch.OutOfMemoryError: there is none for a single sample.
    """
    generator = torch.Generator().manual_seed(seed)
    order = _order(beginnings, generator)
    device = model_device(model)
    written: list[Tensor] = []
    done, size = 0, source.batch_size
    bar = progress_bar(total=count * length, desc="writing samples", unit="token", shown=progress)
    with bar, preserved_random_state(device):
        while done < count:
            torch.manual_seed(int(torch.randint(2**62, (), generator=generator)))
            forced = Beginnings([next(order) for _ in range(min(size, count - done))], order, ends, bar.update)
            samples = _batch(model, forced, source, length)
            if isinstance(samples, Tensor):
                written.append(samples)
                bar.update(len(samples))
                done += len(samples)
                continue
            bar.update(done * length - bar.n)
            size = len(forced.first) // 2
            if size == 0:
                raise torch.OutOfMemoryError(samples)
            release_unused(device)
    if size < source.batch_size:
        notes.append(
            f"out of memory on {device}: the model wrote {size} samples at a time, not {source.batch_size}; they are "
            f"others than those of batch_size={source.batch_size}"
        )
    return torch.cat(written)


def _batch(model: Any, forced: "Beginnings", source: SelfCalibration, length: int) -> Tensor | str:
    """Samples [B, length] on the CPU, or the device's message where it has too little memory for them."""
    try:
        with onloaded_in_turn(visited(model)), _generating(model, length, source):
            return _generate(model, forced.first.to(model_device(model)), forced).cpu()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return one_line(error)


def _order(beginnings: list[list[int]], generator: torch.Generator) -> Iterator[list[int]]:
    while True:
        for index in torch.randperm(len(beginnings), generator=generator).tolist():
            yield beginnings[index]


def _generate(model: Any, first: Tensor, forced: "Beginnings") -> Tensor:
    try:
        return model.generate(
            first, attention_mask=torch.ones_like(first), logits_processor=LogitsProcessorList([forced])
        )
    except MoonshotError:
        raise
    except (TypeError, ValueError, RuntimeError, LookupError, AttributeError) as error:
        if is_out_of_memory(error):
            raise
        message = f"{type(model).__name__} cannot write ({reason(error)})"
        raise MoonshotError(message, field="calibration", value="self") from error


@contextmanager
def _generating(model: Any, length: int, source: SelfCalibration) -> Iterator[None]:
    """Meanwhile `generate` uses these settings alone: it takes missing ones from the model's configuration."""
    original = model.generation_config
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=source.temperature, top_p=source.top_p, top_k=0, max_length=length, use_cache=True
    )
    try:
        yield
    finally:
        model.generation_config = original


class Beginnings(LogitsProcessor):
    """Forces the beginnings of samples, token by token, also after an end that the model has chosen itself.

    Args:
        now: the beginning of each sample of a batch.
        following: the next beginnings, for whichever sample needs one.
        ends: tokens behind which one follows.
        tick: called with the number of tokens that are written at every step.
    """

    def __init__(
        self, now: list[list[int]], following: Iterator[list[int]], ends: set[int], tick: Callable[[int], Any]
    ):
        self.following, self.ends, self.tick = following, ends, tick
        self.first = torch.tensor([[tokens[0]] for tokens in now])
        self.waiting = [deque(tokens[1:]) for tokens in now]
        self.forced = [True] * len(now)  # the latest token was: a prompt may contain the end of a text

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """The scores [B, vocabulary] of the token after `input_ids` [B, T]; where one is forced, of that one alone."""
        self.tick(len(scores))
        for row, token in enumerate(input_ids[:, -1].tolist()):
            waiting = self.waiting[row]
            if not self.forced[row] and token in self.ends:
                waiting.extend(next(self.following))
            self.forced[row] = bool(waiting)
            if waiting:
                scores[row] = -torch.inf
                scores[row, waiting.popleft()] = 0
        return scores
