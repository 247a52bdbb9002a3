"""Objectives and Fisher terms from plain tensors."""

import torch

from optimum_moonshot.objective.fisher import FisherMatrices, SampleGradients
from optimum_moonshot.objective.quadratic import DiagonalQuadratic, Quadratic


def full(weight, gram, gradients, lam, **more):
    """A `Quadratic`; gradients [N, d_out, d_in] or None."""
    return Quadratic.build(weight, gram, None if gradients is None else SampleGradients(gradients), lam, **more)


def diagonal(weight, gram, gradients, lam):
    """A `DiagonalQuadratic` from full statistics."""
    squares = None if gradients is None else gradients.float().square().sum(0)
    samples = 0 if gradients is None else len(gradients)
    return DiagonalQuadratic.build(weight, gram.diagonal(), squares, samples, lam)


def matrices(gradients, size=None):
    """Gradients [N, d_out, d_in] as row matrices, or as matrices of column blocks of `size` inputs."""
    rows = gradients if size is None else gradients.unflatten(2, (-1, size)).flatten(1, 2)
    return FisherMatrices(torch.einsum("nki,nkj->kij", rows, rows), len(gradients))


def indefinite(gram, share, seed=0):
    """`gram` with one eigenvalue of about -share times the mean diagonal."""
    values, vectors = torch.linalg.eigh(gram.double())
    values[0] = -share * gram.diagonal().mean()
    return (vectors * values @ vectors.T).float()
