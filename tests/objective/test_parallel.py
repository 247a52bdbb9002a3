"""Parallel tasks return results in order and leave the settings of torch unchanged."""

import pytest
import torch

from optimum_moonshot import MoonshotConfig, prune_weight
from optimum_moonshot.objective.linalg import parallel_map

CPU = torch.device("cpu")


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_results_are_in_order_and_the_thread_count_is_restored(two_threads):
    seen = parallel_map(lambda piece: (piece, torch.get_num_threads(), torch.is_grad_enabled()), range(20), CPU)
    assert seen == [(piece, 1, False) for piece in range(20)]
    assert torch.get_num_threads() == 2 and torch.is_grad_enabled()


def test_an_exception_is_raised_and_the_thread_count_is_restored(two_threads):
    def fail(piece: int) -> None:
        if piece == 3:
            raise KeyError(piece)

    with pytest.raises(KeyError):
        parallel_map(fail, range(20), CPU)
    assert torch.get_num_threads() == 2


def test_a_single_task_uses_every_thread(two_threads):
    assert parallel_map(lambda _: torch.get_num_threads(), [0], CPU) == [2]


@pytest.mark.parametrize("pattern", [{"sparsity": 0.6}, {"pattern": "2:4"}])
def test_sparsegpt_does_not_depend_on_the_number_of_threads(two_threads, pattern):
    generator = torch.Generator().manual_seed(0)
    weight, inputs = torch.randn(96, 256, generator=generator), torch.randn(256, 512, generator=generator)
    gradients = torch.randn(32, 96, 256, generator=generator)
    config = MoonshotConfig(lam=0.5, **pattern)
    several = prune_weight(weight, inputs @ inputs.T, gradients, config=config)
    torch.set_num_threads(1)
    one = prune_weight(weight, inputs @ inputs.T, gradients, config=config)
    assert torch.equal(several.keep, one.keep)
    torch.testing.assert_close(several.weight, one.weight, rtol=1e-5, atol=1e-6)
