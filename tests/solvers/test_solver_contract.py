"""The contract of all registered solvers, for any objective."""

import math
from dataclasses import replace

import pytest
import torch
from golden.make import grouped_layer, layer
from marks import slow

from optimum_moonshot.config import MoonshotConfig
from optimum_moonshot.errors import MoonshotError
from optimum_moonshot.functional import build_objective, prune_weight
from optimum_moonshot.objective.patterns import NM, Structured, Unstructured
from optimum_moonshot.solvers import solver_class, solver_names

SHAPE = (24, 144, 10)  # more than one block of columns, and not a multiple of it
SOLVERS = pytest.mark.parametrize("solver", solver_names())
LAMS = pytest.mark.parametrize("lam", [0.0, 0.5, slow(0.9), 1.0])
NO_GROUPS, GROUPS = "structured", "structured in 8"
KINDS = {
    Unstructured: [0.0, 0.3, 0.6, 1.0],
    NM: ["2:4", "1:4", "4:8"],
    Structured: [(NO_GROUPS, 0.0), (NO_GROUPS, 0.3), (GROUPS, 0.4), (NO_GROUPS, 1.0)],
}
USUAL = {Unstructured: [0.6], NM: ["2:4"], Structured: [(NO_GROUPS, 0.4), (GROUPS, 0.4)]}


def cases(kinds, solvers=None):
    """Every solver with every listed pattern of the kinds that it supports."""
    pairs = [
        pytest.param(solver, pattern, id=f"{solver}-{pattern}")
        for solver in solvers or solver_names()
        for kind in solver_class(solver).patterns
        for pattern in kinds.get(kind, [])
    ]
    return pytest.mark.parametrize(("solver", "pattern"), pairs)


GROUPED = [name for name in solver_names() if solver_class(name).grouped]
PATTERNS, USUAL_PATTERNS = cases(KINDS), cases(USUAL)


def supported_pattern(solver, sparsity=0.5):
    """An unstructured pattern if the solver supports it, otherwise a structured one."""
    return sparsity if Unstructured in solver_class(solver).patterns else (NO_GROUPS, sparsity)


def config(solver, pattern, lam, **more):
    if solver == "cap":
        more.setdefault("block_size", 48)
    if solver == "alps":  # so that its refit converges, and weights can be compared
        more.setdefault("solver_options", {"refit_steps": 100})
    if isinstance(pattern, tuple):
        more |= {"sparsity": pattern[1], "group_size": 8 if pattern[0] == GROUPS else 1}
        return MoonshotConfig(solver=solver, pattern="structured", lam=lam, **more)
    choice = {"pattern": pattern} if isinstance(pattern, str) else {"sparsity": pattern}
    return MoonshotConfig(solver=solver, lam=lam, **choice, **more)


def prune(solver, pattern, lam, tensors, **more):
    return prune_weight(*tensors, config=config(solver, pattern, lam, **more))


def objective_of(solver, pattern, lam, tensors):
    settings = config(solver, pattern, lam)
    return build_objective(settings.make_solver(), settings.parsed_pattern, *tensors, lam)


def assert_counts(solver, pattern, keep):
    """Every comparison group lost exactly the number of weights that the pattern specifies."""
    if isinstance(pattern, str):
        n, m = map(int, pattern.split(":"))
        assert (keep.reshape(-1, m).sum(1) == n).all()
        return
    if isinstance(pattern, tuple):
        group = 8 if pattern[0] == GROUPS else 1
        columns = keep.view(len(keep), -1, group)
        assert (columns == columns[:1, :, :1]).all()
        assert (~columns[0, :, 0]).sum() == round(pattern[1] * keep.shape[1] / group)
        return
    groups = {"wanda": keep.unbind(0), "sparsegpt": keep.split(128, dim=1)}.get(solver, [keep])
    for group in groups:
        assert (~group).sum() == round(pattern * group.numel())


@PATTERNS
@LAMS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_counts_zeros_and_types_are_exact(solver, pattern, lam, dtype):
    weight, gram, gradients = layer(*SHAPE)
    tensors = (weight.to(dtype), gram, gradients.to(dtype))
    before = [tensor.clone() for tensor in tensors]
    result = prune(solver, pattern, lam, tensors)
    assert result.keep.dtype == torch.bool and result.keep.shape == weight.shape
    assert result.weight.dtype == dtype and result.weight.shape == weight.shape
    assert torch.isfinite(result.weight).all() and not result.weight[~result.keep].any()
    assert_counts(solver, pattern, result.keep)
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(tensors, before, strict=True))
    assert result.damping == getattr(solver_class(solver)(), "damping", 0.0) and result.notes == ()


@PATTERNS
@LAMS
def test_no_solver_has_a_larger_loss_than_its_mask_alone(solver, pattern, lam):
    tensors = layer(*SHAPE, seed=1)
    result = prune(solver, pattern, lam, tensors)
    objective = objective_of(solver, pattern, lam, tensors)
    pruned, masked = objective.losses(result.weight, tensors[0] * result.keep)
    assert pruned.total <= 1.0001 * masked.total + 1e-9
    assert objective.losses(torch.zeros_like(result.weight))[0].total == pytest.approx(1, abs=1e-5)
    if 0 < result.keep.float().mean() < 1 and solver not in ("magnitude", "wanda"):
        assert pruned.total < 0.9 * masked.total


@USUAL_PATTERNS
def test_lambda_one_ignores_gradients(solver, pattern):
    weight, gram, gradients = layer(*SHAPE)
    with_gradients = prune(solver, pattern, 1.0, (weight, gram, gradients))
    without = prune(solver, pattern, 1.0, (weight, gram))
    assert torch.equal(with_gradients.weight, without.weight)
    assert torch.equal(with_gradients.keep, without.keep)


@SOLVERS
@LAMS
def test_sparsity_zero_is_the_dense_weight_up_to_dead_inputs(solver, lam):
    tensors = layer(*SHAPE, dead=(5, 130))
    expected = tensors[0].clone()
    expected[:, [5, 130]] = 0
    result = prune(solver, supported_pattern(solver, 0.0), lam, tensors)
    assert result.keep.all() and result.notes == ("2 dead inputs",)
    torch.testing.assert_close(result.weight, expected, rtol=1e-6, atol=1e-6)


@SOLVERS
@LAMS
def test_sparsity_one_is_zero(solver, lam):
    result = prune(solver, supported_pattern(solver, 1.0), lam, layer(*SHAPE))
    assert not result.weight.any() and not result.keep.any()


@PATTERNS
@LAMS
def test_dead_inputs_are_removed_first_and_the_count_stays_exact(solver, pattern, lam):
    dead = [1, 40, 131]  # at most one to a group of an n:m pattern
    result = prune(solver, pattern, lam, layer(*SHAPE, dead=tuple(dead)))
    assert_counts(solver, pattern, result.keep)
    assert not result.weight[:, dead].any() and "3 dead inputs" in result.notes
    if not result.keep.all() and GROUPS not in str(pattern):
        assert not result.keep[:, dead].any()


@cases({Unstructured: [0.1], NM: ["2:4"], Structured: [(NO_GROUPS, 0.1)]})
def test_more_dead_inputs_than_removals_leave_the_count_exact(solver, pattern):
    dead = tuple(range(100))
    result = prune(solver, pattern, 0.5, layer(*SHAPE, dead=dead))
    assert_counts(solver, pattern, result.keep)
    assert not result.weight[:, list(dead)].any()
    if pattern != "2:4":
        first = 144 if solver != "sparsegpt" else 128
        assert result.keep[:, 100:first].all()


def assert_same(solver, pattern, lam, tensors, result, expected):
    """Two results differ by rounding alone; below λ = 1, ALPS stops early and only the losses agree."""
    if solver == "alps" and lam < 1:
        first, second = objective_of(solver, pattern, lam, tensors).losses(result.weight, expected.weight)
        assert first.total == pytest.approx(second.total, rel=0.02, abs=2e-6)
        return
    assert torch.equal(result.keep, expected.keep)
    rounding = 1e-5 if solver == "alps" else 1e-6  # it computes in float32
    torch.testing.assert_close(result.weight, expected.weight, rtol=1e-4, atol=rounding)


@USUAL_PATTERNS
@LAMS
def test_the_order_of_rows_does_not_matter(solver, pattern, lam):
    weight, gram, gradients = layer(*SHAPE, seed=2)
    order = torch.randperm(len(weight), generator=torch.Generator().manual_seed(0))
    result = prune(solver, pattern, lam, (weight, gram, gradients))
    permuted = prune(solver, pattern, lam, (weight[order], gram, gradients[:, order]))
    restored = replace(permuted, weight=permuted.weight[order.argsort()], keep=permuted.keep[order.argsort()])
    assert_same(solver, pattern, lam, (weight, gram, gradients), restored, result)


@USUAL_PATTERNS
@LAMS
@pytest.mark.parametrize("statistic", ["gram", "gradients"])
@pytest.mark.parametrize("factor", [1e3, slow(1e-3)])
def test_the_scale_of_a_statistic_does_not_matter(solver, pattern, lam, statistic, factor):
    weight, gram, gradients = layer(*SHAPE, seed=3)
    result = prune(solver, pattern, lam, (weight, gram, gradients))
    scaled = (weight, factor * gram, gradients) if statistic == "gram" else (weight, gram, factor * gradients)
    again = prune(solver, pattern, lam, scaled)
    assert_same(solver, pattern, lam, (weight, gram, gradients), again, result)


@USUAL_PATTERNS
@LAMS
def test_equal_input_gives_equal_bits(solver, pattern, lam):
    first, second = (prune(solver, pattern, lam, layer(*SHAPE)) for _ in range(2))
    assert torch.equal(first.weight, second.weight) and torch.equal(first.keep, second.keep)


@USUAL_PATTERNS
def test_the_layout_of_a_tensor_does_not_matter(solver, pattern):
    weight, gram, gradients = layer(*SHAPE, seed=3)  # with other seeds, rounding alone moves a weight by 1e-4
    result = prune(solver, pattern, 0.5, (weight, gram, gradients))
    strided = prune(solver, pattern, 0.5, (weight.T.contiguous().T, gram, gradients.mT.contiguous().mT))
    assert torch.equal(strided.keep, result.keep)
    torch.testing.assert_close(strided.weight, result.weight, rtol=1e-4, atol=1e-6)


@SOLVERS
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_statistics_may_have_any_floating_dtype(solver, dtype):
    weight, gram, gradients = layer(8, 24, 5)
    rounded = ((0.01 * gram).to(dtype), (0.01 * gradients).to(dtype))
    result = prune(solver, supported_pattern(solver, 0.6), 0.5, (weight, *rounded))
    exact = prune(solver, supported_pattern(solver, 0.6), 0.5, (weight, *(tensor.float() for tensor in rounded)))
    assert torch.equal(result.keep, exact.keep)
    torch.testing.assert_close(result.weight, exact.weight, rtol=1e-3, atol=1e-4)


@cases({Unstructured: [0.5], NM: ["2:4"], Structured: [(NO_GROUPS, 0.5), (GROUPS, 1 / 3)]})
@pytest.mark.parametrize("name", ["weight", "gram", "gradients"])
def test_a_zero_tensor_gives_exact_counts_and_a_note(solver, pattern, name):
    tensors = dict(zip(("weight", "gram", "gradients"), layer(8, 24, 5), strict=True))
    tensors[name] = torch.zeros_like(tensors[name])
    result = prune(solver, pattern, 0.5, tensors.values())
    assert_counts(solver, pattern, result.keep)
    assert torch.isfinite(result.weight).all()
    assert any(" at W = 0: " in note for note in result.notes)


@pytest.mark.parametrize("pattern", [0.5, "2:4"])
def test_magnitude_needs_the_weight_alone(pattern):
    weight, gram, gradients = layer(8, 24, 5)
    alone = prune_weight(weight, config=config("magnitude", pattern, None))
    assert torch.equal(alone.weight, prune("magnitude", pattern, 0.5, (weight, gram, gradients)).weight)
    assert torch.equal(alone.weight[alone.keep], weight[alone.keep])


@cases({Unstructured: [0.0, 0.45, 1.0], NM: ["2:4"], Structured: [(NO_GROUPS, 0.4)]}, GROUPED)
@LAMS
@pytest.mark.parametrize(("groups", "rows"), [(3, 4), (6, 1)])
def test_groups_of_rows_may_have_separate_inputs(solver, pattern, lam, groups, rows):
    tensors = grouped_layer(groups, rows, 20, 10, dead=(3,))
    result = prune(solver, pattern, lam, tensors)
    assert_counts(solver, pattern, result.keep)
    assert not result.weight[~result.keep].any() and not result.weight[:, 3].any()
    assert f"{groups} dead inputs" in result.notes
    pruned, masked = objective_of(solver, pattern, lam, tensors).losses(result.weight, tensors[0] * result.keep)
    assert pruned.total <= 1.01 * masked.total
    assert pattern != 0 or pruned.total < 1e-9


@cases(USUAL, GROUPED)
@LAMS
def test_groups_with_the_same_inputs_equal_one_layer(solver, pattern, lam):
    weight, gram, gradients = layer(6, 24, 10, seed=5)
    single = prune(solver, pattern, lam, (weight, gram, gradients))
    grouped = prune(solver, pattern, lam, (weight, gram.expand(3, -1, -1), gradients))
    if solver == "alps" and lam < 1:  # its coordinates depend on the group
        assert_counts(solver, pattern, grouped.keep)
        return
    assert_same(solver, pattern, lam, (weight, gram, gradients), grouped, single)


def test_rows_must_divide_into_groups():
    weight, gram, _ = layer(4, 12, 3)
    with pytest.raises(MoonshotError, match=r"gram has shape \[3, 12, 12\]: d_out=4 is not a multiple of 3 groups"):
        prune("sparsegpt", 0.5, 1.0, (weight, gram.expand(3, -1, -1)))


@cases({NM: ["4:8"]})
def test_groups_must_divide_the_inputs(solver, pattern):
    with pytest.raises(MoonshotError, match="pattern='4:8': d_in=36 is not a multiple"):
        prune(solver, pattern, 0.5, layer(4, 36, 3))


@cases(USUAL, ["obc", "cap", "wanda"])
def test_lambda_zero_ignores_the_inputs(solver, pattern):
    weight, gram, gradients = layer(*SHAPE)
    result, other = (prune(solver, pattern, 0.0, (weight, g, gradients)) for g in (gram, torch.eye(len(gram))))
    assert torch.equal(result.keep, other.keep) and torch.equal(result.weight, other.weight)


@pytest.mark.parametrize("solver", solver_names())
def test_a_solver_refuses_unsupported_patterns(solver):
    for kind, patterns in USUAL.items():
        if kind not in solver_class(solver).patterns:
            with pytest.raises(MoonshotError, match=f"pattern='.*': solver='{solver}' takes .*; choose another"):
                config(solver, patterns[0], 0.5)


def test_groups_of_columns_must_divide_the_inputs():
    settings = MoonshotConfig(solver="magnitude", pattern="structured", sparsity=0.25, group_size=8)
    with pytest.raises(MoonshotError, match="pattern='structured': d_in=36 is not a multiple of 8"):
        prune_weight(layer(4, 36, 3)[0], config=settings)


@SOLVERS
def test_two_objectives_need_gradients(solver):
    weight, gram, _ = layer(4, 12, 3)
    with pytest.raises(MoonshotError, match="gradients=None: lam=0.5.*lam=1"):
        prune(solver, supported_pattern(solver), 0.5, (weight, gram))


@pytest.mark.parametrize("solver", [name for name in solver_names() if solver_class(name).calibrated])
def test_a_solver_that_calibrates_needs_a_gram(solver):
    with pytest.raises(MoonshotError, match=f"gram=None: solver='{solver}' needs"):
        prune(solver, supported_pattern(solver), 1.0, layer(4, 12, 3)[:1])


@SOLVERS
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["weight", "gram", "gradients"])
def test_values_that_are_not_finite_are_refused(solver, value, name):
    tensors = dict(zip(("weight", "gram", "gradients"), layer(4, 12, 3), strict=True))
    tensors[name].view(-1)[7] = value
    with pytest.raises(MoonshotError, match=f"{name} holds NaN or infinite values"):
        prune(solver, supported_pattern(solver), 0.5, tensors.values())


@SOLVERS
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("weight", (12,)),
        ("weight", (4, 12, 1)),
        ("weight", (0, 12)),
        ("gram", (12,)),
        ("gram", (4, 12)),
        ("gram", (13, 13)),
        ("gradients", (4, 12)),
        ("gradients", (3, 12, 4)),
        ("gradients", (0, 4, 12)),
        ("gradients", (3, 5, 12)),
    ],
)
def test_wrong_shapes_are_refused(solver, name, shape):
    tensors = dict(zip(("weight", "gram", "gradients"), layer(4, 12, 3), strict=True))
    tensors[name] = torch.ones(shape)
    with pytest.raises(MoonshotError, match=rf"{name} has shape \[{', '.join(map(str, shape))}\]"):
        prune(solver, supported_pattern(solver), 0.5, tensors.values())


@SOLVERS
@pytest.mark.parametrize("name", ["weight", "gram", "gradients"])
def test_integers_and_lists_are_refused(solver, name):
    tensors = dict(zip(("weight", "gram", "gradients"), layer(4, 12, 3), strict=True))
    with pytest.raises(MoonshotError, match=f"{name} has dtype torch.int64"):
        prune(solver, supported_pattern(solver), 0.5, {**tensors, name: tensors[name].long()}.values())
    with pytest.raises(MoonshotError, match=f"{name} is a list"):
        prune(solver, supported_pattern(solver), 0.5, {**tensors, name: tensors[name].tolist()}.values())


def test_a_half_precision_gram_matrix_does_not_underflow_in_wandas_scale():
    weight, gram, _ = layer(256, 64, 1)
    gram = (gram / gram.max() * 6e4).half()
    config = MoonshotConfig(solver="wanda", sparsity=0.5, lam=1.0)
    half = prune_weight(weight * 300, gram, config=config)
    assert torch.equal(half.keep, prune_weight(weight * 300, gram.float(), config=config).keep)


def test_eight_bit_floats_are_refused():
    weight, gram, _ = layer(8, 16, 1)
    with pytest.raises(MoonshotError, match="weight has dtype torch.float8_e4m3fn"):
        prune_weight(weight.to(torch.float8_e4m3fn), gram, config=MoonshotConfig(sparsity=0.5, lam=1.0))


def test_osscar_refuses_groups_with_separate_inputs():
    weight, gram, gradients = layer(6, 24, 10)
    with pytest.raises(MoonshotError, match="solver='osscar': it does not support grouped convolutions"):
        prune("osscar", (NO_GROUPS, 0.5), 0.5, (weight, gram.expand(3, -1, -1), gradients))
