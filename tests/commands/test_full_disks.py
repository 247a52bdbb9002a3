"""A full disk at any file of a command: a one-line error, no partial output, and a rerun that completes."""

import resource
import time
import types

import pytest
from full_disk import full_disk
from kills import COMMANDS, SAVES, Stage, files, weights

from optimum_moonshot import MoonshotError

pytestmark = pytest.mark.slow

KINDS = ("prune", "recover", "sweep", "convert to packed", "convert to dense", *SAVES)


@pytest.fixture(scope="module")
def stage(tmp_path_factory):
    return Stage(tmp_path_factory.mktemp("stage"))


@pytest.fixture
def run(stage, tmp_path, monkeypatch):
    """A function that runs a command in an otherwise empty folder, any number of times."""
    monkeypatch.setattr(time, "perf_counter", lambda: 0.0)  # reports contain seconds
    monkeypatch.setattr(resource, "getrusage", lambda who: types.SimpleNamespace(ru_maxrss=0))
    return lambda kind: stage.work(kind, tmp_path)


def limits(contents):
    """One byte less than the largest file, one byte less than the median one, and zero."""
    sizes = sorted({len(content) for content in contents.values()})
    return [sizes[-1] - 1, sizes[len(sizes) // 2] - 1, 0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_full_disk(stage, run, capsys, tmp_path, kind):
    stage.prepare(kind, tmp_path)
    before = files(tmp_path)
    run(kind)
    whole = files(tmp_path)
    model = tmp_path / "out" / ("model" if kind == "sweep" else "")
    assert weights(model)
    for limit in limits(whole):
        stage.prepare(kind, tmp_path)
        capsys.readouterr()
        with full_disk(limit):
            if kind in COMMANDS:
                status, lines = failure_of(capsys, run, kind)
                assert status == 1 and len([line for line in lines if line.startswith("error")]) == 1
                assert f"--output {tmp_path / 'out'}" in lines[-1] and "cannot be written: " in lines[-1], lines[-1]
            else:
                with pytest.raises(MoonshotError, match=r"directory=.* cannot be written: .*(File too large|error 27)"):
                    run(kind)
        left = files(tmp_path)
        if kind in SAVES:
            assert left == before
        elif kind != "sweep":
            assert not any(path.startswith("out/") for path in left)
        assert all(content == whole[path] for path, content in left.items() if path.startswith("out/seed"))
        run(kind)
        assert files(tmp_path) == whole


def failure_of(capsys, run, kind):
    with pytest.raises(SystemExit) as caught:
        run(kind)
    return caught.value.code, capsys.readouterr().err.splitlines()
