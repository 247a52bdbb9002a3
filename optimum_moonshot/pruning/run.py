"""One run of the pruner, the only loop over decoder layers: calibrate → objective → solve → report.

The model stays as it is until every layer has its result.
"""

import copy
import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import PreTrainedConfig

from ..calibration.layer_statistics import LayerStatistics
from ..calibration.memory import Storage
from ..calibration.observer import Collector
from ..calibration.passes import ChainPasses, Visit, WholePasses, is_chain
from ..calibration.recompute import RecomputedPasses
from ..config import MoonshotConfig
from ..data.batches import Batch
from ..data.images import load_images, open_images
from ..data.text import CalibrationData, load_calibration
from ..errors import FactorizationError, MoonshotError, require
from ..model.calls import frozen, model_device, to_device
from ..model.facts import max_positions, takes_images, vocabulary_size
from ..model.layers import PrunableLayer, Structure, find_structure
from ..model.losses import add_masked_labels, needs_masked_labels
from ..model.units import structured_patterns
from ..objective.linalg import all_finite
from ..objective.patterns import Pattern, Structured
from ..reports.environment import peak_memory, versions
from ..reports.prune_report import LayerReport, PruneReport, loss_fields
from .allocation import allocate, block_scores
from .layer_solving import solve_layer
from .recovery import Recovery, part_size
from .result_store import Results, fingerprint
from .row_chunks import RowChunks
from .schedule import Gatherer

# A batch's logits, with their gradient, stay below this: with a large vocabulary fewer samples pass at a time.
LOGITS_BYTES = 2 * 2**30
PROBE_TOKENS = 16


class Run:
    """One call of `MoonshotPruner.prune`."""

    def __init__(
        self,
        model: nn.Module,
        config: MoonshotConfig,
        tokenizer: Any,
        loss: Callable | None,
        progress: bool,
        processor: Any = None,
    ):
        self.model, self.config, self.tokenizer, self.processor = model, config, tokenizer, processor
        self.loss, self.progress = loss, progress
        self.solver = self.config.make_solver()
        self.vision = takes_images(model)
        self.lam = self.config.resolve_lam("vision" if self.vision else "language")
        self.patterns: dict[str, Pattern] = {}
        self.notes: list[str] = []
        self.structure = self._structure()
        self.layers = list(self.structure.layers())
        self.solving = self.recovering = 0.0
        self.losses: list[Tensor | None] = []  # of the dense model on the calibration data, batch by batch

    def at(self, config: MoonshotConfig) -> "Run":
        """The same run with a configuration that differs in λ alone; what λ does not change is shared."""
        other = copy.copy(self)
        other.config, other.notes = config, list(self.notes)
        other.lam = config.resolve_lam("vision" if self.vision else "language")
        return other

    def execute(self, calibration: Any, resume_dir: str | os.PathLike | None) -> PruneReport:
        started = time.perf_counter()
        self._prepare(calibration)
        self.results = self._results(resume_dir)
        self.notes += self.results.notes
        recovery = self._recovery()
        bar = tqdm(total=len(self.layers), desc="pruning", unit="layer", disable=not self.progress)
        try:
            with frozen(self.model), bar:
                bar.update(len(self.results.reports))
                self._allocate(self._scores())
                for layer, statistics in self._statistics():
                    bar.set_postfix_str(layer.name)
                    self._put(*self._solve(layer, statistics))
                    bar.update(1)
                if recovery is not None:
                    self._recover(recovery)
        except torch.OutOfMemoryError as error:
            raise MoonshotError(
                f"out of device memory: lower max_memory, batch_size or num_samples ({error})"
            ) from None
        self.results.commit(self.layers)
        self.results.discard()
        return self._finish(time.perf_counter() - started)

    def _prepare(self, calibration: Any) -> None:
        """Check the model and read the data."""
        self._check_model()
        self.data = self._load(calibration)
        self.notes += self.data.notes if self.data else ()
        self.storage = Storage(model_device(self.model), self.config.max_memory_bytes, self.config.offload_dir)

    def _structure(self) -> Structure:
        """What to prune and by which patterns, without the layers that theirs does not fit."""
        found = find_structure(self.model, self.config.targets, self.config.ignore)
        pattern = self.config.parsed_pattern
        if isinstance(pattern, Structured):
            chosen = self.config.targets is not None
            found, self.patterns, self.notes = structured_patterns(self.model, found, pattern, chosen)
        else:
            self.patterns = self.config.layer_patterns(layer.name for layer in found.layers())
        skipped = dict(found.skipped)

        def fitting(layers: tuple[PrunableLayer, ...]) -> tuple[PrunableLayer, ...]:
            for layer in layers:
                pattern = self.patterns[layer.name]
                if not pattern.fits(layer.shape):
                    skipped[layer.name] = f"its {layer.shape[1]} inputs do not divide into groups for {pattern}"
                elif layer.groups > 1 and not self.solver.grouped:
                    skipped[layer.name] = f"a grouped convolution, which solver={self.config.solver!r} does not take"
            return tuple(layer for layer in layers if layer.name not in skipped)

        blocks = tuple(dataclasses.replace(block, layers=fitting(block.layers)) for block in found.blocks)
        structure = Structure(blocks, fitting(found.outside), skipped)
        require(any(structure.layers()), f"pattern={self.config.pattern!r} fits no layer: {skipped}")
        return structure

    def _lam(self, layer: PrunableLayer) -> float:
        return self.lam if self.config.fisher == "all" or layer.attention else 1.0

    def _check_model(self) -> None:
        """Everything about the model that would fail later, before any work."""
        for layer in self.layers:
            weight = layer.matrix
            require(
                weight.device.type != "meta",
                f"{layer.name}: its weight is offloaded; load the model without disk or CPU offload to prune it",
            )
            require(all_finite(weight), f"{layer.name}: its weight holds NaN or infinite values")
        require(
            self.config.fisher == "all" or any(layer.attention for layer in self.layers),
            'fisher="attention": no chosen layer belongs to an attention; use fisher="all"',
        )

    def _load(self, calibration: Any) -> CalibrationData | None:
        if calibration is None:
            require(
                not self.config.recompute,
                "recompute=True: without calibration data there is nothing to recompute; give some, or leave it out",
            )
            require(
                self.config.allocation != "owl",
                'calibration=None: allocation="owl" needs data to find outliers in; give some, or use "alpha"',
            )
            require(
                not self.solver.calibrated,
                f'calibration=None: solver={self.config.solver!r} needs data, such as "c4", a text file, or a '
                "folder of images for an image model",
            )
            return None
        if self.vision and (source := open_images(calibration)) is not None:
            labels = self._gradients and (self.loss is None or source.label is not None)
            options = {name: getattr(self.config, name) for name in ("num_samples", "batch_size", "seed")}
            return load_images(source, self.model, self.processor, labels=labels, **options)
        options = {
            name: getattr(self.config, name) for name in ("num_samples", "sequence_length", "batch_size", "seed")
        }
        data = load_calibration(calibration, self.tokenizer, max_positions=max_positions(self.model), **options)
        if self._gradients and self.loss is None and needs_masked_labels(self.model, data.batches[0]):
            labelled = add_masked_labels(data.batches, self.tokenizer, self.config.seed)
            data = dataclasses.replace(data, batches=labelled, notes=(*data.notes, "15% of tokens masked"))
        vocabulary = vocabulary_size(self.model)
        if (self._gradients or self.config.allocation == "owl") and data.sequence_length:
            per_sample = 2 * data.sequence_length * vocabulary * self.model_dtype.itemsize
            data = dataclasses.replace(data, batches=split(data.batches, max(1, LOGITS_BYTES // per_sample)))
        return data

    @property
    def _gradients(self) -> bool:
        return any(self._lam(layer) < 1 for layer in self.layers)

    @property
    def model_dtype(self) -> torch.dtype:
        return self.layers[0].parameter.dtype

    def _results(self, resume_dir: str | os.PathLike | None, field: str = "resume_dir") -> Results:
        if resume_dir is None:
            return Results(None, "")
        settings = {**self.config.to_dict(), "offload_dir": None, "max_memory": None}
        digest = self.data.digest if self.data else ""
        return Results(resume_dir, fingerprint(str(settings), digest, layers=self.layers), field)

    def _scores(self) -> list[float] | None:
        """OWL's (by a forward pass of its own) or AlphaPruning's scores of the dense model; None without either."""
        unfinished = any(layer not in self.results for layer in self.layers)
        if self.config.allocation not in ("owl", "alpha") or not unfinished:
            return None
        squares = self._input_squares() if self.config.allocation == "owl" else {}
        return block_scores(self.config, self._allocated_blocks(), squares, self.progress)

    def _allocate(self, scores: list[float] | None) -> None:
        """The patterns that follow from the scores, if there are any."""
        if scores is not None:
            self.patterns, note = allocate(self.config, self._allocated_blocks(), scores)
            self.notes.append(note)

    def _allocated_blocks(self) -> list[tuple[PrunableLayer, ...]]:
        inside = [block.layers for block in self.structure.blocks if block.layers]
        return inside + [(layer,) for layer in self.structure.outside]

    def _input_squares(self) -> dict[str, Tensor]:
        """Σ x² of every layer's inputs, [d_in] or [groups, d_in] each, on the dense model."""
        samples = self.data.num_samples
        with (
            tqdm(self.data.batches, desc="outliers", unit="batch", disable=not self.progress) as batches,
            Collector(self.layers, True, set(), samples, self.storage, share=False) as collector,
        ):
            WholePasses(self.model, batches, False, self.loss).run(collector, True)
        return {layer.name: collector.take(layer).inputs for layer in self.layers}

    def _statistics(self, others: Sequence["Run"] = ()) -> Iterator[tuple[PrunableLayer, Any]]:
        """Every layer that has no result yet with its statistics, one decoder layer of them alive at a time.

        The statistics (`LayerStatistics`, `RowChunks`, or None without data) also serve the patterns of other runs.
        """
        if self.data is None:
            yield from ((layer, None) for layer in self.layers if layer not in self.results)
            return
        lams = {layer.name: self._lam(layer) for layer in self.layers}
        patterns = {layer.name: [run.patterns[layer.name] for run in (self, *others)] for layer in self.layers}
        gatherer = Gatherer(self.solver, patterns, lams, self.data.num_samples, self.storage)
        for visit in self._visits():
            yield from gatherer.statistics(visit, [layer for layer in visit.layers if layer not in self.results])
        self.notes += gatherer.notes

    def _recovery(self) -> Recovery | None:
        """The recovery that follows, if one was asked for; what it cannot do is found here, before any work."""
        if self.config.recover is None:
            return None
        require(self.data is not None, f"calibration=None: recover={self.config.recover!r} needs data")
        batches = split(self.data.batches, part_size(self.data.num_samples))
        probe = to_device(shorten(batches[0]), model_device(self.model))
        with frozen(self.model):
            chain = is_chain(self.model, self.structure.blocks, probe, False, self.loss)
        inside = any(block.layers for block in self.structure.blocks)
        require(
            chain and inside,
            f"recover={self.config.recover!r} needs pruned layers inside a chain of blocks, each of which reads what "
            "the one before gives: this model has none; use recover=None",
        )
        if self.structure.outside:
            self.notes.append(f"{len(self.structure.outside)} layers outside of the blocks were not recovered")
        return Recovery(self.model, self.structure, self.config, batches, self.storage, self.results)

    def _recover(self, recovery: Recovery) -> None:
        started = time.perf_counter()
        total = sum(bool(block.layers) for block in self.structure.blocks)
        with tqdm(recovery.run(), desc="recovering", total=total, unit="block", disable=not self.progress) as blocks:
            for block in blocks:
                blocks.set_postfix_str(block.name)
        self.recovering = time.perf_counter() - started

    def _visits(self) -> Iterator[Visit]:
        batches, blocks, gradients = self.data.batches, self.structure.blocks, self._gradients
        inside = tuple(layer for block in blocks for layer in block.layers)
        outside = self.structure.outside
        if not any(layer not in self.results for layer in self.layers):
            return
        probe = to_device(shorten(batches[0]), model_device(self.model))
        if self.config.recompute:
            weight, progress = self.results.weight, self.progress
            passes = RecomputedPasses(self.model, self.structure, batches, self.loss, self.storage, weight, progress)
            yield from passes.visits(probe, gradients)
            self.notes.append(passes.cost)
            return
        whole = WholePasses(self.model, batches, gradients, self.loss)
        self.losses = whole.losses
        if inside and is_chain(self.model, blocks, probe, gradients, self.loss):
            chain = ChainPasses(self.model, blocks, batches, gradients, self.loss, self.storage)
            self.losses = chain.losses
            with tqdm(total=len(batches), desc="calibrating", unit="batch", disable=not self.progress) as bar:
                visits = chain.visits(bar.update)
                first = next(visits)
            yield first
            yield from visits
        elif inside:
            self.notes.append("the layers are no chain: each visit ran the whole model")
            yield from whole.visits(inside + outside)
            return
        yield from whole.visits(outside)

    def _solve(
        self, layer: PrunableLayer, statistics: LayerStatistics | RowChunks | None
    ) -> tuple[LayerReport, Tensor]:
        return self._solve_by(layer, statistics, [self.patterns[layer.name]])[0]

    @torch.no_grad()
    def _solve_by(
        self, layer: PrunableLayer, statistics: LayerStatistics | RowChunks | None, patterns: list[Pattern]
    ) -> list[tuple[LayerReport, Tensor]]:
        """A layer's reports and weights by several patterns, which share the time that it takes."""
        device = layer.parameter.device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        started = time.perf_counter()
        known = statistics is not None
        if not known:
            statistics = LayerStatistics(torch.eye(layer.shape[1], device=device), None, 0)
        try:
            solved = solve_layer(self.solver, layer, patterns, statistics, self._lam(layer) if known else 1.0)
        except FactorizationError as error:
            raise FactorizationError(f"{layer.name}: {error}") from None
        seconds = (time.perf_counter() - started) / len(patterns)
        found = []
        for pattern, (result, masked, pruned, lam) in zip(patterns, solved, strict=True):
            weight = result.weight.to(layer.parameter.dtype)
            report = LayerReport(
                name=layer.name,
                shape=layer.shape,
                sparsity=int((weight == 0).sum()) / weight.numel(),
                damping=result.damping,
                seconds=seconds,
                peak_memory=peak_memory(device),
                notes=result.notes if known else (),
                asked=pattern.sparsity,
                **(loss_fields(lam, masked, pruned) if known else {"lam": None}),
            )
            found.append((report, weight))
        return found

    def _put(self, report: LayerReport, weight: Tensor) -> None:
        self.solving += report.seconds
        self.results.put(report, weight)

    def _finish(self, seconds: float) -> PruneReport:
        if self.storage.spilled:
            self.notes.append(f"{self.storage.spilled / 2**30:.2f} GiB of caches went to disk")
        calibration = None if self.data is None else self.data.describe()
        layers = [self.results.reports[layer.name] for layer in self.layers]
        report = PruneReport(
            config={**self.config.to_dict(), "offload_dir": None},  # nobody's folders in what may be published
            layers=layers,
            skipped=self.structure.skipped,
            calibration=calibration,
            seconds=self._seconds(seconds),
            peak_memory=max(layer.peak_memory for layer in layers),
            versions=versions(),
            notes=self.notes,
            recovery=[self.results.blocks[b.name] for b in self.structure.blocks if b.name in self.results.blocks],
        )
        if isinstance(getattr(self.model, "config", None), PreTrainedConfig):
            self.model.config.moonshot = {
                "config": report.config,
                "lam": self.lam,
                "sparsity": report.sparsity,
                "calibration": calibration,
                "versions": report.versions,
            }
        return report

    def _seconds(self, total: float) -> dict[str, float]:
        seconds = {"calibration": total - self.solving - self.recovering, "solver": self.solving}
        if self.config.recover is not None:
            seconds["recovery"] = self.recovering
        return {**seconds, "total": total}


def shorten(batch: Batch) -> Batch:
    """A batch's first sample, cut to a few tokens where nothing but tokens goes in."""
    single = {name: tensor[:1] for name, tensor in batch.items()}
    token_inputs = {"input_ids", "attention_mask", "token_type_ids", "labels"}
    if "input_ids" in single and set(single) <= token_inputs and all(tensor.ndim == 2 for tensor in single.values()):
        return {name: tensor[:, :PROBE_TOKENS] for name, tensor in single.items()}
    return single


def split(batches: list[Batch], size: int) -> list[Batch]:
    """The same samples in batches of at most `size`."""
    return [
        {name: tensor[start : start + size] for name, tensor in batch.items()}
        for batch in batches
        for start in range(0, len(next(iter(batch.values()))), size)
    ]
