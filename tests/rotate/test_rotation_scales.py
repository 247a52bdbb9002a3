"""Row scales: the gradient moments, the factors computed from them, and scaling in runs."""

import pytest
import torch
from models import token_batches
from rotation_runs import prune, pruner, same, weights
from torch import nn

from optimum_moonshot.model.layer_kinds import LinearLayer
from optimum_moonshot.model.structured_groups import probe_inputs
from optimum_moonshot.rotate import run as rotating
from optimum_moonshot.rotate.basis import check_same, outputs
from optimum_moonshot.rotate.learning import LARGEST, Learned, factors, rotations, scale
from optimum_moonshot.rotate.objective import OutputMoments
from optimum_moonshot.rotate.report import RotationReport
from optimum_moonshot.rotate.spaces import Place, Space
from optimum_moonshot.rotate.trace import Axis

HEADS = torch.tensor([[[4, 1]], [[0, 3]]])
NEURONS = torch.tensor([[[5, 2, 0]]])


def spaces_of(module, index, follows=None):
    places = (Place(Axis(module, "weight", 0), index, writes=True),)
    count, _, width = index.shape
    return Space("test", width, count, False, places, scaled=True, follows=follows)


@pytest.mark.parametrize("turned", [True, False])
def test_moments_sum_over_all_batches(turned):
    module = nn.Linear(3, 6)
    layer = LinearLayer("it", (module,), False)
    follows = Space("heads", 2, 2, False, ()) if turned else None
    index = HEADS if turned else NEURONS
    statistic = OutputMoments.of([spaces_of(module, index, follows), follows or spaces_of(nn.Linear(3, 6), index)])
    moments = statistic(layer, 8, None)
    delta = torch.randn(2, 4, 1, 5, 6)
    for piece in delta:
        moments.add(torch.zeros(4, 1, 5, 3), piece, True, slice(None))
    whole = torch.einsum("...i,...j->ij", delta, delta)
    expected = [whole[rows][:, rows] for rows in index[:, 0]]
    expected = torch.stack(expected if turned else [each.diagonal() for each in expected])
    assert list(moments.result()) == ["test"]
    torch.testing.assert_close(moments.result()["test"].float(), expected, rtol=1e-4, atol=1e-5)
    assert not OutputMoments.of([])(layer, 8, None).outputs


def test_factors_equalise_the_rows():
    moment = torch.rand(2, 6).double() + 0.1
    scales = factors(moment)
    cost = moment / scales.square()  # the gradients of a row are divided by its factor
    torch.testing.assert_close(cost, cost[:1, :1].expand_as(cost))
    assert float(scales.log().mean()) == pytest.approx(0, abs=1e-9)


def test_factors_are_bounded_and_positive():
    scales = factors(torch.tensor([[1e-30, 0.0, 1.0, 1e30]]))
    assert bool((scales >= 1 / LARGEST).all()) and bool((scales <= LARGEST).all())
    assert torch.equal(factors(torch.zeros(1, 3)), torch.ones(1, 3))


def test_factors_follow_rotated_and_permuted_coordinates():
    heads = Space("heads", 2, 2, False, ())
    x = torch.randn(2, 50, 2, dtype=torch.float64)
    skew = torch.tensor([[[0.0, 0.4], [0.0, 0.0]], [[0.0, -0.9], [0.0, 0.0]]])
    state = Learned({"2.best": skew}, history=[1.0])
    module = nn.Linear(3, 6)
    scale([heads, spaces_of(module, HEADS, heads)], state, {"test": x.mT @ x})
    turned = x @ rotations([heads], state)[heads]
    torch.testing.assert_close(state.factors["test"], factors(turned.square().sum(1)))
    neurons = Space("neurons", 3, 1, False, (), permuted=True)
    moment, order = torch.tensor([[1.0, 4.0, 16.0]]), torch.tensor([[2, 0, 1]])
    state = Learned({}, history=[1.0], permutations={"neurons": order})
    scale([neurons, spaces_of(module, NEURONS, neurons)], state, {"test": moment})
    torch.testing.assert_close(state.factors["test"], torch.tensor([[2.0, 0.5, 1.0]]))
    again = Learned.load(*state.saved())
    assert torch.equal(again.factors["test"], state.factors["test"])
    assert again.permutations.keys() == state.permutations.keys()


@pytest.mark.parametrize("rotation", ["learned", "heads"])
def test_a_run_scales_rows_and_the_model_is_the_same_function(rotation):
    alone = pruner("llama-tied-biased", rotation=rotation)
    batch = probe_inputs(alone.model)
    dense = outputs(alone.model, batch)
    report = alone.rotate(token_batches(), progress=False)
    check_same(alone.model, batch, dense, "it")
    assert len(report.scales) == 6 and all(1 < ratio <= LARGEST**2 for ratio in report.scales.values())
    assert "6 layers in units of the loss" in report.line() and report.summary()["layers_scaled"] == 6
    assert RotationReport.from_dict(report.to_dict()) == report


def test_gradients_at_scaled_rows_are_similar():
    model = pruner("llama", rotation="heads")
    model.rotate(token_batches(), progress=False)
    up = model.model.model.layers[1].mlp.up_proj
    seen = []
    up.register_full_backward_hook(lambda module, inputs, gradients: seen.append(gradients[0].square().sum((0, 1))))
    for batch in token_batches():
        for ids in batch["input_ids"]:
            model.model(input_ids=ids[None], labels=ids[None]).loss.backward()
    total = sum(seen)
    assert float(total.max() / total.min()) < 1.5


def test_without_competing_rows_or_gradients_scales_stay():
    assert not prune(sparsity=None, pattern="2:4").report.rotation.scales
    assert not prune(lam=1, rotation_weights="equal").report.rotation.scales
    assert not prune(solver="wanda").report.rotation.scales


def test_a_sweep_of_both_kinds_permutes_and_scales():
    done = pruner()
    dense = weights(done.model)
    swept = done.sweep(token_batches(), lambdas=[1.0], patterns=["2:4", "unstructured"], progress=False)
    assert same(weights(done.model), dense)
    done.choose(swept.entries[0])
    assert len(done.report.rotation.permuted) == 3 and len(done.report.rotation.scales) == 6


def test_a_finished_state_is_reused_bit_for_bit(tmp_path, monkeypatch):
    whole = weights(prune().model)

    def kill(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("optimum_moonshot.prune.run.prune_layers", kill)
        with pytest.raises(KeyboardInterrupt):
            pruner().prune(token_batches(), progress=False, resume_dir=tmp_path)
    monkeypatch.setattr(rotating, "gather", lambda *_: pytest.fail("learned again"))
    again = pruner()
    again.prune(token_batches(), progress=False, resume_dir=tmp_path)
    assert same(weights(again.model), whole) and len(again.report.rotation.scales) == 6
