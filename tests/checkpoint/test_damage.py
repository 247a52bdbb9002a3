"""Damaged folders by the hundred: the weights that were saved, or a `MoonshotError`; nothing else, from any reader."""

import pytest
from damage import READERS, make_folder, trial

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=READERS)
def intact(request, tmp_path_factory):
    """A folder of each format, and its weights."""
    folder = tmp_path_factory.mktemp("intact") / request.param
    return folder, make_folder(folder, request.param), request.param


@pytest.mark.parametrize("start", [0, 100, 200])
def test_a_damaged_folder_gives_the_same_weights_or_is_refused(intact, start, tmp_path):
    folder, expected, format = intact
    seeds = range(start, start + (20 if format == "run" else 100))
    found = {seed: trial(folder, expected, seed, tmp_path, format) for seed in seeds}
    wrong = {seed: done for seed, done in found.items() if any(v.startswith("WRONG") for v in done[1].values())}
    assert not wrong
    kinds = {verdict for _, verdicts in found.values() for verdict in verdicts.values()}
    # A run makes nearly everything that was damaged again.
    assert kinds >= ({"same weights"} if format == "run" else {"refused", "same weights"})


def test_the_trial_notices_what_is_wrong(tmp_path, monkeypatch):
    """Without checksums some damage goes unnoticed, and the trial must say so."""
    expected = make_folder(tmp_path / "intact")
    monkeypatch.setenv("MOONSHOT_VERIFY", "0")
    found = [trial(tmp_path / "intact", expected, seed, tmp_path)[1]["from_pretrained"] for seed in range(60)]
    assert any(verdict.startswith("WRONG") and verdict.endswith("differs") for verdict in found)
