"""A folder that cannot be written is refused before a model is loaded, and nothing else is written."""

import os
import subprocess

import pytest
from command_line import DEMO, failure
from models import make, token_batches

from optimum_moonshot import MoonshotConfig, MoonshotError, MoonshotPruner

PATTERN = ["--pattern", "2:4"]
COMMANDS = {
    "prune": PATTERN,
    "rotate": PATTERN,
    "sweep": ["--patterns", "2:4"],
    "shrink": ["--parameters", "0.8"],
    "convert": ["--format", "packed"],
}


@pytest.fixture
def read_only(tmp_path):
    """A folder on a read-only file system for root, whom permissions do not stop; else one without the permission."""
    folder = tmp_path / "read-only"
    folder.mkdir()
    root = os.name == "posix" and os.geteuid() == 0
    if root and subprocess.run(["mount", "-t", "tmpfs", "-o", "ro,size=1m", "tmpfs", folder]).returncode:
        pytest.skip("nothing can be mounted here")
    folder.chmod(0o555) if not root else None
    yield folder
    subprocess.run(["umount", folder], check=True) if root else folder.chmod(0o755)


@pytest.mark.parametrize("inside", ["", "new", "new/deeper"])
@pytest.mark.parametrize("name", COMMANDS)
def test_commands(name, inside, read_only, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(MoonshotPruner, "from_pretrained", None)
    output = read_only / inside
    status, lines = failure(capsys, name, DEMO, "--output", output, *COMMANDS[name])
    assert status in (1, 2) and f"--output {output}: cannot be written" in lines[-1]
    assert {path.name for path in tmp_path.iterdir()} == {"read-only"} and not any(read_only.iterdir())


@pytest.mark.parametrize("inside", ["", "new"])
def test_in_python(inside, read_only, monkeypatch):
    pruner = MoonshotPruner(make("llama"), MoonshotConfig(pattern="2:4", num_samples=4))
    monkeypatch.setattr("optimum_moonshot.solvers.sparsegpt.SparseGPT.solve", None)
    for run in (pruner.prune, pruner.rotate):
        with pytest.raises(MoonshotError, match="resume_dir=.*cannot be written"):
            run(token_batches(4), progress=False, resume_dir=read_only / inside)
    with pytest.raises(MoonshotError, match="work_dir=.*cannot be written"):
        pruner.sweep(token_batches(4), lambdas=[1.0], progress=False, work_dir=read_only / inside)


@pytest.mark.parametrize("place", ["/proc/moonshot", "/sys/moonshot"])
def test_file_systems_of_the_kernel(place, capsys):
    if not os.path.isdir(os.path.dirname(place)):
        pytest.skip("only on Linux")
    status, lines = failure(capsys, "prune", DEMO, "--output", place, *PATTERN)
    assert status == 1 and f"--output {place}: cannot be written" in lines[-1]
