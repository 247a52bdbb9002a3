"""Statistics of a walk over blocks against a slow reference: one autograd pass per sample, one hook per layer."""

from functools import partial
from itertools import cycle

import pytest
import torch
from blockwise_statistics import CHAINS, CONVOLUTIONAL, batches_for, close, slow_statistics
from models import image_batches, make, token_batches

from optimum_moonshot.calibration.observer import Observer
from optimum_moonshot.calibration.storage import Storage
from optimum_moonshot.data.batches import shorten, split_batches
from optimum_moonshot.model import layer_kinds
from optimum_moonshot.model.calls import frozen
from optimum_moonshot.model.layers import find_structure
from optimum_moonshot.pipeline.block_sequences import find_sequence
from optimum_moonshot.pipeline.walk import OpenStage, Walk, observe_model


def gather(model, batches, gradients=True, diagonal=False, whole=False, captures_all=False, cut_to=()):
    """With `captures_all`, a pass of the whole model captures the arguments of the blocks.

    After each stage, the walk continues with batches of another size of `cut_to`.
    """
    structure = find_structure(model, ignore=("experts",) if type(model).__name__.startswith("Mixtral") else ())
    samples = sum(len(next(iter(batch.values()))) for batch in batches)
    storage = Storage(torch.device("cpu"))
    statistics, sizes = {}, cycle(cut_to)
    with frozen(model):
        if whole:
            run = partial(observe_model, model, structure.blocks, batches, gradients=gradients, loss=None)
            stages = [OpenStage(tuple(structure.layers()), run)]
        else:
            sequence = find_sequence(model, structure.blocks, shorten(batches[0]), gradients, None)
            assert sequence.extras is not None
            extras = None if captures_all else sequence.extras
            walk = Walk(model, structure.blocks, batches, gradients, None, storage, extras)
            stages = walk.capture()
        for stage in stages:
            differentiated = {layer.name for layer in stage.layers} if gradients else set()
            with Observer(list(stage.layers), diagonal, differentiated, samples, storage) as observer:
                stage.observe(observer, True)
            for layer in stage.layers:
                statistics[layer.name] = observer.take(layer)
            if cut_to:
                assert stage.recut(split_batches(batches, next(sizes)))
    return structure, statistics


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", CHAINS)
def test_sequential_blocks_have_the_statistics_of_the_whole_model(name, padded):
    model = make(name)
    batches = batches_for(name, padded=padded)
    structure, statistics = gather(model, batches)
    grams, gradients = slow_statistics(model, list(structure.layers()), batches)
    for layer in structure.layers():
        assert close(statistics[layer.name].inputs, grams[layer.name]), layer.name
        assert close(statistics[layer.name].gradients.gradients, gradients[layer.name]), layer.name


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("name", CHAINS)
def test_batches_of_another_size_give_the_same_statistics(name, gradients):
    """Cached inputs and output gradients are cut between the blocks, in padded batches too."""
    model, batches = make(name), batches_for(name, padded=True)
    first, *rest = batches
    batches = [shorten(first, samples=2, tokens=8), *rest] if set(first) <= {"input_ids", "attention_mask"} else batches
    _, expected = gather(model, batches, gradients)
    _, statistics = gather(model, batches, gradients, cut_to=(1, 2, 1))
    for name, of_layer in expected.items():
        assert close(statistics[name].inputs, of_layer.inputs), name
        assert not gradients or close(statistics[name].gradients.gradients, of_layer.gradients.gradients), name


def test_inputs_without_a_row_for_every_sample_are_not_cut():
    model, batches = make("llama"), batches_for("llama")
    blocks = find_structure(model).blocks
    with frozen(model):
        extras = find_sequence(model, blocks, shorten(batches[0]), False, None).extras
        walk = Walk(model, blocks, batches, False, None, Storage(torch.device("cpu")), extras)
        walk.capture()
        calls = walk.calls
        for call in calls[0]:
            call.hidden = call.hidden.transpose(0, 1)
        assert not walk.recut(split_batches(batches, 1)) and walk.calls is calls and walk.batches is batches


@pytest.mark.parametrize("name", CONVOLUTIONAL)
def test_convolutions_have_the_statistics_of_their_patches(name, monkeypatch):
    model, batches = make(name), image_batches()
    structure, statistics = gather(model, batches, whole=True)
    layers = list(structure.layers())
    grams, gradients = slow_statistics(model, layers, batches)
    assert any(layer.groups > 1 for layer in layers) == (name in ("convnext", "convnet"))
    for layer in layers:
        assert close(statistics[layer.name].inputs, grams[layer.name]), layer.name
        assert close(statistics[layer.name].gradients.gradients, gradients[layer.name]), layer.name
    for limit in (1, 2 * 4 * 8 * 9 * 40):  # one output row at a time, and a few
        monkeypatch.setattr(layer_kinds, "STRIP_BYTES", limit)
        _, sliced = gather(model, batches, whole=True)
        _, squares = gather(model, batches, whole=True, diagonal=True)
        for layer in layers:
            assert close(sliced[layer.name].inputs, grams[layer.name])
            assert close(sliced[layer.name].gradients.gradients, gradients[layer.name])
            assert close(squares[layer.name].inputs, grams[layer.name].diagonal(dim1=-2, dim2=-1))
            assert close(squares[layer.name].gradients, gradients[layer.name].square().sum(0))


@pytest.mark.parametrize("name", CONVOLUTIONAL)
def test_convolutional_stages_are_not_sequential(name):
    model = make(name)
    blocks = find_structure(model).blocks
    with frozen(model):
        assert not blocks or not find_sequence(model, blocks, image_batches()[0], True, None)


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("name", CHAINS)
def test_a_capture_without_computing_blocks_gives_the_same_bits_as_one_of_the_whole_model(name, gradients):
    model, batches = make(name), batches_for(name, padded=True)
    _, statistics = gather(model, batches, gradients)
    _, expected = gather(model, batches, gradients, captures_all=True)
    assert statistics and statistics.keys() == expected.keys()
    for layer, other in expected.items():
        assert torch.equal(statistics[layer].inputs, other.inputs), layer
        assert not gradients or torch.equal(statistics[layer].gradients.gradients, other.gradients.gradients), layer


@pytest.mark.parametrize("name", ["llama", "gpt2", "vit"])
def test_lambda_one_gives_the_same_gram_matrices_without_gradients(name):
    model = make(name)
    batches = batches_for(name, padded=True)
    _, without_gradients = gather(model, batches, gradients=False)
    _, with_gradients = gather(model, batches)
    for layer, statistics in without_gradients.items():
        assert statistics.gradients is None
        assert close(statistics.inputs, with_gradients[layer].inputs)


@pytest.mark.parametrize("whole", [False, True])
def test_diagonal_statistics_are_the_squares(whole):
    model, batches = make("llama"), token_batches(padded=True)
    _, full = gather(model, batches)
    _, diagonal = gather(model, batches, diagonal=True, whole=whole)
    for layer, statistics in diagonal.items():
        assert close(statistics.inputs, full[layer].inputs.diagonal())
        assert close(statistics.gradients, full[layer].gradients.gradients.square().sum(0))


@pytest.mark.parametrize("name", CHAINS)
def test_sequential_blocks_are_recognised(name):
    model = make(name)
    batch = batches_for(name)[0]
    with frozen(model):
        assert find_sequence(model, find_structure(model).blocks, batch, True, None)


def test_blocks_with_a_side_path_are_not_sequential():
    model = make("llama")
    layers = model.model.layers
    skipped = {}
    layers[0].register_forward_hook(lambda _, args, output: skipped.update(hidden=output))

    def add_side_path(_, args, kwargs):
        return (args[0] + 0 * args[0], *args[1:]), kwargs

    handle = layers[2].register_forward_pre_hook(add_side_path, with_kwargs=True)
    with frozen(model):
        assert not find_sequence(model, find_structure(model).blocks, token_batches()[0], True, None)
    handle.remove()

    class Tail(torch.nn.Module):
        def __init__(self, norm):
            super().__init__()
            self.norm = norm

        def forward(self, hidden):
            return self.norm(hidden + 3 * skipped["hidden"])

    model.model.norm = Tail(model.model.norm)
    with frozen(model):
        assert not find_sequence(model, find_structure(model).blocks, token_batches()[0], True, None)
        assert find_sequence(model, find_structure(model).blocks, token_batches()[0], False, None)
