"""`moonshot shrink` after a kill: the same command resumes, and any other can use the output."""

import shutil

import pytest
import transformers as hf
from command_line import DEMO, failure

from optimum_moonshot.__main__ import main
from optimum_moonshot.commands.output import Output
from optimum_moonshot.pipeline.run_folder import RunFolder

pytestmark = pytest.mark.slow

DATA = ["--calibration", DEMO / "calibration.txt", "--num-samples", "4", "--sequence-length", "16", "--device", "cpu"]
WANDA = ["--solver", "wanda", "--pattern", "2:4", "--lam", "1", *DATA]


class Killed(BaseException):
    """Ends a command like a kill: no clean-up follows."""


@pytest.fixture
def killed(monkeypatch, tmp_path):
    """DIR.partial of a command killed before it saved, with runs of a narrowed model, and the folder of the model."""
    config = hf.LlamaConfig(
        vocab_size=2048, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64, bos_token_id=0, eos_token_id=1, pad_token_id=2,
    )  # fmt: skip
    hf.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, tmp_path / "model")

    def kill(*arguments):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Output, "begin", kill)
        patch.setattr(Output, "_clean_up", lambda output: None)
        with pytest.raises(Killed):
            main(command(tmp_path, "shrink", "--parameters", "0.5", *DATA))
    assert list(tmp_path.glob("out.partial/*/measured/run.json"))
    return tmp_path


def command(folder, name, *options):
    return [str(part) for part in (name, folder / "model", "--output", folder / "out", *options)]


def test_another_command_uses_the_output(capsys, killed):
    """Its results have another folder, so that those of the killed command are no "other files" to it."""
    main(command(killed, "prune", *WANDA))
    assert {path.name for path in killed.iterdir()} == {"model", "out"}
    status, lines = failure(capsys, *command(killed, "prune", *WANDA))
    assert status == 2 and lines[-1].endswith("it is not empty; --overwrite writes there anyway")


def test_a_kill_while_the_results_are_removed(monkeypatch, killed):
    """Whatever runs it leaves, with a lock alone, or of a narrowed model: no later command is refused for them."""
    remove = RunFolder._remove

    def halfway(folder):
        remove(folder)
        folder.path.mkdir(parents=True)
        (folder.path / "run.lock").touch()  # as before its last two operations
        if folder.path.parent.name == "narrowed" or folder.path.name == "measured":
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "_remove", halfway)
        patch.setattr(Output, "_clean_up", lambda output: None)
        with pytest.raises(Killed):
            main(command(killed, "shrink", "--parameters", "0.5", *DATA))
    assert (killed / "out" / "config.json").exists() and list(killed.glob("out.partial/**/run.lock"))
    main(command(killed, "shrink", "--parameters", "0.8", *DATA, "--overwrite"))
    assert {path.name for path in killed.iterdir()} == {"model", "out"}
