"""Parameters that are no pruned matrices are stored with a recovered block, and committed with the pruned weights."""

import pytest
import torch
from models import make
from offloaded_models import offloaded
from recovery_runs import config, same, state

from optimum_moonshot.model.layers import visited
from optimum_moonshot.model.offload import Offloaded
from optimum_moonshot.pipeline.selection import select
from optimum_moonshot.pipeline.store import ResultStore
from optimum_moonshot.pipeline.variant import Variant
from optimum_moonshot.reports.prune_report import BlockReport, LayerReport

BLOCK, OUTSIDE = "model.layers.1", "model.norm.weight"
VECTOR, MATRIX = f"{BLOCK}.input_layernorm.weight", f"{BLOCK}.mlp.gate_proj.weight"
LAYER = f"{BLOCK}.mlp.down_proj"


def values(model):
    """A value for every parameter that the run changes, with some zeros in the matrices."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn(dict(model.named_parameters())[name].shape, generator=generator)
        for name in (VECTOR, MATRIX, OUTSIDE, f"{LAYER}.weight")
    }
    tensors[MATRIX][:, ::2] = tensors[f"{LAYER}.weight"][:, ::2] = 0
    return tensors


def filled(store, model):
    tensors = values(model)
    weight = tensors.pop(f"{LAYER}.weight")
    store.put(LayerReport(LAYER, tuple(weight.shape), 0.5, 0.0, None), torch.zeros_like(weight))
    outside = {OUTSIDE: tensors.pop(OUTSIDE)}
    store.put_block(BlockReport(BLOCK, 1.0, 0.5, 3, 0.0), {LAYER: weight}, tensors)
    store.put_block(BlockReport("model", 1.0, 0.5, 3, 0.0), {}, outside)
    return store


def variant_of(model, store):
    return Variant(model, select(model, config(targets=[LAYER], pattern="2:4")), store)


def assert_committed(model, before):
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, {**before, **values(model)}[name]), name


@pytest.mark.parametrize("place", ["memory", "folder", "temporary file"])
@pytest.mark.parametrize("keep", [True, False])
def test_commit_writes_matrices_and_parameters(place, keep, tmp_path):
    model = make("llama")
    before = state(model)
    store = ResultStore(tmp_path if place == "folder" else None, {}, spilling=place == "temporary file")
    variant_of(model, filled(store, model)).commit(keep)
    assert_committed(model, before)


def test_a_reopened_folder_has_the_parameters(tmp_path):
    model = make("llama")
    before = state(model)
    filled(ResultStore(tmp_path, {}), model).release()
    store = ResultStore(tmp_path, {})
    assert store.parameters == {VECTOR, MATRIX, OUTSIDE} and store.blocks.keys() == {"model", BLOCK}
    assert store.reports[LAYER].sparsity == 0.5
    # Statistics behind pruned blocks of the resumed run need the weight of before the recovery.
    (layer,) = store_layers(model)
    assert not variant_of(model, store).pruned_weight(layer).any() and store.weight(layer).any()
    variant_of(model, store).commit()
    assert_committed(model, before)


def store_layers(model):
    return select(model, config(targets=[LAYER], pattern="2:4")).layers


def test_other_processes_receive_the_parameters(tmp_path):
    model, sent = make("llama"), []
    filled(ResultStore(tmp_path, {}), model).release()
    main, other = ResultStore(tmp_path, {}), ResultStore(None, {})
    main.share(lambda value: sent.append(value) or value)
    other.share(lambda value: sent.pop(0))
    assert other.recovered == main.recovered
    for name, value in values(model).items():
        name = name if name in main.parameters else LAYER
        assert torch.equal(other.loader(name)(), value), name
    (layer,) = store_layers(model)
    assert not variant_of(model, other).pruned_weight(layer).any()


@pytest.mark.parametrize("failing", [LAYER, MATRIX, OUTSIDE])
def test_a_failed_commit_restores_every_parameter(failing, monkeypatch):
    model = make("llama")
    before, store = state(model), filled(ResultStore(None, {}), model)

    def fail(name):
        if name == failing:
            raise KeyboardInterrupt
        return original(name)

    original = store.loader
    monkeypatch.setattr(store, "loader", fail)
    with pytest.raises(KeyboardInterrupt):
        variant_of(model, store).commit()
    assert same(model, before)


def test_applied_results_leave_the_dense_model():
    model = make("llama")
    before, store = state(model), filled(ResultStore(None, {}), model)
    with variant_of(model, store).applied():
        assert_committed(model, before)
    assert same(model, before)


def test_offloaded_models_load_the_parameters_of_the_results(tmp_path):
    dense = make("llama")
    before = state(dense)
    dense.save_pretrained(tmp_path / "dense")
    model = offloaded(tmp_path / "dense").model
    store = filled(ResultStore(tmp_path / "run", {}), dense)
    with variant_of(model, store).applied():
        assert_onloaded(model, {**before, **values(dense)})
    assert_onloaded(model, before)
    variant_of(model, store).commit()
    store.discard()
    assert_onloaded(model, {**before, **values(dense)})


def assert_onloaded(model, expected):
    for block in visited(model):
        assert isinstance(block.weights, Offloaded)
        with block.onloaded():
            for name, parameter in block.module.named_parameters(prefix=block.name):
                assert torch.equal(parameter, expected[name]), name
