"""`allocation="fisher"`: sparsity divided between matrices by the Fisher loss of each."""

import dataclasses

import pytest
import torch
from failing_calls import FailingCalls
from fisher_curves import FISHER, SOLVERS, curves_of
from llama_runs import assert_same, config, prune, weights
from models import image_batches, make, token_batches
from report_totals import target_zeros, total_size

from optimum_moonshot import MoonshotConfig, MoonshotError, MoonshotPruner, load_pruned
from optimum_moonshot.allocate import loss_curves
from optimum_moonshot.allocate import run as fisher_allocation
from optimum_moonshot.allocate.loss_curves import SPARSITIES
from optimum_moonshot.checkpoint.verification import verify
from optimum_moonshot.data.batches import spread_samples
from optimum_moonshot.model.layers import find_structure
from optimum_moonshot.objective.loss_allocation import divide_sparsity
from optimum_moonshot.objective.patterns import NM, Unstructured, stacked
from optimum_moonshot.objective.quadratic import Quadratic
from optimum_moonshot.pipeline.selection import ONE_WIDTH
from optimum_moonshot.pipeline.store import ResultStore
from optimum_moonshot.reports.record import PruningRecord

MIXED = dict(pattern="n:4", sparsity=0.5, allocation="fisher")


def uneven(name="llama"):
    """A tiny model in which some matrices have small weights, so that pruning them costs less."""
    model = make(name)
    for k, layer in enumerate(find_structure(model).layers()):
        layer.parameter.detach().mul_((0.2, 1.0, 1.8)[k % 3])
    return model


def zeros(model, report):
    return sum(int((model.get_submodule(layer.name).weight == 0).sum()) for layer in report.layers)


def targets(report):
    return {layer.name: layer.target_sparsity for layer in report.layers}


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("lam", [1.0, 0.5])
def test_the_sparsity_of_the_model_is_exact(solver, lam):
    model = uneven()
    report = prune(model, solver=solver, lam=lam, **{**FISHER, "sparsity": 0.613}).report
    assert zeros(model, report) == round(0.613 * total_size(report))
    shares = targets(report)
    assert max(shares.values()) - min(shares.values()) > 0.05
    assert sum("Fisher allocation: sparsities" in note for note in report.notes) == 1
    assert "target" in report.table() and report.seconds["allocation"] > 0
    assert PruningRecord.of(model).allocated == shares


def with_dead_inputs(fraction):
    """A tiny model in which consecutive inputs of the MLPs' last matrices are always 0."""
    model = uneven()
    for block in model.model.layers:
        rows = block.mlp.up_proj.weight.detach()
        rows[: int(fraction * len(rows))] = 0
    return model


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("sparsity", [0.137, 0.6])
@pytest.mark.parametrize("fraction", [0.1, 0.5])
def test_dead_inputs_count_towards_the_sparsity(solver, sparsity, fraction):
    """SparseGPT compares a few columns at a time, in some of which all inputs are dead."""
    model, options = with_dead_inputs(fraction), {"block_size": 4} if solver == "sparsegpt" else {}
    settings = {**FISHER, "sparsity": sparsity, "solver_options": options, "targets": ["down_proj"]}
    report = prune(model, solver=solver, **settings).report
    dead = sum(layer.shape[0] * int(fraction * layer.shape[1]) for layer in report.layers)
    assert zeros(model, report) == max(dead, round(sparsity * total_size(report)))
    exceeds = any("above the target" in note for note in report.notes)
    assert exceeds == (dead > round(sparsity * total_size(report)))


@pytest.mark.parametrize("sparsity", [0, 1])
def test_sparsities_of_zero_and_one(sparsity):
    model = uneven()
    report = prune(model, lam=1, **{**FISHER, "sparsity": sparsity}).report
    assert zeros(model, report) == sparsity * total_size(report)


@pytest.mark.parametrize(
    ("name", "solver"),
    [("gpt2", "sparsegpt"), ("mixtral", "wanda"), ("opt", "cap"), ("vit", "obc"), ("resnet", "obc")]
    + [("convnext", "sparsegpt")],
)
def test_other_models(name, solver):
    model = uneven(name)
    batches = image_batches() if name in ("vit", "resnet", "convnext") else token_batches(padded=True)
    report = prune(model, batches, solver=solver, lam=1, **FISHER).report
    assert target_zeros(report) == pytest.approx(round(0.6 * total_size(report)), abs=1e-6)
    assert len(set(targets(report).values())) > 2


def literal_curve(solver, weight, gram, gradients):
    """F_l at every sparsity, each by a separate solve over all rows."""
    objective = Quadratic.build(weight, gram, None, 1.0)
    solutions = [solver.solve(objective, Unstructured(sparsity)).weight for sparsity in SPARSITIES]
    deltas = [pruned - weight for pruned in [*solutions, torch.zeros_like(weight)]]
    return [float(torch.einsum("nrd,rd->nr", gradients, d).double().square().sum() / len(gradients)) for d in deltas]


@pytest.mark.parametrize("solver", ["sparsegpt", "obc"])
def test_curves_are_the_losses_of_the_pruned_weights(solver):
    model, batches = uneven(), token_batches()
    curves = curves_of(model, solver=solver)
    layer = model.model.layers[1].mlp.down_proj
    gram, gradients = torch.zeros(layer.weight.shape[1], layer.weight.shape[1]), []

    def add(_, args):
        gram.add_(args[0][0].detach().T @ args[0][0].detach())

    handle = layer.register_forward_pre_hook(add)
    for batch in batches:
        for index in range(len(batch["input_ids"])):
            ids = batch["input_ids"][index : index + 1]
            model.zero_grad()
            logits = model(input_ids=ids).logits[0, :-1].float()
            torch.nn.functional.cross_entropy(logits, ids[0, 1:]).backward()
            gradients.append(layer.weight.grad.clone())
    handle.remove()
    solve = MoonshotConfig(solver=solver, sparsity=0.5).make_solver()
    with torch.no_grad():
        expected = literal_curve(solve, layer.weight.detach(), gram, torch.stack(gradients))
    curve = curves["model.layers.1.mlp.down_proj"]
    assert curve.losses == pytest.approx(expected, rel=2e-2)
    assert curve.size == layer.weight.numel() and curve.sparsities == (*SPARSITIES, 1.0)


def test_curves_do_not_depend_on_lambda_and_are_reproducible():
    first = curves_of(uneven(), lam=1)
    assert first == curves_of(uneven(), lam=0.5) == curves_of(uneven(), lam=1, fisher_layers="attention")


def test_curves_do_not_depend_on_the_memory(tmp_path):
    little = dict(max_memory=60_000, offload_dir=str(tmp_path))
    whole, parts = curves_of(uneven()), curves_of(uneven(), **little)
    for name, curve in whole.items():
        assert parts[name].losses == pytest.approx(curve.losses, rel=1e-4)


def test_recovery_keeps_the_allocation():
    model = uneven()
    batches = token_batches(samples=8)
    report = prune(model, batches, lam=1, num_samples=8, recover="blockwise", recover_steps=2, **FISHER).report
    assert zeros(model, report) == round(0.6 * total_size(report)) and len(report.recovery) == 3


def test_sampled_rows_are_reproducible_and_represent_all_rows(monkeypatch):
    whole = curves_of(uneven(), solver="magnitude")
    monkeypatch.setattr(loss_curves, "ROWS", 8)
    sampled = curves_of(uneven(), solver="magnitude")
    assert sampled == curves_of(uneven(), solver="magnitude") != whole
    for name, curve in whole.items():
        assert sampled[name].size == curve.size
        assert 0.3 < sampled[name].losses[-1] / curve.losses[-1] < 3


def test_samples_are_spread_evenly():
    batches = [{"x": torch.arange(0, 8)[:, None]}, {"x": torch.arange(8, 20)[:, None]}]
    spread = spread_samples(batches, 5)
    assert torch.cat([batch["x"] for batch in spread])[:, 0].tolist() == [0, 4, 8, 12, 16]
    assert [len(batch["x"]) for batch in spread_samples(batches, 99)] == [12, 8]
    ragged = [{"x": torch.zeros(2, 3)}, {"x": torch.zeros(1, 4)}]
    assert [tuple(batch["x"].shape) for batch in spread_samples(ragged, 3)] == [(2, 3), (1, 4)]


def test_a_layer_without_influence_has_the_largest_sparsity():
    model = uneven()
    model.model.layers[1].mlp.up_proj.weight.data.zero_()
    model.model.layers[1].mlp.gate_proj.weight.data.zero_()
    shares = targets(prune(model, lam=1, **FISHER).report)
    for name in ("up_proj", "gate_proj", "down_proj"):
        assert shares[f"model.layers.1.mlp.{name}"] == pytest.approx(0.85, abs=0.01)


def test_the_allocation_follows_from_the_curves():
    model = uneven()
    expected = divide_sparsity(curves_of(model), 0.6)
    sparsities = targets(prune(model, **FISHER).report)
    for name, share in expected.items():
        assert sparsities[name] == pytest.approx(share, abs=1 / 256)


@pytest.mark.parametrize("options", [{"lam": 1.0}, {"lam": 0.5}, {"recompute": True, "lam": 1.0}, MIXED])
@pytest.mark.parametrize("where", ["curves", "layers"])
def test_a_resumed_run_has_the_same_allocation(tmp_path, monkeypatch, options, where):
    choice = {**FISHER, **options}
    whole, resumed = uneven(), uneven()
    prune(whole, **choice)
    name = "put_curve" if where == "curves" else "put"
    put = FailingCalls(monkeypatch, (ResultStore, name), {7}, RuntimeError())
    with pytest.raises(RuntimeError):
        MoonshotPruner(resumed, config(**choice)).prune(token_batches(), progress=False, resume_dir=tmp_path / "run")
    assert len(list((tmp_path / "run/curves").iterdir())) == (7 if where == "curves" else 21)
    pruner = MoonshotPruner(resumed, config(**choice))
    pruner.prune(token_batches(), progress=False, resume_dir=tmp_path / "run")
    assert put.calls == 8 + 14
    assert_same(resumed, weights(whole))
    pruner.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "run").exists()


def test_a_sweep_measures_the_curves_once(monkeypatch):
    count, original = [], fisher_allocation.loss_curve
    monkeypatch.setattr(fisher_allocation, "loss_curve", lambda *args: count.append(1) or original(*args))
    model = uneven()
    pruner = MoonshotPruner(model, config(**FISHER))
    report = pruner.sweep(token_batches(), lambdas=[0.5, 1], sparsities=[0.5, 0.7], progress=False)
    assert len(count) == 21
    entry = report.best(sparsity=0.7)
    pruner.choose(entry)
    alone = uneven()
    prune(alone, **{**FISHER, "sparsity": 0.7, "lam": entry.lam, "recompute": False})
    assert_same(model, weights(alone))
    count.clear()
    patterns = ["unstructured", "n:4"]
    MoonshotPruner(uneven(), config(**FISHER)).sweep(token_batches(), lambdas=[1], patterns=patterns, progress=False)
    assert len(count) == 42


def test_a_run_at_lambda_one_needs_gradients_for_the_curves_only(monkeypatch):
    seen, original = [], torch.autograd.grad

    def grad(*args, **options):
        seen.append(1)
        return original(*args, **options)

    monkeypatch.setattr(torch.autograd, "grad", grad)
    report = prune(uneven(), lam=1, **FISHER).report
    assert len(seen) >= 1 and all(layer.fisher is None for layer in report.layers)
    seen.clear()
    prune(uneven(), lam=1, pattern="unstructured", sparsity=0.6)
    assert not seen


def test_structured_pruning_stays_uniform_and_the_report_explains_it():
    options = dict(solver="wanda", pattern="structured", sparsity=0.5, lam=1)
    model, plain = uneven(), uneven()
    report = prune(model, **options, allocation="fisher").report
    prune(plain, **options)
    assert_same(model, weights(plain))
    assert ONE_WIDTH in report.notes and report.config["allocation"] == "uniform"
    assert "allocation" not in report.seconds


@pytest.mark.parametrize("solver", SOLVERS)
def test_n_is_chosen_for_every_layer(solver):
    model = uneven()
    report = prune(model, solver=solver, lam=1, **MIXED).report
    total, count = total_size(report), zeros(model, report)
    assert 0.5 * total - 32 * 32 / 4 < count <= 0.5 * total
    assert len(set(targets(report).values())) > 1
    for layer in report.layers:
        pattern = NM(round(4 * (1 - layer.target_sparsity)), 4)
        groups = (model.get_submodule(layer.name).weight.view(-1, 4) != 0).sum(1)
        assert 1 <= pattern.n <= 4 and bool((groups <= pattern.n).all())
        assert layer.sparsity == pytest.approx(pattern.sparsity, abs=1e-9)
    assert any("Fisher allocation" in note and "target" in note for note in report.notes)


@pytest.mark.parametrize("format", ["dense", "packed"])
def test_saved_models_record_the_pattern_of_each_layer(tmp_path, format):
    model = uneven().bfloat16()
    pruner = prune(model, lam=1, **MIXED)
    pruner.save_pretrained(tmp_path / "saved", format=format)
    verification = verify(tmp_path / "saved")
    assert verification, verification.table()
    shares = targets(pruner.report)
    assert {layer.name: layer.pattern for layer in verification.layers} == {
        name: f"{round(4 * (1 - share))}:4" for name, share in shares.items()
    }
    assert_same(load_pruned(tmp_path / "saved"), weights(model))
    assert "a different n for each layer" in (tmp_path / "saved/README.md").read_text()


def test_stacked_patterns_apply_to_their_copies():
    scores = torch.rand(12, 8)
    for patterns in ([Unstructured(s) for s in (0.2, 0.5, 0.9)], [NM(n, 4) for n in (3, 2, 1)]):
        keep = stacked(patterns).keep(scores)
        parts = zip(patterns, scores.chunk(3), strict=True)
        assert torch.equal(keep, torch.cat([pattern.keep(chunk) for pattern, chunk in parts]))
    assert stacked([NM(1, 4), NM(1, 2)]) is None and stacked([Unstructured(0.5, exact=True)]) is None


# ALPS uses the trials of SparseGPT.
@pytest.mark.parametrize("solver", [solver for solver in SOLVERS if solver != "alps"])
def test_trials_equal_single_solves(solver):
    torch.manual_seed(0)
    inputs = torch.randn(300, 32) * torch.rand(32)
    options = MoonshotConfig(solver=solver, sparsity=0.5)
    solve, weight = options.make_solver(), torch.randn(24, 32)
    objective = Quadratic.build(weight, inputs.T @ inputs, None, 1.0)
    if solve.objective.diagonal_only:
        objective = solve.objective.build(weight, inputs.square().sum(0), None, 0, 1.0)
    for patterns in ([Unstructured(s) for s in (0.2, 0.5, 0.9)], [NM(n, 4) for n in (3, 2, 1)]):
        for pattern, trial in zip(patterns, solve.trials(objective, patterns), strict=True):
            torch.testing.assert_close(trial, solve.solve(objective, pattern).weight, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(pattern="n:4", sparsity=0.5), "pattern=.n:4.: .*add allocation='fisher'"),
        (dict(pattern="n:4", allocation="fisher"), "sparsity=None: pattern='n:4' needs one"),
        (
            dict(pattern="n:4", sparsity=0.8, allocation="fisher"),
            "sparsity=0.8: .*at least 1 of every 4; give 0 to 0.75",
        ),
        (dict(pattern="n:1", sparsity=0, allocation="fisher"), "pattern=.n:1.: m must be at least 2"),
        (dict(pattern="2:4", allocation="fisher"), "allocation=.fisher.: pattern=.2:4. has equal sparsity"),
        (dict(sparsity=0.5, allocation={"mlp": "n:4"}), r"allocation\['mlp'\]='n:4': give a sparsity"),
    ],
)
def test_contradictory_options_are_errors(options, message):
    with pytest.raises(MoonshotError, match=message):
        MoonshotConfig(**options)


def test_magnitude_needs_data_to_allocate():
    model = uneven()
    settings = config(solver="magnitude", lam=None, **FISHER)
    with pytest.raises(MoonshotError, match="calibration=None: allocation='fisher' needs data"):
        MoonshotPruner(model, settings).prune(progress=False)
    report = MoonshotPruner(model, settings).prune(token_batches(), progress=False)
    assert zeros(model, report) == round(0.6 * total_size(report))
    assert dataclasses.replace(settings, sparsity=0.5).allocation == "fisher"
