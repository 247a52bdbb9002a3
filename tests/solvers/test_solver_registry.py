"""What a registered solver declares is what it gets, whoever wrote it; and it has to declare enough."""

import dataclasses
import re
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from golden.make import grouped_layer, layer
from models import image_batches, make, token_batches
from objectives import full

from optimum_moonshot import MoonshotConfig, MoonshotError, MoonshotPruner, prune_weight, prune_weight_path
from optimum_moonshot.objective.linalg import check_factored
from optimum_moonshot.objective.patterns import NM, Unstructured
from optimum_moonshot.objective.quadratic import DiagonalQuadratic, Quadratic
from optimum_moonshot.objective.row_slices import split_range
from optimum_moonshot.pipeline import spec
from optimum_moonshot.solvers import Solver, register_solver, solver_names
from optimum_moonshot.solvers.base import damped, finish
from optimum_moonshot.solvers.ranked import CAP, OBC
from optimum_moonshot.solvers.sparsegpt import SparseGPT
from optimum_moonshot.solvers.wanda import Wanda

pytestmark = pytest.mark.usefixtures("registry")


class Borrowed:
    """A solver that derives from none here and lends the methods of one: all that others know is what it declares."""

    own: ClassVar[type]

    def solve(self, objective, pattern):
        return self.own(**dataclasses.asdict(self)).solve(objective, pattern)


class BorrowedRanking(Borrowed):
    def rank_removals(self, objective, pattern, damping):
        return self.own(**dataclasses.asdict(self)).rank_removals(objective, pattern, damping)

    def minimise(self, objective, keeps, damping):
        return self.own(**dataclasses.asdict(self)).minimise(objective, keeps, damping)

    def solve_path(self, objective, patterns):
        return self.own(**dataclasses.asdict(self)).solve_path(objective, patterns)


@dataclass(frozen=True)
class LikeOBC(BorrowedRanking):
    damping: float = 0.01

    own = OBC
    patterns = (Unstructured, NM)
    grouped = True
    ranks_removals = True


@dataclass(frozen=True)
class LikeCAP(BorrowedRanking):
    damping: float = 0.01
    block_size: int = 8

    own = CAP
    patterns = (Unstructured, NM)
    ranks_removals = True

    def column_block(self, d_in, pattern):
        return CAP(block_size=self.block_size).column_block(d_in, pattern)


@dataclass(frozen=True)
class LikeWanda(Borrowed):
    own = Wanda
    patterns = (Unstructured,)
    objective = DiagonalQuadratic


LIKE = {"obc": LikeOBC, "cap": LikeCAP, "wanda": LikeWanda}
EACH = pytest.mark.parametrize("solver", LIKE)
RANKING = pytest.mark.parametrize("solver", ["obc", "cap"])


@pytest.fixture(autouse=True)
def registered(registry):
    for name, cls in LIKE.items():
        assert register_solver(f"like-{name}")(cls) is cls


def settings(solver, **more):
    more = {"sparsity": 0.5, "lam": 0.5, **more}
    more |= {"block_size": 8} if solver.endswith("cap") else {}
    return MoonshotConfig(solver=solver, num_samples=20, sequence_length=12, batch_size=2, **more)


def prune(solver, model="vit", **more):
    pruner = MoonshotPruner(make(model), settings(solver, **more))
    batches = image_batches(samples=20) if model == "vit" else token_batches()
    return pruner.model.state_dict(), pruner.prune(batches, progress=False)


@EACH
@pytest.mark.parametrize("lam", [0.0, 0.5, 1.0])
def test_it_is_given_the_objective_that_it_declares(solver, lam):
    tensors = layer(6, 24, 5)
    found, expected = (prune_weight(*tensors, config=settings(name, lam=lam)) for name in (f"like-{solver}", solver))
    assert torch.equal(found.weight, expected.weight) and torch.equal(found.keep, expected.keep)


@EACH
def test_a_run_gathers_what_it_declares(solver):
    found, expected = prune(f"like-{solver}"), prune(solver)
    assert all(torch.equal(tensor, expected[0][name]) for name, tensor in found[0].items())
    assert [layer.loss for layer in found[1].layers] == [layer.loss for layer in expected[1].layers]


@RANKING
def test_one_elimination_serves_a_path_where_it_ranks(solver):
    tensors, sparsities = layer(6, 24, 5), [0.3, 0.9]
    found, expected = (
        prune_weight_path(*tensors, config=settings(name), sparsities=sparsities) for name in (f"like-{solver}", solver)
    )
    assert all(torch.equal(found[sparsity].weight, expected[sparsity].weight) for sparsity in sparsities)


@RANKING
def test_a_sweep_gives_it_all_sparsities_together(solver, monkeypatch):
    cls, seen = LIKE[solver], []
    original = cls.solve_path
    monkeypatch.setattr(cls, "solve_path", lambda self, *args: seen.append(len(args[1])) or original(self, *args))
    pruner = MoonshotPruner(make("vit"), settings(f"like-{solver}"))
    pruner.prune_path(image_batches(samples=20), [0.2, 0.5, 0.8])
    assert set(seen) == {3}


@RANKING
def test_a_layer_that_exceeds_the_memory_is_solved_in_chunks_where_it_ranks(solver, monkeypatch):
    expected = prune(solver)
    monkeypatch.setattr(spec.StatisticsSpec, "bytes_of", lambda self, layer: 2**60)
    monkeypatch.setattr(spec, "row_slices_within", lambda layer, *args: split_range(0, layer.shape[0], 5))
    found = prune(f"like-{solver}")
    assert any("chunks of rows" in note for note in found[1].notes)
    for name, tensor in found[0].items():
        torch.testing.assert_close(tensor, expected[0][name], rtol=1e-4, atol=1e-5, msg=name)


def test_a_solver_that_does_not_rank_has_no_path():
    with pytest.raises(MoonshotError, match="like-wanda.*use one of cap, like-cap, like-obc, obc"):
        prune_weight_path(*layer(6, 24, 5), config=settings("like-wanda"), sparsities=[0.5])


def test_rows_in_groups_are_for_those_that_declare_it():
    tensors = grouped_layer(3, 4, 24, 5)
    prune_weight(*tensors, config=settings("like-obc"))
    with pytest.raises(MoonshotError, match="like-cap.*does not support grouped"):
        prune_weight(*tensors, config=settings("like-cap"))


def test_what_a_class_leaves_out_it_has_from_solver():
    @register_solver("keep-all")
    @dataclass(frozen=True)
    class KeepAll(Solver):
        patterns: ClassVar[tuple[type, ...]] = (Unstructured,)

        def solve(self, objective, pattern):
            assert isinstance(objective, Quadratic)
            return finish(objective, objective.weight, torch.ones_like(objective.weight, dtype=torch.bool))

    weight, gram, gradients = layer(6, 24, 5)
    assert torch.equal(prune_weight(weight, gram, gradients, config=settings("keep-all")).weight, weight)
    for cls in (KeepAll, LikeWanda):
        assert (cls.grouped, cls.calibrated, cls.ranks_removals, cls.by_rows) == (False, True, False, False)
        assert cls().column_block(24, Unstructured(0.5)) is None
    with pytest.raises(MoonshotError, match="gram=None"):
        prune_weight(weight, config=settings("keep-all"))


def test_a_damped_attempt_gets_what_is_added_to_the_diagonal_and_tells_what_it_took():
    weight, gram, gradients = layer(6, 24, 5)
    objective, tried = full(weight, gram, gradients, 0.5), []

    def attempt(ridge):
        tried.append(ridge / objective.damping_unit)
        check_factored(torch.tensor(len(tried) == 2))
        return weight, weight > 0

    found = damped(objective, 0.02, attempt)
    assert tried == pytest.approx([0.02, 0.2]) and found.damping == 0.2
    assert found.notes == ("damping raised from 0.02 to 0.2",)
    assert torch.equal(found.weight, weight.clamp(min=0)) and torch.equal(found.keep, weight > 0)


def declared(**members):
    """A solver with these members changed; None removes one."""
    given = {"patterns": (Unstructured,), "solve": Borrowed.solve, **members}
    given |= {"__annotations__": {"damping": float}} if "damping" in members else {}
    return dataclass(frozen=True)(type("Own", (), {name: value for name, value in given.items() if value is not None}))


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (declared(solve=None), "Own lacks solve; "),
        (declared(patterns=None), "Own lacks patterns; "),
        (dataclass(frozen=True)(type("Own", (Solver,), {})), "Own lacks patterns, solve; "),
        (declared(patterns=()), r"Own\.patterns=\(\): give a tuple of Unstructured, NM, Structured"),
        (declared(patterns=Unstructured), r"Own\.patterns=.*: give a tuple"),
        (declared(patterns=(int,)), r"Own\.patterns=.*: give a tuple"),
        (declared(objective=dict), r"Own\.objective=.*dict.*: give Quadratic or DiagonalQuadratic"),
        (declared(grouped="yes"), r"Own\.grouped='yes': give True or False"),
        (declared(calibrated=1), r"Own\.calibrated=1: give True or False"),
        (
            declared(ranks_removals=True),
            "Own lacks rank_removals, minimise, solve_path, the hyperparameter damping, "
            "which ranks_removals=True requires",
        ),
        (
            declared(by_rows=True),
            "Own lacks attempt, the hyperparameter damping, which by_rows=True requires",
        ),
        (declared(by_rows=0), r"Own\.by_rows=0: give True or False"),
        (
            declared(by_rows=True, attempt=SparseGPT.attempt, damping=0.01, objective=DiagonalQuadratic),
            r"Own\.objective=.*DiagonalQuadratic.*: by_rows=True requires a Quadratic",
        ),
        (
            dataclass(frozen=True)(type("Own", (LikeOBC,), {"objective": DiagonalQuadratic})),
            r"Own\.objective=.*DiagonalQuadratic.*: ranks_removals=True requires a Quadratic",
        ),
    ],
)
def test_a_class_that_declares_too_little_is_not_registered(cls, message):
    with pytest.raises(MoonshotError, match=f"^{message}"):
        register_solver("own")(cls)
    assert "own" not in solver_names()


def test_a_name_is_taken_once():
    with pytest.raises(ValueError, match=re.escape("solver 'obc' is already registered by OBC")):
        register_solver("obc")(LikeOBC)
