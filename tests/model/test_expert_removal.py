"""Whole experts leave a model: it computes what it does when its router does not know them, whatever the family."""

import copy
import json
import re
from pathlib import Path

import pytest
import reference
import torch
import transformers as hf
from expert_removal import FAMILIES, REFUSED, model_of, settled
from models import make, token_batches
from packaging import version
from tiny_configs import tiny_config
from tiny_mixtures import family, mixtral, same
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from optimum_moonshot import MoonshotCallback, MoonshotConfig, MoonshotError, MoonshotPruner, PruneReport, load_pruned
from optimum_moonshot.__main__ import main
from optimum_moonshot.calibration.mixture_sums import MixtureObserver, MixtureSums
from optimum_moonshot.calibration.storage import Storage
from optimum_moonshot.checkpoint.verification import verify
from optimum_moonshot.data.batches import split_batches
from optimum_moonshot.model.calls import frozen, run_model
from optimum_moonshot.model.expert_removal import ExpertRemoval
from optimum_moonshot.model.experts import expert_parameters
from optimum_moonshot.model.losses import loss_gradient
from optimum_moonshot.model.mixtures import RoutedCall, find_mixtures
from optimum_moonshot.objective.patterns import Experts

DEMO = Path(__file__).parents[2] / "examples" / "demo_model"


def prune(model, batches=None, solver="osscar", sparsity=0.25, **options):
    pruner = MoonshotPruner(
        model, MoonshotConfig(pattern="experts", solver=solver, sparsity=sparsity, num_samples=6, **options)
    )
    pruner.prune(batches or token_batches(), progress=False)
    return pruner


class Unknown(TorchFunctionMode):
    """Routers do not know some experts: their scores are -inf."""

    def __init__(self, gone):
        super().__init__()
        self.gone, self.met = gone, set()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        weight = args[1] if function is functional.linear and len(args) > 1 else None
        if weight is not None and weight.data_ptr() in self.gone:
            self.met.add(weight.data_ptr())
            found = found.clone()
            found[..., self.gone[weight.data_ptr()]] = -torch.inf
        return found


def without(model, gone, batch):
    """The logits of a model with all experts whose routers do not know some of them.

    Args:
        model: as it was.
        gone: mixture → the numbers of the experts.
        batch: inputs.
    """
    model, weights = copy.deepcopy(model), {}
    with frozen(model), torch.no_grad():
        mixtures = find_mixtures(model, token_batches()[0])
        plan = ExpertRemoval.plan(model, mixtures, Experts(0.25), token_batches()[0])
        own = {id(p) for mixture in mixtures for p in mixture.module.parameters()}
        for each in plan.sliced.values():
            some = gone[each.mixture]
            if id(each.tensor) not in own and each.tensor.squeeze().ndim == 1:
                each.tensor.movedim(each.axis, -1)[..., some] = -torch.inf  # what is added to scores
            elif id(each.tensor) not in own:
                weights[each.tensor.data_ptr()] = some
        with Unknown(weights) as router:
            logits = run_model(model, batch).logits
    assert router.met == weights.keys()
    return logits


def logits(model, batch):
    with torch.no_grad():
        return run_model(model.eval(), batch).logits


def removed(pruner):
    return {layer.name: list(layer.experts.removed) for layer in pruner.report.layers}


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
    gone = removed(pruner)
    assert gone and all(len(some) == 1 for some in gone.values())
    expected = without(dense, gone, batch)
    torch.testing.assert_close(logits(model, batch), expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(expected, logits(dense, batch), rtol=1e-2, atol=1e-3)
    pruner.save_pretrained(tmp_path)
    assert all(list(change) == [4, 3] for change in pruner.report.compaction["config"].values())
    loaded = type(model).from_pretrained(tmp_path)
    assert same(loaded, model) and torch.equal(logits(loaded, batch), logits(model, batch))
    assert verify(tmp_path)


def test_where_the_count_is_nested(tmp_path):
    """In the configuration of a text model inside of another."""
    torch.manual_seed(0)
    name = "Llama4ForConditionalGeneration"
    model = settled(getattr(hf, name)(tiny_config("llama4", name)).eval().float())
    dense, batch = copy.deepcopy(model), token_batches(seed=7)[0]
    pruner = prune(model, lam=0.5)
    assert pruner.report.compaction["config"] == {"text_config.num_local_experts": [4, 3]}
    expected = without(dense, removed(pruner), batch)
    torch.testing.assert_close(logits(model, batch), expected, rtol=1e-4, atol=1e-5)
    pruner.save_pretrained(tmp_path)
    assert torch.equal(logits(type(model).from_pretrained(tmp_path), batch), logits(model, batch))


def test_experts_leave_again():
    model = settled_mixtral()
    for left in (6, 4, 3):
        dense, batch = copy.deepcopy(model), token_batches(seed=7)[0]
        pruner = prune(model, sparsity=0.25)
        assert model.config.num_local_experts == left
        expected = without(dense, removed(pruner), batch)
        torch.testing.assert_close(logits(model, batch), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_done_is_refused_before_any_work(name):
    model = family(name)
    before = copy.deepcopy(model)
    with pytest.raises(MoonshotError, match=REFUSED[name]):
        prune(model)
    assert same(model, before) and model.config.to_dict() == before.config.to_dict()


def seen(model, batches, gradients=True):
    """What the mixtures of a model give, by name: the statistics, and every token's contributions [T, E, H], choices
    [T, E], ∂ℓ/∂y [T, H] and sample, by other means.
    """
    storage, calls = Storage(torch.device("cpu")), {}
    with frozen(model):
        mixtures = find_mixtures(model, batches[0])
        with MixtureObserver(mixtures.each, gradients, len(batches), storage) as observer:
            for n, batch in enumerate(batches):
                observer.begin(n, 1, None)
                given = {}
                hooks = [each.module.register_forward_hook(note(given, each.name)) for each in mixtures]
                output = run_model(model, batch)
                for hook in hooks:
                    hook.remove()
                torch.autograd.backward(*loss_gradient(model, output, batch)[:2])
                observer.end()
                for mixture in mixtures:
                    args, out = given[mixture.name]
                    calls.setdefault(mixture.name, []).append((*by_hand(mixture.module, args, out), n))
    return {
        name: (observer.sums[name].result(), tuple(map(torch.cat, zip(*map(with_sample, found), strict=True))))
        for name, found in calls.items()
    }


def note(given, name):
    def hook(module, args, output):
        output.retain_grad()
        given[name] = (args, output)

    return hook


def with_sample(found):
    *tensors, sample = found
    return *(tensor.detach().double() for tensor in tensors), torch.full((len(tensors[0]),), sample)


def by_hand(module, args, output):
    """Contributions, choices and gradients of Mixtral's and Llama 4's experts, from their weights."""
    gate_up, down = module.gate_up_proj.detach(), module.down_proj.detach()
    count = len(gate_up)
    if len(args) == 1:  # all tokens of an expert one after another, weighted before
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
    for statistics, (parts, chosen, delta, samples) in seen(settled(model_of(name)), batches).values():
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
def test_what_goes_is_what_the_slow_truth_says(solver, lam):
    batches = split_batches(token_batches(), 1)
    found = seen(settled(mixtral()), batches)
    model = settled(mixtral())
    pruner = prune(model, batches, solver=solver, lam=lam, sparsity=0.5)
    for layer in pruner.report.layers:
        parts, chosen, delta, samples = found[layer.name][1]
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


def settled_mixtral(**changes):
    return settled(mixtral(8, **changes))


@pytest.mark.parametrize("lam", [0.5, 1.0])
def test_neither_batches_nor_memory_matter(lam, monkeypatch):
    plain = settled_mixtral()
    expected = removed(prune(plain, lam=lam))
    again = settled_mixtral()
    assert removed(prune(again, lam=lam)) == expected and same(again, plain)
    one_by_one = settled_mixtral()
    assert removed(prune(one_by_one, split_batches(token_batches(), 1), lam=lam)) == expected
    narrow = settled_mixtral()
    monkeypatch.setattr(RoutedCall.pieces, "__defaults__", (1,))  # one token at a time
    assert removed(prune(narrow, lam=lam, max_memory="200KiB")) == expected and same(narrow, plain)


def test_padding_does_not_count():
    padded = token_batches(padded=True)
    plain = [
        {"input_ids": ids[mask.bool()][None]}
        for batch in padded
        for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ]
    for lam in (0.5, 1.0):
        models = settled_mixtral(), settled_mixtral()
        first, second = (prune(model, data, lam=lam) for model, data in zip(models, (padded, plain), strict=True))
        for mine, other in zip(first.report.layers, second.report.layers, strict=True):
            assert mine.experts.removed == other.experts.removed and mine.loss == pytest.approx(other.loss, rel=1e-4)


@pytest.mark.parametrize("solver", ["osscar", "reap", "frequency"])
def test_an_expert_without_tokens_goes_first(solver):
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
def test_every_group_of_a_router_loses_as_many(solver):
    model = deepseek(3, 2)
    dense, batch = copy.deepcopy(model), token_batches(seed=7)[0]
    pruner = prune(model, solver=solver, lam=0.5, sparsity=0.4)  # of 4 each, 2
    for layer in pruner.report.layers:
        assert [expert // 4 for expert in layer.experts.removed] == [0, 0, 1, 1, 2, 2]
        assert layer.sparsity == 0.5 and layer.target_sparsity == 0.4
    assert model.config.n_routed_experts == 6 and model.config.n_group == 3
    torch.testing.assert_close(logits(model, batch), without(dense, removed(pruner), batch), rtol=1e-4, atol=1e-5)


def test_contributions_that_are_not_added_up_are_refused():
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
    ("model", "sparsity", "told"),
    [
        (lambda: make("llama"), 0.25, "LlamaForCausalLM has no experts in fused parameters"),
        (lambda: mixtral(8), 0.05, r"sparsity=0.05: of 8 experts that rounds to none; set at least 0.0626"),
        (
            lambda: mixtral(8),
            0.9,
            "sparsity=0.9: of 8 experts that leaves 1, and the router sends a token to 2 of them",
        ),
        (lambda: deepseek(3, 1), 0.8, "each of the 3 groups of 4 experts that leaves 1, .* to 2 of the 1 in its"),
        (lambda: deepseek(3, 2), 0.75, "with 3 of 12 experts the model does not run: "),
        (lambda: deepseek(6, 2), 0.2, "each of the 6 groups of 2 experts that rounds to none; set at least 0.25"),
    ],
)
def test_what_leaves_too_few_or_none_is_refused(model, sparsity, told):
    model = model()
    before = copy.deepcopy(model)
    with pytest.raises(MoonshotError, match=told):
        prune(model, sparsity=sparsity)
    assert same(model, before) and model.config.to_dict() == before.config.to_dict()


def test_what_has_no_place_for_it_is_refused():
    config = MoonshotConfig(pattern="experts", solver="osscar", sparsity=0.25, num_samples=6)
    pruner = MoonshotPruner(mixtral(8), config)
    with pytest.raises(MoonshotError, match="calibration=None: solver='osscar' needs data"):
        pruner.prune(progress=False)
    with pytest.raises(MoonshotError, match="pattern='experts': variants have one model's weights in turn"):
        pruner.sweep(token_batches(), progress=False)
    with pytest.raises(MoonshotError, match="rotation='learned': pattern='experts' removes experts as they are"):
        pruner.rotate(token_batches(), progress=False)
    with pytest.raises(MoonshotError, match="pattern='experts': the optimizer has the weights of all experts"):
        MoonshotCallback(config, begin_step=1)
    with pytest.raises(MoonshotError, match="nothing to compact|not pruned yet"):
        pruner.compact()


def test_the_report_and_the_card_say_which(tmp_path):
    model = settled_mixtral()
    before = model.num_parameters()
    pruner = prune(model, lam=0.5)
    done = pruner.compact()
    assert pruner.model is model and done.config == {"num_local_experts": (8, 6)}
    assert done.removed == dict.fromkeys(removed(pruner), 2) and done.parameters == (before, model.num_parameters())
    share = 1 - model.num_parameters() / before
    assert pruner.report.sparsity == 0.25 and share < 0.25
    assert pruner.report.model_sparsity == pytest.approx(share, abs=0.01)  # the routers' rows go too
    pruner.save_pretrained(tmp_path)
    assert PruneReport.load(tmp_path).to_dict()["layers"] == pruner.report.to_dict()["layers"]
    card, table = (tmp_path / "README.md").read_text(), pruner.report.table(width=400)
    for layer in pruner.report.layers:
        numbers = ", ".join(map(str, layer.experts.removed))
        assert f"| `{layer.name}` | {numbers} |" in card and f"without experts {numbers}; L_λ osscar" in table
    assert "25.0% of the experts of its 2 mixtures were removed" in card and "num_local_experts 8 → 6" in card
    record = json.loads((tmp_path / "config.json").read_text())["moonshot"]
    assert record["compaction"] == done.to_dict() and record["config"]["pattern"] == "experts"
    assert same(load_pruned(tmp_path), model)
    with pytest.raises(MoonshotError, match="makes no layer smaller"):
        pruner.save_pretrained(tmp_path / "packed", format="packed")


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        ({"removed": [1, "2"]}, r"layers\[0\].experts.removed\[1\]='2': must be a whole number"),
        ({"losses": {"osscar": "small"}}, r"experts.losses\['osscar'\]='small': must be a number"),
        ({"losses": {}}, "experts.losses={}: must not be empty"),
        ({"more": 1}, "experts.more is an unknown field"),
    ],
    ids=str,
)
def test_a_damaged_report_of_experts_is_refused(damage, told):
    values = json.loads(json.dumps(prune(settled_mixtral(), lam=1.0).report.to_dict()))
    assert PruneReport.from_dict(copy.deepcopy(values)).layers[0].experts is not None
    values["layers"][0]["experts"] |= damage
    with pytest.raises(MoonshotError, match=told):
        PruneReport.from_dict(values)


@pytest.mark.parametrize("family_name", ["mixtral", "gpt_oss"])
@pytest.mark.parametrize("format", ["dense", "packed"])
def test_weights_of_the_experts_that_stay_are_pruned_afterwards(family_name, format, tmp_path):
    """First experts, saved and loaded; then an ordinary pattern on what is left."""
    first, second = tmp_path / "first", tmp_path / "second"
    model = settled(model_of(family_name))
    prune(model).save_pretrained(first)
    config = MoonshotConfig(pattern="2:4", lam=1.0, num_samples=6)
    pruner = MoonshotPruner.from_pretrained(first, config)
    assert pruner.model.config.num_local_experts == 3
    report = pruner.prune(token_batches(), progress=False)
    assert report.sparsity == 0.5 and any("experts" in layer.name for layer in report.layers)
    pruner.save_pretrained(second, format=format)
    loaded = load_pruned(second)
    assert same(loaded, pruner.model) and verify(second)
    assert all(len(module.down_proj) == 3 for module in loaded.modules() if expert_parameters(module))
    batch = token_batches(seed=7)[0]
    torch.testing.assert_close(logits(loaded, batch), logits(pruner.model, batch))


def test_both_at_once_in_one_process():
    model = settled_mixtral()
    prune(model)
    report = prune_again(model)
    assert report.sparsity == 0.5 and report.compaction is None
    for module in (block.mlp.experts for block in model.model.layers):
        assert module.down_proj.shape == (6, 16, 24) and float((module.down_proj == 0).float().mean()) == 0.5


def prune_again(model):
    pruner = MoonshotPruner(model, MoonshotConfig(pattern="2:4", num_samples=6))
    return pruner.prune(token_batches(), progress=False)


def test_a_run_that_fails_leaves_gradients(monkeypatch):
    model = settled_mixtral()
    batch = token_batches()[0]
    model(**batch, labels=batch["input_ids"]).loss.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(MixtureSums, "result", interrupted)
        prune(model)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, gradients[name])
    prune(model)
    assert model.model.layers[0].mlp.gate.weight.grad is None and model.lm_head.weight.grad is not None


def interrupted(self):
    raise KeyboardInterrupt


def test_it_generates_and_trains_as_any_model():
    model = settled_mixtral()
    weight = model.lm_head.weight
    prune(model)
    assert model.lm_head.weight is weight and all(parameter.requires_grad for parameter in model.parameters())
    batch = token_batches()[0]
    found = model.generate(**batch, max_new_tokens=3, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert found.shape == (2, 15)
    model(**batch, labels=batch["input_ids"], output_router_logits=True).loss.backward()
    assert model.model.layers[0].mlp.gate.weight.grad.shape == (6, 16)


def test_pruned_while_loading(tmp_path):
    dense = settled_mixtral()
    dense.save_pretrained(tmp_path / "dense")
    batches = token_batches()
    config = MoonshotConfig(
        pattern="experts", solver="osscar", sparsity=0.25, num_samples=6, calibration=batches, lam=0.5
    )
    loaded = hf.MixtralForCausalLM.from_pretrained(tmp_path / "dense", quantization_config=config)
    prune(dense, lam=0.5)
    assert same(loaded, dense) and loaded.config.num_local_experts == 6
    MoonshotPruner(loaded, config).save_pretrained(tmp_path / "small")
    assert same(hf.MixtralForCausalLM.from_pretrained(tmp_path / "small"), dense)


def test_an_interrupted_run_goes_on(tmp_path, monkeypatch):
    model, plain = settled_mixtral(), settled_mixtral()
    expected = removed(prune(plain))
    config = MoonshotConfig(pattern="experts", solver="osscar", sparsity=0.25, num_samples=6)
    original, met = MixtureSums.result, []

    def killed(self):
        met.append(self.mixture.name)
        if len(met) == 2:
            raise KeyboardInterrupt
        return original(self)

    before = copy.deepcopy(model)
    with monkeypatch.context() as patch:
        patch.setattr(MixtureSums, "result", killed)
        with pytest.raises(KeyboardInterrupt):
            MoonshotPruner(model, config).prune(token_batches(), progress=False, resume_dir=tmp_path / "run")
    assert same(model, before) and len(met) == 2
    pruner = MoonshotPruner(model, config)
    with monkeypatch.context() as patch:
        patch.setattr(MixtureSums, "result", lambda self: met.append(self.mixture.name) or original(self))
        pruner.prune(token_batches(), progress=False, resume_dir=tmp_path / "run")
    assert len(met) == 3 and met[0] != met[2] and removed(pruner) == expected and same(model, plain)
    assert "1 layers were taken over from an interrupted run" in pruner.report.notes
    pruner.save_pretrained(tmp_path / "out")
    assert not (tmp_path / "run").exists()


def test_a_failure_while_experts_are_taken_out_changes_nothing(monkeypatch):
    model = settled_mixtral()
    before, count = copy.deepcopy(model), []
    original = torch.Tensor.index_select

    def failing(self, axis, index):
        count.append(axis)
        if len(count) == 5 + len(list(before.model.layers)) * 3:  # behind the look at other places
            raise KeyboardInterrupt
        return original(self, axis, index)

    monkeypatch.setattr(torch.Tensor, "index_select", failing)
    with pytest.raises(KeyboardInterrupt):
        prune(model)
    assert same(model, before) and model.config.to_dict() == before.config.to_dict()
    assert model.model.layers[0].mlp.experts.num_experts == 8


def test_half_precision():
    for dtype in (torch.bfloat16, torch.float16):
        model = settled_mixtral().to(dtype)
        dense, batch = copy.deepcopy(model), token_batches(seed=7)[0]
        pruner = prune(model, lam=0.5)
        assert all(parameter.dtype == dtype for parameter in model.parameters())
        expected = without(dense, removed(pruner), batch).float()
        error = (logits(model, batch).float() - expected).norm(dim=2) / expected.norm(dim=2)
        assert float((error < 0.02).float().mean()) > 0.9  # of the tokens: ties between experts may turn


def test_a_mixture_that_the_data_do_not_reach_is_an_error():
    model = settled_mixtral()
    model.model.layers[1].mlp.forward = lambda hidden: hidden
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(MoonshotError, match="model.layers.1.mlp.experts: no calibration data reach"):
        prune(model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.slow
def test_the_command_line(tmp_path, capsys):
    torch.manual_seed(0)
    sizes = dict(vocab_size=2048, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    config = hf.MixtralConfig(**sizes, num_key_value_heads=2, num_local_experts=8, max_position_embeddings=64)
    hf.MixtralForCausalLM(config).save_pretrained(tmp_path / "dense")
    hf.AutoTokenizer.from_pretrained(DEMO).save_pretrained(tmp_path / "dense")
    text = str(DEMO / "calibration.txt")
    main(
        [
            *("prune", str(tmp_path / "dense"), "--output", str(tmp_path / "out"), "--calibration", text),
            *("--pattern", "experts", "--solver", "osscar", "--sparsity", "0.25", "--num-samples", "4"),
            *("--sequence-length", "32", "--eval", text),
        ]
    )
    told = capsys.readouterr().out
    assert re.search(r"parameters  [\d,]+ → [\d,]+", told) and "num_local_experts 8 → 6" in told
    assert "perplexity" in told and "L_λ osscar" in told.replace("\n", " ")
    assert hf.AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.num_local_experts == 6
    with pytest.raises(SystemExit):
        main(["prune", str(tmp_path / "dense"), "--output", str(tmp_path / "no"), "--pattern", "experts"])
    assert "error: --sparsity" in capsys.readouterr().err
