"""The measurements of a dense model without some parts: `losses.MeasurableModel` on calibration data."""

import dataclasses
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from pathlib import Path

import torch
from transformers import PreTrainedModel

from ..calibration.statistic import NOT_FINITE
from ..errors import require
from ..model.calls import evaluation_mode
from ..model.depth import BlockSearch
from ..model.layers import PrunableLayer, find_blocks, find_structure
from ..pipeline.calibration_loss import mean_loss, remember_outputs
from ..pipeline.inputs import Prepared
from ..pipeline.run_folder import MEASURED, Parts, RunFolder
from ..pipeline.selection import select
from ..pipeline.variant import Variant, run_parts
from .blocks import BlockScores, score_blocks
from .losses import BLOCKS
from .merging import Merging, Run, best_sets, find_output_layers, measure_runs
from .widths import Width, trial_configs

# Samples on which losses are measured, spread over the calibration data; and on which parts are only compared with each
# other, for which the difference of two losses on the same samples is precise enough.
SAMPLES, FEW = 16, 4

Solve = Callable[[Prepared, Sequence[Variant]], None]  # solves all layers of the variants


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
    """A dense, frozen model whose widths are pruned in trials at λ = 1, all by one pass over the data.

    `solve` runs the trials, once a measurement needs them; `folder` is for their weights and the measurements.
    """

    def __init__(
        self,
        prepared: Prepared,
        widths: Sequence[Width],
        solve: Solve,
        folder: str | os.PathLike[str] | None,
    ):
        config = prepared.selection.config
        self.prepared = dataclasses.replace(prepared, selection=prepared.selection.of_the_dense_model(lam=1.0))
        self.blocks = [module for _, module in find_blocks(prepared.model)]
        self.refused = dict[str, str]()  # numbers of blocks that cannot be removed, with the reason
        self.configs, self.solve, self.variants = trial_configs(config, widths), solve, list[Variant]()
        self.folder = None if folder is None else Path(folder)
        parts = run_parts(prepared, prepared.selection)
        stored = None if self.folder is None else RunFolder(self.folder / "measured", "resume_dir")
        self.measurements = Measurements(stored, parts)
        self.measuring, self.comparing = self._on(SAMPLES), self._on(FEW)
        structure = self.prepared.selection.structure
        with evaluation_mode(prepared.model):
            outputs = find_output_layers(prepared.model, structure.blocks, prepared.probe)
        self.merging, self._merged = Merging(self.prepared, outputs), dict[int, tuple[int, ...]]()

    def _on(self, count: int) -> Prepared:
        """The prepared run on at most `count` samples, with the dense model's outputs if losses need them."""
        prepared = dataclasses.replace(self.prepared, data=self.prepared.calibration.spread(count))
        remember_outputs(prepared)
        return prepared

    def loss(
        self, key: str, changed: Callable[[], AbstractContextManager[None]] | None = None, few: bool = False
    ) -> float:
        def measure() -> float:
            change = nullcontext() if changed is None else changed()
            with change, torch.no_grad(), evaluation_mode(self.prepared.model):
                loss = mean_loss(self.comparing if few else self.measuring)
            measured = "dense model" if changed is None else f"model, {key},"
            require(math.isfinite(loss), f"the calibration loss of the {measured} is {loss}", hint=NOT_FINITE)
            return loss

        return self.measurements.keep(f"{key}, {FEW} samples" if few else key, measure)

    def pruned(self, trial: int, layers: Sequence[PrunableLayer]) -> AbstractContextManager[None]:
        if not self.variants:
            self._solve()
        variant, names = self.variants[trial], {layer.name for layer in layers}
        partial_variant = Variant(self.prepared.model, variant.selection, variant.store)
        partial_variant.skipped = {layer.name: "" for layer in variant.selection.layers if layer.name not in names}
        return partial_variant.applied()

    def without(self, blocks: Sequence[int]) -> AbstractContextManager[None]:
        if self.merging.runs(blocks):  # the runs of all candidates by one pass
            self.merging.fit([run for candidate in self._merged.values() for run in self.merging.runs(candidate)])
        return self.merging.applied(blocks)

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
        # Not on the samples that compare the runs: a fit to 16 samples lowers the loss on them by 0.02 nats.
        samples = self.prepared.calibration.spread(SAMPLES, without=FEW)
        merging = Merging(dataclasses.replace(self.prepared, data=samples), self.merging.outputs)
        count = len(self.blocks)
        pairs = [(before, last) for before in range(count) for last in range(before + 1, min(before + most + 1, count))]
        possible = {run for run in pairs if merging.runs(range(run[0] + 1, run[1] + 1)) == [run]}
        dense = self.loss("dense", few=True)

        def measure(run: Run, runs: Sequence[Run]) -> float:
            @contextmanager
            def merged() -> Iterator[None]:
                if run not in merging.fitted:
                    merging.fitted.clear()  # shorter runs
                    merging.fit(runs)
                with merging.applied(range(run[0] + 1, run[1] + 1)):
                    yield

            return self.loss(f"merging blocks {run[0] + 1} to {run[1]}", merged, few=True) - dense

        return best_sets(measure_runs(possible, most, measure), most)

    @cached_property
    def _search(self) -> BlockSearch:
        assert isinstance(self.prepared.model, PreTrainedModel)
        return BlockSearch(self.prepared.model)

    @cached_property
    def _scores(self) -> BlockScores:
        # All layers: a block may be removed even if none of its layers is selected.
        structure = find_structure(self.prepared.model)
        selection = dataclasses.replace(self.measuring.selection, structure=structure)
        return score_blocks(dataclasses.replace(self.measuring, selection=selection))

    def release(self) -> None:
        """Release the folders for other runs, and the weights of the trials."""
        for variant in self.variants:
            variant.store.release()
        self.measurements.release()
        self.variants = []

    def _solve(self) -> None:
        for index, config in enumerate(self.configs):
            folder = None if self.folder is None else self.folder / f"trial-{index}"
            selection = select(self.prepared.model, config)
            # In host memory the five trials of a Llama would need 1.8 times as much as the model.
            self.variants.append(Variant.open(self.prepared, selection, folder, "resume_dir", spilling=True))
        self.solve(self.prepared, self.variants)
