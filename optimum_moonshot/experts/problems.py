"""The optimisation problem of each mixture, from a pass over the data at the stage of its block."""

from collections.abc import Sequence
from functools import partial

from tqdm.auto import tqdm

from ..calibration.mixture_sums import MixtureObserver, MixtureStatistics, merge_mixtures
from ..errors import MoonshotError
from ..model.layers import PrunableLayer
from ..model.mixtures import Mixture
from ..objective.removal import Removal
from ..pipeline.inputs import Prepared
from ..pipeline.loop import run_pipeline
from ..pipeline.model_pipeline import ModelPipeline
from ..pipeline.stages import Stage
from ..progress import progress_bar


class MixtureProblems:
    """The problems of the mixtures, in the order of their blocks."""

    def __init__(self, prepared: Prepared, mixtures: Sequence[Mixture]):
        self.prepared, self.mixtures, self.selection = prepared, mixtures, prepared.selection
        self.pipeline = ModelPipeline(prepared, self)
        self.where = "the passes over the data"  # in messages; later the current mixture
        self.by_module = {mixture.module: mixture for mixture in mixtures}

    def lacks_mixture(self, name: str) -> bool:
        """Whether the problem of a mixture is needed."""
        raise NotImplementedError

    def take(self, mixture: Mixture, statistics: MixtureStatistics) -> None:
        """Use the statistics of a mixture."""
        raise NotImplementedError

    def problem(self, statistics: MixtureStatistics) -> Removal:
        """The objective of a mixture."""
        sums = statistics.gram, statistics.gradients, statistics.norms, statistics.tokens
        return Removal.build(*sums, self.selection.lam)

    def lacks(self, layer: PrunableLayer) -> bool:
        mixture = self.by_module.get(layer.modules[0])
        return mixture is not None and self.lacks_mixture(mixture.name)

    def skip(self, layer: PrunableLayer) -> None:
        """Raise `MoonshotError`: the same number of experts is removed from all mixtures, so none can be skipped."""
        raise MoonshotError(self.pipeline.reason(layer)).within(layer.name)

    def run(self) -> None:
        """Pass the data through the model, and call `take` with the statistics of each mixture."""
        prepared, shown = self.prepared, self.prepared.subject.progress
        with progress_bar(total=len(self.mixtures), desc="pruning", unit="mixture", shown=shown) as bar:
            bar.update(sum(not self.lacks_mixture(mixture.name) for mixture in self.mixtures))
            visit = partial(self._visit, bar=bar)
            run_pipeline(self.pipeline, visit, prepared.backoff, lambda: prepared.batches, lambda: self.where)

    def _visit(self, stage: Stage, bar: tqdm) -> None:
        modules = dict.fromkeys(layer.modules[0] for layer in stage.layers if self.lacks(layer))
        mixtures = [self.by_module[module] for module in modules]
        if not mixtures:
            return
        self.where = mixtures[0].name
        prepared, gradients = self.prepared, self.selection.needs_gradients
        samples, here = prepared.calibration.num_samples, prepared.samples_here
        watched = MixtureObserver(mixtures, gradients, samples, prepared.storage, here)
        with prepared.backoff.passing(watched, merge_mixtures) as observer:
            stage.observe(observer, advance=True)
        for mixture in mixtures:
            bar.set_postfix_str(mixture.name)
            self.take(mixture, observer.sums[mixture.name].result())
            bar.update(1)
