"""Blocks onloaded for one step at a time give the results of resident blocks."""

import dataclasses
from contextlib import contextmanager

import pytest
import torch
from models import make, token_batches

from optimum_moonshot import MoonshotConfig, MoonshotPruner
from optimum_moonshot.model.layers import PrunableLayer, find_structure
from optimum_moonshot.model.weights import Weights
from optimum_moonshot.pipeline import model_pipeline
from optimum_moonshot.pipeline import selection as selection_module
from optimum_moonshot.pipeline.block_sequences import BlockSequence, BlockSequences


class OffloadedBlock(Weights):
    """Keeps a block's weights outside of the model, which has NaN in their place."""

    at_once, most = 0, 0

    def __init__(self, module):
        self.module, self.depth = module, 0
        self.kept = {name: parameter.data for name, parameter in module.named_parameters()}
        self._empty()

    def _empty(self):
        for name, parameter in self.module.named_parameters():
            self.kept[name] = parameter.data
            parameter.data = torch.full((), torch.nan, dtype=parameter.dtype).expand(parameter.shape)

    @contextmanager
    def onloaded(self):
        if self.depth == 0:
            OffloadedBlock.at_once += 1
            OffloadedBlock.most = max(OffloadedBlock.most, OffloadedBlock.at_once)
            for name, parameter in self.module.named_parameters():
                parameter.data = self.kept[name]
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1
            if self.depth == 0:
                OffloadedBlock.at_once -= 1
                self._empty()


@pytest.fixture
def offloaded_blocks(monkeypatch):
    """Offloads the blocks of every model; the use of an offloaded weight yields NaN."""
    sources = {}

    def find(model, *arguments):
        structure = find_structure(model, *arguments)
        for block in structure.blocks:
            if block.name not in sources:
                sources[block.name] = OffloadedBlock(block.module)
        blocks = tuple(dataclasses.replace(block, weights=sources[block.name]) for block in structure.blocks)
        return dataclasses.replace(structure, blocks=blocks)

    monkeypatch.setattr(selection_module, "find_structure", find)
    monkeypatch.setattr(OffloadedBlock, "most", 0)
    yield sources
    assert OffloadedBlock.at_once == 0


def run(**changes):
    model = make("llama")
    config = MoonshotConfig(**{"pattern": "2:4", "num_samples": 6, "sequence_length": 12, "batch_size": 2, **changes})
    report = MoonshotPruner(model, config).prune(token_batches(), progress=False)
    return model, report


CHANGES = [
    {"lam": 0.9},
    {"lam": 1.0},
    {"lam": 1.0, "recover": "blockwise", "recover_steps": 3},
    {"lam": 1.0, "recompute": True},
    {"lam": 0.5, "recompute": True},
    {"solver": "magnitude"},
    {"pattern": "unstructured", "sparsity": 0.5, "allocation": "owl"},
    {"pattern": "unstructured", "sparsity": 0.5, "allocation": "alpha"},
]


@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_the_result_equals_that_of_resident_weights(changes, request):
    expected = run(**changes)[0].state_dict()
    sources = request.getfixturevalue("offloaded_blocks")
    model, report = run(**changes)
    for block in find_structure(model).blocks:
        with sources[block.name].onloaded():
            for name, tensor in block.module.state_dict().items():
                assert torch.equal(tensor, expected[f"{block.name}.{name}"]), name
    assert report.sparsity == 0.5


def test_a_failure_while_writing_restores_the_dense_weights(offloaded_blocks, monkeypatch):
    model, calls = make("llama"), []
    original = PrunableLayer.assign

    def fail(layer, matrix):
        calls.append(layer.name)
        if len(calls) == 10:
            raise KeyboardInterrupt
        original(layer, matrix)

    monkeypatch.setattr(PrunableLayer, "assign", fail)
    config = MoonshotConfig(pattern="2:4", lam=1.0, num_samples=6, sequence_length=12, batch_size=2)
    with pytest.raises(KeyboardInterrupt):
        MoonshotPruner(model, config).prune(token_batches(), progress=False)
    dense = make("llama").state_dict()
    for block in find_structure(model).blocks:
        with offloaded_blocks[block.name].onloaded():
            for name, tensor in block.module.state_dict().items():
                assert torch.equal(tensor, dense[f"{block.name}.{name}"]), name


@pytest.mark.parametrize("captures_all", [False, True])
@pytest.mark.parametrize("lam", [0.9, 1.0])
def test_calibrating_and_solving_hold_one_block_at_a_time(lam, captures_all, offloaded_blocks, monkeypatch):
    def one_sequence(model, blocks, *arguments):  # without the probe, which needs all blocks onloaded
        return BlockSequences([BlockSequence(blocks, None if captures_all else [None] * len(blocks))], (), ())

    monkeypatch.setattr(model_pipeline, "find_block_sequences", one_sequence)
    monkeypatch.setattr(model_pipeline, "all_onloaded", lambda blocks: torch.no_grad())
    run(lam=lam)
    assert OffloadedBlock.most == 1
