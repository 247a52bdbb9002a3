"""Block-by-block statistics against the slow truth: one full autograd pass per sample, one hook per layer."""

import pytest
import torch
from models import CAUSAL, image_batches, make, token_batches
from transformers.pytorch_utils import Conv1D

from optimum_moonshot.layers import find_structure
from optimum_moonshot.passes import ChainPasses, WholePasses, frozen, is_chain
from optimum_moonshot.statistics import Collector
from optimum_moonshot.storage import Storage

CHAINS = [*CAUSAL, "vit"]


def is_conv1d(layer):
    return isinstance(layer.modules[0], Conv1D)


def slow_statistics(model, layers, batches):
    """Σ x xᵀ over real tokens, and autograd's own weight gradient of each sample's loss."""
    grams = {layer.name: torch.zeros(layer.shape[1], layer.shape[1]) for layer in layers}
    gradients = {layer.name: [] for layer in layers}
    for batch in batches:
        for n in range(len(next(iter(batch.values())))):
            single = {name: tensor[n : n + 1] for name, tensor in batch.items()}
            keep = None
            if "attention_mask" in single:
                keep = single["attention_mask"][0].bool()
            handles = []
            for layer in layers:

                def observe(_, args, output, name=layer.name, keep=keep):
                    x = args[0].detach().reshape(-1, args[0].shape[-1])
                    x = x if keep is None else x[keep]
                    grams[name] += x.T @ x

                handles.append(layer.modules[0].register_forward_hook(observe))
            model.zero_grad()
            if "labels" in single:
                logits = model(pixel_values=single["pixel_values"]).logits
                loss = torch.nn.functional.cross_entropy(logits, single["labels"])
            else:
                logits = model(**single).logits[0]
                ids = single["input_ids"][0]
                real = torch.ones_like(ids, dtype=torch.bool) if keep is None else keep
                loss = torch.nn.functional.cross_entropy(logits[:-1][real[1:]], ids[1:][real[1:]])
            loss.backward()
            for layer in layers:
                gradient = layer.parameter.grad
                gradients[layer.name].append((gradient.T if is_conv1d(layer) else gradient).clone())
            for handle in handles:
                handle.remove()
    model.zero_grad()
    return grams, {name: torch.stack(found) for name, found in gradients.items()}


def gather(model, batches, gradients=True, diagonal=False, whole=False):
    structure = find_structure(model)
    samples = sum(len(next(iter(batch.values()))) for batch in batches)
    storage = Storage(torch.device("cpu"))
    found = {}
    with frozen(model):
        if whole:
            visits = WholePasses(model, batches, gradients, None).visits(tuple(structure.layers()))
        else:
            visits = ChainPasses(model, structure.blocks, batches, gradients, None, storage).visits()
        for visit in visits:
            wanted = {layer.name for layer in visit.layers} if gradients else set()
            with Collector(list(visit.layers), diagonal, wanted, samples, storage) as collector:
                visit.run(collector, True)
            for layer in visit.layers:
                found[layer.name] = collector.take(layer)
    return structure, found


def close(found, expected):
    return (found - expected).norm() <= 2e-4 * expected.norm() + 1e-9


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", CHAINS)
def test_chain_gives_the_statistics_of_the_whole_model(name, padded):
    model = make(name)
    batches = image_batches() if name == "vit" else token_batches(padded=padded)
    structure, found = gather(model, batches)
    grams, gradients = slow_statistics(model, list(structure.layers()), batches)
    for layer in structure.layers():
        assert close(found[layer.name].inputs, grams[layer.name]), layer.name
        assert close(found[layer.name].gradients, gradients[layer.name]), layer.name


@pytest.mark.parametrize("name", ["llama", "gpt2", "vit"])
def test_lambda_one_gives_the_same_gram_matrices_without_gradients(name):
    model = make(name)
    batches = image_batches() if name == "vit" else token_batches(padded=True)
    _, found = gather(model, batches, gradients=False)
    _, with_gradients = gather(model, batches)
    for layer, statistics in found.items():
        assert statistics.gradients is None
        assert close(statistics.inputs, with_gradients[layer].inputs)


@pytest.mark.parametrize("whole", [False, True])
def test_diagonal_statistics_are_the_squares(whole):
    model, batches = make("llama"), token_batches(padded=True)
    _, full = gather(model, batches)
    _, diagonal = gather(model, batches, diagonal=True, whole=whole)
    for layer, statistics in diagonal.items():
        assert close(statistics.inputs, full[layer].inputs.diagonal())
        assert close(statistics.gradients, full[layer].gradients.square().sum(0))


@pytest.mark.parametrize("name", CHAINS)
def test_chains_are_recognised(name):
    model = make(name)
    batch = image_batches()[0] if name == "vit" else token_batches()[0]
    with frozen(model):
        assert is_chain(model, find_structure(model).blocks, batch, True, None)


def test_a_side_path_around_a_block_is_no_chain():
    model = make("llama")
    layers = model.model.layers
    skipped = {}
    layers[0].register_forward_hook(lambda _, args, output: skipped.update(hidden=output))

    def add_side_path(_, args, kwargs):
        return (args[0] + 0 * args[0], *args[1:]), kwargs

    handle = layers[2].register_forward_pre_hook(add_side_path, with_kwargs=True)
    with frozen(model):
        assert not is_chain(model, find_structure(model).blocks, token_batches()[0], True, None)
    handle.remove()

    class Tail(torch.nn.Module):
        def __init__(self, norm):
            super().__init__()
            self.norm = norm

        def forward(self, hidden):
            return self.norm(hidden + 3 * skipped["hidden"])

    model.model.norm = Tail(model.model.norm)
    with frozen(model):
        assert not is_chain(model, find_structure(model).blocks, token_batches()[0], True, None)
        assert is_chain(model, find_structure(model).blocks, token_batches()[0], False, None)
