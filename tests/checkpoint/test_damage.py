"""Hundreds of damaged folders: every reader returns the saved weights or raises a `MoonshotError`."""

import pytest
from damage import READERS, RUNS, make_folder, trial

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=READERS)
def intact(request, tmp_path_factory):
    """A folder of each format, and its weights."""
    folder = tmp_path_factory.mktemp("intact") / request.param
    return folder, make_folder(folder, request.param), request.param


@pytest.mark.parametrize("start", [0, *(pytest.param(seed, marks=pytest.mark.release) for seed in (100, 200))])
def test_a_damaged_folder_gives_the_same_weights_or_is_refused(intact, start, tmp_path):
    folder, expected, format = intact
    seeds = range(start, start + (20 if format in RUNS else 100))
    outcomes = {seed: trial(folder, expected, seed, tmp_path, format) for seed in seeds}
    wrong = [seed for seed, (_, verdicts) in outcomes.items() if any(v.startswith("WRONG") for v in verdicts.values())]
    assert not wrong, [outcomes[seed] for seed in wrong]
    kinds = {verdict for _, verdicts in outcomes.values() for verdict in verdicts.values()}
    # A run recomputes nearly everything that was damaged.
    assert kinds >= ({"same weights"} if format in RUNS else {"refused", "same weights"})


def test_the_trial_detects_wrong_weights(tmp_path, monkeypatch):
    """Without checksums some damage is not refused: the trial reports it as wrong."""
    expected = make_folder(tmp_path / "intact")
    monkeypatch.setenv("MOONSHOT_VERIFY", "0")
    verdicts = [trial(tmp_path / "intact", expected, seed, tmp_path)[1]["from_pretrained"] for seed in range(60)]
    assert any(verdict.startswith("WRONG") and verdict.endswith("differs") for verdict in verdicts)
