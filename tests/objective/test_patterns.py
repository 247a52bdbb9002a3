"""Patterns remove the exact number of weights; of equal scores, the lowest index is removed first."""

import random

import pytest
import reference
import torch

from optimum_moonshot.errors import MoonshotError
from optimum_moonshot.objective.patterns import (
    NM,
    Structured,
    Unstructured,
    _by_order,
    _by_threshold,
    kth_smallest,
    parse_pattern,
    smallest,
)


@pytest.mark.parametrize("sparsity", [0, 0.1, 0.25, 0.5, 0.6, 0.999, 1])
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (5, 128)])
def test_the_count_is_exact_for_any_ties(sparsity, shape):
    for scores in (torch.rand(shape), torch.zeros(shape), torch.randint(0, 2, shape).float()):
        keep = Unstructured(sparsity).keep(scores)
        assert keep.dtype == torch.bool and keep.shape == scores.shape
        assert (~keep).sum() == round(sparsity * scores.numel())
        rows = Unstructured(sparsity).keep_per_row(scores)
        assert ((~rows).sum(1) == round(sparsity * shape[1])).all()


def test_of_equal_scores_the_first_index_is_removed_first():
    scores = torch.tensor([[2.0, 1.0, 1.0, 3.0], [1.0, 1.0, 2.0, 0.0]])
    assert Unstructured(0.375).keep(scores).tolist() == [[True, False, False, True], [True, True, True, False]]
    assert Unstructured(0.5).keep_per_row(scores).tolist() == [[True, False, False, True], [False, True, True, False]]


def test_of_all_equal_scores_the_first_are_removed():
    assert Unstructured(0.4).keep(torch.ones(2, 5)).tolist() == [[False] * 4 + [True], [True] * 5]
    assert NM(1, 4).keep(torch.zeros(1, 8)).tolist() == [[False, False, False, True] * 2]


def test_smallest_selects_none_and_all():
    scores = torch.rand(3, 4)
    for count in (-1, 0):
        assert not smallest(scores, count).any()
    for count in (4, 5):
        assert smallest(scores, count).all()


@pytest.mark.parametrize(("n", "m"), [(1, 1), (1, 2), (2, 4), (1, 4), (4, 8), (3, 5)])
def test_every_group_of_m_keeps_its_n_largest(n, m):
    scores = torch.rand(6, 3 * m)
    keep = NM(n, m).keep(scores)
    assert (keep.view(-1, m).sum(1) == n).all()
    assert torch.equal(keep, reference.remove_nm(scores, n, m))
    assert torch.equal(keep, NM(n, m).keep_per_row(scores))
    assert NM(n, m).sparsity == pytest.approx(1 - n / m)


def test_groups_of_m_do_not_cross_rows():
    assert NM(2, 4).fits((3, 8)) and not NM(2, 4).fits((4, 6)) and Unstructured(0.5).fits((4, 6))


@pytest.mark.parametrize("group", [1, 3, 4])
@pytest.mark.parametrize("sparsity", [0, 0.1, 0.25, 0.5, 1])
def test_structured_removes_exactly_the_columns_with_the_smallest_sums(group, sparsity):
    scores = torch.rand(5, 24, dtype=torch.float64)
    pattern = Structured(sparsity, group)
    keep = pattern.keep(scores)
    sums = torch.stack([scores[:, start : start + group].sum() for start in range(0, 24, group)])
    groups = reference.remove(sums, round(sparsity * (24 // group)))
    assert torch.equal(pattern.keep_groups(sums), groups)
    assert torch.equal(keep, torch.stack([groups[j // group] for j in range(24)]).expand(5, -1))
    assert torch.equal(keep, pattern.keep_per_row(scores))


def test_of_equal_columns_the_first_are_removed():
    assert Structured(0.5, 2).keep(torch.ones(2, 8)).tolist() == [[False] * 4 + [True] * 4] * 2
    assert Structured(0.5, 4).fits((3, 8)) and not Structured(0.5, 3).fits((3, 8))


def test_transposed_scores_are_indexed_by_row_and_column():
    scores = torch.rand(8, 6).T
    assert torch.equal(Unstructured(0.5).keep(scores), reference.remove(scores, 24))
    assert torch.equal(NM(2, 4).keep(scores), reference.remove_nm(scores, 2, 4))


def test_random_sweep_against_a_stable_sort():
    choose, generator = random.Random(0), torch.Generator().manual_seed(0)
    for _ in range(300):
        shape = (choose.randint(1, 6), choose.randint(1, 40))
        levels = choose.choice([1, 2, 5, 1000])  # few levels: many ties
        scores = torch.randint(0, levels, shape, generator=generator).float()
        sparsity = choose.choice([0, 1, choose.random()])
        assert torch.equal(
            Unstructured(sparsity).keep(scores), reference.remove(scores, round(sparsity * scores.numel()))
        )
        count = round(sparsity * shape[1])
        rows = torch.stack([reference.remove(row, count) for row in scores])
        assert torch.equal(Unstructured(sparsity).keep_per_row(scores), rows)


@pytest.mark.parametrize(
    ("pattern", "sparsity", "expected"),
    [
        ("unstructured", 0.6, Unstructured(0.6)),
        ("unstructured", 0, Unstructured(0.0)),
        ("unstructured", 1, Unstructured(1.0)),
        ("2:4", None, NM(2, 4)),
        ("2:4", 0.5, NM(2, 4)),
        ("1:3", 2 / 3, NM(1, 3)),
        ("structured", 0.25, Structured(0.25)),
    ],
)
def test_a_pattern_is_parsed(pattern, sparsity, expected):
    parsed = parse_pattern(pattern, sparsity)
    assert parsed == expected and str(parsed) == pattern


@pytest.mark.parametrize(
    ("pattern", "sparsity", "message"),
    [
        ("structured", None, "sparsity=None: pattern='structured' needs one"),
        ("structured", 1.5, "sparsity=1.5.*between 0 and 1"),
        ("unstructured", None, "sparsity=None.*sparsity=0.5"),
        ("unstructured", 1.2, "sparsity=1.2.*between 0 and 1"),
        ("unstructured", -0.1, "sparsity=-0.1.*between 0 and 1"),
        ("unstructured", float("nan"), "sparsity=nan.*between 0 and 1"),
        ("2/4", None, "pattern='2/4'.*\"n:m\""),
        ("2:4:8", None, "pattern='2:4:8'.*\"n:m\""),
        ("-2:4", None, "pattern='-2:4'.*\"n:m\""),
        ("", None, "pattern=''.*\"n:m\""),
        (24, None, 'pattern=24.*"n:m"'),
        ("0:4", None, "pattern='0:4'.*n must be between 1 and m"),
        ("5:4", None, "pattern='5:4'.*n must be between 1 and m"),
        ("2:4", 0.6, "sparsity=0.6: it contradicts pattern='2:4'.*leave it out"),
    ],
)
def test_an_invalid_pattern_is_an_error_with_the_field_and_a_hint(pattern, sparsity, message):
    with pytest.raises(MoonshotError, match=message):
        parse_pattern(pattern, sparsity)


def test_kth_smallest_selects_within_each_row():
    values = torch.tensor([[3.0, 1.0, 2.0, 1.0], [-1.0, 5.0, 5.0, 0.0]])
    for count in range(1, 5):
        assert torch.equal(kth_smallest(values, count), values.sort(1).values[:, count - 1 : count])


@pytest.mark.parametrize("size", [2, 4, 8, 32])
@pytest.mark.parametrize("values", [2, 1000])  # with ties, and almost without
def test_ranks_and_thresholds_select_the_same_scores(size, values):
    scores = torch.randint(values, (64, size)).float()
    scores[torch.rand(scores.shape) < 0.1] = -torch.inf
    for count in range(1, size):
        by_sorting = torch.zeros_like(scores, dtype=torch.bool)
        by_sorting.scatter_(1, scores.sort(dim=1, stable=True).indices[:, :count], True)
        assert torch.equal(_by_order(scores, count), by_sorting)
        assert torch.equal(_by_threshold(scores, count), by_sorting)
