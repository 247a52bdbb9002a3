"""Commands of the package, and the demo model they run on."""

from pathlib import Path

import pytest

from optimum_moonshot.__main__ import main

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "examples" / "demo_model"


def failure(capsys, *argv):
    """Exit status and message of a command that fails."""
    with pytest.raises(SystemExit) as caught:
        main([str(part) for part in argv])
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert lines[-1].startswith("error: "), captured.err
    assert "Traceback" not in captured.err
    return caught.value.code, lines
