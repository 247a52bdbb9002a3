"""Progress bars: shown in terminals, disabled by every usual switch, absent from logs."""

import io
import sys

import huggingface_hub.utils as hub
import pytest
from models import make, token_batches
from tqdm import std
from transformers.utils import logging

from optimum_moonshot import MoonshotConfig, MoonshotPruner
from optimum_moonshot import progress as progress_module
from optimum_moonshot.progress import progress_bar


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def written(monkeypatch):
    """The output of a bar of three steps on a given type of stderr."""
    monkeypatch.delenv("TQDM_DISABLE", raising=False)

    def write(stream=Terminal, shown=True):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "stderr", stream())
            list(progress_bar(range(3), shown=shown, desc="counting"))
            return sys.stderr.getvalue()

    return write


def test_a_terminal_has_bars(written):
    assert "counting" in written()


def test_bars_can_be_turned_off(written):
    assert written(shown=False) == ""


def test_a_log_has_no_bars(written):
    assert written(io.StringIO) == ""


def test_a_notebook_has_widgets(written, monkeypatch):
    widget = type("Widget", (std.tqdm,), {"__module__": "tqdm.notebook"})  # the choice of tqdm.auto in a notebook
    monkeypatch.setattr(progress_module, "tqdm", widget)
    assert "counting" in written(io.StringIO)


@pytest.mark.parametrize("value", ["1", "true", "yes"])
def test_the_switch_of_tqdm(written, monkeypatch, value):
    monkeypatch.setenv("TQDM_DISABLE", value)
    assert written() == ""
    monkeypatch.setenv("TQDM_DISABLE", "0")
    assert "counting" in written()


def test_the_switch_of_transformers(written):
    logging.disable_progress_bar()
    try:
        assert written() == ""
    finally:
        logging.enable_progress_bar()
    assert "counting" in written()


def test_the_switch_of_the_hub(written):
    hub.disable_progress_bars()
    try:
        assert written() == ""
    finally:
        hub.enable_progress_bars()
    assert "counting" in written()


@pytest.mark.parametrize("stream, lines", [(Terminal, True), (io.StringIO, False)])
def test_a_run_writes_only_to_terminals(monkeypatch, stream, lines):
    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    monkeypatch.setattr(sys, "stderr", stream())
    config = MoonshotConfig(pattern="2:4", lam=0.9, num_samples=6, sequence_length=12)
    MoonshotPruner(make("llama"), config).prune(token_batches())
    written = sys.stderr.getvalue()
    assert ("calibrating" in written and "pruning" in written) if lines else written == ""
