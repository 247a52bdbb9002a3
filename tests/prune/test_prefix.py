"""Statistics behind pruned blocks, with the token weights of the dense model."""

import copy
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from blockwise_statistics import batches_for, close, rows_of, sample_loss
from llama_runs import assert_same, config, prune, weights
from models import make, token_batches

from optimum_moonshot import MoonshotConfig, MoonshotPruner
from optimum_moonshot.calibration.accumulators import GradientPlan, TokenWeights
from optimum_moonshot.calibration.observer import Observer
from optimum_moonshot.calibration.storage import Storage
from optimum_moonshot.model.layers import find_structure
from optimum_moonshot.prune import layers as prune_layers

NOTE = "token weights of the Fisher term from the dense model"


def statistics_of_a_run(model, batches, monkeypatch, **changes):
    """The statistics with which a run solves each layer, by its name."""
    seen, original = {}, prune_layers.prune_layer

    def record(layer, statistics, variants):
        fisher = statistics.gradients
        seen[layer.name] = SimpleNamespace(
            gram=statistics.inputs.clone(),
            fisher=None if fisher is None else fisher.shared[0].clone(),
            squares=None if fisher is None or fisher.squares is None else fisher.squares.clone(),
        )
        original(layer, statistics, variants)

    monkeypatch.setattr(prune_layers, "prune_layer", record)
    return seen, prune(model, batches, **changes)


def single_samples(batches):
    for batch in batches:
        for n in range(len(batch["input_ids"])):
            single = {name: tensor[n : n + 1] for name, tensor in batch.items()}
            yield single, single["attention_mask"][0].bool() if "attention_mask" in single else None


def output_gradients(model, layers, batches):
    """δ [tokens, d_out] of the dense model for every layer and sample, without padding."""
    rows = {layer.name: [] for layer in layers}
    for single, keep in single_samples(batches):
        outputs, handles = {}, []
        for layer in layers:

            def hook(module, args, output, name=layer.name, outputs=outputs):
                output.retain_grad()
                outputs[name] = output

            handles.append(layer.modules[0].register_forward_hook(hook))
        sample_loss(model, single, keep).backward()
        for name, output in outputs.items():
            delta = output.grad.reshape(-1, output.shape[-1])
            rows[name].append(delta if keep is None else delta[keep])
        for handle in handles:
            handle.remove()
    model.zero_grad()
    return rows


def inputs_of(model, layers, batches):
    rows = {layer.name: [] for layer in layers}
    for single, keep in single_samples(batches):
        handles = []
        for layer in layers:

            def hook(module, args, output, name=layer.name, keep=keep):
                rows[name].append(rows_of(module, args[0].detach(), keep)[0])

            handles.append(layer.modules[0].register_forward_hook(hook))
        with torch.no_grad():
            model(**single)
        for handle in handles:
            handle.remove()
    return rows


@pytest.mark.parametrize("some", [False, True])
@pytest.mark.parametrize("pattern", ["2:4", "unstructured"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "opt"])
def test_statistics_are_dense_token_weights_times_inputs_of_the_pruned_prefix(name, pattern, some, monkeypatch):
    """The token weights are those of all of a few samples, or of some of more."""
    model, batches = make(name), batches_for(name, padded=True)
    samples = sum(len(batch["input_ids"]) for batch in batches)
    weighted = set(range(samples))
    if some:
        monkeypatch.setattr(prune_layers, "LEAST", samples // 2)
        weighted = {index * samples // (samples // 2) for index in range(samples // 2)}
        assert 0 < len(weighted) < samples
    dense, reference = copy.deepcopy(model), copy.deepcopy(model)
    sparsity = {"sparsity": 0.5} if pattern == "unstructured" else {}
    seen, pruner = statistics_of_a_run(model, batches, monkeypatch, pattern=pattern, **sparsity)
    assert (f"{NOTE}, on {len(weighted)} of {samples} samples" if some else NOTE) in pruner.report.notes
    structure, pruned = find_structure(reference), {layer.name: layer for layer in find_structure(model).layers()}
    deltas = output_gradients(dense, list(find_structure(dense).layers()), batches)
    for block in structure.blocks:
        inputs = inputs_of(reference, block.layers, batches)
        for layer in block.layers:
            pairs = list(zip(inputs[layer.name], deltas[layer.name], strict=True))
            gram = sum(x.mT @ x for x, _ in pairs)
            pairs = [pair for index, pair in enumerate(pairs) if index in weighted]
            fisher = sum((x * delta.square().mean(1, keepdim=True)).mT @ x for x, delta in pairs)
            statistics = seen[layer.name]
            assert close(statistics.gram, gram) and close(statistics.fisher, fisher), layer.name
            of_rows = sum(delta.square().sum(0) for _, delta in pairs)
            expected = torch.outer(of_rows / of_rows.mean(), fisher.diagonal())
            assert (statistics.squares is None) == (pattern == "2:4")
            assert statistics.squares is None or close(statistics.squares, expected), layer.name
        for layer in block.layers:
            layer.assign(pruned[layer.name].matrix)


def test_the_first_block_has_no_prefix():
    """Its masks are those of the dense model's statistics; those of later blocks differ."""
    ahead, dense = make("llama"), make("llama")
    prune(ahead)
    prune(dense, recompute=False)
    for name, tensor in ahead.state_dict().items():
        if ".layers.0." in name:
            torch.testing.assert_close(tensor, dense.state_dict()[name], rtol=1e-4, atol=1e-5)
    name = "model.layers.2.mlp.up_proj.weight"
    assert not torch.allclose(ahead.state_dict()[name], dense.state_dict()[name], atol=1e-3)


@pytest.mark.parametrize(
    ("name", "settings", "recompute"),
    [
        ("llama", {"lam": 1.0}, True),
        ("llama", {}, True),
        ("mixtral", {"lam": 1.0}, True),
        ("llama", {"fisher": "rows"}, False),
        ("llama", {"solver": "wanda"}, False),
        ("llama", {"solver": "osscar", "pattern": "structured", "sparsity": 0.25}, False),
        ("llama", {"targets": ["layers", "lm_head"]}, False),
        ("mixtral", {}, False),
        ("albert", {"lam": 1.0}, False),
    ],
)
def test_the_default_recomputes_where_it_takes_one_more_pass(name, settings, recompute):
    default, explicit = make(name), make(name)
    prune(default, **settings)
    prune(explicit, **settings, recompute=recompute)
    assert_same(default, weights(explicit))


def test_a_fisher_term_that_rows_share_takes_one_backward_pass(monkeypatch):
    calls, backward = [], torch.autograd.backward
    monkeypatch.setattr(torch.autograd, "backward", lambda *args, **kwargs: calls.append(backward(*args, **kwargs)))
    prune(make("llama"), recompute=True, batch_size=2)
    blocks, batches = 3, 3
    assert len(calls) <= blocks * batches + 2  # and the probes'


def test_a_layer_whose_tokens_are_routed_has_the_statistics_of_the_dense_model():
    """A linear layer that reads only some tokens could read others behind pruned blocks."""

    def routed():
        model = make("llama")
        for block in model.model.layers:
            block.mlp.forward = partial(in_halves, block.mlp)
        return model

    def in_halves(mlp, x):
        hidden = mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x)
        return torch.cat([mlp.down_proj(hidden[:, :5]), mlp.down_proj(hidden[:, 5:])], 1)

    default, dense = routed(), routed()
    report = prune(default).report
    prune(dense, recompute=False)
    assert NOTE not in report.notes
    assert_same(default, weights(dense))


def test_smaller_batches_in_the_second_walk_have_the_same_weights(monkeypatch):
    """Weights are stored by sample: a batch that memory halves finds them."""
    layer = next(find_structure(make("llama")).layers())
    weights_of = TokenWeights(layer, 4, Storage(torch.device("cpu")))
    delta = torch.randn(4, 1, 5, layer.shape[0])
    for first, count in ((0, 3), (3, 1)):
        weights_of.begin(first, count)
        weights_of.add(torch.zeros(count, 1, 5, 1), delta[first : first + count], True, slice(None))
    expected = delta[:, 0].square().mean(-1).sqrt()
    for first, count in ((0, 4), (1, 2), (3, 1)):
        torch.testing.assert_close(weights_of.of_batch(first, count), expected[first : first + count])
    del weights_of.roots[1]
    torch.testing.assert_close(weights_of.of_batch(0, 3), expected[:3] * torch.tensor([[1.0], [0], [1]]))
    assert weights_of.of_batch(1, 1) is None
    assert weights_of.row_shares.mean().item() == pytest.approx(1)


def test_dead_gradients_leave_equal_row_shares():
    layer = next(find_structure(make("llama")).layers())
    dead = TokenWeights(layer, 1, Storage(torch.device("cpu")))
    dead.begin(0, 1)
    dead.add(torch.zeros(1, 1, 3, 1), torch.zeros(1, 1, 3, layer.shape[0]), True, slice(None))
    assert torch.equal(dead.row_shares, torch.ones(layer.shape[0]))
    assert not dead.roots[0].any()


def test_weights_in_place_of_gradients_give_the_same_matrix_on_the_same_inputs():
    """On the dense model itself, the stored weights give the Fisher matrix of the backward pass."""
    model, (batch, *_) = make("llama"), token_batches(padded=True)
    layers, storage = list(find_structure(model).blocks[0].layers), Storage(torch.device("cpu"))
    names, count = {layer.name for layer in layers}, len(batch["input_ids"])

    def observe(plans, extra=(), backward=True):
        with Observer(layers, False, names, count, storage, plans, extra=extra) as observer:
            observer.begin(0, count, batch["attention_mask"].bool())
            with torch.set_grad_enabled(backward):
                output = model(**batch).logits.float().square().mean()
            if backward:
                output.backward()
            observer.end()
            return {layer.name: observer.take(layer) for layer in layers}

    direct = observe(dict.fromkeys(names, GradientPlan(shared=True)))
    statistics = observe(dict.fromkeys(names, GradientPlan(nothing=True)), (TokenWeights,))
    stored = {name: GradientPlan(shared=True, weights=statistics[name].extra[TokenWeights]) for name in names}
    indirect = observe(stored, backward=False)
    for name in names:
        assert close(indirect[name].gradients.shared, direct[name].gradients.shared), name


def test_a_sweep_has_the_statistics_of_the_dense_model():
    swept, dense = MoonshotPruner(make("llama"), config()), make("llama")
    (entry,) = swept.sweep(token_batches(), lambdas=[0.9], progress=False).entries
    prune(dense, recompute=False)
    with swept.applied(entry) as model:
        assert_same(model, weights(dense))


def test_the_default_is_stored_and_read():
    assert MoonshotConfig.from_dict(config().to_dict()).recompute is None
    assert MoonshotConfig.from_dict(config(recompute=False).to_dict()).recompute is False
