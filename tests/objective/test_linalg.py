"""One factorisation replaces inverse and Cholesky, and damping increases until it exists."""

import pytest
import torch

from optimum_moonshot.errors import FactorizationError, MoonshotError
from optimum_moonshot.objective.linalg import damped_inverse_factor, escalate, inverse_factor


def definite(*shape, seed=0):
    root = torch.randn(*shape, shape[-1], generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return root @ root.mT + 0.1 * torch.eye(shape[-1], dtype=torch.float64)


@pytest.mark.parametrize("shape", [(1,), (7,), (40,), (3, 5), (2, 3, 6)])
def test_the_factor_is_upper_triangular_and_squares_to_the_inverse(shape):
    matrix = definite(*shape)
    factor, ok = inverse_factor(matrix)
    assert ok.all() and ok.shape == shape[:-1] and factor.dtype == torch.float64
    assert torch.equal(factor, factor.triu()) and (factor.diagonal(dim1=-2, dim2=-1) > 0).all()
    torch.testing.assert_close(factor.mT @ factor, torch.linalg.inv(matrix), rtol=1e-8, atol=1e-10)
    textbook = torch.linalg.cholesky(torch.linalg.inv(matrix), upper=True)
    torch.testing.assert_close(factor, textbook, rtol=1e-7, atol=1e-9)


def test_members_that_are_not_positive_definite_are_flagged():
    batch = definite(5, 6)
    batch[1] *= -1
    batch[2] = 0
    batch[4] -= 2 * torch.linalg.eigvalsh(batch[4])[0] * torch.eye(6)
    factor, ok = inverse_factor(batch)
    assert ok.tolist() == [True, False, False, True, False]
    torch.testing.assert_close(factor[3].mT @ factor[3], torch.linalg.inv(batch[3]))


def test_the_first_damping_is_kept_where_it_suffices():
    matrix = definite(8)
    before = matrix.clone()
    factor, damping = escalate(0.05, lambda damping: damped_inverse_factor(matrix, 2.0, damping))
    assert damping == 0.05 and torch.equal(matrix, before)
    damped = matrix + 0.1 * torch.eye(8)
    torch.testing.assert_close(factor.mT @ factor, torch.linalg.inv(damped))


@pytest.mark.parametrize(("lowest", "taken"), [(0.005, 0.01), (0.05, 0.1), (0.5, 1.0)])
def test_damping_grows_tenfold_until_the_matrix_is_definite(lowest, taken):
    unit = 3.0
    matrix = torch.diag(torch.tensor([1.0, 2.0, -lowest * unit, 4.0]))
    factor, damping = escalate(0.01, lambda damping: damped_inverse_factor(matrix, unit, damping))
    assert damping == pytest.approx(taken) and factor.dtype == torch.float64
    damped = matrix.double() + taken * unit * torch.eye(4)
    torch.testing.assert_close(factor.mT @ factor, torch.linalg.inv(damped))


def test_the_last_damping_tried_is_one():
    matrix = torch.diag(torch.tensor([1.0, -0.9]))
    assert escalate(0.03, lambda damping: damped_inverse_factor(matrix, 1.0, damping))[1] == 1


def test_a_matrix_beyond_damping_is_an_error_with_the_attempts():
    with pytest.raises(FactorizationError, match=r"size 4 .*\[0\.01, 0\.1, 1\.0\].*calibration samples"):
        escalate(0.01, lambda damping: damped_inverse_factor(-1e6 * torch.eye(4), 1.0, damping))
    assert issubclass(FactorizationError, MoonshotError)
