"""`allocation="fisher"` on mixtures: every expert has a separate sparsity."""

import pytest
import torch
from fisher_curves import SOLVERS, curves_of
from marks import slow
from models import token_batches
from reference_allocation import expert_losses, least_division
from report_totals import total_size
from tiny_mixtures import experts, mixtral, observe, prune, same, starving

from optimum_moonshot import MoonshotConfig, load_pruned
from optimum_moonshot.allocate.loss_curves import SPARSITIES
from optimum_moonshot.allocate.run import ONE_N, fisher_patterns
from optimum_moonshot.checkpoint.verification import verify
from optimum_moonshot.data.batches import split_batches
from optimum_moonshot.objective.loss_allocation import LossCurve, bounds, divide_sparsity
from optimum_moonshot.objective.patterns import PerExpert, Unstructured
from optimum_moonshot.objective.quadratic import Quadratic
from optimum_moonshot.pipeline import under_calibrated_experts
from optimum_moonshot.pipeline.selection import select
from optimum_moonshot.pipeline.store import ResultStore
from optimum_moonshot.pipeline.variant import Variant
from optimum_moonshot.recover.blockwise import stage_patterns
from optimum_moonshot.reports.prune_report import PruneReport

FISHER = dict(sparsity=0.6, allocation="fisher")


def uneven():
    """A model whose experts have weights of very different scales."""
    model = mixtral()
    with torch.no_grad():
        for layer in experts(model):
            layer.parameter.mul_(torch.tensor([0.2, 1.0, 1.8, 0.6])[:, None, None])
    return model


def zeros(layer):
    return [int((matrix == 0).sum()) for matrix in layer.parameter]


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("lam", [slow(1.0), 0.5])
def test_experts_have_separate_sparsities_and_the_sparsity_of_the_model_is_exact(solver, lam, tmp_path):
    model = uneven()
    report = prune(model, solver=solver, lam=lam, **{**FISHER, "sparsity": 0.613}).report
    lost = sum(int((layer.parameter == 0).sum()) for layer in select(model, MoonshotConfig(**FISHER)).layers)
    assert lost == round(0.613 * total_size(report))
    low, high = bounds(0.613)
    for layer in experts(model):
        result = next(each for each in report.layers if each.name == layer.name)
        size = layer.parameter[0].numel()
        shares = [count / size for count in zeros(layer)]
        assert result.expert_targets == (min(shares), max(shares))
        assert result.target_sparsity == pytest.approx(sum(shares) / 4)
        assert low - 1 / size <= min(shares) < max(shares) <= high + 1 / size and max(shares) - min(shares) > 0.1
        row = f"least {min(shares):.4f}, mean {result.target_sparsity:.4f}, most {max(shares):.4f}"
        assert row in report.table(400)
    assert any("16 experts each with its own" in note for note in report.notes)
    report.save(tmp_path)
    assert PruneReport.load(tmp_path) == report


@pytest.mark.parametrize("solver", ["sparsegpt", "obc"])
def test_curves_are_the_losses_of_every_expert(solver):
    model = uneven()
    curves = curves_of(model, solver=solver)
    layer = experts(model)[-1]
    statistics = observe(model, [layer], split_batches(token_batches(), 1))[layer.name]
    solve = MoonshotConfig(solver=solver, sparsity=0.5).make_solver()

    def pruned(weight, gram, share):
        if share == 1:
            return torch.zeros_like(weight)
        return solve.solve(Quadratic.build(weight, gram, None, 1.0), Unstructured(share)).weight

    curve = curves[layer.name]
    for index, expert in enumerate(curve.experts):
        rows = slice(index * 16, (index + 1) * 16)
        gradients = statistics.gradients.gradients[:, rows]
        shares = [*SPARSITIES, 1.0]
        expected = expert_losses(pruned, layer.matrix[rows], statistics.inputs[index], gradients, shares)
        assert expert.losses == pytest.approx(expected, rel=2e-2) and expert.sparsities == tuple(shares)
    assert curve.losses == pytest.approx(
        [sum(each) for each in zip(*(expert.losses for expert in curve.experts), strict=True)]
    )
    assert curve.size == layer.parameter.numel() == 4 * curve.experts[0].size


def test_no_other_division_between_experts_has_a_smaller_loss():
    """Exhaustive search over a grid for the four experts of one layer."""
    curve = next(curve for curve in curves_of(uneven()).values() if curve.experts)
    expert_curves = dict(enumerate(curve.experts))
    low, high = bounds(0.6)
    grid = [low + (high - low) * cell / 12 for cell in range(13)]
    sizes = [each.size for each in curve.experts]
    least = least_division(
        [lambda share, each=each: each.values([share])[0] for each in curve.experts], sizes, 0.6, grid
    )
    divided = divide_sparsity(expert_curves, 0.6)
    assert sum(expert_curves[index].values([share])[0] for index, share in divided.items()) <= least * (1 + 1e-9)
    uniform = sum(each.values([0.6])[0] for each in curve.experts)
    assert least < 0.9 * uniform


def test_equal_experts_get_equal_shares():
    """Copies of one expert, to which all tokens are routed with equal weights."""
    model = mixtral(num_experts_per_tok=4)
    with torch.no_grad():
        for layer in experts(model):
            layer.parameter.copy_(layer.parameter[:1].expand_as(layer.parameter))
        for block in model.model.layers:
            block.mlp.gate.weight.zero_()
    prune(model, lam=1.0, solver="wanda", **FISHER)
    for layer in experts(model):
        counts = zeros(layer)
        assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize("how", ["all", "magnitude", "routed"])
def test_an_under_calibrated_expert_has_the_mean_losses_of_the_others(how):
    curves = curves_of(starving(mixtral()), under_calibrated_experts=how)
    for name, curve in curves.items():
        if name.startswith("model.layers.0.mlp.experts"):
            others = [expert for index, expert in enumerate(curve.experts) if index != 2]
            mean = [sum(losses) / 3 for losses in zip(*(expert.losses for expert in others), strict=True)]
            assert curve.experts[2].losses == pytest.approx(mean) and min(mean) > 0


def test_under_calibrated_experts_without_others_have_their_mean_losses(monkeypatch):
    measured = []
    for inputs_per_token in (1e9, 1e-6):
        monkeypatch.setattr(under_calibrated_experts, "INPUTS_PER_TOKEN", inputs_per_token)
        measured.append(curves_of(mixtral(), under_calibrated_experts="routed"))
    for name, curve in measured[0].items():
        assert measured[1][name].losses == pytest.approx(curve.losses)
        if curve.experts:
            assert len({expert.losses for expert in curve.experts}) == 4
            assert len({expert.losses for expert in measured[1][name].experts}) == 1


@pytest.mark.parametrize("memory", ["60KiB", "25KiB"])
def test_curves_do_not_depend_on_the_memory(memory, tmp_path):
    whole, parts = curves_of(uneven()), curves_of(uneven(), max_memory=memory, offload_dir=str(tmp_path))
    for name, curve in whole.items():
        assert parts[name].losses == pytest.approx(curve.losses, rel=1e-4)
        for expert, other in zip(curve.experts, parts[name].experts, strict=True):
            assert expert.losses == pytest.approx(other.losses, rel=1e-4)


def test_curves_of_experts_survive_a_killed_run(tmp_path):
    expert_curves = tuple(LossCurve(10, (0.5, 1.0), (loss, 2 * loss)) for loss in (1.0, 0.25))
    curve, plain = LossCurve(20, (0.5, 1.0), (1.25, 2.5), expert_curves), LossCurve(7, (0.5, 1.0), (1.0, 2.0))
    store = ResultStore(tmp_path / "run", {})
    store.put_curve("experts", curve)
    store.put_curve("plain", plain)
    store.release()
    assert ResultStore(tmp_path / "run", {}).curves == {"experts": curve, "plain": plain}


def test_n_is_equal_for_the_experts_of_a_layer_and_the_report_explains_it():
    model = uneven()
    report = prune(model, lam=1.0, pattern="n:4", sparsity=0.5, allocation="fisher").report
    assert any(ONE_N in note for note in report.notes)
    for layer in experts(model):
        result = next(each for each in report.layers if each.name == layer.name)
        counts = (layer.matrix.view(-1, 4) != 0).sum(1)
        assert result.expert_targets is None and int(counts.max()) == round(4 * (1 - result.target_sparsity))


def test_gradual_recovery_keeps_the_sparsity_of_every_expert():
    options = {**FISHER, "sparsity": 0.4, "lam": 1.0}
    model, plain = uneven(), uneven()
    report, recovered = (
        prune(plain, **options).report,
        prune(model, **options, recover="gradual", recover_steps=8).report,
    )
    assert [zeros(layer) for layer in experts(model)] == [zeros(layer) for layer in experts(plain)]
    assert [layer.expert_targets for layer in recovered.layers] == [layer.expert_targets for layer in report.layers]
    first, *_, last = stage_patterns(PerExpert(0.5, True, (0.4, 0.6)))
    assert last.experts == (0.4, 0.6) and first.experts == pytest.approx((0.8 * first.sparsity, 1.2 * first.sparsity))


@pytest.mark.parametrize("options", [FISHER, dict(pattern="n:4", sparsity=0.5, allocation="fisher")], ids=str)
def test_packed_files_keep_the_sparsity_of_every_expert(options, tmp_path):
    model = uneven().bfloat16()
    pruner = prune(model, lam=1.0, **options)
    pruner.save_pretrained(tmp_path, format="packed")
    verification = verify(tmp_path)
    assert verification, verification.table()
    assert {layer.name: layer.zeros for layer in verification.layers} == {
        layer.name: int((layer.matrix == 0).sum()) for layer in select(model, MoonshotConfig(**FISHER)).layers
    }
    assert same(load_pruned(tmp_path), model)


def test_every_expert_is_a_comparison_group():
    scores, shares = torch.rand(12, 8), (0.25, 0.5, 0.75)
    pattern = PerExpert(0.5, True, shares)
    for keep in (pattern.keep(scores), pattern.keep_per_row(scores)):
        assert [int((~part).sum()) for part in keep.chunk(3)] == [8, 16, 24]
    for kept, values in zip(pattern.keep(scores).chunk(3), scores.chunk(3), strict=True):
        assert values[kept].min() > values[~kept].max()


def test_patterns_follow_from_the_curves():
    model = mixtral()
    selection = select(model, MoonshotConfig(**FISHER))
    variant = Variant(model, selection, ResultStore(None, ""))
    variant.store.curves.update(curves_of(model))
    patterns, _ = fisher_patterns(variant)
    for layer in selection.layers:
        assert isinstance(patterns[layer.name], PerExpert) == layer.separate
