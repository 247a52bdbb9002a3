"""Every layer of a run with its statistics, in the order in which the passes over the data come by."""

import itertools
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import cached_property, partial
from typing import Protocol

from torch import Tensor
from tqdm.auto import tqdm

from ..calibration.layer_statistics import LayerStatistics
from ..calibration.observer import Observer
from ..data.batches import Batch
from ..model.calls import frozen
from ..model.layers import Block, PrunableLayer
from ..model.onloading import all_onloaded
from ..objective.patterns import Pattern
from ..progress import progress_bar
from .backoff import PassTooLarge
from .block_pipeline import BlockwisePasses, FullModelPasses, Step
from .block_sequences import find_block_sequences, parameters_read
from .inputs import Prepared
from .recompute import RecomputedPasses
from .schedule import Given, StatisticsSchedule, solving_cost
from .solve import Statistics
from .streamed import StreamedPasses

UNREACHED = "no calibration data reached it: give data of the kind that it reads, or name it in ignore="
READ = (
    "its weight is read where its forward is not called, so that no inputs are seen: prune it alone by "
    "solver='magnitude' without data and targets=, or name it in ignore="
)
# Some layers, each with its statistics; None without data.
Round = Generator[tuple[PrunableLayer, Statistics | None], None, None]


class Wanting(Protocol):
    """What is asked here of a `Variant`."""

    def lacks(self, layer: PrunableLayer) -> bool:
        """Whether it has no result for a layer yet."""

    def pattern_of(self, layer: PrunableLayer) -> Pattern:
        """What a layer is pruned by."""

    def weight(self, layer: PrunableLayer) -> Tensor:
        """Its pruned weight of a layer, [d_out, d_in]."""

    def skip(self, layer: PrunableLayer, reason: str) -> None:
        """Leave a layer dense.

        Args:
            layer: that it lacks.
            reason: for the report, as the end of "left dense: LAYER (…)".
        """


class StatisticsSource:
    """Gives every layer that some variant lacks its statistics, those of one block alive at a time.

    Several processes go through the same steps, each with samples of its own; then each is given some layers, whose
    statistics are of all samples. Before the next round they share their results.

    Args:
        prepared: whose selection says what is gathered.
        variants: which layers they lack, and their patterns: the statistics serve all of them.
        schedule: what of a layer is gathered, and how.

    `notes` and `losses` (ℓ_n of the dense model batch by batch, of this process's samples, where a backward pass
    started from them) are complete after the last layer.
    """

    def __init__(
        self,
        prepared: Prepared,
        variants: Sequence[Wanting],
        schedule: type[StatisticsSchedule] = StatisticsSchedule,
    ):
        self.prepared, self.variants, self.schedule = prepared, variants, schedule
        self.notes: list[str] = []
        self.losses: list[Tensor | None] = []

    def rounds(self) -> Iterator[Round]:
        """The layers of this process, as many at a time as the memory takes, each to be iterated to its end.

        A layer's block is present meanwhile; the statistics are None without data. A round inside of
        `Backoff.attempt` that fails comes again, with those of its layers that still have no result.

        Raises:
            torch.OutOfMemoryError: too little memory for the smallest piece.
        """
        prepared = self.prepared
        if prepared.data is None:
            yield self._without_data()
            while prepared.backoff.lost():
                prepared.backoff.halve("a layer", [])
                prepared.backoff.release()
                yield self._without_data()
            return
        while not (yield from self._passed(prepared.data.num_samples)):
            prepared.backoff.release()

    def _passed(self, samples: int) -> Generator[Round, None, bool]:
        """The rounds of all steps; False where the passes have to begin anew."""
        schedule, steps, backoff = self._schedule(samples), self.steps(), self.prepared.backoff
        self.losses = []
        try:
            while (step := backoff.together(partial(next, steps, None))) is not None:
                if not (yield from self._at(step, schedule)):
                    return False
        except PassTooLarge as error:
            backoff.failed, backoff.in_solver = str(error), False
            backoff.halve("the passes over the data", self.prepared.batches)
            return False
        finally:
            self.notes += schedule.notes
        return True

    def _at(self, step: Step, schedule: StatisticsSchedule) -> Generator[Round, None, bool]:
        """The rounds of a step, again while one fails; False where the passes have to begin anew."""
        backoff = self.prepared.backoff
        while not (yield from self._once(step, schedule)):
            layers, _ = schedule.latest
            more = f" and {len(layers) - 1} more layers" if len(layers) > 1 else ""
            anew = backoff.halve(f"{layers[0].name}{more}", self.prepared.batches, schedule)
            if backoff.moved(step.moved) or anew:
                return False
            backoff.release()
        return True

    def _once(self, step: Step, schedule: StatisticsSchedule) -> Generator[Round, None, bool]:
        """The rounds of a step; False where one fails, whose notes are taken back."""
        known = len(schedule.notes)
        for together in schedule.in_rounds(step, [layer for layer in step.layers if self._wanted(layer)]):
            yield self._reached(together)
            if self.prepared.backoff.lost():
                again = tuple(f"{layer.name}: " for layer in schedule.latest[0] if self._wanted(layer))
                schedule.notes[known:] = [note for note in schedule.notes[known:] if not note.startswith(again)]
                return False
            known = len(schedule.notes)
        return True

    def _without_data(self) -> Round:
        structure, ranks = self.prepared.selection.structure, self.prepared.ranks
        wanted = [layer for layer in structure.layers() if self._wanted(layer)]
        solver, patterns = self.prepared.selection.solver, [self._patterns(layer) for layer in wanted]
        owners = ranks.owners([solving_cost(solver, *each) for each in zip(wanted, patterns, strict=True)])
        mine = {layer.name for layer, owner in zip(wanted, owners, strict=True) if owner == ranks.rank}
        for layer in structure.layers_onloaded():
            if layer.name in mine:
                yield layer, None

    def _reached(self, together: Iterator[Given]) -> Round:
        for layer, statistics in together:
            if statistics is None:
                self._skip(layer)
            else:
                yield layer, statistics
            del statistics  # before the next step's are gathered

    def unfinished(self) -> bool:
        """Whether some layer is wanted."""
        return any(self._wanted(layer) for layer in self.prepared.selection.layers)

    def _wanted(self, layer: PrunableLayer) -> bool:
        return any(variant.lacks(layer) for variant in self.variants)

    def _patterns(self, layer: PrunableLayer) -> list[Pattern]:
        """By which some variant prunes a layer."""
        return [variant.pattern_of(layer) for variant in self.variants]

    def _schedule(self, samples: int) -> StatisticsSchedule:
        selection = self.prepared.selection
        lams = {layer.name: selection.lam_of(layer) for layer in selection.layers}
        patterns = {layer.name: self._patterns(layer) for layer in selection.layers}
        config = selection.config
        experts = config.expert_tokens, config.under_calibrated_experts
        of_run = self.prepared.storage, *experts, self.prepared.ranks, self.prepared.backoff
        return self.schedule(selection.solver, patterns, lams, samples, *of_run)

    def steps(self) -> Iterator[Step]:
        """The steps of the passes that serve this model, in their order."""
        if not self.unfinished():
            return
        prepared, selection = self.prepared, self.prepared.selection
        probe = prepared.probe
        if selection.config.recompute:
            yield from self._recomputed(probe)
            return
        structure, gradients, loss = selection.structure, selection.needs_gradients, prepared.subject.loss
        if prepared.surveyed is not None:
            yield from self._shown(streamed(prepared, prepared.batches, gradients))
            outside = FullModelPasses(prepared.model, structure.blocks, prepared.batches, gradients, loss)
            yield from outside.steps(structure.outside)
            return
        with all_onloaded(structure.blocks):
            found = find_block_sequences(prepared.model, structure.blocks, probe, gradients, loss)
        for block in found.unreached:
            for layer in block.layers:
                self._skip(layer)
        for chain in found.sequential:
            yield from self._blockwise(chain)
        loose = tuple(layer for block in found.non_sequential for layer in block.layers)
        whole = FullModelPasses(prepared.model, structure.blocks, prepared.batches, gradients, loss)
        yield from whole.steps(loose + structure.outside)
        if not self.losses:
            self.losses = whole.losses
        if loose:
            cost = f"{whole.passes} passes of the whole model, with all its activations in memory"
            self.notes.append(f"blocks that are no chain: {len(found.non_sequential)}; their layers took {cost}")

    def _blockwise(self, chain: tuple[Block, ...]) -> Iterator[Step]:
        prepared, selection = self.prepared, self.prepared.selection
        passes = BlockwisePasses(
            prepared.model,
            chain,
            prepared.batches,
            selection.needs_gradients,
            prepared.subject.loss,
            prepared.storage,
            [block for block in selection.structure.blocks if block not in chain],
        )
        yield from self._shown(passes)

    def _shown(self, passes: BlockwisePasses) -> Iterator[Step]:
        """Their steps, the first of which waits for a pass under a bar."""
        self.losses = self.losses or passes.losses
        total, shown = len(self.prepared.batches), self.prepared.subject.progress
        with progress_bar(total=total, desc="calibrating", unit="batch", shown=shown) as bar:
            steps = passes.steps(bar.update)
            first = next(steps)
        yield first
        yield from steps

    def _skip(self, layer: PrunableLayer) -> None:
        """Leave a layer dense that the data do not reach."""
        named = self.prepared.model.named_parameters(remove_duplicate=False)
        names = {name for name, parameter in named if parameter is layer.parameter}
        reason = READ if names & self._parameters_read else UNREACHED
        for variant in self.variants:
            if variant.lacks(layer):
                variant.skip(layer, reason)

    @cached_property
    def _parameters_read(self) -> set[str]:
        """By a pass of its own, which only a layer that no data reach asks for."""
        with frozen(self.prepared.model):
            return parameters_read(self.prepared.model, self.prepared.probe)

    def _recomputed(self, probe: Batch) -> Iterator[Step]:
        prepared, selection = self.prepared, self.prepared.selection
        (variant,) = self.variants  # a sweep refuses to recompute: each variant has a prefix of its own
        passes = RecomputedPasses(
            prepared.model,
            selection.structure,
            prepared.batches,
            prepared.subject.loss,
            prepared.storage,
            variant.weight,
            None if prepared.surveyed is None else prepared.surveyed.extras,
            prepared.subject.progress,
        )
        yield from passes.steps(probe, selection.needs_gradients)
        self.notes.append(passes.cost)


def work_through(
    prepared: Prepared, together: Round, work: Callable[[PrunableLayer, Statistics | None], None], bar: tqdm
) -> list[PrunableLayer]:
    """Do something with every layer of a round; the layers for which the memory was enough, which the bar counts.

    Args:
        prepared: of the source.
        together: of `StatisticsSource.rounds`.
        work: given a layer and its statistics, which it leaves as they are.
        bar: of the layers.

    Raises:
        torch.OutOfMemoryError: other processes would wait in vain if it were done again.
    """
    done: list[PrunableLayer] = []
    with prepared.backoff.attempt(together):
        for layer, statistics in together:
            bar.set_postfix_str(layer.name)
            alone = statistics is None or isinstance(statistics, LayerStatistics)
            if prepared.backoff.solved(layer.name, partial(work, layer, statistics), alone):
                done.append(layer)
                bar.update(1)
            del statistics  # before the next step's are gathered
    return done


def streamed(prepared: Prepared, batches: list[Batch], gradients: bool) -> StreamedPasses:
    """Passes over blocks that are elsewhere.

    Args:
        prepared: a model that was surveyed.
        batches: of its data.
        gradients: whether any layer needs them.
    """
    assert prepared.surveyed is not None and prepared.surveyed.extras is not None
    blocks, loss = prepared.selection.structure.blocks, prepared.subject.loss
    return StreamedPasses(prepared.model, blocks, batches, gradients, loss, prepared.storage, prepared.surveyed.extras)


def input_squares(prepared: Prepared) -> dict[str, Tensor]:
    """Σ x² of the inputs of every layer that the data reach, [d_in] or [groups, d_in] each, by one forward pass."""
    layers = prepared.selection.layers
    passed = _streamed_squares if prepared.surveyed is not None else _observed_squares
    found = prepared.backoff.repeated(lambda: "the outliers", partial(passed, prepared), lambda: prepared.batches)
    if isinstance(found, Observer):
        found.merge()
        return {layer.name: found.take(layer).inputs for layer in layers if found.reached(layer)}
    return found


def _observed_squares(prepared: Prepared) -> Observer:
    """What has them, of this process's samples."""
    layers, subject, samples = prepared.selection.layers, prepared.subject, prepared.data.num_samples
    with (
        progress_bar(prepared.batches, desc="outliers", unit="batch", shown=subject.progress) as batches,
        Observer(layers, True, set(), samples, prepared.storage, share=False, ranks=prepared.ranks) as observer,
    ):
        FullModelPasses(prepared.model, prepared.selection.structure.blocks, batches, False, subject.loss).run(observer)
    return observer


def _streamed_squares(prepared: Prepared) -> dict[str, Tensor]:
    """As `input_squares`, block by block."""
    found: dict[str, Tensor] = {}
    structure, samples = prepared.selection.structure, prepared.data.num_samples
    whole = FullModelPasses(prepared.model, structure.blocks, prepared.batches, False, prepared.subject.loss)
    for step in itertools.chain(streamed(prepared, prepared.batches, False).steps(), whole.steps(structure.outside)):
        options = {"share": False, "ranks": prepared.ranks}
        with Observer(step.layers, True, set(), samples, prepared.storage, **options) as observer:
            step.observe(observer, True)
        observer.merge()
        found |= {layer.name: observer.take(layer).inputs for layer in step.layers if observer.reached(layer)}
    return found
