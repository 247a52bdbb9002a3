"""Grids of quantized weights: nearest codes, searched scales, and scales restored from the weights."""

import itertools

import pytest
import torch
from torch import Tensor

from optimum_moonshot.errors import MoonshotError
from optimum_moonshot.objective.grid import Grid

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
GRIDS = [Grid(*each) for each in itertools.product((8, 4, 3), (64, 128), DTYPES)]


def restored(grid: Grid, weight: Tensor) -> Tensor:
    """The weights of the codes and scales that are restored from weights."""
    return grid.rounded(weight, grid.scales_of(weight))


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_scales_are_restored_bit_for_bit(grid: Grid) -> None:
    torch.manual_seed(0)
    weight = 0.02 * torch.randn(30, 200) * (torch.rand(30, 200) < 0.5)
    weight[3], weight[4, :128] = 0, 0
    quantized = grid.rounded(weight, grid.search(weight, torch.rand(1, 200)))
    assert torch.equal(restored(grid, quantized), quantized)
    assert not grid.scales_of(quantized)[3].any()


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_codes_that_do_not_reach_the_last_one_are_restored(grid: Grid) -> None:
    torch.manual_seed(1)
    for top in range(1, grid.top + 1, max(1, grid.top // 9)):
        codes = torch.randint(-top, top + 1, (20, 130)).float() * (torch.rand(20, 130) < 0.3)
        scale = (0.01 * torch.rand(20, grid.groups(130))).to(grid.dtype)
        weight = grid.values(codes, grid.per_weight(scale, 130))
        assert torch.equal(restored(grid, weight), weight)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_weights_off_the_grid_are_refused(grid: Grid) -> None:
    torch.manual_seed(2)
    with pytest.raises(MoonshotError, match=f"row 0 is not on a grid of {grid.bits} bits"):
        grid.scales_of(torch.randn(4, 128).to(grid.dtype))


@pytest.mark.parametrize("bits", [8, 4, 3])
def test_codes_are_the_nearest_by_brute_force(bits: int) -> None:
    grid = Grid(bits)
    weight, step = torch.randn(3, 7), torch.full((3, 7), 0.3)
    every = torch.arange(-grid.top, grid.top + 1)
    distances = (weight[..., None] - 0.3 * every).abs()
    assert torch.equal(grid.codes(weight, step), every[distances.argmin(-1)].float())


@pytest.mark.parametrize("bits", [8, 4, 3])
def test_the_searched_scale_is_no_worse_than_that_of_the_largest_weight(bits: int) -> None:
    torch.manual_seed(3)
    grid, weight, importance = Grid(bits, 64), torch.randn(50, 192), torch.rand(50, 192)
    largest = grid.blocks(weight).abs().amax(-1) / grid.top

    def error(scale: Tensor) -> Tensor:
        return grid.blocks((grid.rounded(weight, scale) - weight).square() * importance).sum(-1)

    searched = error(grid.search(weight, importance))
    assert (searched <= error(largest) * (1 + 1e-6)).all()
    assert bits == 8 or (searched < error(largest)).any()


def test_the_search_ignores_inputs_without_importance() -> None:
    weight = torch.tensor([[7.0, 1.0, 2.0] + [0.0] * 61])
    importance = torch.ones(1, 64)
    importance[0, 0] = 0
    quantized = Grid(3, 64).rounded(weight, Grid(3, 64).search(weight, importance))
    assert quantized[0, 1:3].tolist() == pytest.approx([1, 2], rel=0.15)


@pytest.mark.parametrize(("arguments", "message"), [((5,), "bits=5"), ((True,), "bits"), ((4, 96), "quant_group=96")])
def test_invalid_grids_are_refused(arguments: tuple[int, ...], message: str) -> None:
    with pytest.raises(MoonshotError, match=message):
        Grid(*arguments)


def test_small_negative_weights_are_rounded_to_positive_zero() -> None:
    codes = Grid(4).codes(torch.tensor([-0.1, 0.1]), torch.ones(2))
    assert not torch.signbit(codes).any()
