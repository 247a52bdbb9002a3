"""Stored float64 results of the literal formulas; a second set is compared if it exists beside the repository."""

import json
from pathlib import Path

import pytest
from marks import DEVICES
from safetensors import safe_open

from optimum_moonshot.config import MoonshotConfig
from optimum_moonshot.functional import prune_weight

ROOT = Path(__file__).parents[1]
OWN = sorted((ROOT / "tests/golden").glob("*.safetensors"))
SHARED = sorted(
    path
    for solver in ("sparsegpt", "wanda", "obc", "cap", "osscar")
    for path in (ROOT / "../shared/golden").glob(f"{solver}-*.safetensors")
)


def check(path, device):
    with safe_open(path, "pt", device=device) as file:
        config = MoonshotConfig(**json.loads(file.metadata()["config"]))
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    result = prune_weight(tensors["weight"], tensors["gram"], tensors.get("gradients"), config=config)
    expected, keep = tensors["expected_weight"], tensors["expected_keep"]
    wrong = result.keep != keep
    assert wrong.sum() <= 0.002 * keep.numel()
    right = ~wrong.any(1)  # removing a weight instead of a near-equal one changes its whole row
    error = (result.weight - expected)[right].norm() / expected[right].norm()
    assert error < 1e-4
    assert result.damping == (config.damping if hasattr(config.make_solver(), "damping") else 0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("path", OWN, ids=lambda path: path.stem)
def test_results_match_the_golden_file(path, device):
    check(path, device)


def test_every_golden_file_is_there():
    assert len(OWN) == 41
    assert sum(path.stat().st_size for path in OWN) <= 300_000


@pytest.mark.skipif(not SHARED, reason="no second set of golden files beside the repository")
@pytest.mark.parametrize("path", SHARED, ids=lambda path: path.stem)
def test_results_match_the_second_set(path):
    check(path, "cpu")
