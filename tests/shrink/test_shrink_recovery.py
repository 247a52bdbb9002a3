"""Recovery of a model that became smaller: towards the dense model, in the coordinates of the smaller hidden size."""

import dataclasses

import pytest
import torch
from marks import slow
from models import make, token_batches
from recovery_runs import interrupt, same, state, without_seconds
from test_shrink import BATCHES, CONFIG, low_rank, shrunk

from optimum_moonshot import MoonshotPruner
from optimum_moonshot.model.depth import skipping
from optimum_moonshot.model.layers import find_blocks
from optimum_moonshot.recover.run import TrainingBytes
from optimum_moonshot.recover.tuning import Tuner
from optimum_moonshot.shrink import trials

BLOCKWISE = dataclasses.replace(CONFIG, recover="blockwise", recover_steps=8, recover_lr=0.01)
NARROWED = "recovery trained all parameters of the blocks that lost directions of the residual stream"
NEURONS = ["q_proj", "o_proj", "down_proj"]  # targets without all layers: the hidden size stays


def first_error(dense, small, inputs, removed=()):
    """The relative error of the first remaining block towards the dense one in the smaller coordinates."""
    basis = torch.linalg.lstsq(dense.get_input_embeddings().weight, small.get_input_embeddings().weight).solution
    blocks = [module for _, module in find_blocks(dense)]
    place = next(index for index in range(len(blocks)) if index not in removed)
    with torch.no_grad(), skipping(blocks[index] for index in removed):
        target = dense(**inputs, output_hidden_states=True).hidden_states[place + 1] @ basis
        output = small(**inputs, output_hidden_states=True).hidden_states[1]
    return ((output - target).square().sum(-1) / target.square().sum(-1)).mean().item()


def held_out(batches, count):
    """The last samples."""
    keys = batches[0].keys()
    return {key: torch.cat([batch[key] for batch in batches])[-count:] for key in keys}


@pytest.fixture
def deleted(monkeypatch):
    """Blocks are deleted, not merged into those before them."""
    monkeypatch.setattr(trials, "find_output_layers", lambda *_: {})


def test_a_distillation_reproduces_the_dense_model_not_the_smaller_one(deleted, monkeypatch):
    """Where the hidden size alone leaves, the model without it would be its own teacher, at a divergence of 0."""
    monkeypatch.setattr("optimum_moonshot.shrink.measurements.find_widths", lambda *_: ([], {}))
    monkeypatch.setattr("optimum_moonshot.shrink.decision.MOST_BLOCKS", 0.0)
    config = dataclasses.replace(CONFIG, recover="distill", recover_steps=4)
    model = make("llama")
    pruner, report = shrunk(model=model, config=config, parameters=0.8)
    (distilled,) = pruner.report.recovery
    assert report.hidden_size == (16, 12) and report.chosen.allowed == ("hidden size",)
    assert distilled.name == "model" and 0.01 < distilled.loss_before >= distilled.loss_after
    assert not model.training and pruner.model.num_parameters() == report.parameters[1]


@pytest.mark.slow
@pytest.mark.parametrize("recover", ["blockwise", slow("gradual")])
def test_all_of_every_narrowed_block_trains_towards_the_dense_block(recover):
    dense, batches = make("llama"), token_batches(64)
    before = state(dense)
    config = dataclasses.replace(BLOCKWISE, recover=recover, num_samples=64)
    plain, pruner = (MoonshotPruner(dense, each) for each in (dataclasses.replace(config, recover=None), config))
    for each in (plain, pruner):
        report = each.shrink(batches, parameters=0.5, progress=False)
    assert report.hidden_size == (16, 8) and report.chosen.allowed == ("hidden size",)
    assert same(dense, before) and not dense.training
    blocks = pruner.report.recovery
    assert [block.name for block in blocks] == [name for name, _ in find_blocks(pruner.model)]
    assert blocks[0].loss_before == pytest.approx(first_error(dense, plain.model, held_out(batches, 8)), rel=1e-4)
    assert all(block.loss_after < block.loss_before for block in blocks) and NARROWED in pruner.report.notes
    for name, tensor in state(plain.model).items():
        assert torch.equal(tensor, state(pruner.model)[name]) != name.startswith("model.layers."), name


@pytest.mark.slow
@pytest.mark.parametrize(("model", "share"), [(make("llama"), 0.36), slow(low_rank(), 0.3)])
def test_the_teacher_of_a_narrowed_model_without_blocks_is_the_dense_one_without_them(model, share, deleted):
    plain, decision = shrunk(model=model, parameters=share)
    pruner, report = shrunk(model=model, config=BLOCKWISE, parameters=share)
    assert report.hidden_size == (16, 8) and report.blocks == decision.blocks != ()
    first, _ = pruner.report.recovery
    error = first_error(model, plain.model, held_out(BATCHES, 1), report.blocks)
    assert first.loss_before == pytest.approx(error, rel=1e-3)


@pytest.mark.slow
def test_a_recovery_of_narrowed_blocks_resumes_bit_for_bit(tmp_path, monkeypatch, deleted):
    whole, _ = shrunk(config=BLOCKWISE, parameters=0.8)
    interrupt(monkeypatch, Tuner, "finish", 2)
    with pytest.raises(KeyboardInterrupt):
        shrunk(config=BLOCKWISE, parameters=0.8, resume_dir=tmp_path)
    pruner, _ = shrunk(config=BLOCKWISE, parameters=0.8, resume_dir=tmp_path)
    assert any("1 recovered blocks were reused" in note for note in pruner.report.notes)
    assert same(pruner.model, state(whole.model))
    assert without_seconds(pruner.report) == without_seconds(whole.report)


@pytest.mark.parametrize("recover", ["blockwise", "gradual"])
def test_block_wise_recovery_has_nothing_to_tune_where_blocks_alone_leave(recover):
    config = dataclasses.replace(BLOCKWISE, recover=recover, targets=NEURONS, ignore=["layers.1"])
    pruner, report = shrunk(config=config, parameters=0.8)
    assert report.blocks and not report.widths and not pruner.report.recovery
    assert any(note.startswith(f"recover='{recover}' had nothing to tune") for note in pruner.report.notes)


@pytest.mark.slow
def test_a_distillation_without_memory_recovers_narrowed_blocks(monkeypatch):
    plain, _ = shrunk(config=BLOCKWISE, parameters=0.8)
    monkeypatch.setattr(TrainingBytes, "of", lambda *_: TrainingBytes(*[2**50] * 4))
    config = dataclasses.replace(BLOCKWISE, recover="distill")
    pruner, _ = shrunk(config=config, parameters=0.8)
    assert any("recovered block by block instead of distilled" in note for note in pruner.report.notes)
    assert same(pruner.model, state(plain.model))


def test_a_distillation_without_memory_has_nothing_to_tune_where_blocks_alone_leave(monkeypatch, deleted):
    config = dataclasses.replace(BLOCKWISE, targets=NEURONS, ignore=["layers.1"], recover="distill")
    plain, report = shrunk(config=dataclasses.replace(config, recover=None), parameters=0.8)
    monkeypatch.setattr(TrainingBytes, "of", lambda *_: TrainingBytes(*[2**50] * 4))
    pruner, _ = shrunk(config=config, parameters=0.8)
    assert report.blocks and same(pruner.model, state(plain.model))
    for block in pruner.report.recovery:
        assert (block.loss_before, block.loss_after, block.steps) == (0, 0, 0)
        assert block.notes == ("nothing to tune: it equals the dense block",)
