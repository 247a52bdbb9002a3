"""Removal of whole experts: the smaller model equals the dense one with masked routers, in every family."""

import copy

import pytest
import reference
import torch
import transformers as hf
from expert_removal import FAMILIES, REFUSED, model_of, settled
from models import make, token_batches
from packaging import version
from removed_experts import logits, logits_without, prune, removed, settled_mixtral
from tiny_configs import tiny_config
from tiny_mixtures import family, mixtral, same
from torch.nn import functional

from optimum_moonshot import MoonshotError
from optimum_moonshot.calibration.mixture_sums import MixtureObserver
from optimum_moonshot.calibration.storage import Storage
from optimum_moonshot.checkpoint.verification import verify
from optimum_moonshot.data.batches import split_batches
from optimum_moonshot.model.calls import frozen, run_model
from optimum_moonshot.model.losses import loss_gradient
from optimum_moonshot.model.mixtures import RoutedCall, find_mixtures


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family(name, tmp_path):
    model = settled(model_of(name))
    dense, batch = copy.deepcopy(model), token_batches(seed=7)[0]
    try:
        pruner = prune(model, lam=0.5)
    except MoonshotError as refusal:
        if version.parse(hf.__version__) >= version.parse("5.10"):
            raise
        pytest.skip(f"experts of another kind in this release of transformers: {refusal}")
    assert pruner.model is model and pruner.report.skipped == {}
    experts = removed(pruner)
    assert experts and all(len(indices) == 1 for indices in experts.values())
    expected = logits_without(dense, experts, batch)
    torch.testing.assert_close(logits(model, batch), expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(expected, logits(dense, batch), rtol=1e-2, atol=1e-3)
    pruner.save_pretrained(tmp_path)
    assert all(list(change) == [4, 3] for change in pruner.report.compaction["config"].values())
    loaded = type(model).from_pretrained(tmp_path)
    assert same(loaded, model) and torch.equal(logits(loaded, batch), logits(model, batch))
    assert verify(tmp_path)


def test_a_nested_expert_count_is_updated(tmp_path):
    """In the configuration of the text model of a multimodal one."""
    torch.manual_seed(0)
    name = "Llama4ForConditionalGeneration"
    model = settled(getattr(hf, name)(tiny_config("llama4", name)).eval().float())
    dense, batch = copy.deepcopy(model), token_batches(seed=7)[0]
    pruner = prune(model, lam=0.5)
    assert pruner.report.compaction["config"] == {"text_config.num_local_experts": [4, 3]}
    expected = logits_without(dense, removed(pruner), batch)
    torch.testing.assert_close(logits(model, batch), expected, rtol=1e-4, atol=1e-5)
    pruner.save_pretrained(tmp_path)
    assert torch.equal(logits(type(model).from_pretrained(tmp_path), batch), logits(model, batch))


def test_experts_can_be_removed_repeatedly():
    model = settled_mixtral()
    for left in (6, 4, 3):
        dense, batch = copy.deepcopy(model), token_batches(seed=7)[0]
        pruner = prune(model, sparsity=0.25)
        assert model.config.num_local_experts == left
        expected = logits_without(dense, removed(pruner), batch)
        torch.testing.assert_close(logits(model, batch), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_families_are_refused_before_any_work(name):
    model = family(name)
    before = copy.deepcopy(model)
    with pytest.raises(MoonshotError, match=REFUSED[name]):
        prune(model)
    assert same(model, before) and model.config.to_dict() == before.config.to_dict()


def observed(model, batches):
    """By mixture: the observer's statistics, and (contributions [T, E, H], choices [T, E], ∂ℓ/∂y [T, H], samples [T])
    of all tokens by the reference.
    """
    storage, calls = Storage(torch.device("cpu")), {}
    with frozen(model):
        mixtures = find_mixtures(model, batches[0])
        with MixtureObserver(mixtures.members, True, len(batches), storage) as observer:
            for n, batch in enumerate(batches):
                observer.begin(n, 1, None)
                routed = {}
                hooks = [each.module.register_forward_hook(record(routed, each.name)) for each in mixtures]
                output = run_model(model, batch)
                for hook in hooks:
                    hook.remove()
                torch.autograd.backward(*loss_gradient(model, output, batch)[:2])
                observer.end()
                for mixture in mixtures:
                    values = reference_values(mixture.module, *routed[mixture.name])
                    samples = torch.full((len(values[0]),), n)
                    calls.setdefault(mixture.name, []).append((*(value.detach().double() for value in values), samples))
    return {
        name: (observer.sums[name].result(), tuple(map(torch.cat, zip(*values, strict=True))))
        for name, values in calls.items()
    }


def record(routed, name):
    def hook(module, args, output):
        output.retain_grad()
        routed[name] = (args, output)

    return hook


def reference_values(module, args, output):
    """Contributions, choices and gradients of the experts of Mixtral and Llama 4, computed from their weights."""
    gate_up, down = module.gate_up_proj.detach(), module.down_proj.detach()
    count = len(gate_up)
    if len(args) == 1:  # Llama 4: [expert, token] flattened, weighted by the scores
        tokens, delta = (x.detach().view(count, -1, x.shape[1]) for x in (args[0], output.grad))
        gate, up = (tokens @ gate_up).chunk(2, dim=2)
        parts = ((up * functional.silu(gate)) @ down).transpose(0, 1)
        return parts, tokens.any(2).T, delta[0]
    hidden, index, weights = (x.detach() for x in args)
    parts = torch.zeros(len(hidden), count, hidden.shape[1])
    for token, (experts, gates) in enumerate(zip(index.tolist(), weights, strict=True)):
        for expert, weight in zip(experts, gates, strict=True):
            gate, up = (gate_up[expert] @ hidden[token]).chunk(2)
            parts[token, expert] = weight * (down[expert] @ (functional.silu(gate) * up))
    return parts, torch.zeros(len(hidden), count, dtype=torch.bool).scatter_(1, index, True), output.grad


@pytest.mark.parametrize("name", ["mixtral", "llama4_text"])
def test_statistics_are_those_of_the_contributions(name):
    batches = split_batches(token_batches(samples=3), 1)
    for statistics, (parts, chosen, delta, samples) in observed(settled(model_of(name)), batches).values():
        gram = torch.zeros(4, 4, dtype=torch.float64)
        slopes = torch.zeros(3, 4, dtype=torch.float64)
        for c, g, n in zip(parts, delta, samples.tolist(), strict=True):
            gram += c @ c.T
            slopes[n] += c @ g
        close = dict(rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(statistics.gram, gram, **close)
        torch.testing.assert_close(statistics.gradients, slopes, rtol=1e-3, atol=1e-3 * float(slopes.abs().max()))
        torch.testing.assert_close(statistics.norms, parts.norm(dim=2).sum(0), **close)
        assert torch.equal(statistics.tokens, chosen.sum(0).double())
        torch.testing.assert_close(statistics.norms / statistics.tokens, reference.reap(parts, chosen), **close)


@pytest.mark.parametrize("solver", ["osscar", "reap", "frequency"])
@pytest.mark.parametrize("lam", [0.0, 0.5, 1.0])
def test_removed_experts_and_losses_equal_the_reference(solver, lam):
    batches = split_batches(token_batches(), 1)
    reference_run = observed(settled(mixtral()), batches)
    model = settled(mixtral())
    pruner = prune(model, batches, solver=solver, lam=lam, sparsity=0.5)
    for layer in pruner.report.layers:
        parts, chosen, delta, samples = reference_run[layer.name][1]
        scores = {"reap": reference.reap(parts, chosen), "frequency": chosen.sum(0)}
        if solver == "osscar":
            gone = reference.fewest_lost(parts, delta, samples, lam, 2)
        else:
            gone = torch.zeros(4, dtype=torch.bool).index_fill_(0, scores[solver].argsort(stable=True)[:2], True)
        assert list(layer.experts.removed) == gone.nonzero().flatten().tolist()
        expected = float(reference.expert_losses(parts, delta, samples, gone, lam))
        assert layer.loss == pytest.approx(expected, rel=1e-3) == layer.experts.losses[solver]
        assert layer.experts.losses["osscar"] == min(layer.experts.losses.values())
        assert layer.shape == (4, 3 * 16 * 24) and layer.sparsity == layer.target_sparsity == 0.5
        assert (layer.fisher is None) == (lam == 1)


@pytest.mark.parametrize("lam", [0.5, 1.0])
def test_batch_size_and_memory_limit_do_not_change_the_result(lam, monkeypatch):
    plain = settled_mixtral()
    expected = removed(prune(plain, lam=lam))
    again = settled_mixtral()
    assert removed(prune(again, lam=lam)) == expected and same(again, plain)
    one_by_one = settled_mixtral()
    assert removed(prune(one_by_one, split_batches(token_batches(), 1), lam=lam)) == expected
    narrow = settled_mixtral()
    monkeypatch.setattr(RoutedCall.pieces, "__defaults__", (1,))  # one token at a time
    assert removed(prune(narrow, lam=lam, max_memory="200KiB")) == expected and same(narrow, plain)


def test_padding_does_not_contribute():
    padded = token_batches(padded=True)
    plain = [
        {"input_ids": ids[mask.bool()][None]}
        for batch in padded
        for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ]
    for lam in (0.5, 1.0):
        models = settled_mixtral(), settled_mixtral()
        first, second = (prune(model, data, lam=lam) for model, data in zip(models, (padded, plain), strict=True))
        for layer, other in zip(first.report.layers, second.report.layers, strict=True):
            assert layer.experts.removed == other.experts.removed and layer.loss == pytest.approx(other.loss, rel=1e-4)


@pytest.mark.parametrize("solver", ["osscar", "reap", "frequency"])
def test_an_expert_without_tokens_is_removed_first(solver):
    model = settled(model_of("gpt_oss"))
    for block in model.model.layers:
        block.mlp.router.bias.data[2] = -1000
    dense, batch = copy.deepcopy(model), token_batches(seed=7)[0]
    pruner = prune(model, solver=solver)
    assert set(map(tuple, removed(pruner).values())) == {(2,)}
    assert all(layer.loss == 0 for layer in pruner.report.layers)
    torch.testing.assert_close(logits(model, batch), logits(dense, batch))


def deepseek(groups, chosen_groups, experts=12):
    config = family("deepseek_v3").config
    config.n_routed_experts, config.n_group, config.topk_group = experts, groups, chosen_groups
    torch.manual_seed(0)
    model = hf.DeepseekV3ForCausalLM(config).eval()
    for module in model.modules():
        if hasattr(module, "e_score_correction_bias"):
            module.weight.data.normal_()
            module.e_score_correction_bias.uniform_(-0.1, 0.1)
    return settled(model)


@pytest.mark.parametrize("solver", ["osscar", "reap", "frequency"])
def test_every_router_group_loses_equally_many_experts(solver):
    model = deepseek(3, 2)
    dense, batch = copy.deepcopy(model), token_batches(seed=7)[0]
    pruner = prune(model, solver=solver, lam=0.5, sparsity=0.4)  # 2 of 4 in each group
    for layer in pruner.report.layers:
        assert [expert // 4 for expert in layer.experts.removed] == [0, 0, 1, 1, 2, 2]
        assert layer.sparsity == 0.5 and layer.target_sparsity == 0.4
    assert model.config.n_routed_experts == 6 and model.config.n_group == 3
    torch.testing.assert_close(
        logits(model, batch), logits_without(dense, removed(pruner), batch), rtol=1e-4, atol=1e-5
    )


def test_mixtures_that_do_not_sum_contributions_are_refused():
    model = settled_mixtral()
    experts = model.model.layers[0].mlp.experts
    original = experts.forward
    experts.forward = lambda *args: functional.normalize(original(*args), dim=1)
    with pytest.raises(MoonshotError, match="layers.0.mlp.experts: its output is not the sum"):
        prune(model)
    model = settled(model_of("llama4_text"))
    block = model.model.layers[1].feed_forward

    def largest(hidden):
        tokens = hidden.reshape(-1, hidden.shape[-1])
        scores, logits = block.router(tokens)
        routed = block.experts(tokens.repeat(4, 1) * scores.T.reshape(-1, 1))
        return block.shared_expert(tokens) + routed.view(4, *tokens.shape).amax(0), logits

    block.forward = largest
    with pytest.raises(MoonshotError, match="layers.1.feed_forward.experts: its output is not the sum"):
        prune(model)


@pytest.mark.parametrize(
    ("model", "sparsity", "message"),
    [
        (lambda: make("llama"), 0.25, "LlamaForCausalLM has no experts in fused parameters"),
        (lambda: mixtral(8), 0.05, r"sparsity=0.05: it removes none of 8 experts; set at least 0.0626"),
        (
            lambda: mixtral(8),
            0.9,
            "sparsity=0.9: 1 of 8 experts would remain, and the router sends a token to 2 of them",
        ),
        (lambda: deepseek(3, 1), 0.8, "1 of 4 experts in each of the 3 groups would remain, .* to 2 of the 1 in its"),
        (lambda: deepseek(3, 2), 0.75, "with 3 of 12 experts the model does not run: "),
        (lambda: deepseek(6, 2), 0.2, "it removes none of 2 experts in each of the 6 groups; set at least 0.25"),
    ],
)
def test_sparsities_that_remove_none_or_leave_too_few_are_refused(model, sparsity, message):
    model = model()
    before = copy.deepcopy(model)
    with pytest.raises(MoonshotError, match=message):
        prune(model, sparsity=sparsity)
    assert same(model, before) and model.config.to_dict() == before.config.to_dict()


def test_half_precision():
    for dtype in (torch.bfloat16, torch.float16):
        model = settled_mixtral().to(dtype)
        dense, batch = copy.deepcopy(model), token_batches(seed=7)[0]
        pruner = prune(model, lam=0.5)
        assert all(parameter.dtype == dtype for parameter in model.parameters())
        expected = logits_without(dense, removed(pruner), batch).float()
        error = (logits(model, batch).float() - expected).norm(dim=2) / expected.norm(dim=2)
        assert float((error < 0.02).float().mean()) > 0.9  # of the tokens: rounding may flip close routing scores


def test_a_mixture_that_no_data_reach_is_an_error():
    model = settled_mixtral()
    model.model.layers[1].mlp.forward = lambda hidden: hidden
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(MoonshotError, match="model.layers.1.mlp.experts: no calibration data reach"):
        prune(model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
