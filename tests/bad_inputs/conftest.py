import pytest
from invalid_inputs import BATCHES, config
from models import make

from optimum_moonshot import MoonshotPruner


@pytest.fixture(scope="session")
def pruned():
    pruner = MoonshotPruner(make("llama"), config())
    pruner.prune(BATCHES, progress=False)
    return pruner
