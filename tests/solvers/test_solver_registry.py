"""A registered solver receives the statistics that it declares; incomplete declarations are refused."""

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
from optimum_moonshot.objective.linalg import check_factored, split_range
from optimum_moonshot.objective.patterns import NM, Unstructured
from optimum_moonshot.objective.quadratic import DiagonalQuadratic, Quadratic
from optimum_moonshot.pipeline import partition
from optimum_moonshot.solvers import Solver, register_solver, solver_names
from optimum_moonshot.solvers.base import damped, finish
from optimum_moonshot.solvers.ranked import CAP, OBC
from optimum_moonshot.solvers.sparsegpt import SparseGPT
from optimum_moonshot.solvers.wanda import Wanda

pytestmark = pytest.mark.usefixtures("registry")


class Delegating:
    """Delegates to a builtin solver without inheriting from it: only its declarations are visible."""

    delegate: ClassVar[type]

    def solve(self, objective, pattern):
        return self.delegate(**dataclasses.asdict(self)).solve(objective, pattern)


class DelegatingRanking(Delegating):
    def rank_removals(self, objective, pattern, damping):
        return self.delegate(**dataclasses.asdict(self)).rank_removals(objective, pattern, damping)

    def minimise(self, objective, keeps, damping):
        return self.delegate(**dataclasses.asdict(self)).minimise(objective, keeps, damping)

    def solve_path(self, objective, patterns):
        return self.delegate(**dataclasses.asdict(self)).solve_path(objective, patterns)


@dataclass(frozen=True)
class LikeOBC(DelegatingRanking):
    damping: float = 0.01

    delegate = OBC
    patterns = (Unstructured, NM)
    grouped = True
    ranks_removals = True


@dataclass(frozen=True)
class LikeCAP(DelegatingRanking):
    damping: float = 0.01
    block_size: int = 8

    delegate = CAP
    patterns = (Unstructured, NM)
    ranks_removals = True

    def column_block(self, d_in, pattern):
        return CAP(block_size=self.block_size).column_block(d_in, pattern)


@dataclass(frozen=True)
class LikeWanda(Delegating):
    delegate = Wanda
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
def test_a_solver_receives_the_objective_that_it_declares(solver, lam):
    tensors = layer(6, 24, 5)
    result, expected = (prune_weight(*tensors, config=settings(name, lam=lam)) for name in (f"like-{solver}", solver))
    assert torch.equal(result.weight, expected.weight) and torch.equal(result.keep, expected.keep)


@EACH
def test_a_run_collects_the_statistics_that_a_solver_declares(solver):
    (tensors, report), (expected, expected_report) = prune(f"like-{solver}"), prune(solver)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors.items())
    assert [layer.loss for layer in report.layers] == [layer.loss for layer in expected_report.layers]


@RANKING
def test_a_ranking_solver_has_a_sparsity_path(solver):
    tensors, sparsities = layer(6, 24, 5), [0.3, 0.9]
    path, expected = (
        prune_weight_path(*tensors, config=settings(name), sparsities=sparsities) for name in (f"like-{solver}", solver)
    )
    assert all(torch.equal(path[sparsity].weight, expected[sparsity].weight) for sparsity in sparsities)


@RANKING
def test_a_ranking_solver_receives_all_sparsities_of_a_path_together(solver, monkeypatch):
    cls, seen = LIKE[solver], []
    original = cls.solve_path
    monkeypatch.setattr(cls, "solve_path", lambda self, *args: seen.append(len(args[1])) or original(self, *args))
    pruner = MoonshotPruner(make("vit"), settings(f"like-{solver}"))
    pruner.prune_path(image_batches(samples=20), [0.2, 0.5, 0.8])
    assert set(seen) == {3}


@pytest.mark.slow
@RANKING
def test_a_ranking_solver_solves_a_layer_that_exceeds_the_memory_in_chunks(solver, monkeypatch):
    expected, _ = prune(solver)
    monkeypatch.setattr(partition.StatisticsSpec, "bytes_of", lambda self, layer: 2**60)
    monkeypatch.setattr(partition, "row_slices_within", lambda layer, *args: split_range(0, layer.shape[0], 5))
    tensors, report = prune(f"like-{solver}")
    assert any("row chunks" in note for note in report.notes)
    for name, tensor in tensors.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=1e-5, msg=name)


def test_a_solver_that_does_not_rank_has_no_path():
    with pytest.raises(MoonshotError, match="like-wanda.*use one of cap, like-cap, like-obc, obc"):
        prune_weight_path(*layer(6, 24, 5), config=settings("like-wanda"), sparsities=[0.5])


def test_only_solvers_that_declare_it_support_grouped_rows():
    tensors = grouped_layer(3, 4, 24, 5)
    prune_weight(*tensors, config=settings("like-obc"))
    with pytest.raises(MoonshotError, match="like-cap.*does not support grouped"):
        prune_weight(*tensors, config=settings("like-cap"))


def test_a_solver_inherits_the_defaults_of_the_base_class():
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


def test_a_damped_attempt_receives_the_ridge_and_reports_the_damping():
    weight, gram, gradients = layer(6, 24, 5)
    objective, tried = full(weight, gram, gradients, 0.5), []

    def attempt(ridge):
        tried.append(ridge / objective.damping_unit)
        check_factored(torch.tensor(len(tried) == 2))
        return weight, weight > 0

    result = damped(objective, 0.02, attempt)
    assert tried == pytest.approx([0.02, 0.2]) and result.damping == 0.2
    assert result.notes == ("damping raised from 0.02 to 0.2",)
    assert torch.equal(result.weight, weight.clamp(min=0)) and torch.equal(result.keep, weight > 0)


def declared(**members):
    """A solver with these members changed; None removes one."""
    members = {"patterns": (Unstructured,), "solve": Delegating.solve, **members}
    members |= {"__annotations__": {"damping": float}} if "damping" in members else {}
    declared_members = {name: value for name, value in members.items() if value is not None}
    return dataclass(frozen=True)(type("Custom", (), declared_members))


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (declared(solve=None), "Custom lacks solve; "),
        (declared(patterns=None), "Custom lacks patterns; "),
        (dataclass(frozen=True)(type("Custom", (Solver,), {})), "Custom lacks patterns, solve; "),
        (declared(patterns=()), r"Custom\.patterns=\(\): give a tuple of Unstructured, NM, Structured"),
        (declared(patterns=Unstructured), r"Custom\.patterns=.*: give a tuple"),
        (declared(patterns=(int,)), r"Custom\.patterns=.*: give a tuple"),
        (declared(objective=dict), r"Custom\.objective=.*dict.*: give Quadratic or DiagonalQuadratic"),
        (declared(grouped="yes"), r"Custom\.grouped='yes': give True or False"),
        (declared(calibrated=1), r"Custom\.calibrated=1: give True or False"),
        (
            declared(ranks_removals=True),
            "Custom lacks rank_removals, minimise, the hyperparameter damping, which ranks_removals=True requires",
        ),
        (
            declared(by_rows=True),
            "Custom lacks attempt, the hyperparameter damping, which by_rows=True requires",
        ),
        (declared(by_rows=0), r"Custom\.by_rows=0: give True or False"),
        (
            declared(by_rows=True, attempt=SparseGPT.attempt, damping=0.01, objective=DiagonalQuadratic),
            r"Custom\.objective=.*DiagonalQuadratic.*: by_rows=True requires a Quadratic",
        ),
        (
            dataclass(frozen=True)(type("Custom", (LikeOBC,), {"objective": DiagonalQuadratic})),
            r"Custom\.objective=.*DiagonalQuadratic.*: ranks_removals=True requires a Quadratic",
        ),
    ],
)
def test_a_class_with_an_invalid_declaration_is_not_registered(cls, message):
    with pytest.raises(MoonshotError, match=f"^{message}"):
        register_solver("custom")(cls)
    assert "custom" not in solver_names()


def test_a_name_is_registered_once():
    with pytest.raises(ValueError, match=re.escape("solver 'obc' is already registered by OBC")):
        register_solver("obc")(LikeOBC)
