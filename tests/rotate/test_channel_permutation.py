"""Channel permutations for n:m: the search against all permutations, and permutations in runs."""

import copy
import dataclasses
import itertools

import pytest
import torch
from models import token_batches
from rotation_problems import problem, space
from rotation_runs import prune, pruner, same, weights

from optimum_moonshot.model.structured_groups import probe_inputs
from optimum_moonshot.objective.patterns import NM, Unstructured
from optimum_moonshot.pipeline.store import ResultStore
from optimum_moonshot.rotate import permutation_search
from optimum_moonshot.rotate import run as rotating
from optimum_moonshot.rotate.basis import check_same, outputs
from optimum_moonshot.rotate.learning import Learned, learn, rotations
from optimum_moonshot.rotate.objective import competing, removed
from optimum_moonshot.rotate.permutation_search import GAIN, best_permutation, permute_channels
from optimum_moonshot.rotate.report import RotationReport
from optimum_moonshot.rotate.spaces import Place, Space
from optimum_moonshot.rotate.trace import Axis

CPU = torch.device("cpu")
N_OF_M = dict(sparsity=None, pattern="2:4")


def some_scores(columns, seed, rows=5):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator).square() * torch.logspace(-1, 1, columns)


def lost(scores, order, patterns):
    return float(removed(scores.double()[:, order], patterns))


@pytest.mark.parametrize("seed", range(8))
def test_two_pairs_get_the_best_permutation(seed):
    scores, patterns = some_scores(4, seed), [NM(1, 2)]
    best = min(lost(scores, list(order), patterns) for order in itertools.permutations(range(4)))
    assert lost(scores, best_permutation(scores, patterns), patterns) <= best * (1 + GAIN) + 1e-9


@pytest.mark.parametrize("patterns", [[NM(2, 4)], [NM(1, 4)], [NM(3, 4)], [NM(4, 6)], [NM(1, 2), NM(2, 4)]], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_no_swap_of_two_columns_is_better(patterns, seed):
    scores = some_scores(12, seed)
    order = best_permutation(scores, patterns)
    assert torch.equal(order.sort().values, torch.arange(12))
    assert torch.equal(order, best_permutation(scores, patterns))
    initial, permuted = lost(scores, torch.arange(12), patterns), lost(scores, order, patterns)
    assert permuted < initial
    for i, j in itertools.combinations(range(12), 2):
        other = order.clone()
        other[[i, j]] = order[[j, i]]
        assert lost(scores, other, patterns) >= permuted - 1.01 * len(patterns) * GAIN * initial


@pytest.mark.parametrize("patterns", [[NM(2, 4)], [NM(1, 4)], [NM(4, 8)], [NM(1, 2), NM(2, 4)]], ids=str)
@pytest.mark.parametrize("spread", [permutation_search.SPREAD, 64 * 7])
def test_products_give_as_good_a_permutation_as_distances(patterns, spread, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    scores = some_scores(64, 0, rows=50) * torch.rand(50, 1, generator=generator)
    scores[3], scores[:, 5], scores[4, ::2] = 0.0, 0.0, 0.0
    best = lost(scores, best_permutation(scores, patterns), patterns)
    monkeypatch.setattr(permutation_search, "EXACT", 0)
    monkeypatch.setattr(permutation_search, "SPREAD", spread)
    order = best_permutation(scores, patterns)
    assert torch.equal(order.sort().values, torch.arange(64)) and torch.equal(order, best_permutation(scores, patterns))
    initial = lost(scores, torch.arange(64), patterns)
    assert initial - lost(scores, order, patterns) > 0.95 * (initial - best) > 0


@pytest.mark.parametrize("exact", [permutation_search.EXACT, 0])
def test_sums_of_pairwise_maxima_match_their_definition(exact, monkeypatch):
    monkeypatch.setattr(permutation_search, "EXACT", exact)
    scores = some_scores(256, 0, rows=40)
    columns = permutation_search._Columns(scores)
    others = columns.values[torch.randperm(256, generator=torch.Generator().manual_seed(0))[:12]]
    sums = columns.larger(others)
    expected = torch.maximum(others[:, None], columns.values).double().sum(2)
    error = (sums - expected) / expected.mean()
    assert float(error.min()) > -1e-6  # a product is never too small
    assert float(error.max()) < (1e-6 if exact else 0.5) and float(error.mean()) < 0.01


def test_the_gain_of_a_swap_is_its_change_of_the_loss():
    scores, order = some_scores(24, 0), torch.randperm(24, generator=torch.Generator().manual_seed(1))
    for pattern in (NM(2, 4), NM(1, 4), NM(3, 6)):
        table = permutation_search._Table(permutation_search._Columns(scores), pattern)
        first, second = torch.tensor([0, 9, 20]), torch.tensor([7, 17, 21])  # the last two are in one group
        for number, gained in enumerate(table.gained(order, first, second)):
            other = order.clone()
            i, j = int(first[number]), int(second[number])
            other[[i, j]] = order[[j, i]]
            change = lost(scores, order, [pattern]) - lost(scores, other, [pattern])
            assert float(gained) == pytest.approx(change, rel=1e-4, abs=1e-5)


def test_dominant_columns_are_separated():
    scores = torch.full((3, 16), 0.1)
    scores[:, [0, 1, 2, 3]] = 10.0
    order = best_permutation(scores, [NM(1, 4)])
    assert sorted((order.argsort()[:4] // 4).tolist()) == [0, 1, 2, 3]


def test_ties_give_the_identity():
    assert torch.equal(best_permutation(torch.ones(4, 16), [NM(2, 4)]), torch.arange(16))
    assert torch.equal(best_permutation(torch.zeros(4, 16), [NM(2, 4)]), torch.arange(16))


@pytest.mark.parametrize("patterns", [[Unstructured(0.5)], [NM(4, 4)], [NM(2, 8)], [NM(5, 7)]], ids=str)
def test_columns_that_do_not_compete_keep_their_order(patterns):
    assert torch.equal(best_permutation(some_scores(8, 0), patterns), torch.arange(8))
    assert bool(competing(patterns)) == (patterns[0] in (NM(2, 8), NM(5, 7)))


def neurons(objective):
    """The neurons that the matrix "write" reads."""
    (matrix,) = (matrix for matrix in objective.matrices if matrix.layer.name == "write")
    at = Axis(matrix.layer.modules[0], "weight", 1)
    return Space("write neurons", matrix.layer.shape[1], 1, False, (Place(at),), permuted=True)


@pytest.mark.parametrize("patterns", [(NM(2, 4),), (NM(2, 4), NM(4, 8)), (NM(1, 4), Unstructured(0.5))], ids=str)
def test_the_reported_objective_is_that_of_the_permutation(patterns):
    stream = space()
    objective = problem(stream, patterns)
    spaces = [stream, neurons(objective)]
    state = learn(objective, spaces, 5, 0.05, CPU)
    assert state.after == state.learned == min(state.history)
    permute_channels(objective, spaces, state)
    assert state.after < state.learned
    (order,) = state.permutations["write neurons"]
    group = objective.blocks[0][1][-1]
    weight = group.matrices[0].layer.parameter
    weight.data, group.inverse = weight.data[:, order], group.inverse[order]
    at = {stream: rotations([stream], state)[stream].float()}
    assert objective.value(at) == pytest.approx(state.after, rel=1e-4)


def test_a_permutation_changes_nothing_else_and_survives_saving():
    stream = space()
    objective = problem(stream, (NM(2, 4),))
    spaces = [stream, neurons(objective)]
    state = learn(objective, spaces, 3, 0.05, CPU)
    before = copy.deepcopy(state)
    permute_channels(objective, spaces, state)
    assert state.history == before.history
    again = Learned.load(*state.saved())
    assert again.saved()[1] == state.saved()[1] and again.after == state.after
    assert again.tensors.keys() == before.tensors.keys()
    permute_channels(objective, spaces, again, lambda _: pytest.fail("searched again"))
    assert torch.equal(again.permutations["write neurons"], state.permutations["write neurons"])


def test_neurons_alone_take_no_step():
    objective = problem(space(), (NM(2, 4),))
    objective.blocks[0][1].pop(0)
    (group,) = objective.blocks[0][1]
    group.matrices[0] = dataclasses.replace(group.matrices[0], writes=())
    spaces = [neurons(objective)]
    state = learn(objective, spaces, 30, 0.05, CPU)
    assert len(state.history) == 1 and state.done and not state.tensors
    permute_channels(objective, spaces, state)
    assert state.after < state.before


@pytest.mark.parametrize("name", ["llama", "opt", "phi3"])
@pytest.mark.parametrize("rotation", ["learned", "heads"])
def test_a_run_permutes_neurons_for_n_m(name, rotation):
    report = prune(name, rotation=rotation, **N_OF_M).report
    turned = report.rotation
    assert len(turned.permuted) == 3 and set(turned.permuted.values()) == {24}
    assert turned.objective_after < turned.objective_learned <= turned.objective_before
    assert "channel permutations of 3 layers" in report.table()
    assert RotationReport.from_dict(turned.to_dict()) == turned and turned.summary()["layers_permuted"] == 3
    assert not any(name.endswith("neurons") for name in turned.spaces)


def test_unstructured_runs_and_dense_layers_need_no_permutation():
    assert not prune().report.rotation.permuted
    kept = prune(ignore=["layers.1.mlp.down_proj"], **N_OF_M).report.rotation
    assert list(kept.permuted) == [f"model.layers.{i}.mlp.down_proj neurons" for i in (0, 2)]


@pytest.mark.parametrize("rotation", ["learned", "heads"])
def test_a_permuted_model_is_the_same_function_and_prunes_like_a_run(rotation):
    alone = pruner("llama-tied-biased", rotation=rotation, **N_OF_M)
    batch = probe_inputs(alone.model)
    dense, before = outputs(alone.model, batch), weights(alone.model)
    report = alone.rotate(token_batches(), progress=False)
    check_same(alone.model, batch, dense, "it")
    assert len(report.permuted) == 3 and not same(weights(alone.model), before)
    alone.prune(token_batches(), progress=False)
    assert same(weights(alone.model), weights(prune("llama-tied-biased", rotation=rotation, **N_OF_M).model))


@pytest.mark.parametrize("count", [1, 3])
def test_a_run_killed_between_permutations_resumes_bit_for_bit(count, tmp_path, monkeypatch):
    whole = prune(**N_OF_M)
    put = ResultStore.put_rotation

    def kill(store, tensors, values):
        put(store, tensors, values)
        state = Learned.load(tensors, values)
        if len(state.permutations) == count and (count < 3 or state.finished):
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ResultStore, "put_rotation", kill)
        with pytest.raises(KeyboardInterrupt):
            pruner(**N_OF_M).prune(token_batches(), progress=False, resume_dir=tmp_path)
    if count == 3:
        monkeypatch.setattr(rotating, "gather", lambda *_: pytest.fail("learned again"))
    again = pruner(**N_OF_M)
    again.prune(token_batches(), progress=False, resume_dir=tmp_path)
    assert same(weights(again.model), weights(whole.model))
    assert again.report.rotation.permuted == whole.report.rotation.permuted
    assert again.report.rotation.objective_after == whole.report.rotation.objective_after


def test_a_failure_restores_the_neurons(monkeypatch):
    done = pruner(**N_OF_M)
    dense = weights(done.model)

    def fail(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("optimum_moonshot.prune.run.prune_layers", fail)
    with pytest.raises(KeyboardInterrupt):
        done.prune(token_batches(), progress=False)
    assert same(weights(done.model), dense)


def test_a_sweep_permutes_for_all_its_patterns():
    done = pruner(**N_OF_M)
    dense = weights(done.model)
    swept = done.sweep(token_batches(), lambdas=[1.0], patterns=["2:4", "4:8"], progress=False)
    assert same(weights(done.model), dense)
    done.choose(swept.entries[0])
    assert len(done.report.rotation.permuted) == 3
