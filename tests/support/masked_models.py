"""Models pruned in memory, whose masks are kept during training."""

from models import make

from optimum_moonshot import MoonshotConfig, MoonshotPruner
from optimum_moonshot.masks import find_pruned


def pruned(name="llama", **changes):
    model = make(name)
    config = MoonshotConfig(**{"solver": "magnitude", "pattern": "2:4", **changes})
    MoonshotPruner(model, config).prune(progress=False)
    return model.train()


def zeros(model):
    return {layer.name: layer.matrix == 0 for layer in find_pruned(model)}


def loss_of(model, batch):
    return model(**batch, labels=batch["input_ids"]).loss
