"""Sums over tokens are those of the whole product, although only some of its blocks are computed."""

import pytest
import torch

from optimum_moonshot.calibration.accumulators import GradientPlan, Gram, WeightedGram
from optimum_moonshot.calibration.storage import Storage
from optimum_moonshot.model.layers import named_layers

SIZES = [1, 5, 127, 129, 256, 600]


def linear(d_in):
    model = torch.nn.ModuleDict({"layer": torch.nn.Linear(d_in, 3)})
    return next(layer for _, _, layer in named_layers(model) if layer is not None)


@pytest.mark.parametrize("d_in", SIZES)
def test_a_gram_matrix_is_the_sum_over_batches_and_symmetric(d_in):
    gram = Gram(linear(d_in), Storage(torch.device("cpu")), torch.device("cpu"))
    batches = [torch.randn(1, tokens, d_in) for tokens in (7, 64)]
    for number, batch in enumerate(batches):
        gram.add(batch, slice(None))
        inputs = torch.cat(batches[: number + 1], 1)[0].double()
        result = gram.result()  # also between batches
        torch.testing.assert_close(result, result.T)
        torch.testing.assert_close(result.double(), inputs.T @ inputs, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("d_in", SIZES)
def test_a_weighted_gram_matrix_is_the_sum_over_tokens_and_symmetric(d_in):
    layer = linear(d_in)
    gram = WeightedGram(layer, 2, Storage(torch.device("cpu")), GradientPlan(shared=True))
    inputs, delta = torch.randn(2, 1, 9, d_in), torch.randn(2, 1, 9, 3)  # [samples, groups, tokens, …]
    gram.add(inputs, delta, True, slice(None))
    matrix = gram.result().shared[0]
    expected = torch.einsum("ngt,ngti,ngtj->ij", delta.square().mean(-1).double(), inputs.double(), inputs.double())
    torch.testing.assert_close(matrix, matrix.T)
    torch.testing.assert_close(matrix.double(), expected, rtol=1e-5, atol=1e-5)
