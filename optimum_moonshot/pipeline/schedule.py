"""How the gradients of each layer are gathered, by what its solver needs and by the memory that is left.

With as many samples as a row's quadratic has inputs or more, the matrices of the rows are the smaller form, and as
exact. A layer whose statistics exceed the memory all the same is solved in chunks of rows, where its solver ranks
removals (`solvers/ranked.py`): the data pass again for each, first to rank, then to compute the weights that survive.

Several processes have some of the layers each; of what would keep one of them busy alone, some of the rows each.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import inf

from ..calibration.accumulators import Plan, numbers_per_row
from ..calibration.layer_statistics import LayerStatistics
from ..calibration.observer import Observer
from ..calibration.storage import Storage
from ..distributed.ranks import SINGLE_PROCESS, Ranks
from ..errors import require
from ..malloc_trim import trim_host_memory
from ..model.layers import PrunableLayer
from ..objective.patterns import Pattern, Unstructured
from ..objective.problem_size import ProblemSize
from ..objective.row_slices import split_range
from ..solvers import Solver
from .backoff import Backoff
from .block_pipeline import Step
from .expert_chunks import ExpertChunks
from .expert_share import ExpertShare, is_shared, shares
from .row_chunks import RowChunks, chunk_rows
from .row_share import RowShare, is_divisible, row_parts
from .under_calibrated_experts import UnderCalibratedExperts

# A layer and its statistics; None where no data reached it.
Given = tuple[PrunableLayer, "LayerStatistics | RowChunks | RowShare | ExpertChunks | ExpertShare | None"]


def solving_cost(
    solver: Solver, layer: PrunableLayer, patterns: Sequence[Pattern], samples: int = 0, processes: int = 1
) -> float:
    """About how long a layer takes, in operations of one kind, as the solver says.

    Args:
        solver: by which algorithm.
        layer: the layer.
        patterns: that it is pruned by; where removals are ranked, one elimination serves the unstructured ones.
        samples: N, of the gradients; 0 without any (λ = 1).
        processes: that have some of its rows each.
    """
    d_out, d_in = layer.shape
    matrices, groups = (layer.groups, 1) if layer.adapter.separate else (1, layer.groups)
    rows = -(-d_out // (matrices * processes))
    kinds = {Unstructured if solver.ranks and isinstance(each, Unstructured) else each: each for each in patterns}
    sizes = {
        each: ProblemSize(rows, d_in, samples, groups, solver.column_block(d_in, each), sparsity=each.sparsity)
        for each in kinds.values()
    }
    return matrices * sum(solver.work(size, each).operations for each, size in sizes.items())


class StatisticsSchedule:
    """Gives every layer of a run its statistics, in as few passes over the data as the memory allows.

    Args:
        solver: which decides what statistics are.
        patterns: those that a layer will be pruned by, by its name.
        lams: λ by layer.
        samples: N.
        storage: where statistics live, within its budget.
        expert_tokens, under_calibrated_experts: as in `MoonshotConfig`.
        ranks: the processes that share the samples, and the layers.
        backoff: of the run; None is one of this schedule's own.
    """

    def __init__(
        self,
        solver: Solver,
        patterns: dict[str, list[Pattern]],
        lams: dict[str, float],
        samples: int,
        storage: Storage,
        expert_tokens: str = "routed",
        under_calibrated_experts: str = "all",
        ranks: Ranks = SINGLE_PROCESS,
        backoff: Backoff | None = None,
    ):
        self.solver, self.patterns, self.lams = solver, patterns, lams
        self.samples, self.storage, self.ranks = samples, storage, ranks
        self.diagonal = solver.objective.diagonal_only
        self.notes: list[str] = []
        self.backoff = Backoff(storage, ranks) if backoff is None else backoff
        experts = expert_tokens, under_calibrated_experts, self.diagonal
        self.experts = UnderCalibratedExperts(*experts, samples, self.notes, self.backoff)
        self.latest: tuple[list[PrunableLayer], list[slice] | None] = [], None  # round, and the chunks of its layer
        self.room = 0  # of a round, when the latest ones were divided

    def statistics(self, step: Step, layers: list[PrunableLayer]) -> Iterator[Given]:
        """As `in_rounds`, one after the other."""
        for together in self.in_rounds(step, layers):
            yield from together

    def in_rounds(self, step: Step, layers: list[PrunableLayer]) -> Iterator[Iterator[Given]]:
        """The statistics of some layers of a step, as many at a time as the memory takes.

        Each is forgotten here once it is given; None where no data reached a layer. Of several processes each is given
        those of its own layers, and of those that all solve: what exceeds the memory, and its part of what is divided,
        in one order in all of them. Every round has to come to its end.

        Args:
            step: as the passes give it; it is observed once or several times, or skipped.
            layers: some of the step's.

        Raises:
            MoonshotError: the data gave NaN or infinity, or there is no memory for the statistics.
        """
        rounds = self.rounds(layers)
        seen = False
        while rounds:
            together = rounds.pop(0)
            self.latest = list(together), self.parts(together)
            chunks = self._chunks(together, step)
            seen = chunks is None and not rounds
            if chunks is None:
                plans = {layer.name: self.plan(layer) for layer in together}
                yield self._collected(together, step, plans, seen, self._owners(together))
            else:
                yield iter([(together[0], chunks)])
                del chunks  # it may hold a part's statistics
        if not seen:
            self.backoff.together(step.skip)
        trim_host_memory()

    def halved(self, parts: bool) -> tuple[int, int] | None:
        """As `Halvable.halved`, after the latest round."""
        together, chunks = self.latest
        if len(together) > 1:
            sizes = [self._held(layer, self.room) for layer in together]
            return None if parts else (sum(sizes), max(sum(sizes) // 2, *sizes))
        if not parts or not together:
            return None
        count, fixed, each = self._parts_of(together[0])
        width = count if chunks is None else max(part.stop - part.start for part in chunks)
        return None if width == 1 else (fixed + width * each, fixed + -(-width // 2) * each)

    def _parts_of(self, layer: PrunableLayer) -> tuple[int, int, int]:
        """In how many parts a layer can be gathered; bytes of what all need, and of each."""
        if layer.adapter.separate:
            return layer.groups, 0, -(-self._held(layer, self.room) // layer.groups)
        if self.lams[layer.name] == 1 or not self.solver.ranks:
            return 1, self.bytes_of(layer), 0
        return layer.shape[0], self.gram_bytes(layer), self.gradient_bytes(layer) // layer.shape[0]

    def rounds(self, layers: list[PrunableLayer]) -> list[list[PrunableLayer]]:
        """Layers that one pass serves; the memory that they leave is for solving."""
        self.room = room = self._available() // 2
        return list(self.storage.rounds(layers, lambda layer: self._held(layer, room), self._available))

    def _held(self, layer: PrunableLayer, room: int) -> int:
        """What a layer's statistics take in a process, on average where several have some of the samples each.

        Such a process has its own samples of every layer, and all samples of its own layers, twice its share together.
        A layer that leaves no room for others counts whole, unless its experts or its rows are divided.
        """
        whole, size = self.bytes_of(layer), self.ranks.size
        if size <= 2 or self.diagonal or self.lams[layer.name] == 1 or self.plan(layer).column_block is not None:
            return whole
        if whole > room and not (is_shared(layer, self.ranks) or self._is_divisible(layer)):
            return whole
        inputs = self.gram_bytes(layer)
        return inputs + 2 * (whole - inputs) // size

    def _available(self) -> int:
        """What is left of the memory, in all processes the same."""
        return self.ranks.all_reduce_min(self.storage.available())

    def _owners(self, layers: Sequence[PrunableLayer]) -> dict[str, int | list[slice]]:
        """Who solves each layer, or which of its rows each process does: its experts are divided, or its rows.

        A matrix whose statistics are too large for one process is divided, whatever it costs.
        """
        ranks, room = self.ranks, self._available() // 2
        found: dict[str, int | list[slice]] = {
            layer.name: shares(layer, ranks) for layer in layers if is_shared(layer, ranks)
        }
        whole = [layer for layer in layers if layer.name not in found]
        costs = [inf if self._too_large(layer, room) else self._cost(layer) for layer in whole]
        parts = [self._cost(layer, ranks.size) if self._is_divisible(layer) else None for layer in whole]
        for layer, owner in zip(whole, ranks.divide(costs, parts), strict=True):
            found[layer.name] = row_parts(layer, ranks) if owner is None else owner
        return found

    def _too_large(self, layer: PrunableLayer, room: int) -> bool:
        """Whether the statistics of a layer that can be divided leave a single process no room for others."""
        whole = self.bytes_of(layer)
        return self._is_divisible(layer) and whole > room and whole > self._held(layer, room)

    def _cost(self, layer: PrunableLayer, processes: int = 1) -> float:
        """As `solving_cost`."""
        samples = self.samples if self.lams[layer.name] < 1 else 0
        return solving_cost(self.solver, layer, self.patterns[layer.name], samples, processes)

    def _is_divisible(self, layer: PrunableLayer) -> bool:
        """As `is_divisible`."""
        return is_divisible(layer, self.solver, self.patterns[layer.name], self.ranks)

    def _collected(
        self,
        together: list[PrunableLayer],
        step: Step,
        plans: dict[str, Plan],
        last: bool,
        owners: Mapping[str, int | list[slice]] | None = None,
    ) -> Iterator[tuple[PrunableLayer, LayerStatistics | RowShare | ExpertShare | None]]:
        """Pass the data once, and give each of some layers its statistics; without owners, to all processes."""
        wanted = {layer.name for layer in together if self.lams[layer.name] < 1}
        fused = [layer for layer in together if layer.adapter.separate and not self.experts.as_routed]

        def observed() -> Observer:
            seen = Observer(together, self.diagonal, wanted, self.samples, self.storage, plans, ranks=self.ranks)
            with seen as observer:
                step.observe(observer, last and not fused)
            return observer

        observer = self.backoff.together(observed)
        observer.merge(owners)
        starved = {layer.name: self.experts.starved(layer, observer) for layer in fused if observer.reached(layer)}
        some = [layer for layer in fused if starved.get(layer.name)]
        known = self.experts.all_tokens(step, some, starved, {layer.name: observer.sums(layer) for layer in some})
        if fused and last:
            step.skip()
        trim_host_memory()
        if owners is not None:  # what all solve together first: nobody waits for one that solves a layer alone
            together.sort(key=lambda layer: layer.adapter.separate or isinstance(owners[layer.name], int))
        while together:
            layer = together.pop(0)
            if starved.get(layer.name):
                self.experts.note(layer, starved[layer.name], known)
            owner = self.ranks.rank if owners is None else owners[layer.name]
            if observer.reached(layer) and isinstance(owner, int) and owner != self.ranks.rank:
                observer.forget(layer)
                continue
            found = observer.take(layer) if observer.reached(layer) else None
            if found is not None and starved.get(layer.name):
                found = self.experts.complete(layer, found, starved[layer.name], known)
            if found is None or isinstance(owner, int):
                yield layer, found
            elif layer.adapter.separate:
                yield layer, ExpertShare(found, self.ranks, layer.groups)
            else:
                yield layer, RowShare(layer, found, self.ranks, self.backoff)

    def plan(self, layer: PrunableLayer) -> Plan:
        """The smaller form of a layer's gradients; that of the samples serves patterns with unequal blocks too."""
        d_in = layer.shape[1]
        sizes = {self.solver.column_block(d_in, pattern) or d_in for pattern in self.patterns[layer.name]}
        compressed = not self.diagonal and len(sizes) == 1 and self.samples >= max(sizes)
        return Plan(column_block=max(sizes) if compressed else None)

    def bytes_of(self, layer: PrunableLayer) -> int:
        """What a layer's statistics take."""
        return self.gram_bytes(layer) + self.gradient_bytes(layer)

    def gram_bytes(self, layer: PrunableLayer) -> int:
        """What its Gram matrices take, or their diagonals."""
        d_in = layer.shape[1]
        return 4 * layer.groups * d_in * (1 if self.diagonal else d_in)

    def gradient_bytes(self, layer: PrunableLayer, plan: Plan | None = None) -> int:
        """What its gradients take.

        Args:
            layer: the layer.
            plan: by which they are gathered, with the rows of a chunk; None is that of the whole layer.
        """
        if self.lams[layer.name] == 1:
            return 0
        plan = self.plan(layer) if plan is None else plan
        d_out, d_in = layer.shape
        rows = d_out if plan.rows is None else len(range(*plan.rows.indices(d_out)))
        return 4 * rows * numbers_per_row(d_in, 1 if self.diagonal else self.samples, plan.column_block)

    def parts(self, together: list[PrunableLayer]) -> list[slice] | None:
        """The rows, or the experts, that a layer is gathered in, one pass for each; None where it is gathered whole."""
        layer, room = together[0], self._available() // 2
        size = self._held(layer, room)
        if len(together) > 1 or size <= room:
            return None
        if layer.adapter.separate:
            return None if layer.groups == 1 else split_range(0, layer.groups, max(1, room * layer.groups // size))
        if self.lams[layer.name] == 1 or not self.solver.ranks:
            return None
        rows = chunk_rows(layer, self.plan(layer), self.samples, room - 4 * layer.groups * layer.shape[1] ** 2)
        return None if len(rows) == 1 else rows

    def _chunks(self, together: list[PrunableLayer], step: Step) -> "RowChunks | ExpertChunks | None":
        """A single layer in chunks of rows, where it does not fit in memory as a whole and its solver can do that."""
        layer, plan = together[0], self.plan(together[0])
        parts = self.parts(together)
        if parts is None:
            return None
        if layer.adapter.separate:
            return self._some_experts(layer, step, parts)
        self.notes.append(f"{layer.name}: solved in {len(parts)} chunks of rows, for the sake of memory")

        def collect(plan: Plan) -> LayerStatistics:
            ((_, statistics),) = self._collected([layer], step, {layer.name: plan}, False)
            assert not isinstance(statistics, ExpertShare | RowShare)
            require(statistics is not None, f"{layer.name}: no calibration data reached it; name it in ignore=")
            return statistics

        return RowChunks(layer, parts, collect, plan)

    def _some_experts(self, layer: PrunableLayer, step: Step, parts: list[slice]) -> ExpertChunks:
        """Experts that are too many for the memory, as many at a time as there is room for."""
        spans = [(part.start, part.stop) for part in parts]
        self.notes.append(f"{layer.name}: its experts solved in {len(spans)} parts, for the sake of memory")

        def collect(part: PrunableLayer) -> LayerStatistics | None:
            ((_, statistics),) = self._collected([part], step, {part.name: self.plan(part)}, False)
            assert not isinstance(statistics, ExpertShare | RowShare)
            return statistics

        return ExpertChunks(layer, spans, collect, self.samples, self.diagonal)
