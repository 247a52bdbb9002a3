"""The configuration and data of the tests of bad inputs."""

from models import token_batches

from optimum_moonshot import MoonshotConfig

BATCHES = token_batches()
NAN = float("nan")
LONG = "9" * 400  # digits


def config(**changes):
    usual = {"solver": "wanda", "pattern": "2:4", "lam": 1.0}
    return MoonshotConfig(**{**usual, "num_samples": 4, "sequence_length": 12, "batch_size": 2, **changes})


def one_line(error):
    return len(str(error).splitlines()) == 1
