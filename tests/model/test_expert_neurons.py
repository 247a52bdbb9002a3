"""Neurons of fused experts: chosen for every expert by its own tokens, and removed from all fused tensors."""

import itertools
import json
import os
import subprocess
import sys

import pytest
import torch
import transformers as hf
from expert_removal import settled
from models import token_batches
from removed_experts import logits
from tiny_mixtures import FAMILIES, experts, family

from optimum_moonshot import MoonshotConfig, MoonshotPruner, compact_model
from optimum_moonshot.model.calls import frozen
from optimum_moonshot.model.layers import find_structure
from optimum_moonshot.model.structured_groups import find_structured_groups

BATCHES = token_batches(8)
# Architectures in which the configuration has another name for the width of an expert, or other widths share it.
FIELDS = {"mixtral": "intermediate_size", "qwen2_moe": "moe_intermediate_size", "qwen3_moe": "moe_intermediate_size"}
FIELDS |= {"olmoe": "intermediate_size", "gpt_oss": "intermediate_size", "deepseek_v2": "moe_intermediate_size"}
LOADING = """
import sys, torch, transformers
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
inputs = torch.load(sys.argv[1] + "/inputs.pt")
with torch.no_grad():
    torch.save(model(input_ids=inputs, use_cache=False).logits, sys.argv[1] + "/logits.pt")
"""


def down_projections(model):
    return [layer for layer in experts(model) if layer.name in find_structured_groups(model)[0]]


def columns(layer):
    """The matrices of all experts, [experts, d_out, neurons]: views of the weight."""
    return layer.matrix.unflatten(0, (layer.matrices, -1))


def pruned(model, sparsity=1 / 3, **options):
    config = {"solver": "osscar", "num_samples": 8, "lam": 1.0, "targets": [r"experts\.down_proj"], **options}
    pruner = MoonshotPruner(model, MoonshotConfig(pattern="structured", sparsity=sparsity, **config))
    pruner.prune(BATCHES, progress=False)
    return pruner


def computed_alone(path):
    """The logits of a saved model in a process without this package."""
    torch.save(BATCHES[0]["input_ids"], path / "inputs.pt")
    environment = {**os.environ, "PYTHONPATH": ""}
    subprocess.run([sys.executable, "-c", LOADING, str(path)], check=True, capture_output=True, env=environment)
    return torch.load(path / "logits.pt")


@pytest.mark.parametrize("name", FAMILIES)
def test_the_neurons_of_experts_are_found_in_every_layout(name):
    """A family's gated experts read every neuron from two rows."""
    model = family(name).float()
    groups = find_structured_groups(model)[0]
    layers = {layer.name: layer for layer in find_structure(model).layers()}
    neurons = [groups[layer.name] for layer in experts(model) if layer.name in groups]
    assert neurons
    for reader in neurons:
        assert (reader.size, reader.count) == (1, layers[reader.name].shape[1])
        for maker, served in reader.rows.items():
            gated = len(served) // reader.count
            assert sorted(served.tolist()) == sorted([*range(reader.count)] * gated) or (served < 0).all(), maker


@pytest.mark.parametrize("name", FIELDS)
def test_the_smaller_model_computes_what_the_masked_dense_model_does(name, tmp_path):
    model = settled(family(name).float())
    width = getattr(model.config, FIELDS[name])
    pruner = pruned(model)
    for layer in down_projections(model):
        dead = (columns(layer) == 0).all(1)
        assert (dead.sum(1) == width // 3).all()
        assert len({tuple(of_expert.tolist()) for of_expert in dead}) > 1  # experts lose different neurons
    masked, small = logits(model, BATCHES[0]), pruner.compact()
    assert small.config == {FIELDS[name]: (width, width - width // 3)} and not small.zeros
    assert type(pruner.model) is type(model)
    torch.testing.assert_close(logits(pruner.model, BATCHES[0]), masked, rtol=1e-4, atol=1e-5)
    pruner.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())[FIELDS[name]] == width - width // 3
    loaded = hf.AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(logits(loaded, BATCHES[0]), masked, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_a_process_without_this_package_loads_the_smaller_model(name, tmp_path):
    pruner = pruned(settled(family(name).float()))
    masked = logits(pruner.model, BATCHES[0])
    pruner.compact()
    pruner.save_pretrained(tmp_path)
    torch.testing.assert_close(computed_alone(tmp_path), masked, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("solver", ["osscar", "wanda", "magnitude"])
def test_neurons_whose_outputs_nothing_reads_are_removed_without_a_loss(solver):
    model = settled(family("qwen3_moe").float())
    generator, dead = torch.Generator().manual_seed(0), {}
    for layer in down_projections(model):
        matrices = columns(layer)
        dead[layer.name] = torch.stack([torch.randperm(48, generator=generator)[:16] for _ in matrices])
        for matrix, neurons in zip(matrices, dead[layer.name], strict=True):
            matrix[:, neurons] = 0
    before = logits(model, BATCHES[0])
    pruner = pruned(model, solver=solver)
    for layer in down_projections(model):
        zeros = [of_expert.nonzero().flatten().tolist() for of_expert in (columns(layer) == 0).all(1)]
        assert zeros == dead[layer.name].sort().values.tolist()
    assert all(layer.loss == pytest.approx(0, abs=1e-9) for layer in pruner.report.layers)
    assert torch.equal(logits(model, BATCHES[0]), before)
    pruner.compact()
    torch.testing.assert_close(logits(pruner.model, BATCHES[0]), before, rtol=1e-4, atol=1e-5)


def test_every_expert_loses_the_neuron_whose_refitted_loss_is_least():
    """Brute force over all neurons of an expert, by least squares on its tokens, weighed by their gates."""
    model = settled(hf.Qwen3MoeForCausalLM(tiny(moe_intermediate_size=4, num_experts=2)).eval())
    layer = down_projections(model)[0]
    inputs, weights = inputs_of_experts(model, layer), columns(layer).clone()
    pruned(model, 0.25, under_calibrated_experts="routed", damping=1e-9)
    for weight, x, result in zip(weights, inputs, columns(layer), strict=True):
        losses = {}
        for keep in itertools.combinations(range(4), 3):
            refitted = torch.linalg.lstsq(x[:, keep], x @ weight.double().T).solution
            losses[keep] = (float((x[:, keep] @ refitted - x @ weight.double().T).square().sum()), refitted.T)
        best = min(losses, key=lambda keep: losses[keep][0])
        assert (result != 0).any(0).nonzero().flatten().tolist() == list(best)
        torch.testing.assert_close(result[:, best], losses[best][1].float(), rtol=1e-3, atol=1e-4)


def tiny(**changes):
    sizes = dict(vocab_size=96, hidden_size=16, intermediate_size=24, num_hidden_layers=1, max_position_embeddings=64)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=4, num_experts_per_tok=1)
    return hf.Qwen3MoeConfig(**{**sizes, **heads, **changes}, experts_implementation="eager")


def inputs_of_experts(model, layer):
    """The intermediate activations of every expert for its tokens, times their gates, [tokens, neurons], literally."""
    seen, module = [[] for _ in range(layer.matrices)], layer.module

    def record(_, args):
        hidden, index, weights = args
        for expert, rows in enumerate(seen):
            chosen = index == expert
            gate, up = (hidden[chosen.any(1)] @ module.gate_up_proj[expert].T).chunk(2, -1)
            rows.append(torch.nn.functional.silu(gate) * up * weights[chosen][:, None])

    handle = module.register_forward_pre_hook(record)
    with frozen(model), torch.no_grad():
        for batch in BATCHES:
            model(input_ids=batch["input_ids"])
    handle.remove()
    return [torch.cat(rows).double() for rows in seen]


@pytest.mark.parametrize("few", ["all", "magnitude", "routed"])
def test_experts_with_few_tokens_lose_as_many_neurons(few):
    model = settled(family("mixtral").float())
    pruned(model, num_samples=2, under_calibrated_experts=few)
    for layer in down_projections(model):
        assert ((columns(layer) == 0).all(1).sum(1) == 16).all() and columns(layer).isfinite().all()


def test_the_fisher_loss_chooses_and_refits_neurons_too():
    model, other = (settled(family("mixtral").float()) for _ in range(2))
    pruned(model)
    pruned(other, lam=0.1)
    for layer, changed in zip(down_projections(model), down_projections(other), strict=True):
        assert ((columns(changed) == 0).all(1).sum(1) == 16).all()
        assert not torch.equal(layer.matrix, changed.matrix)


def test_experts_keep_a_multiple_of_eight_neurons():
    """torch's grouped product, by which transformers multiplies experts, refuses others."""
    model = settled(family("mixtral").float())
    pruner = pruned(model, 13 / 48)
    masked = logits(model, BATCHES[0])
    done = pruner.compact()
    assert done.config == {"intermediate_size": (48, 40)}
    (reason,) = done.zeros.values()
    assert reason.startswith("5 of 48 neurons or heads remain as zeros: a multiple of 8 neurons remains in an expert")
    torch.testing.assert_close(logits(pruner.model, BATCHES[0]), masked, rtol=1e-4, atol=1e-5)


def test_an_expert_with_fewer_dead_neurons_decides_how_many_leave():
    model = settled(family("mixtral").float())
    for layer in down_projections(model):
        for matrix, count in zip(columns(layer), (8, 17, 20, 48), strict=True):
            matrix[:, :count] = 0
    before = logits(model, BATCHES[0])
    small, done = compact_model(model)
    assert done.config == {"intermediate_size": (48, 40)} and not done.zeros
    torch.testing.assert_close(logits(small, BATCHES[0]), before, rtol=1e-4, atol=1e-5)
