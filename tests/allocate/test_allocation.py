"""OWL and alpha allocation: the formulas of the methods, and exact totals."""

import json
import random
import re
import weakref

import pytest
import reference_allocation as reference
import torch
from command_line import ROOT
from failing_calls import FailingCalls
from golden.make import layer as random_layer
from llama_runs import assert_same, config, prune, weights
from marks import slow_but
from models import image_batches, make, token_batches
from report_totals import target_zeros, total_size
from safetensors import safe_open

from optimum_moonshot import MoonshotConfig, MoonshotError, MoonshotPruner
from optimum_moonshot.allocate.block_scores import (
    alpha_sparsities,
    apportion,
    exact_patterns,
    input_squares,
    outlier_share,
    owl_sparsities,
    tail_exponent,
)
from optimum_moonshot.functional import build_objective
from optimum_moonshot.model.calls import frozen
from optimum_moonshot.model.layers import find_structure
from optimum_moonshot.objective.patterns import Unstructured
from optimum_moonshot.pipeline.inputs import prepare
from optimum_moonshot.pipeline.selection import Subject, select
from optimum_moonshot.solvers import solver_class, solver_names

GOLDEN = ROOT / "../shared/golden/allocation.safetensors"
SOLVERS = [name for name in solver_names() if Unstructured in solver_class(name).patterns]


def blocks(count=5, seed=0):
    """Pairs of weights and input norms, two per block; some have outliers."""
    torch.manual_seed(seed)
    shapes = [(24, 40), (32, 24)]
    pairs = []
    for k in range(count):
        tails = 1 + k * torch.rand(()).item()
        pairs.append(
            [(torch.randn(shape) * torch.rand(shape[1]) ** tails, torch.rand(shape[1]) ** tails) for shape in shapes]
        )
    return pairs


def spiky(name="llama"):
    """A tiny model whose blocks differ in their outliers and spectra."""
    model = make(name)
    for k, block in enumerate(find_structure(model).blocks):
        for layer in block.layers:
            layer.matrix[:, : 1 + k] *= 4 * (k + 1)
    return model


def zeros(model, report):
    names = [layer.name for layer in report.layers]
    chosen = find_structure(model, [f"^{re.escape(name)}$" for name in names])
    matrices = {layer.name: layer.matrix for layer in chosen.layers()}
    return sum((matrices[layer.name] == 0).sum().item() for layer in report.layers)


@pytest.mark.skipif(not GOLDEN.exists(), reason="no second set of golden files beside the repository")
def test_results_match_the_golden_file():
    with safe_open(GOLDEN, "pt") as file:
        settings = json.loads(file.metadata()["config"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    config = MoonshotConfig(**settings)
    blocks = [[(tensors[f"weight.{i}.{j}"], tensors[f"input_norm.{i}.{j}"]) for j in range(2)] for i in range(4)]
    sizes = [sum(weight.numel() for weight, _ in block) for block in blocks]
    shares = [
        outlier_share([weight for weight, _ in block], [norm.square() for _, norm in block], config.owl_threshold)
        for block in blocks
    ]
    sparsities = owl_sparsities(shares, sizes, config.sparsity, config.owl_lambda)
    assert sparsities == pytest.approx(tensors["owl_sparsity"].tolist(), rel=1e-12)
    exponents = [sum(tail_exponent(weight) for weight, _ in block) / 2 for block in blocks]
    assert exponents == pytest.approx(tensors["alpha_exponent"].tolist(), rel=1e-6)
    sparsities = alpha_sparsities(exponents, sizes, config.sparsity, config.alpha_tau)
    assert sparsities == pytest.approx(tensors["alpha_sparsity"].tolist(), rel=1e-6)


@pytest.mark.parametrize("threshold", [1.5, 3, 5])
def test_outliers_are_counted_over_a_block(threshold):
    for block in blocks():
        matrices, norms = [list(side) for side in zip(*block, strict=True)]
        share = outlier_share(matrices, [norm.square() for norm in norms], threshold)
        assert share == pytest.approx(reference.owl_score(matrices, norms, threshold))
    assert outlier_share([torch.zeros(3, 4)], [torch.ones(4)], threshold) == 0


def test_the_exponent_equals_an_exhaustive_search():
    for block in blocks():
        for weight, _ in block:
            for matrix in (weight, weight.T, 1e3 * weight, weight.bfloat16()):
                assert tail_exponent(matrix) == pytest.approx(reference.exponent(matrix), rel=1e-6)


def test_a_heavier_tail_has_a_smaller_exponent():
    torch.manual_seed(0)
    left, right = (torch.linalg.qr(torch.randn(60, 60))[0] for _ in range(2))
    exponents = [tail_exponent(left @ torch.arange(1, 61).pow(-power).diag() @ right) for power in (0.3, 0.6, 1.2)]
    assert exponents == sorted(exponents, reverse=True)


@pytest.mark.parametrize("weight", [torch.zeros(4, 6), torch.eye(5), torch.ones(1, 7), torch.ones(4, 4)])
def test_spectra_without_a_tail_have_no_exponent(weight):
    assert tail_exponent(weight) is None


def test_zero_rows_and_columns_do_not_change_the_exponent():
    weight = blocks()[3][0][0]
    wide = torch.zeros(30, 50)
    wide[3:27, 5:45] = weight
    assert tail_exponent(wide) == pytest.approx(tail_exponent(weight), rel=1e-9)


def test_unclipped_sparsities_follow_the_formulas():
    scores = [3.0, 7.5, 5.0, 3.2]
    assert owl_sparsities(scores, [6] * 4, 0.6, 0.08) == pytest.approx(reference.owl(scores, 0.6, 0.08), rel=1e-12)
    sizes = [5, 10, 20, 4]
    expected = reference.alpha(scores, sizes, 0.6, 0.1)
    assert alpha_sparsities(scores, sizes, 0.6, 0.1) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("method", [owl_sparsities, alpha_sparsities])
def test_clipping_keeps_the_mean_over_the_weights(method):
    choose = random.Random(0)
    for _ in range(300):
        count = choose.randint(1, 8)
        scores = [choose.choice([0.0, choose.random(), 5.0]) for _ in range(count)]
        sizes = [choose.randint(1, 1000) for _ in range(count)]
        sparsity, spread = choose.choice([0, 0.02, 0.5, 0.97, 1, choose.random()]), choose.choice([0, 0.08, 0.5, 0.99])
        sparsities = method(scores, sizes, sparsity, spread)
        assert all(0 <= value <= 1 for value in sparsities)
        total = sum(value * size for value, size in zip(sparsities, sizes, strict=True))
        assert total == pytest.approx(sparsity * sum(sizes), abs=1e-9)
        sign = -1 if method is owl_sparsities else 1  # many outliers: dense; a large exponent, a light tail: sparse
        ordered = [value for _, value in sorted(zip(scores, sparsities, strict=True), key=lambda pair: sign * pair[0])]
        assert all(second - first > -1e-12 for first, second in zip(ordered, ordered[1:], strict=False))
        if spread == 0 or len(set(scores)) == 1:
            assert sparsities == pytest.approx([sparsity] * count, abs=1e-12)


def test_rounding_is_by_largest_remainder():
    assert apportion([1.2, 2.7, 0.1], 4) == [1, 3, 0]
    assert apportion([0.5, 0.5, 0.5, 0.5], 2) == [1, 1, 0, 0]
    choose = random.Random(0)
    for _ in range(300):
        sizes = {str(k): choose.randint(1, 400) for k in range(choose.randint(1, 9))}
        sparsities = {name: choose.choice([0.0, 1.0, choose.random()]) for name in sizes}
        mean = sum(sizes[name] * sparsities[name] for name in sizes) / sum(sizes.values())
        patterns = exact_patterns(sizes, sparsities, mean)
        counts = {name: round(patterns[name].sparsity * sizes[name]) for name in sizes}
        assert sum(counts.values()) == round(mean * sum(sizes.values()))
        for name, count in counts.items():
            assert 0 <= count <= sizes[name] and abs(count - sizes[name] * sparsities[name]) < 1


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("lam", [1.0, 0.5])
@pytest.mark.parametrize("count", [0, 1, 145, 2001, 3455, 3456])
def test_exact_counts_are_spread_over_the_comparison_groups(solver, lam, count):
    solve = MoonshotConfig(solver=solver, sparsity=0.5, lam=lam).make_solver()
    weight, gram, gradients = random_layer(24, 144, 10)
    pattern = Unstructured(count / weight.numel(), exact=True)
    objective = build_objective(solve, pattern, weight, gram, gradients if lam < 1 else None, lam)
    keep = solve.solve(objective, pattern).keep
    assert (~keep).sum() == count
    groups = {"wanda": keep.unbind(0), "sparsegpt": keep.split(128, dim=1)}.get(solver, [keep])
    for group in groups:
        assert abs((~group).sum() - count / weight.numel() * group.numel()) < 1


def test_the_remainder_is_pruned_where_its_scores_are_least():
    scores = torch.tensor([[5.0, 1.0, 9.0], [3.0, 2.0, 8.0], [4.0, 6.0, 7.0], [0.0, 4.0, 5.0]])
    keep = Unstructured(6 / 12, exact=True).keep_per_row(scores)  # the next scores of the rows: 5, 3, 6, 4
    assert keep.int().tolist() == [[1, 0, 1], [0, 0, 1], [0, 1, 1], [0, 0, 1]]
    order = torch.tensor([2, 0, 3, 1])
    assert torch.equal(Unstructured(6 / 12, exact=True).keep_per_row(scores[order]), keep[order])


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("allocation", ["owl", "alpha"])
@pytest.mark.parametrize("name", slow_but({"llama", "opt"}, ["llama", "gpt2", "opt", "qwen2", "llama-tied-biased"]))
def test_the_sparsity_of_the_model_is_exact(name, allocation, solver):
    model = spiky(name)
    report = prune(model, solver=solver, pattern="unstructured", sparsity=0.613, allocation=allocation).report
    assert zeros(model, report) == round(0.613 * total_size(report))
    targets = [layer.target_sparsity for layer in report.layers]
    assert max(targets) - min(targets) > 0.01
    for layer in report.layers:
        assert layer.sparsity == pytest.approx(layer.target_sparsity, abs=1e-12)
    assert any("sparsities 0." in note for note in report.notes) and "target" in report.table()


def dense_norms(model, batches):
    """Layer → ‖x‖₂ of its inputs over the tokens that are no padding, by hooks on the whole model."""
    squares = {layer.name: 0 for layer in find_structure(model).layers()}
    for batch in batches:
        real = batch["attention_mask"].bool()

        def observe(name, args, real=real):
            squares[name] = squares[name] + args[0][real].square().sum(0)

        handles = [
            model.get_submodule(name).register_forward_pre_hook(lambda _, args, name=name: observe(name, args))
            for name in squares
        ]
        with torch.no_grad():
            model(**batch)
        for handle in handles:
            handle.remove()
    return {name: total.sqrt() for name, total in squares.items()}


@pytest.mark.parametrize("lam", [1.0, 0.5])
def test_owl_scores_the_dense_model(lam):
    model, batches = spiky(), token_batches(padded=True)
    norms, structure = dense_norms(model, batches), find_structure(model)
    shares = [
        reference.owl_score([layer.matrix for layer in b.layers], [norms[layer.name] for layer in b.layers], 4)
        for b in structure.blocks
    ]
    expected = reference.owl(shares, 0.5, 0.1)
    choice = dict(allocation="owl", owl_threshold=4, owl_lambda=0.1)
    report = prune(model, batches, pattern="unstructured", sparsity=0.5, lam=lam, **choice).report
    for layer in report.layers:
        assert layer.target_sparsity == pytest.approx(expected[int(layer.name.split(".")[2])], abs=1 / 256)


def test_alpha_needs_no_data_and_owl_does():
    model = spiky()
    exponents = [
        sum(reference.exponent(layer.matrix) for layer in block.layers) / len(block.layers)
        for block in find_structure(model).blocks
    ]
    expected = reference.alpha(exponents, [1] * 3, 0.5, 0.3)
    options = dict(solver="magnitude", pattern="unstructured", sparsity=0.5, lam=None)
    report = MoonshotPruner(model, config(**options, allocation="alpha", alpha_tau=0.3)).prune(progress=False)
    for layer in report.layers:
        assert layer.target_sparsity == pytest.approx(expected[int(layer.name.split(".")[2])], abs=1 / 256)
    before = weights(model)
    with pytest.raises(MoonshotError, match="allocation='owl' needs data"):
        MoonshotPruner(model, config(**options, allocation="owl")).prune(progress=False)
    assert_same(model, before)


@pytest.mark.parametrize("allocation", ["owl", "alpha"])
def test_a_layer_outside_of_the_blocks_is_scored_alone(allocation):
    choice = dict(pattern="unstructured", sparsity=0.5, allocation=allocation)
    model = spiky()
    report = prune(model, targets=[r"layers\.0\.", "lm_head"], **choice).report
    inside, outside = report.layers[0].target_sparsity, report.layers[-1].target_sparsity
    assert report.layers[-1].name == "lm_head" and abs(inside - outside) > 0.01
    assert all(layer.target_sparsity == pytest.approx(inside, abs=1 / 256) for layer in report.layers[:-1])
    assert zeros(model, report) == round(0.5 * total_size(report))
    alone = prune(spiky(), targets=[r"layers\.0\."], **choice).report
    assert all(layer.target_sparsity == pytest.approx(0.5, abs=1 / 256) for layer in alone.layers)


@pytest.mark.parametrize("allocation", ["owl", "alpha"])
@pytest.mark.parametrize("name", ["albert", "vit", "mixtral"])
def test_models_other_than_decoders(name, allocation):
    model = spiky(name)
    batches = image_batches() if name == "vit" else token_batches(padded=True)
    choice = dict(solver="wanda", pattern="unstructured", sparsity=0.55, lam=1, allocation=allocation)
    report = prune(model, batches, **choice).report
    assert zeros(model, report) == round(0.55 * total_size(report))
    assert len(report.notes) == len(set(report.notes))


def test_the_error_of_alpha_names_the_block_without_a_spectrum():
    model = make("llama")
    for layer in find_structure(model).blocks[1].layers:
        layer.matrix.zero_()
    with pytest.raises(MoonshotError, match=r"layers\.1\.self_attn\.q_proj.*no tail to fit"):
        prune(model, pattern="unstructured", sparsity=0.5, allocation="alpha", lam=1)
    report = prune(model, pattern="unstructured", sparsity=0.5, allocation="owl", lam=1).report
    assert report.layers[7].target_sparsity > report.layers[0].target_sparsity


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models(dtype):
    for allocation in ("owl", "alpha"):
        model = spiky().to(dtype)
        report = prune(model, pattern="unstructured", sparsity=0.5, allocation=allocation, lam=1).report
        assert target_zeros(report) == total_size(report) // 2


def test_a_resumed_run_has_the_same_allocation(tmp_path, monkeypatch):
    choice = dict(solver="wanda", pattern="unstructured", sparsity=0.5, allocation="owl")
    whole, resumed = spiky(), spiky()
    prune(whole, **choice)
    FailingCalls(monkeypatch, (solver_class("wanda"), "solve"), {10}, RuntimeError())
    folder = tmp_path / "partial"
    for expected in (RuntimeError, None):
        pruner = MoonshotPruner(resumed, config(**choice))
        if expected:
            with pytest.raises(expected):
                pruner.prune(token_batches(), progress=False, resume_dir=folder)
        else:
            pruner.prune(token_batches(), progress=False, resume_dir=folder)
    assert_same(resumed, weights(whole))
    assert all(layer.target_sparsity is not None for layer in pruner.report.layers)


def test_owl_takes_one_forward_pass_and_keeps_no_activation_longer_than_its_layer():
    model = spiky()
    calls, kept = [], []
    down = model.model.layers[0].mlp.down_proj
    down.register_forward_pre_hook(lambda _, args: kept.append(weakref.ref(args[0])))
    model.model.layers[2].mlp.register_forward_pre_hook(lambda _, args: calls.append(kept[-1]() is None))
    selection = select(model, config(pattern="unstructured", sparsity=0.5, allocation="owl", lam=1))
    prepared = prepare(Subject(model, progress=False), selection, token_batches())
    with frozen(model):
        squares = input_squares(prepared)
    assert len(calls) == 2 + 3 and all(calls[2:])  # the first two are of the probe of one short sample
    norms = dense_norms(model, [{**b, "attention_mask": torch.ones_like(b["input_ids"])} for b in token_batches()])
    for name, norm in norms.items():
        torch.testing.assert_close(squares[name].sqrt(), norm, rtol=1e-4, atol=1e-6)
