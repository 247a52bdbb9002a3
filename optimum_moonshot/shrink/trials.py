"""The measurements of a dense model without some parts: `losses.MeasurableModel` on calibration data."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ..errors import NOT_FINITE, require
from ..model.calls import evaluation_mode
from ..model.depth import BlockSearch
from ..model.layers import PrunableLayer, find_structure
from ..pipeline.calibration_loss import against_dense, mean_loss
from ..pipeline.inputs import Prepared
from ..pipeline.run_folder import MEASURED, Parts, RunFolder
from ..pipeline.variant import Variant, run_parts
from ..progress import progress_bar
from ..prune.layers import prune_layers
from ..solvers.osscar import OSSCAR, Draft
from .blocks import BLOCKS, BlockScores, score_blocks
from .merging import Merging, Run, best_sets, find_output_layers, measure_runs
from .widths import TRIALS, Width, trial_levels

# The least samples and tokens on which losses are measured, on which parts are only compared with each other, and to
# which trials are fitted.
MEASURED_ON, COMPARED_ON, FITTED_TO = (6, 1536), (2, 512), (16, 4096)
# The most blocks of a run that is merged, or a fifth of the model's.
LONGEST_RUN = 4


class Measurements:
    """Measured numbers by name, stored in a folder for a repeated run."""

    def __init__(self, folder: RunFolder | None, parts: Parts):
        self.folder, self.values = folder, dict[str, float]()  # in the order of their use, also in a repeated run
        self._stored: dict[str, float] = {}
        if folder is not None and folder.open(parts):
            stored = (values for _, values, _ in folder.saved(MEASURED) if values is not None)
            self._stored = {entry["name"]: entry["value"] for entry in stored}

    def keep(self, name: str, measure: Callable[[], float]) -> float:
        """Return the stored number of a name, or measure and store it."""
        if name not in self._stored:
            self._stored[name] = measure()
            if self.folder is not None:
                values = {"name": name, "value": self._stored[name]}
                self.folder.save(MEASURED, name.replace("/", "-"), {}, values)
        return self.values.setdefault(name, self._stored[name])

    def release(self) -> None:
        if self.folder is not None:
            self.folder.release()


class Trials:
    """Trials of a dense, frozen model, fitted to some samples and measured on others; `folder` has the measurements."""

    def __init__(self, prepared: Prepared, widths: Sequence[Width], folder: Path | None):
        self.prepared = dataclasses.replace(prepared, selection=prepared.selection.of_the_dense_model(lam=1.0))
        self.refused = dict[str, str]()  # numbers of blocks that cannot be removed, with the reason
        self.widths, self._dense = widths, dict[bool, float]()  # the dense model's loss, on few samples or more
        stored = None if folder is None else RunFolder(folder, "resume_dir")
        self.measurements = Measurements(stored, run_parts(prepared, prepared.selection))
        data = self.prepared.calibration
        measured = data.spread(data.at_least(*MEASURED_ON))
        self.samples = measured, measured.spread(data.at_least(*COMPARED_ON))
        fitted = data.spread(data.at_least(*FITTED_TO), without=measured.num_samples)
        self.fitting = dataclasses.replace(self.prepared, data=fitted)
        structure = self.prepared.selection.structure
        with evaluation_mode(prepared.model):
            outputs = find_output_layers(prepared.model, structure.blocks, prepared.probe)
        self.merging = Merging(self.prepared, outputs)  # for the smaller model, by all samples
        self.merging_trials, self._merged = Merging(self.fitting, outputs), dict[int, tuple[int, ...]]()

    @cached_property
    def measuring(self) -> Prepared:
        return against_dense(self.prepared, self.samples[0])

    @cached_property
    def comparing(self) -> Prepared:
        return dataclasses.replace(self.measuring, data=self.samples[1])  # some of its samples

    def increase(self, key: str, changed: Callable[[], AbstractContextManager[None]], few: bool = False) -> float:
        """The increase of the mean loss, on `few` samples or more, by a change; `key` is its name."""

        def measure() -> float:
            prepared = self.comparing if few else self.measuring
            with torch.no_grad(), evaluation_mode(self.prepared.model):
                if few not in self._dense:
                    self._dense[few] = 0.0 if self.prepared.subject.loss is None else mean_loss(prepared)
                with changed():
                    loss = mean_loss(prepared)
            require(math.isfinite(loss), f"the calibration loss of the model, {key}, is {loss}", hint=NOT_FINITE)
            return loss - self._dense[few]

        return self.measurements.keep(f"{key}, few samples" if few else key, measure)

    def pruned(self, trial: int, layers: Sequence[PrunableLayer]) -> AbstractContextManager[None]:
        variant, names = self._variants[trial], {layer.name for layer in layers}
        partial_variant = Variant(self.prepared.model, variant.selection, variant.store)
        partial_variant.skipped = {layer.name: "" for layer in variant.selection.layers if layer.name not in names}
        return partial_variant.applied()

    @cached_property
    def _variants(self) -> list[Variant]:
        """The model with every trial of all widths, by one pass over the samples of a fit."""
        selection, shown = self.fitting.selection, self.prepared.subject.progress
        solver: Any = selection.solver
        solver = Draft(**dataclasses.asdict(solver)) if type(solver) is OSSCAR else solver
        prepared = dataclasses.replace(self.fitting, selection=dataclasses.replace(selection, solver=solver))
        members, variants = {layer.name: width for width in self.widths for layer, _ in width.members}, []
        for trial in range(len(TRIALS)):
            patterns: dict[str, Any] = dict(selection.patterns)
            for name, width in members.items():
                sparsity = width.sparsity(trial_levels(width)[trial])
                patterns[name] = dataclasses.replace(patterns[name], sparsity=sparsity)
            of_trial = dataclasses.replace(prepared.selection, patterns=patterns)
            # In host memory the trials of a Llama would need as much as the model.
            variants.append(Variant.open(prepared, of_trial, None, "resume_dir", spilling=True))
            variants[-1].skipped = {layer.name: "" for layer in selection.layers if layer.name not in members}
        with progress_bar(total=len(selection.layers), desc="trials", unit="layer", shown=shown) as bar:
            prune_layers(prepared, variants, bar)
        return variants

    def without(self, blocks: Sequence[int]) -> AbstractContextManager[None]:
        merging = self.merging_trials
        if merging.runs(blocks):  # the runs of all candidates by one pass
            merging.fit([run for candidate in self._merged.values() for run in merging.runs(candidate)])
        return merging.applied(blocks)

    def candidates(self, count: int, most: int) -> Sequence[tuple[int, ...]]:
        search, refusals = self._search, dict[tuple[int, ...], str | None]()

        def allowed(blocks: tuple[int, ...]) -> bool:
            # Only with several kinds of blocks does the configuration depend on the chosen set.
            if blocks not in refusals:
                refusals[blocks] = search.refusal(blocks) if len(search.kinds) > 1 else None
            return refusals[blocks] is None

        if not self._merged and self.merging.outputs:
            self._merged = self._best_sets(most)
        if count in self._merged and allowed(self._merged[count]):
            return [self._merged[count]]
        selected = [self._scores.select_allowed(count, lam, search.kinds, allowed) for lam in (0.0, 1.0)]
        if selected == [None, None]:
            self.refused[f"{count} {BLOCKS}"] = next(filter(None, refusals.values()))
        return list(dict.fromkeys(blocks for blocks in selected if blocks is not None))

    def _best_sets(self, most: int) -> dict[int, tuple[int, ...]]:
        """The sets of runs to merge with the least loss on few samples, by their number of blocks."""
        merging, count = self.merging_trials, len(self.merging.blocks)
        longest = min(most, max(LONGEST_RUN, count // 5))
        pairs = [(before, before + length) for length in range(1, longest + 1) for before in range(count - length)]
        possible = {run for run in pairs if merging.runs(range(run[0] + 1, run[1] + 1)) == [run]}

        def measure(run: Run, runs: Sequence[Run]) -> float:
            def merged() -> AbstractContextManager[None]:
                if run not in merging.fitted:
                    merging.fitted.clear()  # shorter runs
                    merging.fit(runs)
                return merging.applied(range(run[0] + 1, run[1] + 1))

            return self.increase(f"merging blocks {run[0] + 1} to {run[1]}", merged, few=True)

        return best_sets(measure_runs(possible, most, measure), most)

    @cached_property
    def _search(self) -> BlockSearch:
        assert isinstance(self.prepared.model, PreTrainedModel)
        return BlockSearch(self.prepared.model)

    @cached_property
    def _scores(self) -> BlockScores:
        # All layers: a block may be removed even if none of its layers is selected.
        structure = find_structure(self.prepared.model)
        selection = dataclasses.replace(self.prepared.selection, structure=structure)
        return score_blocks(dataclasses.replace(self.prepared, selection=selection, data=self.measuring.data))
