"""Curves of the Fisher allocation."""

from llama_runs import config
from models import token_batches

from optimum_moonshot.allocate.run import gather_curves
from optimum_moonshot.model.calls import frozen
from optimum_moonshot.objective.patterns import Unstructured
from optimum_moonshot.pipeline.inputs import prepare
from optimum_moonshot.pipeline.selection import Subject, select
from optimum_moonshot.pipeline.store import ResultStore
from optimum_moonshot.pipeline.variant import Variant
from optimum_moonshot.solvers import solver_class, solver_names

SOLVERS = [name for name in solver_names() if Unstructured in solver_class(name).patterns]
FISHER = dict(pattern="unstructured", sparsity=0.6, allocation="fisher")


def curves_of(model, batches=None, **options):
    settings = config(**{**FISHER, **options})
    selection = select(model, settings)
    prepared = prepare(Subject(model, progress=False), selection, batches or token_batches())
    variant = Variant(model, selection, ResultStore(None, ""))
    with frozen(model):
        gather_curves(prepared, [variant])
    return variant.store.curves
